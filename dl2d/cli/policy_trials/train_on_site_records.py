"""Learning from this site's records: trains a policy further on the site's twin, and compares it at the gate.

``dl2d train --twin`` and the daemon's learner (``learner_process``) run it, for the policies ``dl2`` and
``dl2-original``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from dl2d import __version__
from dl2d.cli.policy_trials.check_trained_policy import check_on_site
from dl2d.cli.policy_trials.trial_on_recorded_days import (
    TrialPolicy,
    compared_with,
    learned_days,
    on_trial,
    policy_of,
    recorded_days,
    too_little_to_judge,
)
from dl2d.config.settings import Settings
from dl2d.core.errors import CheckpointError, Dl2dError, GateRefused
from dl2d.core.measured_speeds_and_losses import MeasuredSpeeds
from dl2d.core.progress_callback import Tell
from dl2d.daemon.policy_versions.active_version import (
    current_checkpoint,
    nodes_and_requests,
    read_version,
    version_in,
)
from dl2d.daemon.policy_versions.candidate_files import Candidate
from dl2d.learning.dl2.evolution_strategy import Step
from dl2d.learning.dl2.training import State, Trainer, TrainingSettings
from dl2d.learning.replay_check import ReplayCheck
from dl2d.learning.site_records.digital_twin import NODE_PARTS
from dl2d.learning.site_records.recorded_days import DAY_SECONDS, day_name
from dl2d.learning.site_records.recorded_decisions import Recording
from dl2d.learning.site_records.split_of_recorded_days import Split
from dl2d.plugins import load_placement
from dl2d.policies.common.checkpoint import DIGITS, Checkpoint, settings_in
from dl2d.policies.common.training_input_ranges import widened
from dl2d.policies.dl2.checkpoint_contents import from_arrays
from dl2d.policies.dl2_paper.policy import Dl2PaperPolicy
from dl2d.throughput.training_data import as_measured, by_kind, merged_kinds

if TYPE_CHECKING:
    from dl2d.learning.dl2_paper.samples import Samples
    from dl2d.learning.dl2_paper.samples_from_recorded_slots import LiveSlot
    from dl2d.policies.dl2_paper.observation import ObservationEncoding
    from dl2d.store.sql_store import SqlStore
    from dl2d.store.tables.policy_versions import SqlRegistry

#: The policies that learn from a site.
DL2 = "dl2"
DL2_PAPER = "dl2-original"
#: The search begins with weights that are good already: it looks and goes less far than one that begins with none.
_STEP = Step(spread=0.07, rate=0.03)
#: Slots that the policy decided, the newest ones that may be learned from, among which live samples are looked for.
_MAX_LIVE_SLOTS = 4000
#: What follows the seed in the seed of the generator of live samples.
_LIVE = 7


@dataclass(frozen=True, slots=True)
class Learned:
    """What came of learning."""

    split: Split
    parent: Checkpoint
    checkpoint: Checkpoint
    record: Mapping[str, Any]
    #: Of policy dl2.
    state: State | None = None
    settings: TrainingSettings | None = None

    @property
    def is_new(self) -> bool:
        """Whether it decides otherwise than what it was trained from."""
        return self.checkpoint.digest != self.parent.digest


@dataclass(frozen=True, slots=True, kw_only=True)
class TwinSettings:
    """How long to learn and from how much; None: what ``learning`` of the configuration says."""

    #: Iterations of the search (dl2), or rounds of actor-critic learning (dl2-original), at most.
    iterations: int
    days: int | None
    minutes: float | None
    seed: int
    #: Whether the gate is to judge what comes of it.
    gate: bool


def learn(settings: Settings, store: SqlStore, policy: str, chosen: TwinSettings, *, tell: Tell, now: float) -> Learned:
    """Read the site's history, and train a policy from the weights that decide now.

    ``now`` is the end of the history, seconds since 1970. The store is only read.

    Raises
    ------
    WorkloadError
        There is too little to learn from.
    GateRefused
        There are too few days or jobs for the gate, whatever would be learned.
    CheckpointError, StoreError
        Something cannot be read, or the policy has no weights yet.
    """
    ends_at = time.monotonic() + 60 * (settings.learning.minutes if chosen.minutes is None else chosen.minutes)
    parent = _current(settings, store.registry, policy)
    policy_of(settings, parent)  # it has to be one that can decide
    split = recorded_days(
        settings, store, now=now, seed=chosen.seed, days=chosen.days, candidate=parent, tell=tell,
        expected_speeds=policy == DL2_PAPER,
    )  # fmt: skip
    if chosen.gate and (problem := too_little_to_judge(settings, split, parent)):
        raise GateRefused(f"{problem}; nothing was trained")
    learned = (
        _learn_dl2(settings, split, parent, chosen, ends_at, tell)
        if policy == DL2
        else _learn_dl2_paper(settings, store, split, parent, chosen, ends_at, tell, now)
    )
    # Busy days are trained on as those of a smaller site, whose policy sizes jobs in the same way.
    days = ((len(day.jobs), len(day.nodes)) for day in split.trained_on)
    checkpoint = replace(learned.checkpoint, training=widened(learned.checkpoint.training, days))
    return replace(learned, checkpoint=checkpoint)


def _learn_dl2(
    settings: Settings, split: Split, parent: Checkpoint, chosen: TwinSettings, ends_at: float, tell: Tell
) -> Learned:
    """Search for better weights of the scorer in the twin."""
    began = time.monotonic()
    how, known = _training_settings(settings, split, parent, chosen)
    tell("setting up", 0, 1)
    trainer = Trainer(split.training, split.validation, how)
    measured = as_measured(merged_kinds(by_kind(known), by_kind(split.measured)))
    state = trainer.start(parent.weights["scorer"], measured)
    tell("setting up", 1, 1)
    tell("searching", 0, how.iterations)
    for reached in trainer.search(state):
        state = reached
        tell("searching", state.search.iteration, how.iterations, _note(state))
        if time.monotonic() > ends_at:
            break
    record = {
        **_record(split, parent, how.seed, time.monotonic() - began),
        "iterations": state.search.iteration, "best_iteration": state.best_look.iteration, "parts": list(how.parts),
        "validation_jct_slots": list(state.best_look.jct), "parents_jct_slots": list(state.looks[0].jct),
        "curve": [asdict(look) for look in state.looks],
    }  # fmt: skip
    made = trainer.checkpoint(state, record)
    kept = {name: parent.settings.get(name, 0.0) for name in ("optimism", "resize_seconds")}
    checkpoint = replace(made, settings={**made.settings, **kept})
    return Learned(split, parent, checkpoint, record, state, how)


def _learn_dl2_paper(
    settings: Settings, store: SqlStore, split: Split, parent: Checkpoint, chosen: TwinSettings, ends_at: float,
    tell: Tell, now: float,
) -> Learned:  # fmt: skip
    """Actor-critic learning (section 4.3 of the paper): in the twin, and from the slots that versions decided live."""
    from dl2d.learning.dl2_paper.samples_from_recorded_slots import live_samples  # noqa: PLC0415 - torch takes seconds
    from dl2d.learning.dl2_paper.settings import SITE  # noqa: PLC0415
    from dl2d.learning.dl2_paper.training_loop import continuing, train  # noqa: PLC0415

    began = time.monotonic()
    # Today may be held out tomorrow.
    live = _live_slots(settings, store, [*split.held_out_times, (now // DAY_SECONDS * DAY_SECONDS, math.inf)], tell)
    counts = {"slots": len(live), "samples": 0}
    # A network that imitates a scheduler is sure of every step, so its output layer is drawn anew; later versions learn
    # on from what they have.
    imitated = "supervised" in parent.training
    how = continuing(replace(SITE, iterations=chosen.iterations, fresh_output=imitated), parent)
    # A scheduler that serves some jobs whole lets others wait, and so does a network that imitates it. From there no
    # better policy was found (docs/research/dl2-paper.md), so learning begins with the minimum size for each job.
    first_bundles = imitated or bool(parent.settings["first_bundles"])
    how = replace(how, window=int(parent.settings["window"]), first_bundles=first_bundles)

    def recorded(encoding: ObservationEncoding) -> Samples | None:
        found = live_samples(live, encoding, np.random.default_rng([chosen.seed, _LIVE]))
        counts["samples"] = 0 if found is None else len(found)
        tell("live samples", counts["samples"], counts["samples"])
        return found

    checkpoint = train(
        split.training, split.validation, how, seed=chosen.seed, start=parent, recorded=recorded, on_step=tell,
        should_stop=lambda: time.monotonic() > ends_at,
    )  # fmt: skip
    record = {**_record(split, parent, chosen.seed, time.monotonic() - began), "live": counts}
    record["days"] = sorted({*record["days"], *(day_name(each.recording.snapshot.at) for each in live)})
    return Learned(split, parent, replace(checkpoint, training={**checkpoint.training, **record}), record)


def _live_slots(
    settings: Settings, store: SqlStore, outside: Sequence[tuple[float, float]], tell: Tell
) -> list[LiveSlot]:
    """The newest slots outside some times that versions of the paper's policy decided, unchanged by the guard, oldest
    first.
    """
    from dl2d.learning.dl2_paper.samples_from_recorded_slots import LiveSlot  # noqa: PLC0415

    placement = load_placement(settings.placement)
    folders = {version.digest[:DIGITS]: version for version in store.registry.versions(DL2_PAPER)}
    versions: dict[str, Dl2PaperPolicy | None] = {}
    found = []
    listed = store.slots(limit=_MAX_LIVE_SLOTS, policy=DL2_PAPER, outside=outside)
    for number, summary in enumerate(reversed(listed)):
        tell("its own slots read", number, len(listed))
        text = summary.policy_version
        if text[:DIGITS] not in folders:
            continue
        if text not in versions:
            try:
                checkpoint = read_version(folders[text[:DIGITS]])
                versions[text] = Dl2PaperPolicy(checkpoint, **settings_in(text))  # type: ignore[arg-type]
            except Dl2dError:  # a version whose folder is gone cannot say how likely its actions were
                versions[text] = None
        version, slot = versions[text], store.slot(summary.number)
        if version is None or slot is None or slot.proposed.allocations() != slot.decision.allocations():
            continue
        found.append(LiveSlot(Recording(slot.snapshot, slot.proposed, placement), version))
    return found


def _training_settings(
    settings: Settings, split: Split, parent: Checkpoint, chosen: TwinSettings
) -> tuple[TrainingSettings, tuple[MeasuredSpeeds, ...]]:
    """How to train, and the speeds that the parent knows. Raises ``CheckpointError`` where it lacks something."""
    nodes = max(len(workload.nodes()) for workload in split.training)
    # On few nodes some parts are the same.
    parts = tuple({max(1, round(nodes * part)): part for part in reversed(NODE_PARTS)}.values())[::-1]
    own = settings.policy.settings.get("optimism") if settings.policy.name == DL2 else None
    try:
        return (
            TrainingSettings(
                seed=chosen.seed, iterations=chosen.iterations, every=2, hidden=int(parent.settings["hidden"]),
                parts=parts, rounds=0, step=_STEP, measuring=False,
                deciding_optimism=float(parent.settings["optimism"]) if own is None else own,
            ),
            tuple(from_arrays(parent.weights, parent.settings["kinds"])),
        )  # fmt: skip
    except (KeyError, ValueError, TypeError, IndexError) as error:
        raise CheckpointError(f"checkpoint of {DL2}: missing or unsuitable entry {error}") from error


def _record(split: Split, parent: Checkpoint, seed: int, seconds: float) -> dict[str, Any]:
    """What the checkpoint says of its training, whatever the policy."""
    return {
        "dl2d": __version__, "twin": True, "parent": parent.digest, "seed": seed,
        "days": sorted({*learned_days(parent), *(day.name for day in split.trained_on)}),
        "held_out": [day.name for day in split.held_out],
        "data_from": split.trained_on[0].begin, "data_to": split.trained_on[-1].begin + DAY_SECONDS,
        "jobs": sum(day.submitted for day in split.trained_on), "seconds": round(seconds, 1), "costs": _costs(split),
    }  # fmt: skip


def checked(settings: Settings, store: SqlStore, learned: Learned, *, tell: Tell) -> ReplayCheck:
    """Whether what was learned starts and ends jobs on the site's cluster; the store is only read.

    What decides already is not replayed.
    """
    if not learned.is_new:
        return ReplayCheck(problem="", ended=0, jobs=0)
    return check_on_site(settings, learned.checkpoint, *nodes_and_requests(store), learned.split, tell=tell)


def judged(settings: Settings, store: SqlStore, learned: Learned, replays: ReplayCheck, *, tell: Tell) -> Candidate:
    """Put what was learned among the versions, and compare it with what decides now unless it failed in replays; the
    store is only read.
    """
    version = replace(
        version_in(settings.versions_path, learned.checkpoint, at=time.time(), origin="learned from this site's days"),
        parent=learned.parent.digest,
    )
    name = version.policy

    def side(checkpoint: Checkpoint) -> TrialPolicy:
        return TrialPolicy(checkpoint.digest, policy_of(settings, checkpoint))

    candidate, split = side(learned.checkpoint), learned.split
    current = compared_with(settings, split, side(_current(settings, store.registry, name)))
    trial = on_trial(settings, name, split, candidate, current, tell=tell, problem=replays.problem)
    return Candidate(version, trial)


def _current(settings: Settings, registry: SqlRegistry, policy: str) -> Checkpoint:
    """The checkpoint that decides now. Raises ``CheckpointError`` where the policy has none yet."""
    found = current_checkpoint(settings, registry, policy)
    if found is None:
        raise CheckpointError(
            f"{policy} has no checkpoint from which it could go on learning: train one, and set policy.checkpoint"
        )
    return found


def _note(state: State) -> str:
    """Mean completion times on the validation workloads with all nodes, in slots."""
    return f"JCT {state.best_look.jct[0]:.3f}, it began with {state.looks[0].jct[0]:.3f}"


def _costs(split: Split) -> dict[str, float]:
    return {"start_seconds": split.costs.start_seconds, "join_seconds": split.costs.join_seconds}
