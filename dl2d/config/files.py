"""Where the files that ship with dl2d lie: inside the installed package, or in a checkout."""

from __future__ import annotations

from pathlib import Path

import dl2d
from dl2d.core.errors import ConfigError

_PACKAGE = Path(dl2d.__file__).parent


def shipped(name: str) -> Path:
    """Path of a shipped file such as ``etc/dl2d.yaml``. Raises ``ConfigError`` if the installation is not complete."""
    for root in (_PACKAGE, _PACKAGE.parent):
        if (root / name).exists():
            return root / name
    raise ConfigError(f"{name} is not part of this installation of dl2d; install it again")
