from __future__ import annotations

import json
from pathlib import Path

import pytest

JOB = {
    "id": "1", "model": "m", "submit_slot": 0, "epochs": 5.0, "samples_per_epoch": 100.0,
    "worker": {"cpu": 2, "gpu": 4}, "ps": {"cpu": 2}, "max_workers": 2, "max_ps": 2,
}  # fmt: skip
WORKLOAD = {
    "slot_seconds": 100,
    "cluster": [{"count": 1, "resources": {"cpu": 8, "gpu": 8}}],
    "speeds": {"m": {"table": [[1.0, 2.0], [1.0, 2.0]]}},
    "jobs": [JOB],
}


@pytest.fixture
def workload(tmp_path: Path) -> Path:
    path = tmp_path / "jobs.json"
    path.write_text(json.dumps(WORKLOAD))
    return path


@pytest.mark.parametrize("preset", [(), ("--preset", "dl2-paper")])
def test_policies_are_compared_as_one_json_object(dl2d, workload: Path, preset: tuple[str, ...]) -> None:
    ran = dl2d("simulate", "--workload", workload, "--policy", "drf", "--policy", "fifo", "--json", *preset)
    assert ran.status == 0, ran.err
    bound = json.loads(ran.out)["bound"]
    assert bound == {"avg_jct_slots": 2.5, "best_size": 2.5, "capacity": 2.5, "resource": "gpu"}
    policies = json.loads(ran.out)["policies"]
    assert list(policies) == ["drf", "fifo"]
    for result in policies.values():
        assert result["avg_jct_slots"] == result["makespan_slots"] == 2.5
        assert result["avg_jct_slots_plain"] == 3.0
        assert result["jobs"] == {"1": 2.5}
        # The node is held to the end of the third slot.
        assert result["utilisation"] == {"cpu": 1.0, "gpu": 1.0}
        assert result["resizes"] == 0
        assert 0 <= result["decision_ms"]["p50"] <= result["decision_ms"]["p99"]


def test_without_json_a_table_is_printed(dl2d, workload: Path) -> None:
    ran = dl2d("simulate", "-w", workload)
    assert ran.status == 0, ran.err
    assert [line.split()[0] for line in ran.out.splitlines()] == ["POLICY", "drf", "bound"]
    assert "2.500" in ran.out


@pytest.mark.parametrize(
    ("options", "change", "words"),
    [
        (["--policy", "nonsense"], {}, "there is no 'nonsense'"),
        (["--policy", "even", "--preset", "dl2-paper"], {}, "this preset has no 'even'"),
        (["--placement", "nowhere"], {}, "'nowhere' is not installed"),
        (["--preset", "nonsense"], {}, "nonsense"),
        (["--preset", "dl2-paper", "--placement", "pack"], {}, "--placement cannot be used with --preset"),
        (["--checkpoint", "x"], {}, "--checkpoint needs a learned policy: --policy dl2 or dl2-original"),
        (["--with", "speed_nois=1"], {}, "did you mean speed_noise"),
        (["--with", "speed_nois=1"], {}, "straggler_probability"),
        (["--with", "speed_noise"], {}, "expected OPTION=NUMBER"),
        (["--with", "speed_noise=lots"], {}, "--with: speed_noise: expected a number"),
        (["--with", "speed_noise=0.1", "--with", "speed_noise=0.2"], {}, "given twice"),
        ([], {"allowed_workers": [9]}, "allowed_workers"),
        ([], {"epochs": -1}, "epochs"),
        ([], {"model": "other"}, "other"),
    ],
)
def test_wrong_use_is_told_and_ends_with_status_2(dl2d, workload: Path, options, change, words) -> None:
    workload.write_text(json.dumps({**WORKLOAD, "jobs": [{**JOB, **change}]}))
    ran = dl2d("simulate", "--workload", workload, *options)
    assert ran.status == 2
    assert words in " ".join(ran.err.replace("│", " ").split())


def test_options_cost_what_they_say_and_go_on_top_of_a_preset(dl2d, workload: Path) -> None:
    """Slots of 100 s: 25 s of the first are lost; a restart is never needed."""

    def jct(*options: str) -> float:
        ran = dl2d("simulate", "--workload", workload, "--json", "--seed", 3, *options)
        assert ran.status == 0, ran.err
        return float(json.loads(ran.out)["policies"]["drf"]["avg_jct_slots"])

    assert jct("--with", "start_seconds=25", "--with", "restart_seconds=50") == 2.75
    assert jct("--preset", "dl2-paper", "--with", "start_seconds=25") == 2.75
    realistic = jct("--preset", "realistic")
    assert realistic != 2.5
    assert jct("--preset", "realistic", "--with", "start_seconds=58") > realistic


def test_a_missing_workload_is_told(dl2d, tmp_path: Path) -> None:
    ran = dl2d("simulate", "--workload", tmp_path / "gone.json")
    assert ran.status == 2
    assert "gone.json" in ran.err


def test_a_generator_and_a_log_are_replayed(dl2d, tmp_path: Path) -> None:
    log = tmp_path / "jobs.csv"
    log.write_text(
        "JobID|Submit|Start|End|State|AllocTRES|Elapsed\n"
        "1|2024-03-01T00:00:00|2024-03-01T00:10:00|2024-03-01T01:10:00|COMPLETED|cpu=8,gres/gpu=2|01:00:00\n"
        "1.batch|2024-03-01T00:10:00|2024-03-01T00:10:00|2024-03-01T01:10:00|COMPLETED|cpu=8,gres/gpu=2|01:00:00\n"
    )
    for source, jobs, note in (
        (f"sacct:{log}?slot_seconds=600", 1, "2 rows, 1 jobs, 1 nodes; left out: a step, not a job (1)"),
        ("generator:dl2?jobs=9", 9, "9 jobs, 12 nodes"),
    ):
        ran = dl2d("simulate", "--workload", source, "--policy", "fifo", "--json", "--seed", 4)
        assert ran.status == 0, ran.err
        assert len(json.loads(ran.out)["policies"]["fifo"]["jobs"]) == jobs
        assert note in ran.err
        again = dl2d("simulate", "--workload", source, "--policy", "fifo", "--json", "--seed", 4)
        times = [json.loads(each.out)["policies"]["fifo"]["jobs"] for each in (ran, again)]
        assert times[0] == times[1]


@pytest.mark.parametrize("source", ["generator:dl3", "generator:dl2?cap=0", "sacct:gone.csv", "sacc:gone.csv"])
def test_a_wrong_source_is_told(dl2d, source: str) -> None:
    ran = dl2d("simulate", "--workload", source)
    assert ran.status == 2
    assert source.partition(":")[2].partition("?")[0] in ran.err
