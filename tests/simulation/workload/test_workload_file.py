from __future__ import annotations

import copy
import json
import math
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dl2d.core.errors import WorkloadError
from dl2d.core.jobs import Architecture, Consistency
from dl2d.core.resources import NO_RESOURCES, Resources
from dl2d.simulation.speeds.model_profiles import load_profile
from dl2d.simulation.speeds.speed_models import parse_speed
from dl2d.simulation.workload import workload_file as module
from dl2d.simulation.workload.workload_file import describe_workload, read_workload, to_request, write_workload

DOCS = Path(__file__).parents[3] / "docs" / "workloads.md"


def job(**changes):
    entry = {
        "id": "1", "model": "resnet-50", "submit_slot": 0, "epochs": 1200.0, "declared_epochs": 1100.0,
        "samples_per_epoch": 115.0, "worker": {"cpu": 2, "gpu": 4}, "ps": {"cpu": 2, "gpu": 0},
        "min_workers": 0, "max_workers": 16, "max_ps": 16,
    }  # fmt: skip
    return {key: value for key, value in (entry | changes).items() if value is not ...}


def workload(*jobs, **changes):
    return {
        "slot_seconds": 1200,
        "cluster": [{"count": 96, "resources": {"cpu": 8, "gpu": 8}}],
        "speeds": {
            "resnet-50": {"table": [[10.0, 18.0], [12.0, 22.0]]},
            "vgg-16": {"formula": "ps-sync", "theta": [0.01, 0.02, 0.03, 0.004, 0.005], "batch": 32},
            "ring": {"table": [[10.0, 18.0]], "architecture": "allreduce"},
            "loose": {"formula": "ps-async", "theta": [0.1, 0.02, 0.003, 0.004], "batch": 8},
        },
        "jobs": list(jobs) or [job()],
        **changes,
    }


def refused(given, **kwargs) -> WorkloadError:
    with pytest.raises(WorkloadError) as caught:
        read_workload(given, where="trace.json", **kwargs)
    assert str(caught.value).startswith("trace.json: ")
    assert "\n" not in str(caught.value)
    return caught.value


# What is read means what the design says.


def test_a_workload_as_the_design_has_it() -> None:
    read = read_workload(workload(job(), job(id="2", model="vgg-16", submit_slot=3, declared_epochs=...)))
    assert read.slot_seconds == 1200
    assert read.capacity == Resources.of(cpu=768, gpu=768)
    first, second = read.jobs
    assert (first.id, first.model, first.submit_slot, first.epochs) == ("1", "resnet-50", 0, 1200.0)
    assert first.declared_epochs == 1100.0
    assert second.declared_epochs == second.epochs == 1200.0
    assert first.worker == Resources.of(cpu=2, gpu=4)
    assert first.ps == Resources.of(cpu=2)
    assert (first.min_workers, first.max_workers, first.min_ps, first.max_ps) == (0, 16, 0, 16)
    assert first.architecture is Architecture.PS
    # row = PS count, column = workers: 12 samples/s with 2 PS and 1 worker
    assert read.speeds["resnet-50"].samples_per_second(workers=1, ps=2) == 12.0
    assert read.speeds["resnet-50"].samples_per_second(workers=2, ps=1) == 18.0


def test_progress_is_speed_times_slot_over_epoch() -> None:
    read = read_workload(workload())
    assert read.epochs_in_slot(read.jobs[0], workers=2, ps=1) == pytest.approx(18.0 * 1200 / 115)
    assert read.epochs_in_slot(read.jobs[0], workers=2, ps=0) == 0.0


def test_jobs_come_in_submit_order_then_by_id() -> None:
    slots = {"10_10": 1, "10_9": 1, "10": 1, "9": 1, "b": 1, "a": 1, "z": 0, "2": 5}
    read = read_workload(workload(*(job(id=name, submit_slot=slot) for name, slot in slots.items())))
    assert [each.id for each in read.jobs] == ["z", "9", "10", "10_9", "10_10", "a", "b", "2"]


def test_the_scheduler_is_told_what_was_declared() -> None:
    loose = job(id="3", model="loose", min_workers=2, min_ps=3)
    read = read_workload(workload(job(), job(id=2, model="ring"), loose, job(id="4", model="vgg-16")))
    assert to_request(read.jobs[3], read).batch == 32
    request = to_request(read.jobs[0], read)
    assert request.epochs == 1100.0
    assert request.samples_per_epoch == 115.0
    assert (request.min_workers, request.max_workers, request.min_ps, request.max_ps) == (1, 16, 1, 16)
    assert request.consistency is Consistency.SYNC
    assert request.batch is None
    ring = to_request(read.jobs[1], read)
    assert ring.architecture is Architecture.ALLREDUCE
    assert (ring.min_ps, ring.max_ps, ring.ps) == (0, 0, NO_RESOURCES)
    loose = to_request(read.jobs[2], read)
    assert loose.consistency is Consistency.ASYNC
    assert (loose.min_workers, loose.min_ps) == (2, 3)


