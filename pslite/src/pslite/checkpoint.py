"""Public name of `pslite.storage.checkpoints` for training scripts that use the runtime without an adapter."""

from __future__ import annotations

from pslite.storage.checkpoints import Checkpoint, latest

__all__ = ["Checkpoint", "latest"]
