"""Public name of `pslite.launch.environment` for training scripts that use the runtime without an adapter."""

from __future__ import annotations

from pslite.launch.environment import architecture_of

__all__ = ["architecture_of"]
