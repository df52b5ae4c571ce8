"""transformers without its progress bars and chatter, for a few lines at a time."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator


@contextlib.contextmanager
def without_bars() -> Iterator[None]:
    """No progress bars from transformers for the duration; the former state afterwards. Warnings stay."""
    from transformers.utils import logging

    before = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if before:
            logging.enable_progress_bar()


@contextlib.contextmanager
def silenced() -> Iterator[None]:
    """Nothing from transformers below an exception, standard error included (one of its bars cannot be disabled)."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with without_bars(), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.set_verbosity(verbosity)
