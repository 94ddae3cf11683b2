"""status, why, history: against a store that real ticks have filled."""

from __future__ import annotations

import contextlib
import csv
import math
import os
import pty
import signal
import subprocess
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from cli.conftest import Dl2d, Recorded, new_store, store_url, write_config
from daemon_process import BIN
from msgspec import structs
from tick.world import IgnoresLimits, World

from dl2d.cli.jobs.usage_report import use_of
from dl2d.core.cluster import NodeSet, Task, TaskState
from dl2d.core.daemon_mode_and_canary import Mode
from dl2d.core.decision import Alternative
from dl2d.core.jobs import Allocation, FailureCause, JobKey, JobState, Role
from dl2d.core.plan_of_starts_and_stops import Start
from dl2d.core.resources import Resources
from dl2d.core.store import JobChange, TaskChange, TaskReport, TaskTime
from dl2d.store.sql_store import SqlStore
from dl2d.tick.tick_context import GuardRules


def line_of(text: str, word: str) -> str:
    return next(line for line in text.splitlines() if word in line)


# status


def test_status_lists_what_has_not_ended_in_submit_order(dl2d: Dl2d, recorded: Recorded):
    ran = dl2d("status", "-c", recorded.config)
    assert ran.status == 0
    lines = ran.out.splitlines()
    assert lines[0].split() == [
        "ID", "NAME", "USER", "MODEL", "STATE", "WORKERS", "PS", "EPOCH", "STEPS/S", "LOSS", "AGE", "WHY"
    ]  # fmt: skip
    assert [line.split()[0] for line in lines[1:]] == ["1", "2", "3"]
    assert lines[1].split()[1:8] == ["first", "ann", "vgg-16", "running", "4", "4", "3.8/10"]
    assert "no room for a worker (gpu: wanted 1, had 0" in lines[1]
    assert "has its maximum of 4w+4ps" in lines[2]


def reported_now(recorded: Recorded, job: JobKey) -> None:
    store = recorded.world.store
    store.report_progress(job, replace(store.job(job).progress, at=time.time()))


def test_a_coordinator_that_does_not_report_is_told(dl2d: Dl2d, recorded: Recorded):
    silent = "its coordinator has not reported for "
    reported_now(recorded, recorded.second)
    text = dl2d("status", "-c", recorded.config).out
    assert [silent in line for line in text.splitlines()[1:]] == [True, False, False]
    assert silent in line_of(dl2d("why", "first", "-c", recorded.config).out, "silent")
    assert silent not in dl2d("why", "second", "-c", recorded.config).out


def test_status_says_once_that_a_coordinator_does_not_report(dl2d: Dl2d, recorded: Recorded):
    """The reason of the newest decision says so already, where the policy wants another size."""
    world = recorded.world
    world.store.change_job(recorded.second, JobChange(state=JobState.CANCELLED), world.now)
    world.tick(100.0)
    line = line_of(dl2d("status", "-c", recorded.config).out, "first")
    assert ": allocation unchanged meanwhile" in line
    assert line.count("not reported for ") == 1


def test_names_are_shown_as_they_are_and_nothing_is_cut(dl2d: Dl2d, recorded: Recorded):
    ran = dl2d("status", "-c", recorded.config)
    assert "[bold]huge[/bold]" in ran.out
    assert "…" not in ran.out
    assert all(line == line.rstrip() for line in ran.out.splitlines())


def test_newest_first(dl2d: Dl2d, recorded: Recorded):
    ran = dl2d("status", "--newest", "-c", recorded.config)
    assert [line.split()[0] for line in ran.out.splitlines()[1:]] == ["3", "2", "1"]


