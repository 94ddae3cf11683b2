"""Writes the file by which jobs that users submit find the daemon; ``pslite.launch.daemon_address_file`` reads it."""

from __future__ import annotations

from pathlib import Path

import msgspec

from dl2d.atomic_file import write_atomically
from pslite.launch.daemon_address_file import DaemonAddress


def write_address(path: Path, address: DaemonAddress) -> None:
    """Replace the file, which everybody may read. Raises ``OSError``."""
    path = path.resolve()  # a link stays one
    missing = [folder for folder in path.parents if not folder.exists()]
    for folder in reversed(missing):
        folder.mkdir(exist_ok=True)
        folder.chmod(0o755)  # whatever the daemon's file mask is
    write_atomically(path, msgspec.json.format(msgspec.json.encode(address), indent=2) + b"\n", mode=0o644)
