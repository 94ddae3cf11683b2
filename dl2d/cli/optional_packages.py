"""Optional packages: what each extra of the distribution brings, and the error where it is missing."""

from __future__ import annotations

import sys
from importlib.util import find_spec

from dl2d.core.errors import Dl2dError

#: By extra of pyproject.toml: the modules that its packages install and dl2d imports.
EXTRAS = {
    "train": ("torch", "matplotlib"),
    "simulate": ("gymnasium", "matplotlib"),
    "demo": ("torch", "sklearn", "matplotlib"),
    "ray": ("ray",),
}
#: The extra to name where a module was looked for that is not installed.
_EXTRA_OF = {"torch": "train", "matplotlib": "simulate", "gymnasium": "simulate", "sklearn": "demo", "ray": "ray"}


class MissingExtraError(Dl2dError):
    """A command needs packages that are not installed; the message says which, and the command that installs them."""

    def __init__(self, modules: str, extra: str, who: str = "this command") -> None:
        pip = f"{sys.prefix}/bin/pip"
        super().__init__(f"{who} needs {modules}, not installed here; install with: {pip} install 'dl2d[{extra}]'")


def require_extra(extra: str) -> None:
    """Raise ``MissingExtraError`` unless all modules of an extra can be imported."""
    missing = [module for module in EXTRAS[extra] if find_spec(module) is None]
    if missing:
        raise MissingExtraError(" and ".join(missing), extra)


def missing_extra(error: ModuleNotFoundError, who: str = "this command") -> MissingExtraError | None:
    """The error to show for a failed import; None where no extra brings the module."""
    module = (error.name or "").partition(".")[0]
    return MissingExtraError(module, _EXTRA_OF[module], who) if module in _EXTRA_OF else None
