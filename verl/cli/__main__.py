"""``python -m verl.cli``."""

from __future__ import annotations

import sys

from verl.cli.entry import main

if __name__ == "__main__":
    sys.exit(main())