def test_status_as_json(dl2d: Dl2d, recorded: Recorded):
    shown = dl2d("status", "--json", "-c", recorded.config).json
    assert shown["slot"] == recorded.world.store.last_slot_number()
    first, _, waiting = shown["jobs"]
    assert first["job"] == recorded.first.slug
    assert first["allocation"] == first["decided"] == {"workers": 4, "ps": 4}
    said = {key: first[key] for key in ("version", "total_versions", "epoch", "epochs", "loss", "steps_per_second")}
    assert said == {
        "version": 120, "total_versions": 320, "epoch": 3.75, "epochs": 10, "loss": 0.25, "steps_per_second": 12.5
    }  # fmt: skip
    assert waiting["decided"] == {"workers": 0, "ps": 0}
    assert waiting["state"] == "ready"
    assert waiting["why"]


def test_status_of_one_job_has_its_tasks(dl2d: Dl2d, recorded: Recorded):
    shown = dl2d("status", "second", "--json", "-c", recorded.config).json
    assert [job["name"] for job in shown["jobs"]] == ["second"]
    assert {task["task"] for task in shown["tasks"]} == {f"{role}-{n}" for role in ("worker", "ps") for n in range(4)}
    text = dl2d("status", "second", "-c", recorded.config).out
    assert line_of(text, "worker-3").split()[1] == "confirmed"


def test_what_tasks_use_and_why_they_ended_is_shown(dl2d: Dl2d, recorded: Recorded):
    store = recorded.world.store
    how = "died: killed by signal 9 (SIGKILL): out of memory in its control group"
    reports = [
        TaskReport(task="worker-1", at=1.0, cpu_percent=212.4, memory=1536.0, gpus=2, gpu_percent=55.0, step_ms=12.0,
                   step_p95_ms=15.5, slowdown=2.5, slowdown_reason="computes a shard in 5 ms, the others in 2 ms"),
        TaskReport(task="worker-9", at=1.0, memory_peak=900.0, cause="out-of-memory", how=how),
        TaskReport(task="worker-8", at=1.0, memory_peak=900.0, cause="drained"),
    ]  # fmt: skip
    store.report_progress(recorded.second, store.job(recorded.second).progress, reports)
    text = dl2d("status", "second", "-c", recorded.config).out
    words = line_of(text, "worker-1").split()
    assert words[1] == "confirmed"
    assert words[words.index("212%") :][:4] == ["212%", "1.5G", "2x55%", "12/15.5"]
    assert "2.5 times slower: computes a shard in 5 ms, the others in 2 ms" in line_of(text, "worker-1")
    assert how in line_of(text, "worker-9")
    assert "worker-8" not in text  # it ended as it should
    assert f"tasks that were lost\n  worker-9  {how}\n" in dl2d("why", "second", "-c", recorded.config).out
    shown = {task["task"]: task for task in dl2d("status", "second", "--json", "-c", recorded.config).json["tasks"]}
    assert shown["worker-1"]["report"]["memory"] == 1536.0
    assert shown["worker-9"]["report"]["cause"] == "out-of-memory"
    assert shown["worker-0"]["report"] is None


def test_which_tasks_do_not_execute_is_shown(dl2d: Dl2d, recorded: Recorded):
    note = "does not execute: suspended by Slurm since 2026-11-30 10:04:05 UTC"
    changes = [TaskChange(recorded.second, f"worker-{n}", TaskState.CONFIRMED, note=note) for n in (1, 3)]
    says = "2 of its 4 workers hold resources and do not execute: suspended by Slurm since 2026-11-30 10:04:05 UTC"
    for command in ("status", "why"):
        assert says not in dl2d(command, "second", "-c", recorded.config).out
    assert "hold resources" not in dl2d("status", "-c", recorded.config).out
    recorded.world.store.change_tasks(changes, 1.0)
    for command in ("status", "why"):
        assert says in dl2d(command, "second", "-c", recorded.config).out
    # In the list, too.
    assert says in line_of(dl2d("status", "-c", recorded.config).out, "second")
    shown = dl2d("status", "--json", "-c", recorded.config).json["jobs"]
    assert [(job["id"], job["suspended"]) for job in shown] == [("1", None), ("2", says), ("3", None)]


