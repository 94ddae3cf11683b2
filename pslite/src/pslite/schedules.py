"""Public name of `pslite.job.schedules` for training scripts that use the runtime without an adapter."""

from __future__ import annotations

from pslite.job.schedules import Constant, Cosine, Milestones, Polynomial, StepDecay

__all__ = ["Constant", "Cosine", "Milestones", "Polynomial", "StepDecay"]
