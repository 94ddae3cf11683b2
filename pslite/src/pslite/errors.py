"""Errors of pslite. Every one is a `PsliteError`; the message says what was wrong, where, and what to do."""

from __future__ import annotations


class PsliteError(Exception):
    """Root of all errors raised by pslite."""


class SpecError(PsliteError, ValueError):
    """The description of a job (model, optimizer, data, batch, epochs) is not usable."""


class UsageError(PsliteError):
    """The environment or the command line of a task is wrong, or the user's loop breaks a rule of the API."""


class AuthenticationError(PsliteError):
    """The peer refused this process, or could not prove that it knows the job's token."""


class Rejected(AuthenticationError):
    """The peer refused this process for a stated reason; trying again is of no use."""


class Fenced(PsliteError):
    """Another coordinator has taken the job over; this one must send nothing more."""


class LogError(PsliteError):
    """The coordinator's log cannot be written."""


class ProtocolError(PsliteError):
    """A peer sent bytes that the protocol does not allow."""


class ConnectError(PsliteError):
    """A peer could not be reached within the time allowed."""


class Unreachable(ConnectError):
    """A member of the job could not be reached; `task` names it."""

    def __init__(self, task: str, reason: str) -> None:
        super().__init__(f"cannot reach {task}: {reason}")
        self.task = task


class PeerLost(PsliteError):
    """A connection ended although the peer had not left."""


class Cancelled(BaseException):
    """The job is to end now, although nothing is wrong with it: a signal or the daemon says so."""


class CheckpointError(PsliteError):
    """A checkpoint cannot be written, cannot be read, or is of another job."""


class JobFailed(PsliteError):
    """The job failed; the text names the task that caused it and how."""


class RolledBack(PsliteError):
    """The job goes back to its newest checkpoint: this member ends, and joins again as a new one."""
