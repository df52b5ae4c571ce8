"""``python -m verl.cli``."""

import sys

from verl.cli.entry import main

sys.exit(main())
