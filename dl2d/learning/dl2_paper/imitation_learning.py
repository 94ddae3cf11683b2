"""Supervised learning (section 4.2 of the paper): a network learns to decide as a scheduler did, and is compared."""

from __future__ import annotations

import contextlib
import copy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from msgspec import structs
from torch import Tensor

from dl2d.core.errors import TooFewSamples
from dl2d.core.jobs import NOTHING, Allocation, Job
from dl2d.core.policy import Policy
from dl2d.core.progress_callback import Tell, silent
from dl2d.learning.dl2_paper.demonstrations import demonstrations_in, demonstrations_with_floors
from dl2d.learning.dl2_paper.networks import (
    Net,
    begin,
    check_finite,
    described,
    deterministic,
    policy_network,
    weights_of,
)
from dl2d.learning.dl2_paper.samples import Demonstrations
from dl2d.learning.dl2_paper.settings import NetworkKind, Settings, SupervisedLoss
from dl2d.learning.site_records.recorded_decisions import (
    MIN_JOBS,
    Recording,
    SizeComparison,
    Yardstick,
    compare_sizes,
    simple_yardstick,
    sizes_of,
    split_recordings,
)
from dl2d.policies.common.checkpoint import Checkpoint
from dl2d.policies.common.training_input_ranges import INPUT_RANGES, recorded_ranges
from dl2d.policies.dl2_paper.observation import ObservationEncoding
from dl2d.policies.dl2_paper.policy import Dl2PaperPolicy
from dl2d.policies.drf import Drf
from dl2d.policies.fifo import Fifo
from dl2d.policies.srtf import Srtf
from dl2d.simulation.workload.workload_file import Workload

#: The largest J that is chosen for a network that can have any.
_MAX_WINDOW = 128
#: Updates after which the loss on held-out demonstrations is computed, and such losses in a row, none lower than the
#: lowest before, after which learning stops.
_UPDATES_PER_CHECK = 10
_CHECKS_WITHOUT_GAIN = 5
#: Fraction of the tasks by which a known scheduler's sizes may differ from the recorded ones, on at most so many slots.
_MAX_DIFFERING = 0.01
_MAX_COMPARED_SLOTS = 300
#: Maximum number of workloads that are replayed to ask it.
_MAX_REPLAYED_DAYS = 6

#: Called after each update with its number, the number of all, and the loss.
OnUpdate = Callable[[int, int, float], None]


def imitation_loss(logits: Tensor, masks: Tensor, rights: Tensor, kind: SupervisedLoss) -> Tensor:
    """One of the paper's three losses (Fig. 16), mean over states.

    Where several actions are right, all of them are to be equally likely.
    """
    masked = torch.where(masks, logits, -torch.inf)
    logs = torch.log_softmax(masked, dim=1)
    wanted = rights / rights.sum(dim=1, keepdim=True)
    if kind is SupervisedLoss.CROSS_ENTROPY:
        return -(wanted * torch.where(rights, logs, 0.0)).sum(dim=1).mean()
    errors = logs.exp() - wanted
    per_action = errors.square() if kind is SupervisedLoss.SQUARE else errors.abs()
    return per_action.sum(dim=1).mean()


