"""``dl2d demo``: three real training jobs on this machine, resized while they train, and proof that nothing changed."""

from __future__ import annotations
