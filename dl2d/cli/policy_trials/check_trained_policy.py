"""Replays of a trained policy before it is written or goes live: a generated load, recorded days, workloads."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from dl2d.cli.policy_trials.trial_on_recorded_days import policy_of, slot_seconds
from dl2d.config.settings import Settings
from dl2d.core.cluster import Node
from dl2d.core.errors import GateRefused, counted
from dl2d.core.jobs import JobRequest
from dl2d.core.measured_speeds_and_losses import MeasuredSpeeds
from dl2d.core.policy import Policy
from dl2d.core.progress_callback import Tell
from dl2d.daemon.tick_settings_from_configuration import guard_rules
from dl2d.learning.replay_check import ReplayCheck, generated_load, replay_check
from dl2d.learning.site_records.split_of_recorded_days import Split
from dl2d.placement.load_balance import LoadBalance
from dl2d.plugins import FactoryArguments, load_placement, load_policy
from dl2d.policies.common.checkpoint import Checkpoint
from dl2d.simulation.workload.workload_file import Workload
from dl2d.tick.policy_check.policy_starts_jobs_check import requests_to_try, start_check
from dl2d.tick.tick_context import GuardRules

#: Longest that the replays of a policy take together.
MAX_REPLAY_SECONDS = 120.0
#: Recorded days, or other workloads, that are replayed.
_MAX_WORKLOADS = 3


def check_on_site(
    settings: Settings, checkpoint: Checkpoint, nodes: Sequence[Node], requests: Sequence[JobRequest],
    days: Split | None, *, tell: Tell,
) -> ReplayCheck:  # fmt: skip
    """Whether a trained policy starts and ends jobs on a site's cluster: the start check, then replays.

    Replayed are a small generated load and the newest days on which versions are compared, with expected speeds.
    """
    policy = policy_of(settings, checkpoint)
    if problem := start_check(policy, load_placement(settings.placement), nodes, requests).problem:
        return ReplayCheck(problem=problem, ended=0, jobs=0)
    if days is None:
        return replayed(settings, policy, nodes, requests, tell=tell)
    expected = {case.name: case.workload for case in days.cases}
    names = [day.name for day in days.held_out if day.name in expected]
    workloads = {f"recorded day {name}": expected[name] for name in names[-_MAX_WORKLOADS:]}
    return replayed(settings, policy, nodes, requests, speeds=days.measured, workloads=workloads, tell=tell)


def replayed(
    settings: Settings, policy: Policy, nodes: Sequence[Node], requests: Sequence[JobRequest], *, tell: Tell,
    speeds: Sequence[MeasuredSpeeds] = (), workloads: Mapping[str, Workload] = MappingProxyType({}),
) -> ReplayCheck:  # fmt: skip
    """Replay a policy on a small load, generated from requests of the site's jobs, and on workloads; see
    ``dl2d.learning.replay_check``.
    """
    placement = load_placement(settings.placement)
    load = generated_load(requests_to_try(placement, nodes, requests), nodes, speeds, slot_seconds(settings))
    return replay_check(
        policy, placement, {**({} if load is None else {"a small generated load": load}), **workloads},
        guard_rules(settings), clock=time.monotonic, most_seconds=MAX_REPLAY_SECONDS,
        progress=lambda done, total: tell("jobs replayed", done, total),
    )  # fmt: skip


def check_on_workloads(checkpoint: Checkpoint, workloads: Sequence[Workload], *, tell: Tell) -> ReplayCheck:
    """Replay a trained policy on the first workloads by which it was chosen.

    Raises
    ------
    GateRefused
        It fails, or leaves jobs waiting on an idle cluster.
    """
    found = replay_check(
        load_policy(checkpoint.policy, given=FactoryArguments(checkpoint=checkpoint)), LoadBalance(),
        {f"validation workload {number}": each for number, each in enumerate(workloads[:_MAX_WORKLOADS], 1)},
        GuardRules(), clock=time.monotonic, most_seconds=MAX_REPLAY_SECONDS,
        progress=lambda done, total: tell("jobs replayed", done, total),
    )  # fmt: skip
    if found.problem:
        raise GateRefused(
            f"the trained policy {found.problem}; no checkpoint was written; train it longer, or on other workloads"
        )
    return found


def replay_line(found: ReplayCheck) -> str:
    """What a replay check without a problem says."""
    ended = f"{found.ended} of {counted(found.jobs, 'job')}"
    if found.cut_short:
        rest = ", ".join(found.cut_short)
        return f"{ended} ended in {MAX_REPLAY_SECONDS:.0f} s of replays; not replayed to the end: {rest}"
    return f"{ended} started and ended in replays"
