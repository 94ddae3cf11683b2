"""Python runs this at its start in the processes that dl2-run starts: with mxnet comes pslite.mxnet.

So a script that was written for MXNet's own servers needs no line changed.  A sitecustomize that this one hides is run
too.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from types import ModuleType

_HERE = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120  (pathlib would slow down every start)


class _Loader(importlib.abc.Loader):
    """Loads mxnet as its own loader does, then pslite's part."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        try:
            importlib.import_module("pslite.mxnet")
        except ModuleNotFoundError as error:
            if not (error.name or "").startswith(("pslite", "msgspec", "safetensors")):
                raise
            message = f"dl2-run started this script, but {sys.executable} has no {error.name}: install pslite there"
            raise ImportError(message) from error


class _Finder(importlib.abc.MetaPathFinder):
    """Finds mxnet, once."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "mxnet" or "pslite.mxnet" in sys.modules:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


def _run_hidden() -> None:
    """Run the sitecustomize that would have been found without this one."""
    elsewhere = [place for place in sys.path if os.path.abspath(place) != _HERE]  # noqa: PTH100
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


sys.meta_path.insert(0, _Finder())
_run_hidden()
