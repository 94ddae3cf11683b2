"""What both designs of ``dl2d train supervised`` share: comparisons that may refuse a policy, and the report."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from dl2d.cli.output import print_json
from dl2d.cli.policy_trials.check_trained_policy import replay_line
from dl2d.cli.policy_trials.decisions_to_learn_from import RecordedSlots
from dl2d.cli.policy_trials.trial_on_recorded_days import compared_with_recorded
from dl2d.config.settings import Settings
from dl2d.core.errors import GateRefused, counted
from dl2d.core.policy_registry import Trial
from dl2d.core.progress_callback import Tell
from dl2d.learning.replay_check import ReplayCheck
from dl2d.learning.site_records.recorded_decisions import NO_TASKS, SizeComparison, Yardstick
from dl2d.policies.common.checkpoint import Checkpoint, write_checkpoint, writing

if TYPE_CHECKING:
    from dl2d.learning.dl2.supervised import ScorerImitation
    from dl2d.learning.dl2_paper.imitation_learning import Imitation

#: Part of the tasks below which a difference is no reason to refuse a network.
_MIN_DIFFERING = 0.1
#: Part of the tasks by which a network may differ more than every job at its size as before, and more than DRF.
_MORE_THAN_AS_BEFORE = 0.05
_MORE_THAN_DRF = 0.2
#: Added where a longer record would change nothing.
_OF_WAITING_JOBS = (
    "; most of these tasks are of jobs that the scheduler left waiting although there was room, which dl2d gives them"
)
_GATE_DECIDES = "the gate of `dl2d policy promote`, which takes other speeds, too, decides"


def imitation_problem(trained: SizeComparison, yardstick: Yardstick) -> str:
    """Why a network is refused that is worse than simple deciders, or of which the slots do not tell; else empty."""
    as_before, drf = yardstick.as_before.differing, yardstick.drf.differing
    if trained.differing > max(as_before, drf, _MIN_DIFFERING):
        more = f"more than every job at its size as before ({as_before:.1%}) and than drf ({drf:.1%})"
    elif trained.differing > max(as_before + _MORE_THAN_AS_BEFORE, _MIN_DIFFERING):
        more = f"clearly more than every job at its size as before ({as_before:.1%})"
    else:
        more = f"clearly more than drf ({drf:.1%})" if trained.differing > drf + _MORE_THAN_DRF else ""
    if more:
        waiting = _OF_WAITING_JOBS if 2 * trained.given_to_waiting > trained.differing else ""
        return f"differs from the recorded scheduler in {trained.differing:.1%} of tasks, {more}{waiting}"
    if reason := _why_they_do_not_tell(trained, yardstick):
        return f"was compared on {counted(trained.slots, 'slot')} that cannot tell how well it imitates: {reason}"
    return ""


def _why_they_do_not_tell(trained: SizeComparison, yardstick: Yardstick) -> str:
    """Why held-out slots do not tell whether a network imitates the recorded scheduler; empty if they do."""
    if not trained.started:
        return "no job was started in them"
    if yardstick.drf_only_here:
        return "drf, which differs from the recorded scheduler in other slots, gives the recorded sizes, too"
    return ""


def comparison_lines(
    trained: SizeComparison, yardstick: Yardstick, own_weights: SizeComparison | None = None
) -> list[str]:
    """Lines on the sizes that the trained policy gives on the held-out slots, beside those of simple deciders.

    ``own_weights`` is the policy with dl2d's own weights.
    """
    simple = _simple_deciders(yardstick, own_weights)
    all_jobs = "; ".join(f"{name}: {each.same:.1%}, {each.differing:.1%}" for name, each in simple.items())
    new_jobs = "; ".join(
        f"{name}: {each.started_same:.1%}" for name, each in simple.items() if each is not yardstick.as_before
    )
    recorded = (
        f"{counted(trained.slots, 'held-out slot')}: {trained.same:.1%} of {counted(trained.jobs, 'job')} get the "
        f"recorded size, {trained.differing:.1%} of tasks differ ({all_jobs})"
    )
    started = f"of {counted(trained.started, 'job')} started then, {trained.started_same:.1%} get the recorded size"
    lines = [recorded, f"{started} ({new_jobs})" if trained.started else "no job was started in these slots"]
    if reason := _why_they_do_not_tell(trained, yardstick):
        lines.append(f"these slots cannot tell how well it imitates the recorded scheduler: {reason}")
    if equals := not_better_than(trained, yardstick, own_weights):
        lines.append(
            f"not better than {' and '.join(equals)}, which is as near to the recorded scheduler, or nearer: "
            "it has learned little; record longer before it decides"
        )
    return lines


def comparison_with_recorded(
    settings: Settings, recorded: RecordedSlots, checkpoint: Checkpoint, checked: ReplayCheck, *, tell: Tell
) -> tuple[Trial | None, str]:
    """Compare completion times with the recorded scheduler's, and say why the policy is refused for them; "" if not.

    There is no comparison without days for it, or if the replays of ``checked`` were cut short.
    """
    if recorded.days is None or not recorded.left_out or checked.cut_short:
        return None, ""
    trial = compared_with_recorded(settings, recorded.days, checkpoint, tell=tell)
    if trial.low is None or trial.low <= settings.learning.gate_site_margin:
        return trial, ""
    return trial, f"is surely worse than the recorded scheduler: {_completion_times(trial)}"


def refuse_unless_forced(policy: str, problem: str, force_reason: str) -> None:
    """Refuse a policy that has a problem, unless there is a reason to write it by force. Raises ``GateRefused``."""
    if problem and not force_reason:
        longer = "" if problem.endswith(_OF_WAITING_JOBS) else "record longer, or "
        raise GateRefused(f"{policy} {problem}; nothing was written; {longer}add --force --reason TEXT")


def _completion_times(trial: Trial) -> str:
    """Change of the mean completion time in a comparison with the recorded scheduler; or why there is none."""
    if trial.change is None or trial.low is None or trial.high is None:
        return f"completion times were not compared: {trial.reason}"
    return (
        f"mean completion time {trial.change:+.2%} (95 % interval {trial.low:+.2%} to {trial.high:+.2%} over days) on "
        f"{', '.join(trial.days)} with the expected speeds, where no running job gets less than its minimum size, "
        "as in mode live"
    )


def not_better_than(
    trained: SizeComparison, yardstick: Yardstick, own_weights: SizeComparison | None = None
) -> list[str]:
    """The simple deciders that come as near to the recorded sizes as the trained policy, of all jobs or of new ones.

    None where the trained policy gives the recorded sizes: where DRF was recorded, DRF gives them, too.
    """
    if trained.differing < NO_TASKS:
        return []
    return [
        name
        for name, each in _simple_deciders(yardstick, own_weights).items()
        if trained.differing >= each.differing or trained.started_same < each.started_same
    ]


def _simple_deciders(yardstick: Yardstick, own_weights: SizeComparison | None) -> dict[str, SizeComparison]:
    own = {} if own_weights is None else {"dl2d's own weights": own_weights}
    return {**own, "size as before": yardstick.as_before, "drf": yardstick.drf}


def finish_imitation(
    out: Path,
    checkpoint: Checkpoint,
    recorded: RecordedSlots,
    found: Imitation | ScorerImitation,
    checked: ReplayCheck,
    beside: Trial | None,
    *,
    learned_lines: Sequence[str],
    policy_lines: Sequence[str],
    figures: Mapping[str, object],
    own_weights: SizeComparison | None = None,
    problem: str,
    force_reason: str,
    began: float,
    as_json: bool,
) -> None:
    """Write checkpoint and report, and print the report's lines, or ``figures`` and others as JSON.

    Parameters
    ----------
    beside
        The comparison of completion times with the recorded scheduler, if there was one.
    learned_lines, policy_lines
        Lines of the report on what was learned from, and on the policy.
    figures
        What only one design has for ``--json``.
    own_weights
        The comparison of sizes of the policy with dl2d's own weights.
    problem
        Why the policy, which is written by force, was refused; empty if it was not.
    began
        When learning began, on the monotonic clock.
    """
    lines = [
        *learned_lines,
        *recorded.deciders,
        *comparison_lines(found.comparison, found.yardstick, own_weights),
        *policy_lines,
        replay_line(checked),
    ]
    if beside is not None:
        lines.append(f"beside the recorded scheduler: {_completion_times(beside)}; {_GATE_DECIDES}")
    if problem:
        lines.append(f"written by force ({force_reason}) although it {problem}")
        forced = {"problem": problem, "reason": force_reason}
        checkpoint = replace(checkpoint, training={**checkpoint.training, "forced": forced})
    if recorded.note:
        lines.append(recorded.note)
    folder, seconds = out / "checkpoint", round(time.monotonic() - began, 1)
    write_checkpoint(checkpoint, folder)
    _write_report(out, checkpoint, found.losses, lines)
    if as_json:
        head = {"checkpoint": str(folder), "digest": checkpoint.digest, "seconds": seconds}
        compared = {
            "replayed": checked.as_json,
            "not_better_than": not_better_than(found.comparison, found.yardstick, own_weights),
        }
        print_json({**head, **figures, **compared, **checkpoint.training})
        return
    for line in lines:
        typer.echo(line)
    typer.echo(f"{folder}: {checkpoint.digest[:12]}, after {seconds:.0f} s; report in {out / 'report.md'}")


def _write_report(out: Path, checkpoint: Checkpoint, losses: Sequence[float], lines: Sequence[str]) -> None:
    """Write ``report.md`` and ``loss.png``; raises ``CheckpointError`` if the folder cannot be written."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - slow to import

    plain = "\n".join(f"- {key}: {value}" for key, value in checkpoint.training.items())
    page = [f"# Supervised learning of {checkpoint.policy}", "", *(f"- {line}" for line in lines), "", plain, "",
            "![loss by update](loss.png)", ""]  # fmt: skip
    figure = Figure(figsize=(5.0, 3.0), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(range(1, len(losses) + 1), losses)
    axes.set_xlabel("update")
    axes.set_ylabel("loss")
    with writing(out):
        (out / "report.md").write_text("\n".join(page), encoding="utf-8")
        figure.savefig(out / "loss.png", metadata={"Software": None})
