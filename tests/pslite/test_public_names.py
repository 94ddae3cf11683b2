"""Modules that training scripts may import by their own names, wherever their contents are defined."""

from __future__ import annotations

import importlib

import pytest


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("pslite.checkpoint", ["Checkpoint", "latest"]),
        ("pslite.connect", ["open_session", "session_for"]),
        ("pslite.environment", ["architecture_of"]),
        ("pslite.gradients", ["Bundle", "Contribution", "GradientSums"]),
        ("pslite.schedules", ["Constant", "Cosine", "Milestones", "Polynomial", "StepDecay"]),
        ("pslite.session", ["SingleSession"]),
        ("pslite.spec", ["LAMB", "SGD", "Adam", "JobSpec", "Part", "Segment", "block_bytes_for"]),
        ("pslite.testing", ["Resize", "pace", "run_local"]),
        ("pslite.run", ["main"]),
    ],
)
def test_public_names_are_there(module, names):
    there = importlib.import_module(module)
    assert [name for name in names if not hasattr(there, name)] == []