def test_control_characters_in_what_a_resource_manager_says_of_a_job_are_escaped(dl2d: Dl2d, recorded: Recorded):
    change = JobChange(state=JobState.FAILED, end_reason="killed\x1b[2J\x9b31m")
    recorded.world.store.change_job(recorded.second, change, recorded.world.now)
    for command in ("why", "status"):
        said = dl2d(command, "second", "-c", recorded.config).out
        assert "killed\\x1b[2J\\x9b31m" in said
        assert not set(said) & set("\x1b\x9b")


def test_ended_jobs_of_the_last_day_are_shown_on_demand(dl2d: Dl2d, recorded: Recorded):
    now = time.time()
    store = recorded.world.store
    store.change_job(recorded.first, JobChange(state=JobState.FINISHED, end_reason="did all epochs"), now - 100)
    store.change_job(recorded.second, JobChange(state=JobState.FAILED, end_reason="worker-0 died"), now - 90_000)
    assert [job["id"] for job in dl2d("status", "--json", "-c", recorded.config).json["jobs"]] == ["3"]
    ran = dl2d("status", "--all", "-c", recorded.config)
    *lines, size = ran.out.splitlines()[1:]
    assert [line.split()[0] for line in lines] == ["1", "3"]
    assert size.startswith("store: ")
    assert "did all epochs" in ran.out
    assert "worker-0 died" in dl2d("status", "2", "-c", recorded.config).out


@pytest.mark.parametrize("width", [80, 200])
def test_a_narrow_terminal_keeps_names_and_reasons(recorded: Recorded, width: int):
    reported_now(recorded, recorded.first)
    near, far = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(width), "LINES": "40", "NO_COLOR": "1", "TERM": "dumb"}
    with subprocess.Popen(
        [BIN / "dl2d", "status", "--all", "-c", recorded.config], stdout=far, stderr=subprocess.DEVNULL, env=environment
    ):
        os.close(far)
        said = b""
        with contextlib.suppress(OSError):  # how a terminal ends
            while data := os.read(near, 65536):
                said += data
    os.close(near)
    heading, first, *_ = said.decode().splitlines()
    assert [word for word in ("ID", "NAME", "STATE", "WORKERS", "EPOCH", "WHY") if word not in heading.split()] == []
    assert ("MODEL" in heading) == (width == 200)
    assert first.split()[:2] == ["1", "first"]
    assert "next bundle of" in first
    assert max(map(len, (heading, first))) <= width


def test_who_watches_sees_that_the_daemon_is_away(recorded: Recorded):
    near, far = pty.openpty()
    environment = {**os.environ, "COLUMNS": "200", "LINES": "40", "NO_COLOR": "1", "TERM": "xterm"}
    command = [BIN / "dl2d", "status", "--watch", "-c", recorded.config]
    with subprocess.Popen(command, stdout=far, stderr=subprocess.DEVNULL, env=environment) as watching:
        os.close(far)
        said = b""
        while b"first" not in said:
            said += os.read(near, 65536)
        watching.send_signal(signal.SIGINT)
    os.close(near)
    assert b"daemon: no daemon answers at " in said


def test_a_list_of_jobs_has_a_limit(dl2d: Dl2d, recorded: Recorded):
    ran = dl2d("status", "--limit", "2", "-c", recorded.config)
    assert [line.split()[0] for line in ran.out.splitlines()[1:3]] == ["2", "3"]
    assert ran.out.splitlines()[3] == "1 older jobs are left out: --limit 3 shows them, too"
    shown = dl2d("status", "--limit", "2", "--json", "-c", recorded.config).json
    assert ([job["id"] for job in shown["jobs"]], shown["left_out"]) == (["2", "3"], 1)


def test_no_jobs(dl2d: Dl2d, tmp_path: Path):
    config = write_config(tmp_path)
    new_store(tmp_path)
    ran = dl2d("status", "-c", config)
    assert (ran.status, ran.out) == (
        0,
        "no job is waiting or running; --all also lists those that ended within the last day\n",
    )
    assert dl2d("status", "--json", "-c", config).json["jobs"] == []
    assert dl2d("history", "-c", config).out == "no decision is recorded yet\n"


# Which job


