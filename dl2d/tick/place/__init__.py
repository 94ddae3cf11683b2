"""From a decision to single starts and stops on nodes."""

from __future__ import annotations
