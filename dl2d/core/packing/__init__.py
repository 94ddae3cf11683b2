"""Bin packing: room on nodes and in limits, why a task does not fit, and which tasks leave to make room for it."""
