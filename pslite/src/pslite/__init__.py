"""pslite: the elastic parameter-server runtime. Jobs grow and shrink while they train, without a stop."""

from __future__ import annotations

__version__ = "0.1.0"
