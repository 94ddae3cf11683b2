"""What goes wrong in training."""

from __future__ import annotations

from dl2d.core.errors import Dl2dError


class TrainingError(Dl2dError):
    """Training cannot go on."""


class Diverged(TrainingError):
    """A loss, a gradient or a weight is not a number any more."""


class TooFewSamples(TrainingError):
    """There is less to learn from than an update needs: to go on would mean to learn nothing without a word."""
