"""The command line: thin commands over daemon and store."""

from __future__ import annotations
