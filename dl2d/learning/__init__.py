"""Learning: policies trained in the simulator, and what they are kept in. torch is imported here only."""

from __future__ import annotations