def test_nodes_have_names_that_sort_as_they_stand() -> None:
    cluster = [
        {"count": 9, "resources": {"cpu": 8, "gpu": 4}},
        {"count": 2, "resources": {"cpu": 1}, "name": "small"},
        {"count": 3, "resources": "cpu:16,gpu:8,memory:4G"},
    ]
    nodes = read_workload(workload(cluster=cluster)).nodes()
    assert [node.name for node in nodes[:2]] == ["node-01", "node-02"]
    assert [node.name for node in nodes[9:]] == ["small-1", "small-2", "node-10", "node-11", "node-12"]
    assert nodes[-1].capacity == Resources.of(cpu=16, gpu=8, memory=4096)
    assert len({node.name for node in nodes}) == 14


def test_speeds_may_come_from_the_library() -> None:
    speeds = {"resnet-50": {"profile": "resnet-50"}, "words": {"profile": "wlm", "kind": "allreduce"}}
    read = read_workload(workload(job(), job(id="2", model="words"), speeds=speeds))
    assert read.speeds["resnet-50"] == load_profile("resnet-50").speeds["ps-sync"]
    assert read.speeds["words"] == load_profile("word-lm").speeds["allreduce"]
    assert read.jobs[1].architecture is Architecture.ALLREDUCE


# Round trips.

AMOUNTS = st.integers(1, 4000).map(lambda thousandths: thousandths / 1000)
JOBS = st.builds(
    lambda model, slot, epochs, declared, samples, cpu, gpu, low, more: job(
        model=model, submit_slot=slot, epochs=epochs, declared_epochs=declared, samples_per_epoch=samples,
        worker={"cpu": cpu, "gpu": gpu}, ps={"cpu": cpu}, min_workers=low, max_workers=max(1, low + more), min_ps=low,
        max_ps=max(1, low + more),
    ),
    st.sampled_from(["resnet-50", "vgg-16", "ring", "loose"]), st.integers(0, 10**6), st.floats(1e-3, 1e6),
    st.floats(1e-3, 1e6) | st.just(...), st.floats(1e-3, 1e9), AMOUNTS, AMOUNTS, st.integers(0, 8), st.integers(0, 12),
)  # fmt: skip


@given(st.lists(JOBS, min_size=1, max_size=8))
@settings(max_examples=60)
def test_what_is_described_reads_back_equal(entries) -> None:
    for number, entry in enumerate(entries):
        entry["id"] = str(number)
    read = read_workload(workload(*entries))
    text = json.dumps(describe_workload(read), allow_nan=False)
    assert read_workload(json.loads(text)) == read
    for each in read.jobs:
        to_request(each, read)


def test_files_are_written_whole_and_read_back(tmp_path) -> None:
    read = read_workload(workload(job(), job(id="2", model="ring"), description="made by a test"))
    assert read.description == "made by a test"
    path = tmp_path / "w.json"
    path.write_text("older")
    write_workload(read, path)
    assert read_workload(path) == read == read_workload(str(path))
    assert [entry.name for entry in tmp_path.iterdir()] == ["w.json"]
    with pytest.raises(WorkloadError, match="cannot be written"):
        write_workload(read, tmp_path / "no" / "w.json")


# Bad files.


@pytest.mark.parametrize("key", sorted(job().keys() - {"declared_epochs", "min_workers"}))
def test_a_missing_key_of_a_job_is_named(key: str) -> None:
    error = refused(workload(job(id="7"), job(**({"id": "8"} | {key: ...}))))
    assert error.key == key
    assert "missing" in error.problem
    assert error.job == ("8" if key != "id" else "number 2 of the list")
    assert error.job in str(error)


@pytest.mark.parametrize("key", ["slot_seconds", "cluster", "speeds", "jobs"])
def test_a_missing_key_of_the_file_is_named(key: str) -> None:
    given = workload()
    del given[key]
    assert refused(given).key == key