def fit(
    network: Net,
    demonstrations: Demonstrations,
    settings: Settings,
    rng: np.random.Generator,
    on_update: OnUpdate | None = None,
    held_out: Demonstrations | None = None,
) -> list[float]:
    """Train a network on demonstrations with Adam, whose rate falls to a tenth; returns the loss of each update.

    With ``held_out``, learning stops when the loss on these has not fallen for some time, and the network gets the
    weights with which it was lowest (early stopping: Prechelt, "Early Stopping - But When?", 1998).

    Raises
    ------
    Diverged
        The loss is not a number.
    """
    minibatch, updates = min(settings.minibatch, len(demonstrations)), settings.supervised_updates
    optimiser = torch.optim.Adam(network.parameters(), lr=settings.supervised_rate)
    losses: list[float] = []
    stopping = None if held_out is None else _EarlyStopping(network, held_out, settings.supervised_loss)
    for number in range(updates):
        for group in optimiser.param_groups:
            group["lr"] = settings.supervised_rate * (1.0 - 0.9 * number / updates)
        drawn = demonstrations.take(rng.choice(len(demonstrations), minibatch, replace=False))
        logits = network(torch.from_numpy(drawn.observations))
        masks, rights = torch.from_numpy(drawn.masks), torch.from_numpy(drawn.rights)
        value = imitation_loss(logits, masks, rights, settings.supervised_loss)
        check_finite("the supervised loss", value)
        optimiser.zero_grad()
        value.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        losses.append(float(value.detach()))
        if on_update is not None:
            on_update(number + 1, updates, losses[-1])
        if stopping is not None and (number + 1) % _UPDATES_PER_CHECK == 0 and stopping.is_due():
            break
    if stopping is not None:
        stopping.restore()
    check_finite("the weights", *network.parameters())
    return losses


class _EarlyStopping:
    """Keeps the weights with which the loss on held-out demonstrations was lowest."""

    def __init__(self, network: Net, held_out: Demonstrations, kind: SupervisedLoss) -> None:
        self._network, self._kind = network, kind
        self._observations = torch.from_numpy(held_out.observations)
        self._masks, self._rights = torch.from_numpy(held_out.masks), torch.from_numpy(held_out.rights)
        self._lowest, self._without_gain = float("inf"), 0
        self._weights: dict[str, Any] | None = None

    def is_due(self) -> bool:
        """Compute the loss; whether it has not fallen for so long that learning should stop."""
        with torch.no_grad():
            loss = float(imitation_loss(self._network(self._observations), self._masks, self._rights, self._kind))
        if loss < self._lowest:
            self._lowest, self._weights, self._without_gain = loss, copy.deepcopy(self._network.state_dict()), 0
        else:
            self._without_gain += 1
        return self._without_gain >= _CHECKS_WITHOUT_GAIN

    def restore(self) -> None:
        """Give the network the kept weights, if the loss was ever computed."""
        if self._weights is not None:
            self._network.load_state_dict(self._weights)


@dataclass(frozen=True, slots=True, kw_only=True)
class Imitation:
    """Result of supervised learning."""

    checkpoint: Checkpoint
    #: By update.
    losses: tuple[float, ...]
    #: Number of demonstrations that were learned from.
    demonstrations: int
    #: The network on the slots that are held out, and simple deciders on the same.
    comparison: SizeComparison
    yardstick: Yardstick


