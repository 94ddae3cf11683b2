"""For tests of dl2d and of plug-ins: builders of jobs and nodes; manager and store in memory."""

from __future__ import annotations

from dl2d.simulation.in_memory_manager import MemoryManager
from dl2d.simulation.in_memory_store import MemoryStore
from dl2d.testing.builders import make_job, make_nodes, make_request

__all__ = [
    "MemoryManager",
    "MemoryStore",
    "make_job",
    "make_nodes",
    "make_request",
]
