"""dl2d sizes elastic deep-learning jobs on a cluster and resizes them while they train."""

from __future__ import annotations

__version__ = "0.1.0"