def imitate_recordings(
    recordings: Sequence[Recording],
    settings: Settings,
    *,
    slot_seconds: float,
    seed: int,
    min_jobs: int = MIN_JOBS,
    workloads: Sequence[Workload] = (),
    tell: Tell = silent,
) -> Imitation:
    """Learn from slots that a daemon recorded, oldest first.

    The network is compared on held-out slots, and the loss on others decides when learning stops
    (``split_recordings``). The window of a shared network is so large that all jobs of a slot are in one batch: an
    observation does not show what is left for later batches. Where jobs of fixed size of one model type have different
    ones, the network sees the size that each job asks for. In a record with elastic jobs, it learns and is compared as
    if static jobs were elastic, too, so that it learns the steps that lead to their sizes.

    Where one of dl2d's policies gives the recorded sizes (``known_scheduler``), it is also asked in ``workloads``, the
    recorded days, while running jobs keep their minimum size: in the slots to which its own decisions lead, then in
    those to which the network's lead (dataset aggregation: Ross, Gordon, Bagnell, "A reduction of imitation learning
    and structured prediction to no-regret online learning", 2011).

    Raises
    ------
    TrainingError
        See ``TooFewSamples``, ``Diverged``.
    """
    split = split_recordings(_with_asked_sizes(recordings), min_jobs)
    given = [*split.training, *split.stopping, *split.compared]
    encoding = _encoding(given, settings, slot_seconds)
    if not encoding.fixed_sizes:
        split = split._replace(
            training=_as_elastic(split.training), stopping=_as_elastic(split.stopping),
            compared=_as_elastic(split.compared),
        )  # fmt: skip

    def steps(recordings: Sequence[Recording], most: int) -> Demonstrations:
        def mixed() -> Iterator[Recording]:
            for number, place in enumerate(rng.permutation(len(recordings)).tolist()):
                tell("recorded slots gone through", number, len(recordings))
                yield recordings[place]

        return demonstrations_in(mixed(), encoding, labels=settings.labels, kept=1.0, rng=rng, most=most)

    def learned(recordings: Sequence[Recording]) -> tuple[Checkpoint, Demonstrations, list[float]]:
        shown = steps(recordings, 40_000)
        network = policy_network(settings.network, encoding.layout, settings.hidden)
        begin(network, torch.Generator().manual_seed(seed), encoding)
        losses = fit(
            network, shown, settings, rng, lambda done, total, loss: tell("learning", done, total, f"loss {loss:.3f}"),
            stopping,
        )  # fmt: skip
        made = Checkpoint(
            policy="dl2-original", weights=weights_of(network, "policy"),
            settings=described(encoding, settings.network, sampled=False), training={},
        )  # fmt: skip
        return made, shown, losses

    with deterministic():
        rng = np.random.default_rng([seed, 2])
        stopping = None
        with contextlib.suppress(TooFewSamples):  # no job waited in these slots
            stopping = steps(split.stopping, 4_000)
        slots, placement, days = list(split.training), given[0].placement, workloads[:_MAX_REPLAYED_DAYS]
        teacher = None if encoding.fixed_sizes or not days else known_scheduler(slots)
        if teacher is not None:
            slots += demonstrations_with_floors(teacher, teacher, days, placement, tell)
        made, shown, losses = learned(slots)
        if teacher is not None:
            slots += demonstrations_with_floors(teacher, Dl2PaperPolicy(made), days, placement, tell)
            made, shown, losses = learned(slots)
        ways = {
            sampled: compare_sizes(
                sizes_of(Dl2PaperPolicy(made, sampled=sampled), seed), split.compared,
                partial(tell, "held-out slots compared"),
            )
            for sampled in (False, True)
        }  # fmt: skip
    sampled = ways[True].differing < ways[False].differing
    yardstick = simple_yardstick(split, seed)
    record = {
        "slots": len(split.training), "jobs": split.jobs, "policies": sorted({each.decision.policy for each in given}),
        "held_out": asdict(ways[sampled]), "yardstick": asdict(yardstick),
        "asked": "" if teacher is None else teacher.name, "asked_slots": len(slots) - len(split.training),
    }  # fmt: skip
    training = {
        "supervised": record, "updates": settings.supervised_updates, "loss": settings.supervised_loss.value,
        "seed": seed, INPUT_RANGES: recorded_ranges(each.snapshot for each in split.training),
    }  # fmt: skip
    return Imitation(
        checkpoint=replace(made, settings={**made.settings, "sampled": sampled}, training=training),
        losses=tuple(losses), demonstrations=len(shown), comparison=ways[sampled], yardstick=yardstick,
    )  # fmt: skip


def _encoding(recordings: Sequence[Recording], settings: Settings, slot_seconds: float) -> ObservationEncoding:
    """The encoding of observations for a network that learns from recorded slots."""
    jobs = [job for each in recordings for job in each.snapshot.jobs]
    amounts = [node.capacity for each in recordings for node in each.snapshot.nodes]
    amounts += [demand for job in jobs for demand in (job.request.worker, job.request.ps)]
    window = settings.window
    if settings.network is NetworkKind.SHARED:
        most_jobs = max(len(each.snapshot.jobs) for each in recordings)
        window = max(window, min(most_jobs, _MAX_WINDOW))
    fixed_sizes = gives_fixed_sizes(recordings)
    first_bundles = settings.first_bundles and not fixed_sizes and not grows_jobs_while_others_wait(recordings)
    models = tuple(sorted({job.request.model for job in jobs}))
    return ObservationEncoding(
        window=window,
        models=models,
        resources=tuple(sorted({name for amount in amounts for name, _ in amount.thousandths})),
        first_bundles=first_bundles,
        last_bundles=not first_bundles,
        slot_seconds=slot_seconds,
        extras=settings.supervised_extras,
        remaining_times=settings.supervised_extras,
        usual_sizes=usual_sizes(jobs, models, always=fixed_sizes),
        fixed_sizes=fixed_sizes,
    )


