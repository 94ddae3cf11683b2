"""For tests of dl2d and of plug-ins: a resource manager in memory, and coordinators that do as they are told."""

from __future__ import annotations

from dl2d.testing.coordinator import PromptCoordinator
from dl2d.testing.manager import MemoryManager

__all__ = ["MemoryManager", "PromptCoordinator"]
