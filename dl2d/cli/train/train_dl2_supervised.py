"""``dl2d train supervised --design dl2``: trains policy dl2 from a store: its measured speeds, and fitted weights."""

from __future__ import annotations

import time
from pathlib import Path

import typer

from dl2d.cli.daemon_access.open_store import open_store
from dl2d.cli.policy_trials.check_trained_policy import check_on_site
from dl2d.cli.policy_trials.decisions_to_learn_from import RecordedSlots
from dl2d.cli.policy_trials.trial_on_recorded_days import TrialPolicy, on_trial, policy_of
from dl2d.cli.progress_bars import interruptible, shown_progress
from dl2d.cli.train.train_supervised_report import comparison_with_recorded, finish_imitation, refuse_unless_forced
from dl2d.config.settings import Settings
from dl2d.core.errors import GateRefused
from dl2d.core.measured_speeds_and_losses import TrainingKind
from dl2d.learning.dl2.supervised import imitate_with_scorer
from dl2d.learning.replay_check import ReplayCheck
from dl2d.policies.common.checkpoint import Checkpoint
from dl2d.policies.dl2.policy import with_checkpoint

_DL2 = "dl2"


def train_dl2_supervised(
    settings: Settings,
    recorded: RecordedSlots,
    *,
    out: Path,
    seed: int,
    min_jobs: int,
    force_reason: str,
    as_json: bool,
) -> None:
    """Fit weights to recorded slots; the checkpoint gets them if recorded days' jobs end sooner than with dl2d's own.

    With a ``force_reason`` the checkpoint is also written if jobs end later than with the recorded scheduler.

    Raises
    ------
    GateRefused
        With dl2d's own weights and the store's speeds, jobs are left waiting on an idle cluster; or, without a
        ``force_reason``, jobs of recorded days surely end later with the checkpoint than with the recorded scheduler.
    """
    began = time.monotonic()
    if recorded.problem:
        typer.echo(
            f"the checkpoint will have dl2d's own weights, whatever is learned: {recorded.problem}", err=True
        )  # fmt: skip
    with interruptible(lambda: "nothing was written"), shown_progress() as tell, open_store(settings) as store:
        days, reason = recorded.days, recorded.problem
        learned = (job.request for recording in recorded.slots for job in recording.snapshot.jobs)
        kinds = {TrainingKind.of(request) for request in (*recorded.requests, *learned)}
        with recorded.explained():
            found = imitate_with_scorer(
                recorded.slots, with_checkpoint().checkpoint, store.speeds(kinds),
                slot_seconds=recorded.slot_seconds, seed=seed, min_jobs=min_jobs,
                tell=tell,
            )  # fmt: skip

        if not found.states:
            reason = "each job got all that it may have, or its only size: there was no choice to learn from"

        def replayed(checkpoint: Checkpoint) -> ReplayCheck:
            return check_on_site(settings, checkpoint, recorded.nodes, recorded.requests, days, tell=tell)

        trial = None
        replays: ReplayCheck | None = None
        if days is not None and not reason:
            replays = replayed(found.fitted)
            reason = replays.problem
        if days is not None and not reason:
            sides = (TrialPolicy(each.digest, policy_of(settings, each)) for each in (found.fitted, found.begun_with))
            trial = on_trial(settings, _DL2, days, *sides, tell=tell)
            reason = trial.reason
        is_better = trial is not None and trial.passed
        checkpoint = recorded.with_days(found.fitted) if is_better else found.begun_with
        if replays is None or not is_better:
            replays = replayed(checkpoint)
        if replays.problem:
            raise GateRefused(f"policy {_DL2} {replays.problem}; nothing was written; record more days first")
        beside, problem = None, ""
        # Not with assumed speeds, which tell little of a policy that chooses sizes by speed.
        if not recorded.problem:
            beside, problem = comparison_with_recorded(settings, recorded, checkpoint, replays, tell=tell)
        refuse_unless_forced(f"policy {_DL2}", problem, force_reason)
    weights = "fitted weights" if is_better else "dl2d's own weights"
    not_kept = "; the fitted weights, which the checkpoint does not have, compare as follows"
    finish_imitation(
        out, checkpoint, recorded, found, replays, beside,
        learned_lines=[f"{found.states} choices learned from{not_kept if found.states and not is_better else ''}"],
        policy_lines=[f"the checkpoint has {weights}: {reason}"],
        figures={
            "weights": "fitted" if is_better else "own", "reason": reason, "trial": trial,
            "beside_recorded": beside,
        },
        own_weights=found.comparison_begun_with, problem=problem, force_reason=force_reason, began=began,
        as_json=as_json,
    )  # fmt: skip
