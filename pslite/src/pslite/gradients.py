"""Public name of `pslite.numeric.gradients` for training scripts that use the runtime without an adapter."""

from __future__ import annotations

from pslite.numeric.gradients import Bundle, Contribution, GradientSums

__all__ = ["Bundle", "Contribution", "GradientSums"]
