"""Provenance of a run: versions of libraries, revision and digest of the code, machine."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import dl2d

_PACKAGE = Path(dl2d.__file__).parent
#: Libraries on which a result may depend.
_LIBRARIES = ("numpy", "scipy", "torch", "matplotlib", "msgspec", "ray")
_PATIENCE = 10.0


def environment() -> Mapping[str, object]:
    """Versions, the code's revision (in a checkout) and digest, and the kind of machine; no names of users or hosts."""
    revision = _git("rev-parse", "HEAD") if _git("ls-files", "__init__.py") else None
    return {
        "dl2d": dl2d.__version__,
        "revision": revision,
        "modified": bool(_git("status", "--porcelain", "--", ".")) if revision else None,
        "code": code_digest(),
        "python": platform.python_version(),
        "libraries": {name: found for name in _LIBRARIES if (found := _version(name))},
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "byteorder": sys.byteorder,
    }


def code_digest() -> str:
    """SHA-256 over dl2d's own Python files: equal digests, equal code, with git or without."""
    sha = hashlib.sha256()
    for path in sorted(_PACKAGE.rglob("*.py")):
        sha.update(path.relative_to(_PACKAGE).as_posix().encode() + b"\0")
        sha.update(path.read_bytes() + b"\0")
    return sha.hexdigest()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _git(*arguments: str) -> str | None:
    try:
        ran = subprocess.run(
            ["git", "-C", str(_PACKAGE), *arguments], capture_output=True, text=True, timeout=_PATIENCE, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return ran.stdout.strip() if ran.returncode == 0 else None
