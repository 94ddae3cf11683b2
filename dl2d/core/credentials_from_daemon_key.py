"""Credentials of jobs and of the command line, derived from the daemon's key."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass, field

from dl2d.core.jobs import JobKey


@dataclass(frozen=True, slots=True)
class Credentials:
    """Secrets, derived with HMAC-SHA256, so that a restarted daemon derives the same ones again."""

    key: bytes = field(repr=False)

    def for_job(self, job: JobKey) -> str:
        """Bearer credential of a job's coordinator in the job API."""
        return self._derive("coordinator", job.slug)

    def token(self, job: JobKey) -> str:
        """Token by which the members of a job authenticate to one another."""
        return self._derive("members", job.slug)

    def for_submission(self) -> str:
        """Bearer credential of the command line, to submit and cancel jobs."""
        return self._derive("submission", "")

    def is_for_job(self, job: JobKey, credential: str) -> bool:
        """Whether a credential is the job's, compared in constant time."""
        return hmac.compare_digest(self.for_job(job).encode(), credential.encode())

    def is_for_submission(self, credential: str) -> bool:
        """Whether a credential is that of the command line, compared in constant time."""
        return hmac.compare_digest(self.for_submission().encode(), credential.encode())

    def _derive(self, purpose: str, subject: str) -> str:
        return hmac.new(self.key, f"dl2d/{purpose}/{subject}".encode(), hashlib.sha256).hexdigest()