def known_scheduler(recordings: Sequence[Recording]) -> Policy | None:
    """The policy of dl2d's that gives nearly all recorded sizes; None if none does."""
    some = recordings[:: max(1, -(-len(recordings) // _MAX_COMPARED_SLOTS))]
    for policy in (Drf(), Fifo(), Srtf()):
        if compare_sizes(sizes_of(policy, 0), some).differing < _MAX_DIFFERING:
            return policy
    return None


def grows_jobs_while_others_wait(recordings: Sequence[Recording]) -> bool:
    """Whether a scheduler gives some jobs more than their minimum size while others wait, as FIFO does.

    True where that holds of most jobs that were left with nothing. A scheduler that does not gives every job its least
    size first. Jobs of fixed size count, too: they wait for room for all of it.
    """
    waiting, passed_over = 0, 0
    for each in recordings:
        sizes = each.decision.allocations()
        jobs = [job for job in each.snapshot.jobs if job.key in sizes]
        idle = sum(sizes[job.key] == NOTHING for job in jobs)
        grown = any(sizes[job.key] != NOTHING and sizes[job.key] != job.request.min_size for job in jobs)
        waiting += idle
        passed_over += idle * grown
    return 2 * passed_over > waiting


def gives_fixed_sizes(recordings: Sequence[Recording]) -> bool:
    """Whether each job that got anything is static and had the size that its user asks for."""
    is_fixed = [
        job.static and size == job.request.asked_size
        for each in recordings
        for sizes in [each.decision.allocations()]
        for job in each.snapshot.jobs
        if (size := sizes.get(job.key, NOTHING)) != NOTHING
    ]
    return bool(is_fixed) and all(is_fixed)


def _with_asked_sizes(recordings: Sequence[Recording]) -> list[Recording]:
    """Slots in which static jobs ask for the size that they got: earlier versions of dl2d recorded none in requests."""
    got = {key: size for each in recordings for key, size in each.decision.allocations().items() if size != NOTHING}

    def asking(job: Job) -> Job:
        size = got.get(job.key, job.request.asked_size)
        if not job.static or size == job.request.asked_size:
            return job
        return replace(job, request=replace(job.request, asked_size=size))

    return [
        replace(each, snapshot=structs.replace(each.snapshot, jobs=tuple(map(asking, each.snapshot.jobs))))
        for each in recordings
    ]


def _as_elastic(recordings: Sequence[Recording]) -> list[Recording]:
    """Slots in which static jobs are elastic, as in replays and as users submit them once dl2d decides."""
    return [
        replace(
            each,
            snapshot=structs.replace(
                each.snapshot, jobs=tuple(replace(job, static=False) for job in each.snapshot.jobs)
            ),
        )
        for each in recordings
    ]


def usual_sizes(jobs: Iterable[Job], models: Sequence[str], *, always: bool = False) -> tuple[Allocation, ...]:
    """Most frequent size of the static jobs of each model type, ``NOTHING`` where there are none.

    Empty where the jobs of each type have all the same size, unless ``always``: then the type tells what users ask for.
    """
    asked = {job.key: (job.request.model, job.request.asked_size) for job in jobs if job.static}
    counted = Counter(each for each in asked.values() if each[1] != NOTHING)
    if not always and len(counted) == len({model for model, _ in counted}):
        return ()
    usual = {model: size for (model, size), _ in reversed(counted.most_common())}
    return tuple(usual.get(model, NOTHING) for model in models)
