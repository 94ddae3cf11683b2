"""Public name of `pslite.worker.session` for training scripts that use the runtime without an adapter."""

from __future__ import annotations

from pslite.worker.session import Drained, Given, OpenSession, Session, Share, SingleSession

__all__ = ["Drained", "Given", "OpenSession", "Session", "Share", "SingleSession"]
