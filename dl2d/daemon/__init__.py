"""The daemon: the tick, its loop, reconciliation, the job API."""

from __future__ import annotations
