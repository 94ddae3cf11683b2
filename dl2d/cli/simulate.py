"""``dl2d simulate``: replay of workloads in virtual time, without a daemon."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from dl2d.cli.output import print_tables, table
from dl2d.cli.progress_bars import shown_progress
from dl2d.cli.shared_options import JsonOption, option, options_given
from dl2d.core.errors import WorkloadError, printable
from dl2d.core.json_codec import as_plain
from dl2d.simulation.completion_time_lower_bound import Bound, lower_bound
from dl2d.simulation.parse_key_value_options import key_values
from dl2d.simulation.policy_by_name import LEARNED, find_policy
from dl2d.simulation.realism import Realism
from dl2d.simulation.replay import Replayed, replay
from dl2d.simulation.simulation_presets import PresetName, preset
from dl2d.simulation.workload.workload_source_by_name import load_source, source_forms


def simulate(
    context: typer.Context,
    workload: Annotated[str, option(f"What to replay: {source_forms()} (docs/workloads.md).", "--workload", "-w")],
    policy: Annotated[
        list[str] | None, option("Policy to run; may be repeated. Default: drf.", "--policy", "-p")
    ] = None,
    preset_name: Annotated[
        PresetName | None,
        option(
            "dl2-paper: rules of the DL2 authors' simulator. realistic: costs and failures as on a real cluster.",
            "--preset",
        ),
    ] = None,
    options: Annotated[
        list[str] | None,
        option(
            "A cost, noise or failure, also on top of a preset; may be repeated (docs/simulator.md).",
            "--with",
            metavar="OPTION=NUMBER",
        ),
    ] = None,
    placement: Annotated[str, option("Placement. Not with --preset, which has its own.")] = "load_balance",
    checkpoint: Annotated[
        Path | None,
        option("Checkpoint of a learned policy: a folder that `dl2d train` wrote. Default: the shipped one."),
    ] = None,
    seed: Annotated[int, option("Seed of random policies and workloads.", min=0)] = 0,
    as_json: JsonOption = False,
) -> None:
    """Replay a workload under one policy after another and compare completion times.

    It is the daemon's own tick on a simulated cluster. Times are in slots of the workload's length.
    """
    given = options_given(context)
    if preset_name is not None and "placement" in given:
        raise typer.BadParameter("--placement cannot be used with --preset, which has its own")
    if checkpoint is not None and not LEARNED.intersection(policy or ()):
        raise typer.BadParameter(f"--checkpoint needs a learned policy: --policy {' or '.join(sorted(LEARNED))}")
    chosen = preset(preset_name, placement)
    rules = replace(chosen.rules, realism=_realism(chosen.rules.realism, options or []))
    sourced = load_source(workload, seed=seed)
    jobs = sourced.workload
    limit = lower_bound(jobs)
    results: dict[str, Replayed] = {}
    if sourced.note:
        typer.echo(sourced.note, err=True)
    with shown_progress() as tell:
        for name in dict.fromkeys(policy or ["drf"]):
            results[name] = replay(
                jobs,
                find_policy(name, jobs, chosen, checkpoint),
                chosen.placement_of(name),
                rules=rules,
                seed=seed,
                timer=time.perf_counter,
                progress=partial(tell, name),
            )
    if as_json:
        policies = {name: _as_json(result) for name, result in results.items()}
        typer.echo(json.dumps({"policies": policies, "bound": {"avg_jct_slots": limit.avg_jct, **as_plain(limit)}}))
    else:
        print_tables(_table(results, limit))


def _realism(preset: Realism, options: list[str]) -> Realism:
    given = key_values(options, "OPTION=NUMBER", where="--with")
    try:
        return preset.with_options(given)
    except WorkloadError as error:
        raise WorkloadError(printable(error.key), error.problem, where="--with") from None


def _as_json(result: Replayed) -> dict[str, object]:
    p50, p99 = result.decision_percentiles
    return {
        "avg_jct_slots": result.avg_jct,
        "avg_jct_slots_plain": result.avg_jct_plain,
        "makespan_slots": result.makespan,
        "utilisation": dict(result.utilisation),
        "resizes": result.resizes,
        "jobs": {job.id: job.jct for job in result.jobs},
        "decision_ms": {"p50": p50, "p99": p99},
    }


def _table(results: dict[str, Replayed], limit: Bound) -> Table:
    resources = sorted({name for result in results.values() for name in result.utilisation})
    rows = []
    for name, result in results.items():
        p50, p99 = result.decision_percentiles
        used = (f"{result.utilisation.get(resource, 0.0):.0%}" for resource in resources)
        rows.append(
            (
                name, str(len(result.jobs)), f"{result.avg_jct:.3f}", f"{result.avg_jct / limit.avg_jct - 1:.1%}",
                f"{result.avg_jct_plain:.3f}", f"{result.makespan:.2f}", *used, str(result.resizes),
                f"{p50:.2f}", f"{p99:.2f}",
            )
        )  # fmt: skip
    rows.append(("bound", "", f"{limit.avg_jct:.3f}", *[""] * (len(resources) + 6)))
    shares = (f">{resource.upper()}" for resource in resources)
    return table(
        ("POLICY", ">JOBS", ">JCT", ">OVER", ">PLAIN", ">MAKESPAN", *shares, ">RESIZES", ">p50 ms", ">p99 ms"), rows
    )
