"""The daemon: its loop, HTTP API, models and health."""

from __future__ import annotations
