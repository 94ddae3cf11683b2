"""The parameter server: owns blocks of the model, sums gradients, applies the optimizer, answers with new weights."""

from __future__ import annotations

from pslite.server.loop import Server

__all__ = ["Server"]