def test_unknown_jobs_get_a_hint(dl2d: Dl2d, recorded: Recorded):
    ran = dl2d("why", "secnd", "-c", recorded.config)
    assert ran.status == 2
    assert ran.err == (
        "dl2d: JOB: there is no job 'secnd'; did you mean second? "
        "(`dl2d status --all` lists the jobs of the last day; the output of a job that was refused says why)\n"
    )


def test_of_several_jobs_the_living_one_is_meant(dl2d: Dl2d, recorded: Recorded):
    store = recorded.world.store
    store.change_job(recorded.first, JobChange(state=JobState.FINISHED), recorded.world.now)
    again = recorded.world.submit(name="first")
    assert dl2d("status", "first", "--json", "-c", recorded.config).json["jobs"][0]["job"] == again.slug
    store.change_job(again, JobChange(state=JobState.FINISHED), recorded.world.now)
    ran = dl2d("status", "first", "-c", recorded.config)
    assert ran.status == 2
    assert recorded.first.slug in ran.err
    assert again.slug in ran.err
    found = dl2d("status", recorded.first.slug, "--json", "-c", recorded.config).json
    assert found["jobs"][0]["job"] == recorded.first.slug


def test_of_the_runs_of_a_requeued_job_the_last_is_meant_and_history_has_all(dl2d: Dl2d, recorded: Recorded):
    world = recorded.world
    requeued = JobChange(state=JobState.LOST, end_reason="was requeued", cause=FailureCause.REQUEUED)
    first = world.store.change_job(recorded.first, requeued, world.now)
    again = recorded.first._replace(submitted=recorded.first.submitted + 500)
    world.store.add_job(replace(first, key=again, state=JobState.SUBMITTED, ended_at=None, end_reason=""))
    for state in (None, JobState.FINISHED):
        world.store.change_job(again, JobChange(state=state), world.now)
        assert dl2d("status", again.id, "--json", "-c", recorded.config).json["jobs"][0]["job"] == again.slug
    runs = dl2d("history", "--job", again.id, "--json", "-c", recorded.config).json["runs"]
    assert [(run["job"], run["state"], run["why"]) for run in runs] == [
        (recorded.first.slug, "lost", "was requeued"), (again.slug, "finished", "")
    ]  # fmt: skip
    shown = dl2d("history", "--job", again.id, "-c", recorded.config).out
    assert "was requeued" in shown


# why


def test_why_says_everything(dl2d: Dl2d, recorded: Recorded):
    ran = dl2d("why", "first", "-c", recorded.config)
    assert ran.status == 0
    assert ran.out.startswith("job 1 (first) of ann: running\n")
    assert "policy       drf version 1, inputs " in ran.out
    assert "constraint   capacity: next bundle of 1w+0ps: no room for a worker (gpu: wanted 1, had 0 on n" in ran.out
    assert "alternatives by dominant share: 4w+4ps 0.5 (chosen), 5w+4ps 0.625" in ran.out
    assert "guard        changed nothing" in ran.out
    assert "worker-0  confirmed for" in ran.out


def test_a_script_that_trains_other_epochs_than_its_job_file_says_is_told(dl2d: Dl2d, recorded: Recorded):
    declared = recorded.world.job(recorded.first).request.epochs
    assert dl2d("status", "first", "--json", "-c", recorded.config).json["jobs"][0]["script_epochs"] == declared
    assert "job file" not in "".join(dl2d(each, "first", "-c", recorded.config).out for each in ("why", "status"))
    recorded.world.beat(recorded.first, version=160, total_versions=3200, epoch=2.0)
    told = f"the script trains 40 epochs, but the job was submitted with epochs={declared:g}"
    assert told in dl2d("why", "first", "-c", recorded.config).out
    assert told in dl2d("status", "first", "-c", recorded.config).out


