"""The scheduling tick: one pass from observing the cluster to recording a slot. The daemon and the simulator run it."""

from __future__ import annotations
