"""Public name of `pslite.worker.connect` for training scripts that use the runtime without an adapter."""

from __future__ import annotations

from pslite.worker.connect import open_session, session_for

__all__ = ["open_session", "session_for"]
