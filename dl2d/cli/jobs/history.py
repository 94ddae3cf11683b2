"""``dl2d history``: slots, resizes with every step, and the runtime plans of jobs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer
from rich.table import Table

from dl2d.cli.daemon_access.job_views_from_store_or_api import job_source
from dl2d.cli.output import moment, print_json, print_tables, table
from dl2d.cli.shared_options import ConfigOption, JsonOption, option
from dl2d.config.settings import DEFAULT_PATH
from dl2d.core.daemon_mode_and_canary import ModeChange
from dl2d.core.job_views import MAX_LISTED, HistoryView
from dl2d.core.jobs import Job, JobKey
from dl2d.core.json_codec import as_plain
from dl2d.core.store import DecisionEntry, Resize, RuntimePlan, SlotSummary


def history(
    job: Annotated[str | None, option("Show this job only.", "--job", "-j", metavar="JOB")] = None,
    limit: Annotated[
        int,
        option("How many of the newest slots and resizes to show.", "--limit", "-n", min=1, max=MAX_LISTED),
    ] = 20,
    as_json: JsonOption = False,
    config: ConfigOption = DEFAULT_PATH,
) -> None:
    """Show mode changes, slots, resizes with their steps, and runtime plans with suspension times, oldest first."""
    with job_source(config) as source:
        seen = source.views.history(job, limit=limit)
    if seen.job is not None:
        _show_job(seen, seen.job, as_json=as_json)
    elif as_json:
        print_json({"modes": seen.modes, "slots": seen.slots, **_resizes_json(seen.resizes, seen.plans)})
    elif not seen.slots and not seen.modes:
        typer.echo("no decision is recorded yet")
    else:
        parts = [_modes_table(seen.modes)] if seen.modes else []
        parts += [_slots_table(seen.slots)] if seen.slots else []
        print_tables(*parts, *_resize_tables(seen.resizes, seen.plans))


def _show_job(seen: HistoryView, job: Job, *, as_json: bool) -> None:
    if as_json:
        print_json({"job": job.key.slug, "runs": [_run_json(run) for run in seen.runs],
                    "decisions": [_change_json(entry) for entry in seen.decisions],
                    **_resizes_json(seen.resizes, seen.plans)})  # fmt: skip
        return
    if len(seen.runs) > 1:
        print_tables(_runs_table(seen.runs))
    if not seen.decisions and not seen.resizes:
        typer.echo(f"job {job.key.id} has not been resized yet")
        return
    rows = [
        (str(entry.slot), moment(entry.at), f"{entry.policy} {entry.policy_version}", str(entry.decided.previous),
         str(entry.decided.allocation), entry.decided.binding_reason.text)
        for entry in seen.decisions
    ]  # fmt: skip
    print_tables(
        table((">SLOT", "TIME", "POLICY", "BEFORE", "AFTER", "BECAUSE"), rows, title="changes"),
        *_resize_tables(seen.resizes, seen.plans),
    )


def _runs_table(runs: Sequence[Job]) -> Table:
    rows = [
        (run.key.slug, moment(run.key.submitted), moment(run.started_at), moment(run.ended_at), run.state,
         f"{run.progress.epoch:.1f}", run.end_reason)
        for run in runs
    ]  # fmt: skip
    return table(("RUN", "QUEUED", "STARTED", "ENDED", "STATE", ">EPOCHS", "WHY"), rows, title="runs (requeued)")


def _run_json(run: Job) -> dict[str, object]:
    return {"job": run.key.slug, "queued_at": run.key.submitted, "started_at": run.started_at,
            "ended_at": run.ended_at, "state": run.state, "epochs": run.progress.epoch,
            "why": run.end_reason}  # fmt: skip


def _modes_table(modes: Sequence[ModeChange]) -> Table:
    rows = [(moment(each.at), str(each.before or "-"), str(each.after), each.reason, each.by) for each in modes]
    return table(("TIME", "BEFORE", "MODE", "AT", "BY"), rows, title="modes")


def _slots_table(slots: Sequence[SlotSummary]) -> Table:
    return table(
        (">SLOT", "TIME", "POLICY", ">CHANGED", ">STARTED", ">DRAINED", ">FAILURES", ">SECONDS", "INPUTS"),
        (
            (str(slot.number), moment(slot.at), f"{slot.policy} {slot.policy_version}", str(slot.changed),
             str(slot.started), str(slot.draining), str(slot.failures), f"{slot.seconds:.3f}", slot.inputs_hash[:12])
            for slot in slots
        ),
        title="slots",
    )  # fmt: skip


def _resize_tables(resizes: Sequence[Resize], plans: Sequence[tuple[JobKey, RuntimePlan]]) -> list[Table]:
    parts = []
    if resizes:
        rows = [
            (resize.job.id, resize.task, resize.direction, resize.node or "-", _steps(resize)) for resize in resizes
        ]
        parts.append(table(("JOB", "TASK", "RESIZE", "NODE", "STEPS"), rows, title="resizes"))
    if plans:
        parts.append(
            table(
                ("JOB", ">PLAN", "TIME", ">FROM VERSION", ">WORKERS", ">PS", "JOINED", "LEFT", ">MOVED MB",
                 ">PREPARED ms", ">MOVED ms", ">SUSPENDED p50 ms", ">max ms", ">STEP median ms",
                 ">longest ms"),
                (
                    (key.id, str(plan.number), moment(plan.at), str(plan.first_version), str(plan.workers),
                     str(plan.servers), ", ".join(plan.added) or "-", ", ".join(plan.removed) or "-",
                     f"{plan.moved_bytes / 1e6:.2f}", f"{plan.prepare_ms:.1f}", f"{plan.move_ms:.1f}",
                     f"{plan.suspension_p50_ms:.1f}", f"{plan.suspension_max_ms:.1f}",
                     _milliseconds(plan.median_step_ms), _milliseconds(plan.longest_step_ms))
                    for key, plan in plans
                ),
                title="runtime plans",
            )
        )  # fmt: skip
    return parts


def _milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _steps(resize: Resize) -> str:
    """``asked 10:12:05, granted +0.2 s, joined +4.1 s``, with notes."""
    begin = resize.events[0].at
    said = [f"{resize.events[0].state} {moment(begin).partition(' ')[2]}"]
    said += [f"{event.state} +{event.at - begin:.1f} s" for event in resize.events[1:]]
    note = next((event.note for event in reversed(resize.events) if event.note), "")
    return ", ".join(said) + (f" ({note})" if note else "")


def _change_json(entry: DecisionEntry) -> dict[str, object]:
    reason = entry.decided.binding_reason
    return {
        "slot": entry.slot,
        "at": entry.at,
        "policy": entry.policy,
        "policy_version": entry.policy_version,
        "inputs_hash": entry.inputs_hash,
        "previous": entry.decided.previous._asdict(),
        "allocation": entry.decided.allocation._asdict(),
        "constraint": reason.constraint,
        "why": reason.text,
    }


def _resizes_json(resizes: Sequence[Resize], plans: Sequence[tuple[JobKey, RuntimePlan]]) -> dict[str, object]:
    return {
        "resizes": [{**as_plain(resize), "job": resize.job.slug} for resize in resizes],
        "plans": [{"job": key.slug, **as_plain(plan)} for key, plan in plans],
    }
