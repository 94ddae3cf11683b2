from __future__ import annotations

from tick.conftest import build

__all__ = ["build"]
