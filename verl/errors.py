"""Errors that a user can act on: what is wrong, the value that is wrong, and how to fix it.

The command line prints these as one message without a traceback (``--debug`` shows it).
"""

from __future__ import annotations


class VerlError(Exception):
    """Base of all user-facing errors.

    Args:
        what: what is wrong, naming the field, file or role.
        value: the offending value, if there is one.
        fix: what to do about it.

    Attributes:
        bad_input: what was asked for is to blame, and asking again will not help. False: it was right, and the run
            failed all the same (a dead worker, a full disk, numbers gone astray). Decides the exit code.
    """

    bad_input: bool = True

    def __init__(self, what: str, value: object = None, fix: str | None = None) -> None:
        self.what, self.value, self.fix = what, value, fix
        super().__init__(what, value, fix)

    def __str__(self) -> str:
        lines = [self.what]
        if self.value is not None:
            lines.append(f"  value: {self.value}")
        if self.fix:
            lines.append(f"  fix:   {self.fix}")
        return "\n".join(lines)


class ConfigError(VerlError):
    """The configuration cannot be what the user meant."""


class DataError(VerlError):
    """A data file or row cannot be used."""


class ModelError(VerlError):
    """A model or tokenizer cannot be loaded or is not supported."""


class RewardError(VerlError):
    """A reward function cannot be loaded or returned something that is not a reward."""


class CheckpointError(VerlError):
    """A checkpoint cannot be written or read."""


class EngineError(VerlError):
    """The rollout engine cannot serve a request."""


class ClusterError(VerlError):
    """Workers or resources that were asked for are not there."""


class WorkerDiedError(ClusterError):
    """A worker process ended while it was needed.

    Attributes:
        while_training: the run had started well, so that it may go on if it is started again.
    """

    bad_input = False
    while_training: bool = False


class RanksLostError(WorkerDiedError):
    """Other training ranks did not answer, as one that waited for them saw it; seldom the first thing that failed."""


class OutOfMemoryError(VerlError):
    """A micro-batch did not fit into memory."""

    bad_input = False


def first_line(error: BaseException) -> str:
    """Of what another library says."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]


def meant(error: BaseException) -> BaseException:
    """The error itself, or what a signal raised within compiled code that made a SystemError of it."""
    cause = error.__cause__
    return error if cause is None or isinstance(cause, Exception) or not isinstance(error, SystemError) else cause