def test_why_of_a_change_in_an_earlier_slot(dl2d: Dl2d, recorded: Recorded):
    slots = [
        entry.slot
        for entry in recorded.world.store.decisions(recorded.first)
        if entry.decided.previous == Allocation(6, 4) and entry.decided.allocation == Allocation(4, 4)
    ]
    assert slots, "the second job made the first one shrink"
    ran = dl2d("why", "first", "--slot", str(slots[0]), "-c", recorded.config)
    assert "allocation   6w+4ps -> 4w+4ps" in ran.out
    assert "given more   job 2 0w+0ps -> " in ran.out
    given = dl2d("why", "first", "--slot", str(slots[0]), "--json", "-c", recorded.config).json["decisions"][0]
    assert [each["job"] for each in given["given_more"]] == ["2"]
    second = dl2d("why", "second", "--slot", str(slots[0]), "--json", "-c", recorded.config).json
    deferred = second["decisions"][0]["deferred"]
    assert deferred[0]["role"] == "worker"
    assert {"resource": "gpu", "wanted": 1.0, "had": 0.0} in deferred[0]["shortfalls"]
    text = dl2d("why", "second", "--slot", str(slots[0]), "-c", recorded.config).out
    assert line_of(text, "deferred     ").endswith("; started since")
    assert "given more" not in text


@pytest.mark.parametrize("mode", [Mode.LIVE, Mode.SHADOW])
def test_the_constraint_is_that_of_the_allocation_also_where_the_guard_changed_it(
    dl2d: Dl2d, tmp_path: Path, mode: Mode
):
    rules = GuardRules(per_user=Resources.of(gpu=2))
    with closing(World(url=store_url(tmp_path), policy=IgnoresLimits(), rules=rules)) as world:
        world.submit(name="limited", max_workers=6)
        world.settle()
        world.mode = mode
        world.now += world.slot_seconds
        world.beat()
        world.tick(1.0)
    config = write_config(tmp_path)
    lines = dl2d("why", "limited", "-c", config).out.splitlines()
    begin = lines.index("  constraint   limit: jobs of ann may hold gpu=2 together")
    assert lines[begin + 1 : begin + 4] == [
        "  proposed     6w+4ps by the policy, which the guard changed to 2w+2ps",
        "               satisfied: has its maximum of 6w+4ps",
        "  alternatives by dominant share: 6w+4ps 0.75 (proposed)",
    ]


def test_why_of_what_can_never_run(dl2d: Dl2d, recorded: Recorded):
    shown = dl2d("why", "3", "--json", "-c", recorded.config).json
    decision = shown["decisions"][-1]
    assert decision["allocation"] == {"workers": 0, "ps": 0}
    assert decision["reason"]["constraint"] in ("capacity", "fragmented")
    assert decision["reason"]["shortfalls"][0]["resource"] == "gpu"


def test_why_says_which_nodes_a_job_may_use(dl2d: Dl2d, recorded: Recorded):
    store = recorded.world.store
    slot = store.slot(store.last_slot_number())
    assert slot is not None
    small = NodeSet((recorded.first,), frozenset({"n1"}), "partition small")
    snapshot = structs.replace(slot.snapshot, node_sets=(small,))
    store.record_slot(replace(slot, number=slot.number + 1, snapshot=snapshot))
    text = dl2d("why", "first", "-c", recorded.config).out
    assert f"  may use      1 of {len(slot.snapshot.nodes)} nodes (partition small)\n" in text
    assert "may use" not in dl2d("why", "second", "-c", recorded.config).out
    decision = dl2d("why", "first", "--json", "-c", recorded.config).json["decisions"][0]
    assert decision["may_use"].endswith("nodes (partition small)")


def test_why_all_is_oldest_first(dl2d: Dl2d, recorded: Recorded):
    slots = [each["slot"] for each in dl2d("why", "1", "--all", "--json", "-c", recorded.config).json["decisions"]]
    assert slots == sorted(slots)
    assert len(slots) == len(recorded.world.store.decisions(recorded.first)) > 1


def test_why_all_has_a_limit(dl2d: Dl2d, recorded: Recorded):
    every = dl2d("why", "1", "--all", "--json", "-c", recorded.config).json["decisions"]
    some = dl2d("why", "1", "--all", "--limit", "2", "--json", "-c", recorded.config).json["decisions"]
    assert some == every[-2:] != every


