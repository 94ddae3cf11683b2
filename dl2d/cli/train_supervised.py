"""``dl2d train supervised``: a network that decides as a scheduler did, from records or from a built-in teacher."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from dl2d.cli.imitation_report import comparison_lines, not_better_than, start_problem, write_imitation_report
from dl2d.cli.options import JsonOption
from dl2d.cli.output import print_json
from dl2d.cli.recorded_slots import recorded_slots
from dl2d.cli.train_options import (
    Design,
    interruptible,
    progress_bars,
    refuse_inapplicable,
    site_settings,
    training_workloads,
)
from dl2d.core.errors import GateRefused
from dl2d.learning.dl2_paper.settings import NetworkKind, Settings, SupervisedLoss, Teacher
from dl2d.learning.recorded_slots import Recording
from dl2d.policies.common.checkpoint import write_checkpoint
from dl2d.policies.dl2_paper.policy import Dl2Original
from dl2d.simulation.workload.sources import source_forms

#: Options that do not apply to --design jumps.
_NOT_FOR_DL2: Final = ("teacher", "workload", "validate", "loss", "updates", "network", "window", "draws")
_UPDATES_FROM_TEACHER, _MAX_UPDATES_FROM_STORE = 100, 400

if TYPE_CHECKING:
    from dl2d.learning.dl2_paper.supervised import Imitation


def supervised(
    context: typer.Context,
    from_store: Annotated[
        bool, typer.Option("--from-store", help="Learn from the slots that the daemon recorded, whoever decided.")
    ] = False,
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="Configuration that names the store and the placement.")
    ] = None,
    store: Annotated[str | None, typer.Option(help="URL of the store, instead of the configuration's.")] = None,
    design: Annotated[
        Design, typer.Option(help="What is trained: original, the paper's network, or with --from-store jumps, dl2.")
    ] = Design.ORIGINAL,
    slots: Annotated[int, typer.Option(min=2, max=100_000, help="Newest slots of the store that are read.")] = 2000,
    policy: Annotated[str | None, typer.Option(help="Only slots in which this policy decided.")] = None,
    teacher: Annotated[Teacher | None, typer.Option(help="A built-in policy to learn from, on workloads.")] = None,
    workload: Annotated[
        list[str] | None,
        typer.Option("--workload", "-w", help=f"For the teacher; may be repeated. {source_forms()}, or a pattern."),
    ] = None,
    validate: Annotated[list[str] | None, typer.Option(help="Workloads to compare with the teacher on.")] = None,
    loss: Annotated[SupervisedLoss, typer.Option(help="What is minimised.")] = SupervisedLoss.CROSS_ENTROPY,
    updates: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=1_000_000,
            help="Updates of the weights. Default: 100 with --teacher; with --from-store as many as lower the error on "
            "held-out slots, at most 400.",
        ),
    ] = None,
    min_jobs: Annotated[
        int, typer.Option(min=1, help="Jobs that the recorded slots must have; with fewer nothing is learned.")
    ] = 20,
    network: Annotated[NetworkKind, typer.Option(help="Kind of network.")] = NetworkKind.SHARED,
    window: Annotated[
        int, typer.Option(min=1, max=1000, help="J, jobs of a batch; a shared network may see more of them.")
    ] = 20,
    seed: Annotated[int, typer.Option(min=0, help="Seed; the same seed gives the same weights.")] = 0,
    draws: Annotated[int, typer.Option(min=2, help="Workloads drawn from each generator.")] = 32,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of checkpoint and report.")] = Path("dl2-out"),
    as_json: JsonOption = False,
) -> None:
    """Train a policy to decide as the present scheduler does.

    The checkpoint is for policy dl2-original, and for dl2d train --design original --start to go on from; with --design
    jumps it is for policy dl2, with fitted weights if jobs of recorded days end sooner with them than with dl2d's own.
    """
    if design is Design.JUMPS:
        refuse_inapplicable(context, _NOT_FOR_DL2, "--design jumps")
        if not from_store:
            raise typer.BadParameter("--design jumps learns from a store alone: give --from-store")
        site = site_settings(config, store)
        from dl2d.cli.train_scorer import train_scorer  # noqa: PLC0415 - what replays days takes half a second

        recorded = recorded_slots(site, slots, policy, seed)
        train_scorer(site, recorded, out=out, seed=seed, min_jobs=min_jobs, as_json=as_json)
        return
    if from_store == (teacher is not None):
        raise typer.BadParameter("give either --from-store or --teacher")
    if teacher is not None and not workload:
        raise typer.BadParameter("--teacher needs workloads", param_hint="--workload")
    from dl2d.learning.dl2_paper import supervised as learning  # noqa: PLC0415 - torch takes seconds

    began = time.monotonic()
    most_updates = updates or (_MAX_UPDATES_FROM_STORE if from_store else _UPDATES_FROM_TEACHER)
    settings = replace(
        Settings(), teacher="" if teacher is None else teacher.value, supervised_loss=loss,
        supervised_updates=most_updates, network=network, window=window,
    )  # fmt: skip
    recordings: list[Recording] = []
    note = ""
    with interruptible(lambda: "nothing was written"), progress_bars() as display:
        bar = display.add_task("looking on", total=None, note="")

        def show(done: int, total: int, value: float) -> None:
            display.update(bar, description="learning", completed=done, total=total, note=f"loss {value:.3f}")

        if from_store:
            recorded = recorded_slots(site_settings(config, store), slots, policy, seed)
            recordings, note = recorded.slots, recorded.note
            with recorded.explained():
                found = learning.imitate_recordings(
                    recorded.learned_from, settings, slot_seconds=recorded.slot_seconds, seed=seed, min_jobs=min_jobs,
                    on_update=show,
                )  # fmt: skip
            found = replace(found, checkpoint=recorded.with_days(found.checkpoint))
        else:
            train_on, look_at = training_workloads(workload or [], validate or [], seed, draws)
            found = learning.imitate_teacher(train_on, look_at, settings, seed=seed, on_update=show)
    if recordings and (problem := start_problem(Dl2Original(found.checkpoint), recordings)):
        raise GateRefused(
            f"the trained policy {problem}; nothing was written; train on more slots, on those of another scheduler, "
            "or with other --updates"
        )
    folder = out / "checkpoint"
    write_checkpoint(found.checkpoint, folder)
    lines = [*_lines(found, teacher), *([note] if note else [])]
    write_imitation_report(out, found.checkpoint, found.losses, lines)
    taken = round(time.monotonic() - began, 1)
    if as_json:
        training, nothing_better = found.checkpoint.training, None
        if found.comparison is not None and found.yardstick is not None:
            nothing_better = not_better_than(found.comparison, found.yardstick)
        print_json({
            "checkpoint": str(folder), "digest": found.checkpoint.digest, "seconds": taken,
            "not_better_than": nothing_better, "lessons": found.demonstrations, "losses": list(found.losses),
            **training,
        })  # fmt: skip
        return
    for line in lines:
        typer.echo(line)
    typer.echo(f"{folder}: {found.checkpoint.digest[:12]}, after {taken:.0f} s; report in {out / 'report.md'}")


def _lines(found: Imitation, teacher: Teacher | None) -> list[str]:
    lines = [
        f"{found.demonstrations} decisions learned from; the best action was right in {found.agreement:.1%} of others"
    ]
    if found.score is not None and found.teacher is not None:
        for way, value in (("best actions", found.score.greedy), ("actions drawn", found.score.sampled)):
            share = f"{value / found.teacher - 1:+.1%} against {teacher}'s {found.teacher:.3f}"
            lines.append(f"{way}: mean completion time {value:.3f} slots, {share}")
    if found.comparison is not None and found.yardstick is not None:
        lines += comparison_lines(found.comparison, found.yardstick)
    acting = "drawn actions" if found.checkpoint.settings["sampled"] else "the best action each time"
    return [*lines, f"a policy from this checkpoint takes {acting}"]
