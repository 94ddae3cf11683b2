"""Modules that training scripts may import by their own names, wherever their contents are defined."""

from __future__ import annotations

import importlib

import pytest


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("pslite.checkpoint", ["Checkpoint", "latest"]),
        ("pslite.testing", ["Resize", "pace", "run_local"]),
        ("pslite.run", ["main"]),
    ],
)
def test_public_names_are_there(module, names):
    there = importlib.import_module(module)
    assert [name for name in names if not hasattr(there, name)] == []
