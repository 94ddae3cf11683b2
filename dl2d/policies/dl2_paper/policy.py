"""DL2 as its paper has it (Peng et al., arXiv 1909.06040, section 4): jobs get tasks one at a time, until enough.

In each interval the jobs, in submit order, are gone through in batches of J. A network that sees the batch answers with
one of 3J + 1 actions, again and again: a worker, a PS or one of both for one of its jobs, or void, which ends the
batch. Its observations and actions are those of ``dl2d.simulation.vectorized.dl2_paper_sizing``, in which it was
trained.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import ClassVar

import numpy as np

from dl2d.core.array_types import Floats32
from dl2d.core.cluster import Snapshot
from dl2d.core.decision import Alternative, Constraint, Decision, Reason
from dl2d.core.errors import CheckpointError, ConfigError, PolicyError
from dl2d.core.jobs import NOTHING, JobKey
from dl2d.core.packing.bin_packing import Packing
from dl2d.core.policy import NO_EVIDENCE, Evidence
from dl2d.policies.common.checkpoint import Checkpoint, version_of
from dl2d.policies.dl2_paper.exploration import correcting_actions
from dl2d.policies.dl2_paper.inference_network import network_of
from dl2d.policies.dl2_paper.observation import ObservationEncoding
from dl2d.policies.dl2_paper.sizing_step_by_step import Batch, Sizing


class Dl2PaperPolicy:
    """Sizes jobs by a network that was trained as the paper says; see the module.

    Actions that have no room are masked: which those are is found out when one is chosen, and another is chosen then,
    which is the same as masking them before.

    Parameters
    ----------
    checkpoint
        Of policy ``dl2-original``. Settings: ``network`` (dense, shared), ``window`` (J), ``models`` and ``resources``
        (names in the order of the inputs), ``first_bundles``, ``last_bundles``, ``extras``, ``usual_sizes``,
        ``fixed_sizes``, ``sampled``, ``slot_seconds``.
    sampled
        Whether actions are drawn from the policy's distribution instead of taking the best; by default as the
        checkpoint says, which knows what did better in validation.
    exploration
        Probability, 0 to 1, with which a poor state is corrected instead of asking the network, and with which a job
        has a drawn size in a slot (``dl2d.policies.dl2_paper.exploration``): so the policy's versions learn from sizes
        that it would not try.

    Raises
    ------
    CheckpointError
        Settings and weights do not belong together.
    ConfigError
        The probability is not one.
    """

    name: ClassVar[str] = "dl2-original"
    needs: ClassVar[frozenset[Evidence]] = NO_EVIDENCE

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        sampled: bool | None = None,
        slot_seconds: float | None = None,
        exploration: float | None = None,
    ) -> None:
        if exploration is not None and not 0.0 <= exploration <= 1.0:
            raise ConfigError(f"policy.settings.exploration: must be between 0 and 1, got {exploration:g}")
        #: Probability with which a poor state is corrected, and with which a job has a drawn size.
        self.exploration = exploration or 0.0
        #: What was learned.
        self.checkpoint = checkpoint
        settings = checkpoint.settings
        #: What scores actions; may be put into another that watches it.
        self.network = network_of(checkpoint.weights, settings)
        encoding = ObservationEncoding.of(settings)
        #: How it is shown a snapshot.
        self.encoding = encoding if slot_seconds is None else replace(encoding, slot_seconds=float(slot_seconds))
        if "sampled" not in settings:
            raise CheckpointError("dl2-original: the checkpoint has no setting 'sampled'")
        self._sampled = bool(settings["sampled"]) if sampled is None else sampled
        acting = "sampled" if self._sampled else "greedy"
        own = {"sampled": sampled, "slot_seconds": slot_seconds, "exploration": exploration}
        self.version = version_of(checkpoint, own, f"-{acting}")

    def decide(self, snapshot: Snapshot, packing: Packing, rng: np.random.Generator) -> Decision:
        """See ``dl2d.core.policy.Policy``.

        Raises
        ------
        PolicyError
            The network overflows.
        """
        sizing = Sizing(snapshot, packing, self.encoding, exploration=self.exploration)
        allocation = sizing.allocation
        alternatives: dict[JobKey, tuple[Alternative, ...]] = {}
        batches = [(batch, self._decide_batch(batch, rng)) for batch in sizing.batches()]
        last_bundles = sizing.give_last_bundles()
        for batch, weights in batches:
            for place, job in enumerate(batch.jobs):
                has = allocation.allocations[job.key]
                scores = {has: float(weights[-1])}
                for number, step in sizing.steps_left(job).items():
                    # Each action of a job below its minimum size leads to that.
                    option = has.plus(step)
                    scores[option] = scores.get(option, 0.0) + float(weights[3 * place + number])
                alternatives[job.key] = tuple(Alternative(option, score) for option, score in scores.items())
        reasons = {job.key: sizing.no_room(job) or sizing.reasons.get(job.key) for job in snapshot.jobs}
        for job in snapshot.jobs:
            has = allocation.allocations[job.key]
            constraint = Constraint.QUEUE if has == NOTHING else Constraint.SATISFIED
            if has == NOTHING and (ahead := sizing.waits_behind.get(job.key)) is not None:
                text = f"waits behind {ahead.key.id} ({ahead.request.name}), for which there is no room"
            elif has == NOTHING:
                text = "the learned policy gives it nothing although there is room"
            elif not sizing.steps_left(job):
                text = f"has its maximum of {has}"
            elif sizing.is_fixed(job) and has == sizing.asked_size(job):
                text = f"has the {has} that its user asks for"
            elif job.key in last_bundles and has != job.request.min_size:
                text = f"has {has} of the {sizing.asked_size(job)} that its user asks for, for which there is no room"
            elif job.key in last_bundles:
                text = f"has its minimum size of {has} since there was room left; the learned policy gave it nothing"
            elif has == sizing.most(job):
                text = f"has {has} in this slot for its speed to be measured (exploration)"
            else:
                text = f"the learned policy gives it no more than {has}"
            allocation.refuse(job, reasons[job.key] or Reason(constraint, text))
        return allocation.decision(self, measure="probability", alternatives=alternatives)

    def _decide_batch(self, batch: Batch, rng: np.random.Generator) -> Floats32:
        """Give tasks until void; returns the last distribution over actions, shape (3J + 1,)."""
        void = self.encoding.void
        while True:
            if self.exploration:
                correction = int(correcting_actions(batch.sizes()[None], batch.mask()[None])[0])
                if correction >= 0 and rng.random() < self.exploration and batch.act(correction):
                    continue
            logits = self.network(batch.observation)[0]
            noise = rng.gumbel(size=void + 1) if self._sampled else 0.0
            # Stays what it is while actions are tried: the distribution is that from which the last one was taken.
            mask = batch.mask()
            scores = np.where(mask, logits + noise, -np.inf)
            while True:
                action = int(scores.argmax())
                # NaN counts as the largest.
                if not math.isfinite(scores[action]):
                    raise PolicyError(
                        "dl2-original: the network's output is not a finite number: its weights cannot be used"
                    )
                if action == void:
                    shifted = np.exp(np.where(mask, logits - logits[mask].max(), -np.inf))
                    return np.asarray(shifted / shifted.sum(), dtype=np.float32)
                if batch.act(action):
                    break
                scores[action] = -np.inf


def with_checkpoint(
    checkpoint: Checkpoint | None = None,
    *,
    sampled: bool | None = None,
    slot_seconds: float | None = None,
    exploration: float | None = None,
) -> Dl2PaperPolicy:
    """DL2 as its paper has it, with a checkpoint that you trained.

    Raises ``CheckpointError`` if there is none, for none comes with dl2d.
    """
    if checkpoint is None:
        raise CheckpointError("dl2-original: name a checkpoint; dl2d train --design dl2-original makes one")
    return Dl2PaperPolicy(checkpoint, sampled=sampled, slot_seconds=slot_seconds, exploration=exploration)
