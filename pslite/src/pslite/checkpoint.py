"""Public name of `pslite.storage.checkpoint_files` for training scripts that use the runtime without an adapter."""

from __future__ import annotations

from pslite.storage.checkpoint_files import Checkpoint, latest

__all__ = ["Checkpoint", "latest"]
