"""``dl2d train supervised``: a policy that decides as a scheduler did, from the slots that the daemon recorded."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from dl2d.cli.policy_trials.check_trained_policy import check_on_site
from dl2d.cli.policy_trials.decisions_to_learn_from import recorded_slots
from dl2d.cli.progress_bars import interruptible, shown_progress
from dl2d.cli.shared_options import JsonOption, option
from dl2d.cli.train.options_of_train_commands import Design, read_design, refuse_inapplicable, site_settings
from dl2d.cli.train.train_supervised_report import (
    comparison_with_recorded,
    finish_imitation,
    imitation_problem,
    refuse_unless_forced,
)
from dl2d.core.errors import GateRefused, counted
from dl2d.learning.dl2_paper.settings import DEFAULTS, NetworkKind, SupervisedLoss
from dl2d.policies.common.checkpoint import Checkpoint
from dl2d.policies.common.training_input_ranges import range_in_words

#: Options that do not apply to --design dl2.
_NOT_FOR_DL2 = ("loss", "updates", "network", "window")
_MAX_UPDATES = 400


def _asked(checkpoint: Checkpoint) -> list[str]:
    """Line on the policy that was also learned from, since it decides as the recorded scheduler; none without one."""
    record = checkpoint.training["supervised"]
    if not record["asked"]:
        return []
    slots = counted(record["asked_slots"], "slot")
    replays = "replays of recorded days (it reproduces the recorded sizes)"
    return [f"also learned from {slots} that `{record['asked']}` decided in {replays}"]


def supervised(
    context: typer.Context,
    config: Annotated[
        Path | None,
        option("Configuration that names the store and the placement.", "--config", "-c", envvar="DL2D_CONFIG"),
    ] = None,
    store: Annotated[str | None, option("URL of the store, instead of the configuration's.")] = None,
    design: Annotated[
        Design,
        option("The policy to train; dl2-original is the paper's network.", parser=read_design),
    ] = Design.DL2_PAPER,
    slots: Annotated[
        int,
        option(
            "How many slots to learn from: the newest ones with jobs, without those of the days on which versions "
            "are compared.",
            min=2,
            max=100_000,
        ),
    ] = 2000,
    policy: Annotated[str | None, option("Only slots in which this policy decided.")] = None,
    loss: Annotated[SupervisedLoss, option("What is minimised.")] = DEFAULTS.supervised_loss,
    updates: Annotated[
        int | None,
        option(
            f"Updates of the weights. Default: while the error on held-out slots falls, at most {_MAX_UPDATES}.",
            min=1,
            max=1_000_000,
        ),
    ] = None,
    min_jobs: Annotated[
        int, option("Jobs that the recorded slots must have; with fewer nothing is learned.", min=1)
    ] = 20,
    network: Annotated[NetworkKind, option("Kind of network.")] = DEFAULTS.network,
    window: Annotated[
        int, option("Number of jobs in a batch (J); a shared network can see more.", min=1, max=1000)
    ] = DEFAULTS.window,
    seed: Annotated[int, option("Seed; the same seed gives the same weights.", min=0)] = 0,
    force: Annotated[
        bool,
        option("Write a policy that is refused for its sizes or completion times. Needs --reason.", "--force"),
    ] = False,
    reason: Annotated[str, option("Why, with --force; it is recorded in the checkpoint.")] = "",
    out: Annotated[Path, option("Folder of checkpoint and report.", "--out", "-o")] = Path("dl2-out"),
    as_json: JsonOption = False,
) -> None:
    """Train a policy to decide as the scheduler did in the slots that the daemon recorded, whoever it was.

    The checkpoint of dl2-original can be trained further: dl2d train --design dl2-original --start. That of dl2 has
    fitted weights if jobs of recorded days end sooner with them than with dl2d's own.
    """
    if force != bool(reason.strip()):
        raise typer.BadParameter("--force and --reason go together: the reason is recorded in the checkpoint")
    force_reason = reason if force else ""
    if design is Design.DL2:
        refuse_inapplicable(context, _NOT_FOR_DL2, "--design dl2")
        from dl2d.cli.train.train_dl2_supervised import train_dl2_supervised  # noqa: PLC0415 - what replays days takes half a second

        site = site_settings(config, store)
        with interruptible(lambda: "nothing was written"), shown_progress() as tell:
            recorded = recorded_slots(site, slots, policy, seed, tell=tell)
        train_dl2_supervised(
            site, recorded, out=out, seed=seed, min_jobs=min_jobs, force_reason=force_reason, as_json=as_json
        )
        return
    from dl2d.learning.dl2_paper import imitation_learning as learning  # noqa: PLC0415 - torch takes seconds

    began = time.monotonic()
    settings = replace(
        DEFAULTS, supervised_loss=loss, supervised_updates=updates or _MAX_UPDATES, network=network, window=window,
    )  # fmt: skip
    with interruptible(lambda: "nothing was written"), shown_progress() as tell:
        site = site_settings(config, store)
        recorded = recorded_slots(site, slots, policy, seed, tell=tell)
        tell("setting up", 0, 1)
        with recorded.explained():
            found = learning.imitate_recordings(
                recorded.slots, settings, slot_seconds=recorded.slot_seconds, seed=seed, min_jobs=min_jobs,
                workloads=() if recorded.days is None else recorded.days.training, tell=tell,
            )  # fmt: skip
        checkpoint = recorded.with_days(found.checkpoint)
        problem = imitation_problem(found.comparison, found.yardstick)
        refuse_unless_forced("the trained policy", problem, force_reason)
        checked = check_on_site(site, checkpoint, recorded.nodes, recorded.requests, recorded.days, tell=tell)
        if checked.problem:
            raise GateRefused(
                f"the trained policy {checked.problem}; nothing was written; train on more slots, on those of another "
                "scheduler, or with other --updates"
            )
        trial, is_worse = comparison_with_recorded(site, recorded, checkpoint, checked, tell=tell)
        problem = problem or is_worse
        refuse_unless_forced("the trained policy", problem, force_reason)
    acting = "drawn actions" if checkpoint.settings["sampled"] else "the best action each time"
    finish_imitation(
        out, checkpoint, recorded, found, checked, trial,
        learned_lines=[f"{found.demonstrations} decisions learned from", *_asked(checkpoint)],
        policy_lines=[f"a policy from this checkpoint takes {acting}", range_in_words(checkpoint.training)],
        figures={"trial": trial, "lessons": found.demonstrations, "losses": list(found.losses)},
        problem=problem, force_reason=force_reason, began=began, as_json=as_json,
    )  # fmt: skip