def test_why_before_the_first_decision_and_after_the_end(dl2d: Dl2d, recorded: Recorded):
    recorded.world.submit(name="fresh")
    ran = dl2d("why", "fresh", "-c", recorded.config)
    assert "no decision  waits for the first heartbeat of its coordinator" in ran.out
    store = recorded.world.store
    store.change_job(recorded.second, JobChange(state=JobState.FAILED, end_reason="worker-0: no disk"), 1e9)
    assert "worker-0: no disk" in dl2d("why", "second", "-c", recorded.config).out


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--slot", "999"], "slot 999 is not recorded; the newest is"),
        (["--slot", "1", "--all"], "--slot: cannot be used with --all"),
    ],
)
def test_why_with_a_wrong_slot(dl2d: Dl2d, recorded: Recorded, options: list[str], says: str):
    ran = dl2d("why", "1", *options, "-c", recorded.config)
    assert ran.status == 2
    assert says in ran.err


def test_a_slot_without_the_job(dl2d: Dl2d, recorded: Recorded):
    ran = dl2d("why", "3", "--slot", "1", "-c", recorded.config)
    assert ran.status == 2
    assert (
        "slot 1 has no decision on job 3, which was neither ready nor running then; `dl2d history --job 3`" in ran.err
    )


def test_recompute_gives_the_same_bits_for_every_slot(dl2d: Dl2d, recorded: Recorded):
    ran = dl2d("why", "first", "--all", "--recompute", "-c", recorded.config)
    assert ran.status == 0
    count = len(recorded.world.store.decisions(recorded.first))
    assert ran.out.count("placement load_balance and seed 7: the same, bit for bit") == count


def test_recompute_tells_a_decision_that_was_not_this_policys(dl2d: Dl2d, recorded: Recorded):
    """Recorded as if DRF had answered otherwise."""
    store = recorded.world.store
    slot = store.slot(store.last_slot_number())
    assert slot is not None
    entry, *rest = slot.proposed.jobs
    forged = replace(slot.proposed, jobs=(replace(entry, allocation=Allocation(1, 1)), *rest))
    store.record_slot(replace(slot, number=slot.number + 1, proposed=forged, decision=forged))
    ran = dl2d("why", "first", "--recompute", "-c", recorded.config)
    assert ran.status == 1
    assert "DIFFERENT: job 1 had 1w+1ps and would get 4w+4ps" in ran.out
    shown = dl2d("why", "first", "--recompute", "--json", "-c", recorded.config)
    assert shown.status == 1
    assert shown.json["decisions"][0]["recomputed"]["same"] is False


def test_recompute_sees_a_score_that_differs_in_its_last_bit(dl2d: Dl2d, recorded: Recorded):
    store = recorded.world.store
    slot = store.slot(store.last_slot_number())
    assert slot is not None
    entry, *rest = slot.proposed.jobs
    scored = tuple(Alternative(each.allocation, math.nextafter(each.score, 1)) for each in entry.alternatives)
    forged = replace(slot.proposed, jobs=(replace(entry, alternatives=scored), *rest))
    store.record_slot(replace(slot, number=slot.number + 1, proposed=forged, decision=forged))
    ran = dl2d("why", "first", "--recompute", "-c", recorded.config)
    assert ran.status == 1
    assert "the allocations are equal, reasons or scores are not" in ran.out


def test_recompute_of_a_policy_that_is_not_installed(dl2d: Dl2d, recorded: Recorded):
    store = recorded.world.store
    slot = store.slot(store.last_slot_number())
    assert slot is not None
    store.record_slot(replace(slot, number=slot.number + 1, inputs_hash="0" * 64))
    ran = dl2d("why", "first", "--recompute", "-c", recorded.config)
    assert ran.status == 1
    assert (
        "not possible: no installed policy, registered version and placement have the recorded inputs hash" in ran.out
    )


# history


