"""One scheduling tick, which the daemon and the simulator run."""

from __future__ import annotations