@pytest.mark.parametrize(
    ("changes", "key", "says"),
    [
        ({"worker": {"cpu": -2}}, "worker", "-2"),
        ({"worker": {}}, "worker", "nothing"),
        ({"worker": {"cpu": True}}, "worker.cpu", "number"),
        ({"worker": {"C P U": 1}}, "worker", "not a resource name"),
        ({"model": "resnet-05"}, "model", "did you mean resnet-50?"),
        ({"submit_slot": -1}, "submit_slot", "from 0"),
        ({"submit_slot": 1.5}, "submit_slot", "whole"),
        ({"epochs": 0}, "epochs", "more than 1e-09"),
        ({"epochs": math.nan}, "epochs", "nan"),
        ({"declared_epochs": -1}, "declared_epochs", "more than 1e-09"),
        ({"samples_per_epoch": 5e-324}, "samples_per_epoch", "more than 1e-09"),
        ({"min_workers": 17}, "min_workers", "more than max_workers"),
        ({"min_ps": 17}, "min_ps", "more than max_ps"),
        ({"max_workers": 0}, "max_workers", "from 1"),
        ({"max_ps": 1001}, "max_ps", "1000"),
        ({"architecture": "ring"}, "architecture", "one of"),
        ({"architecture": "allreduce"}, "architecture", "speeds.resnet-50 is of ps"),
        ({"id": "a b"}, "id", "letters"),
        ({"submit_slott": 1}, "submit_slott", "did you mean submit_slot?"),
        ({"worker": {"cpu": 9}}, "worker", "no node has room"),
        ({"ps": {"gpu": 9}}, "ps", "no node has room"),
    ],
)
def test_a_bad_value_of_a_job_is_named(changes, key: str, says: str) -> None:
    error = refused(workload(job(id="6"), job(**({"id": "7"} | changes))))
    assert error.key == key
    assert says in str(error)
    assert error.job


def test_a_misspelled_key_is_hinted_at() -> None:
    assert "is 'epoch' meant?" in str(refused(workload(job(epochs=..., epoch=3))))
    assert "did you mean slot_seconds?" in str(refused(workload(slot_second=3)))


def test_duplicate_ids_are_refused() -> None:
    error = refused(workload(job(id="7"), job(id="8"), job(id=7)))
    assert (error.key, error.job) == ("id", "7")


@pytest.mark.parametrize(
    ("description", "key"),
    [
        ({"table": [[1.0, 2.0], [3.0]]}, "speeds.resnet-50.table[1][1]"),
        ({"profile": "resnet-49"}, "speeds.resnet-50.profile"),
        ({"profile": "dssm", "kind": "measured"}, "speeds.resnet-50.kind"),
        ({"profile": "dssm", "theta": 1}, "speeds.resnet-50.theta"),
        (7, "speeds.resnet-50"),
    ],
)
def test_a_bad_speed_names_the_file_and_the_key(description, key: str) -> None:
    given = workload()
    given["speeds"]["resnet-50"] = description
    assert refused(given).key == key


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"cluster": []}, "cluster"),
        ({"cluster": [{"count": 0, "resources": {"cpu": 1}}]}, "cluster"),
        ({"cluster": [{"count": 60_000, "resources": {"cpu": 1}}] * 2}, "cluster"),
        ({"cluster": [{"count": 2, "resources": {"cpu": 0}}]}, "cluster[0].resources"),
        ({"cluster": [{"resources": {"cpu": 1}}]}, "cluster[0].count"),
        ({"cluster": [3]}, "cluster[0]"),
        ({"slot_seconds": 0}, "slot_seconds"),
        ({"speeds": {}}, "speeds"),
        ({"speeds": {"a\nb": {"table": [[1]]}}}, "speeds"),
        ({"jobs": []}, "jobs"),
        ({"jobs": {"1": {}}}, "jobs"),
        ({"jobs": [3]}, ""),
        ({"seed\n": 3}, "'seed\\n'"),
    ],
)
def test_a_bad_value_of_the_file_is_named(changes, key: str) -> None:
    assert refused(workload(**changes)).key == key


def test_a_minimum_size_larger_than_the_cluster_is_refused() -> None:
    two = [{"count": 2, "resources": {"cpu": 8, "gpu": 8}}]
    read_workload(workload(job(min_workers=4), cluster=two))
    assert "the whole cluster has no room for 5 tasks" in str(refused(workload(job(min_workers=5), cluster=two)))
    one = [{"count": 1, "resources": {"cpu": 3, "gpu": 8}}]
    error = refused(workload(job(), cluster=one))
    assert "cpu: wanted 4, had 3" in str(error)


def test_a_job_that_never_gets_on_is_refused() -> None:
    given = workload(job(id="7", max_workers=1, max_ps=1), job(id="6"))
    given["speeds"]["resnet-50"] = {"table": [[0.0, 0.0], [0.0, 5.0]]}
    error = refused(given)
    assert (error.job, error.key) == ("7", "max_workers")