def test_history(dl2d: Dl2d, recorded: Recorded):
    ran = dl2d("history", "-n", "100", "-c", recorded.config)
    assert ran.status == 0
    assert [line for line in ran.out.splitlines() if line in ("slots", "resizes", "runtime plans")] == [
        "slots", "resizes", "runtime plans"
    ]  # fmt: skip
    grown = line_of(ran.out, "asked ")
    assert "confirmed +" in grown
    plan = line_of(ran.out, " 4.00 ")
    assert plan.split()[-7:] == ["4.00", "20.0", "3.5", "0.1", "1.8", "30.0", "95.2"]


def test_history_as_json_is_oldest_first_and_limited(dl2d: Dl2d, recorded: Recorded):
    shown = dl2d("history", "--json", "-n", "3", "-c", recorded.config).json
    newest = recorded.world.store.last_slot_number()
    assert [slot["number"] for slot in shown["slots"]] == [newest - 2, newest - 1, newest]
    assert len(shown["resizes"]) == 3


def test_history_of_a_job(dl2d: Dl2d, recorded: Recorded):
    shown = dl2d("history", "--job", "first", "--json", "-c", recorded.config).json
    changes = [(each["previous"]["workers"], each["allocation"]["workers"]) for each in shown["decisions"]]
    assert changes[0] == (0, 6)
    assert (6, 4) in changes
    assert {resize["job"] for resize in shown["resizes"]} == {recorded.first.slug}
    left = [resize for resize in shown["resizes"] if resize["direction"] == "shrink"]
    assert [event["state"] for event in left[0]["events"]] == ["draining", "drained", "released"]
    assert shown["plans"][0]["suspension_max_ms"] == 1.75
    text = dl2d("history", "--job", "first", "-c", recorded.config).out
    assert "6w+4ps" in text
    assert (
        dl2d("history", "--job", "[bold]huge[/bold]", "-c", recorded.config).out == "job 3 has not been resized yet\n"
    )


# A store that cannot be read


def test_without_a_store(dl2d: Dl2d, tmp_path: Path):
    ran = dl2d("status", "-c", write_config(tmp_path))
    assert ran.status == 1
    assert "there is no store at" in ran.err
    assert "dl2d db upgrade" in ran.err


def test_without_a_configuration(dl2d: Dl2d, tmp_path: Path):
    ran = dl2d("status", "-c", tmp_path / "none.yaml")
    assert ran.status == 2
    assert "dl2d config" in ran.err


def test_reading_takes_no_lease(dl2d: Dl2d, recorded: Recorded):
    daemon = SqlStore(recorded.world.url)
    daemon.acquire("a daemon")
    try:
        assert dl2d("status", "-c", recorded.config).status == 0
        assert dl2d("why", "1", "-c", recorded.config).status == 0
    finally:
        daemon.close()


# Export


def test_the_tables_are_exported_beside_a_running_daemon(dl2d: Dl2d, recorded: Recorded, tmp_path: Path):
    folder = tmp_path / "new" / "folder"
    shown = dl2d("db", "export", folder, "--json", "-c", recorded.config).json
    assert shown["folder"] == str(folder)
    assert shown["rows"]["jobs"] == 3
    assert sorted(path.stem for path in folder.iterdir()) == sorted(shown["rows"])
    with (folder / "jobs.csv").open(newline="") as stream:
        assert [row["name"] for row in csv.DictReader(stream)] == ["first", "second", "[bold]huge[/bold]"]
    assert (folder / "jobs.csv").stat().st_mode & 0o077 == 0


def test_chosen_tables_are_exported_and_errors_say_what_to_do(dl2d: Dl2d, recorded: Recorded, tmp_path: Path):
    ran = dl2d("db", "export", tmp_path / "out", "--table", "jobs", "--table", "slots", "-c", recorded.config)
    assert ran.status == 0
    assert ran.out.endswith(f" rows of 2 tables written to {tmp_path / 'out'}\n")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["jobs.csv", "slots.csv"]
    ran = dl2d("db", "export", tmp_path / "out", "--table", "secrets", "-c", recorded.config)
    assert ran.status == 2
    assert "there is no table secrets; the tables are " in ran.err
    (tmp_path / "other").mkdir()
    ran = dl2d("db", "export", tmp_path / "out", "-c", write_config(tmp_path / "other"))
    assert ran.status == 1
    assert "there is no store at" in ran.err