def test_a_huge_table_with_sizes_unmeasured_is_refused_when_it_is_read() -> None:
    given = workload(job(max_workers=70, max_ps=70))
    given["speeds"]["resnet-50"] = {"table": [[1.0] * 70] * 70}
    read_workload(given)
    given["jobs"][0]["max_workers"] = 71
    assert refused(given).key == "max_workers"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is not JSON"),
        ("{", "is not JSON"),
        ("[]", "expected an object"),
        ('{"a": 1, "a": 2}', "given twice"),
        ("[" * 100_000, "is not JSON"),
        ("1" * 5000, "is not JSON"),
        ("\ud800", "is not JSON"),
        ('{"slot_seconds": NaN, "cluster": [], "speeds": {}, "jobs": []}', "slot_seconds"),
    ],
)
def test_text_that_is_no_workload(tmp_path, text: str, says: str) -> None:
    path = tmp_path / "w.json"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(WorkloadError, match=says) as caught:
        read_workload(path)
    assert str(caught.value).startswith(f"{path}: ")


def test_files_that_cannot_be_read(tmp_path) -> None:
    for path in (tmp_path, tmp_path / "none.json", "a\0b"):
        with pytest.raises(WorkloadError, match="cannot be read"):
            read_workload(path)


def test_more_jobs_than_there_is_room_for(monkeypatch) -> None:
    monkeypatch.setattr(module, "MAX_JOBS", 2)
    assert refused(workload(job(id=1), job(id=2), job(id=3))).key == "jobs"


# Whatever the file holds, nothing but a WorkloadError comes out.

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.integers(10**300, 10**320) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


def places(value, at=()):
    yield at
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in inside:
        yield from places(part, (*at, key))


@given(st.data())
@settings(max_examples=150)
def test_a_spoiled_workload_reads_or_says_why(data) -> None:
    whole = copy.deepcopy(workload(job(), job(id="2", model="ring"), job(id="3", model="vgg-16", min_ps=1)))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.sampled_from([place for place in places(whole) if place]))
        holder = whole
        for key in at[:-1]:
            holder = holder[key]
        how = data.draw(st.sampled_from(["replace", "remove", "add"]))
        if how == "replace":
            holder[at[-1]] = data.draw(JSON | st.sampled_from([0, -1, 1e308, 5e-324, 2**63, "", {}, []]))
        elif how == "remove":
            del holder[at[-1]]
        elif isinstance(holder, dict):
            holder[data.draw(st.text(max_size=12))] = data.draw(JSON)
        else:
            holder.append(data.draw(JSON))
    try:
        read = read_workload(whole)
    except WorkloadError as error:
        said = str(error)
        ok = said.startswith("workload: ") and "\n" not in said and len(said) < 2000
    else:
        ok = all(math.isfinite(read.epochs_in_slot(each, 1, 1)) and to_request(each, read) for each in read.jobs)
    assert ok


@given(JSON)
@settings(max_examples=60)
def test_any_description_of_a_speed_reads_or_says_why(value) -> None:
    for description in (value, {"table": value}, {"points": value}, {"formula": "ps-sync", "theta": value, "batch": 1}):
        try:
            speed = parse_speed(description)
        except WorkloadError:
            continue
        assert math.isfinite(speed.samples_per_second(1, 1))


# The documentation is true.


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", DOCS.read_text(encoding="utf-8"), flags=re.DOTALL)


def test_the_documented_example_is_read() -> None:
    whole, *speeds = [json.loads(block) for block in blocks("json")]
    read = read_workload(whole)
    assert len(read.jobs) >= 2
    assert {type(speed).__name__ for speed in read.speeds.values()} >= {"Table", "PsSync"}
    assert len(speeds) >= 5
    for described in speeds:
        read_workload(workload(job(model="m"), speeds={"m": described}) | {"jobs": [example_job(described)]})


def example_job(described):
    ring = "allreduce" in (described.get("architecture"), described.get("formula"), described.get("kind"))
    return job(model="m", **({"ps": ..., "max_ps": ...} if ring else {}))


def test_every_key_is_documented() -> None:
    text = DOCS.read_text(encoding="utf-8")
    error = refused(workload(job(unknown=1)))
    known = re.search(r"known are (.*)$", str(error))
    assert known
    for key in known[1].split(", "):
        assert f"`{key}`" in text


def test_notes_for_people_may_stand_anywhere() -> None:
    plain, noted = (
        workload(job()),
        workload(job(user="ada", note={"why": ["first"]})) | {"title": "one", "source": "us"},
    )
    noted["speeds"] = {model: speed | {"comment": "measured"} for model, speed in noted["speeds"].items()}
    assert read_workload(noted) == read_workload(plain)