# report


def test_a_report_sums_what_all_tasks_of_a_job_held(dl2d: Dl2d, recorded: Recorded):
    store = recorded.world.store
    times = store.task_times(recorded.first)
    ended = [each for each in times if each.ended_at is not None]
    assert ended, "tasks that the job gave back count"
    shown = dl2d("report", "first", "--json", "-c", recorded.config).json
    assert shown["all"]["tasks"] == len(times) == sum(use["tasks"] for use in shown["roles"].values())
    now = time.time()
    hours = sum((each.ended_at or now) - each.granted_at for each in times) / 3600
    cpu = sum(((each.ended_at or now) - each.granted_at) * each.task.demand.get("cpu") for each in times) / 3600
    assert shown["all"]["task_hours"] == pytest.approx(hours, rel=1e-3)
    assert shown["all"]["cpu_hours"] == pytest.approx(cpu, rel=1e-3)
    workers = dl2d("report", "first", "-c", recorded.config).out.splitlines()
    assert workers[0] == "job 1 (first) of ann: running"
    assert workers[1].split() == ["ROLE", "TASKS", "TASK-HOURS", "CPU-HOURS", "GPU-HOURS"]
    assert [line.split()[0] for line in workers[2:]] == ["worker", "ps", "all"]


def test_a_report_of_a_requeued_job_sums_all_its_runs_and_of_one_run_that(dl2d: Dl2d, recorded: Recorded):
    world, store = recorded.world, recorded.world.store
    first = store.change_job(recorded.first, JobChange(state=JobState.LOST, end_reason="was requeued"), world.now)
    again = recorded.first._replace(submitted=recorded.first.submitted + 500)
    store.add_job(replace(first, key=again, state=JobState.SUBMITTED, ended_at=None, end_reason=""))
    (task,) = store.ask_tasks([Start(again, Role.WORKER, "n1", Resources.of(cpu=1))], world.now)
    for state, at in ((TaskState.CONFIRMED, world.now), (TaskState.FAILED, world.now + 3600)):
        store.change_tasks([TaskChange(again, task.id, state, handle="77")], at)

    def used(name: str) -> tuple[int, int, float]:
        shown = dl2d("report", name, "--json", "-c", recorded.config).json
        return shown["runs"], shown["all"]["tasks"], shown["all"]["cpu_hours"]

    assert used(again.slug) == (1, 1, pytest.approx(1.0))
    runs, tasks, hours = used(again.id)
    alone = used(recorded.first.slug)
    assert (runs, tasks) == (2, 1 + alone[1])
    assert hours == pytest.approx(1.0 + alone[2], rel=1e-3)
    assert dl2d("report", again.id, "-c", recorded.config).out.splitlines()[0].endswith("; 2 runs")


def test_a_report_of_a_job_that_has_not_run(dl2d: Dl2d, recorded: Recorded):
    ran = dl2d("report", recorded.waiting.slug, "-c", recorded.config)
    assert ran.out.splitlines()[1] == "none of its tasks has run"
    shown = dl2d("report", recorded.waiting.slug, "--json", "-c", recorded.config).json
    assert (shown["roles"], shown["all"]) == ({}, {"tasks": 0, "task_hours": 0.0})


def test_what_tasks_held_is_counted_by_resource():
    def held(hours: float | None, **demand: float) -> TaskTime:
        job = JobKey("lab", "1", 1)
        task = Task(job=job, id="worker-0", role=Role.WORKER, node="n", demand=Resources.of(demand))
        return TaskTime(task, 3600.0, None if hours is None else 3600.0 * (1 + hours))

    use = use_of([held(2.0, cpu=4, gpu=1, memory=512), held(None, cpu=0.5)], now=3 * 3600.0)
    assert (use.tasks, use.task_hours) == (2, 4.0)
    assert use.resource_hours == {"cpu": 9.0, "gpu": 2.0, "memory": 1.0}
