from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dl2d.core.errors import WorkloadError
from dl2d.simulation.workload import trace_readers as module
from dl2d.simulation.workload.trace_readers import FORMATS, ReadTrace, TraceSettings, read_trace
from dl2d.simulation.workload.workload_file import describe_workload, read_workload

DATA = Path(__file__).parents[4] / "shared" / "data"

PHILLY = "timestamp,duration,num_gpus,gpu_time,cluster\n"
ITP = "job_id,submission_time,duration,num_gpu\n"
OPENB = (
    "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time\n"
)
SACCT = "JobID|User|Submit|Start|End|State|NNodes|NCPUS|ReqTRES|AllocTRES|Elapsed\n"
ITP_ROWS = "a,7200,3600,1\nb,3600,1800,8\nc,10800,60,2\n"


def read(tmp_path: Path, name: str, text: str | bytes, *, seed: int = 0, **given: object) -> ReadTrace:
    path = tmp_path / "log.csv"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return read_trace(name, path, TraceSettings.parse({key: str(value) for key, value in given.items()}), seed=seed)


def refused(tmp_path: Path, name: str, text: str | bytes, **given: object) -> str:
    with pytest.raises(WorkloadError) as caught:
        read(tmp_path, name, text, **given)
    return str(caught.value)


def by_id(trace: ReadTrace) -> dict:
    return {job.id: job for job in trace.workload.jobs}


def seconds_at(trace: ReadTrace, identity: str, tasks: int) -> float:
    job = by_id(trace)[identity]
    return job.epochs * job.samples_per_epoch / trace.workload.speeds[job.model].samples_per_second(tasks, tasks)


def balanced(trace: ReadTrace) -> bool:
    return trace.rows == len(trace.workload.jobs) + sum(trace.left_out.values())


# What each format means.


def test_itp(tmp_path: Path) -> None:
    trace = read(tmp_path, "itp", ITP + ITP_ROWS, slot_seconds=1200)
    assert trace.rows == 3
    assert not trace.left_out
    jobs = by_id(trace)
    assert {name: job.submit_slot for name, job in jobs.items()} == {"b": 0, "a": 3, "c": 6}
    assert {name: job.max_workers for name, job in jobs.items()} == {"b": 16, "a": 2, "c": 4}
    # The work is such that the size it had takes the time it took.
    assert [seconds_at(trace, name, gpus) for name, gpus in (("a", 1), ("b", 8), ("c", 2))] == pytest.approx(
        [3600, 1800, 60]
    )
    assert jobs["a"].worker.get("gpu") == 1


def test_philly_calls_jobs_by_their_line_and_need_not_be_sorted(tmp_path: Path) -> None:
    trace = read(
        tmp_path, "philly", PHILLY + "2017-10-09 07:01:55,66.0,1,66.0,11cb48\n2017-10-09 06:13:03,50.0,4,1,x\n"
    )
    assert {job.id: job.submit_slot for job in trace.workload.jobs} == {"3": 0, "2": 2}


def test_openb_shares_of_a_gpu_and_pods_without_one(tmp_path: Path) -> None:
    rows = (
        "half,6000,1,1,460,,LS,Running,0,100,40\nwhole,6000,1,8,1000,,LS,Running,0,100,0\n"
        "cpu,9000,1,0,0,,LS,Running,0,100,0\nlost,6000,1,1,460,,LS,Pending,0,100,\n"
    )
    trace = read(tmp_path, "openb", OPENB + rows, stretch=1)
    jobs = by_id(trace)
    assert jobs["half"].worker.get("gpu") == 0.46
    assert seconds_at(trace, "half", 1) == pytest.approx(60)
    assert jobs["whole"].max_workers == 8
    assert jobs["cpu"].worker.get("gpu") == 0
    assert jobs["cpu"].max_workers == 3  # 9 cores, 4 a worker
    assert trace.left_out == {"no start or end": 1}


SACCT_ROWS = [
    "100|ann|2024-03-01T00:00:00|2024-03-01T00:10:00|2024-03-01T01:10:00|COMPLETED|1|8||billing=8,cpu=8,gres/gpu=2,mem=64G,node=1|01:00:00",
    "100.batch||2024-03-01T00:10:00|2024-03-01T00:10:00|2024-03-01T01:10:00|COMPLETED|1|8||cpu=8,gres/gpu=2|01:00:00",
    "100.extern||2024-03-01T00:10:00|2024-03-01T00:10:00|2024-03-01T01:10:00|COMPLETED|1|8||cpu=8|01:00:00",
    "100.0||2024-03-01T00:10:00|2024-03-01T00:10:00|2024-03-01T01:10:00|COMPLETED|1|8||cpu=8|01:00:00",
    "101_7|bob|2024-03-01T01:00:00|2024-03-01T01:00:00|2024-03-02T02:00:05|TIMEOUT|2|16||cpu=16,gres/gpu:a100=4,gres/gpu:v100=1|1-01:00:05",
    "101_[8-20%4]|bob|2024-03-01T01:00:00|Unknown|Unknown|PENDING|1|1|cpu=1||00:00:00",
    "102|ann|2024-03-01T02:00:00|None|2024-03-01T03:00:00|CANCELLED by 1000|1|1|cpu=1||00:00:00",
    "103|ann|2024-03-01T02:00:00|2024-03-01T03:00:00|Unknown|RUNNING|1|1|cpu=1|cpu=1|00:30:00",
    "104+1|ann|2024-03-01T02:00:00|2024-03-01T03:00:00|2024-03-01T03:00:30|FAILED|1|12|cpu=12|cpu=12|00:00:30",
    "105|ann|2024-03-01T02:00:00|2024-03-01T03:00:00|2024-03-01T03:00:00|FAILED|1|1|cpu=1|cpu=1|00:00:00",
    "100|ann|2024-03-01T05:00:00|2024-03-01T05:10:00|2024-03-01T06:10:00|COMPLETED|1|8||cpu=8|01:00:00",
    "106|ann|Unknown|2024-03-01T03:00:00|2024-03-01T03:00:09|FAILED|1|1|cpu=1|cpu=1|00:00:09",
]


def check_sacct(trace: ReadTrace) -> None:
    jobs = by_id(trace)
    assert set(jobs) == {"100", "101_7", "104-1"}
    assert {name: job.submit_slot for name, job in jobs.items()} == {"100": 0, "101_7": 3, "104-1": 6}
    assert jobs["100"].max_workers == 4
    assert seconds_at(trace, "100", 2) == pytest.approx(3600)
    assert jobs["101_7"].max_workers == 10
    assert seconds_at(trace, "101_7", 5) == pytest.approx(90_005)
    assert jobs["104-1"].worker.get("gpu") == 0
    assert seconds_at(trace, "104-1", 3) == pytest.approx(30)  # 12 cores, 4 a worker
    assert trace.left_out == {
        module.STEP: 3, module.ARRAY_REST: 1, module.NO_TIME: 2, module.NOT_ENDED: 1, module.NO_LENGTH: 1,
        module.AGAIN: 1,
    }  # fmt: skip
    assert balanced(trace)


def test_sacct(tmp_path: Path) -> None:
    check_sacct(read(tmp_path, "sacct", SACCT + "\n".join(SACCT_ROWS) + "\n"))


def test_sacct_columns_may_come_in_any_order_and_lines_end_in_a_bar(tmp_path: Path) -> None:
    table = [line.split("|") for line in [SACCT.strip(), *SACCT_ROWS]]
    check_sacct(read(tmp_path, "sacct", "".join("|".join(reversed(row)) + "|\r\n" for row in table)))


def test_sacct_without_elapsed_takes_end_minus_start_and_numbers_for_times(tmp_path: Path) -> None:
    trace = read(tmp_path, "sacct", "jobid,submit,start,end,allocgres,nnodes\n7,1000,2000,2500,gpu:a100:2,3\n")
    assert seconds_at(trace, "7", 6) == pytest.approx(500)


def test_sacct_gpus_that_are_not_among_tres_are_taken_from_gres(tmp_path: Path) -> None:
    table = "JobID|Submit|Elapsed|AllocTRES|ReqGRES\n7|2024-03-01T02:00:00|01:15|cpu=4,node=1|gpu:2(S:0)\n"
    assert seconds_at(read(tmp_path, "sacct", table, stretch=1), "7", 2) == pytest.approx(75)


def test_sacct_raw_seconds_and_requested_resources(tmp_path: Path) -> None:
    trace = read(tmp_path, "sacct", "JobID|Submit|ElapsedRaw|ReqTRES\n7|2024-03-01T02:00:00|75|cpu=4,gres/gpu=3\n")
    assert seconds_at(trace, "7", 3) == pytest.approx(75)


# Files and options.


@pytest.mark.parametrize("prefix", [b"", b"\xef\xbb\xbf"])
def test_gzip_and_a_byte_order_mark_change_nothing(tmp_path: Path, prefix: bytes) -> None:
    plain = (ITP + ITP_ROWS).encode()
    assert read(tmp_path, "itp", gzip.compress(prefix + plain)) == read(tmp_path, "itp", plain)


def test_window_and_number_of_jobs(tmp_path: Path) -> None:
    trace = read(tmp_path, "itp", ITP + ITP_ROWS, start_hours=1, hours=1)
    assert set(by_id(trace)) == {"a"}
    assert trace.left_out == {module.OUTSIDE: 2}
    assert trace.workload.jobs[0].submit_slot == 0
    trace = read(tmp_path, "itp", ITP + ITP_ROWS, jobs=2)
    assert set(by_id(trace)) == {"a", "b"}
    assert trace.left_out == {module.BEYOND: 1}


def test_rigid_jobs_that_the_cluster_cannot_hold_are_left_out(tmp_path: Path) -> None:
    trace = read(tmp_path, "itp", ITP + ITP_ROWS, shrink=1, stretch=1, nodes=1, node="cpu:64,gpu:4")
    assert {job.id: (job.min_workers, job.max_workers) for job in trace.workload.jobs} == {"a": (1, 1), "c": (2, 2)}
    assert trace.left_out == {"larger than the cluster": 1}


def test_nodes_are_as_many_as_fill_the_load(tmp_path: Path) -> None:
    rows = "".join(f"j{index},{index * 100},10000,8\n" for index in range(101))
    # 101 x 10,000 s x 8 GPUs over 20,000 s: 404 GPUs at work.
    for load, nodes in ((1.0, 51), (0.5, 101)):
        trace = read(tmp_path, "itp", ITP + rows, load=load, node="cpu:1000,gpu:8")
        assert trace.workload.cluster[0].count == nodes


def test_a_job_keeps_its_model_whatever_part_is_read_and_another_seed_changes_some(tmp_path: Path) -> None:
    rows = "".join(f"j{index},{index},100,1\n" for index in range(60))
    whole = {job.id: job.model for job in read(tmp_path, "itp", ITP + rows).workload.jobs}
    part = {job.id: job.model for job in read(tmp_path, "itp", ITP + rows, jobs=20).workload.jobs}
    other = {job.id: job.model for job in read(tmp_path, "itp", ITP + rows, seed=1).workload.jobs}
    assert part.items() <= whole.items()
    assert len(set(whole.values())) == 9  # all profiles on GPUs
    assert other != whole


# Errors name file, line and column.


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("itp", ITP + "a,1,x,1\n", "log.csv: line 2: duration: expected a number, got 'x'"),
        ("itp", ITP + "a,1,1,1\nb,1,nan,1\n", "line 3: duration: expected a number from"),
        ("itp", ITP + "a,1,1,1.5\n", "line 2: num_gpu: expected a whole number"),
        ("itp", ITP + "a,1,1,-1\n", "line 2: num_gpu"),
        ("itp", ITP + "a b,1,1,1\n", "line 2: job_id"),
        ("itp", ITP + "\na,1,1\n", "line 3: expected 4 columns, got 3"),
        ("itp", ITP, "no job can be used of 0 rows"),
        ("itp", ITP + "a,1,0,1\n", "no job can be used of 1 rows; left out: ran for no time (1)"),
        ("itp", ITP + "a,0,1,1\nb,1e12,1,1\n", "take longer slots"),
        ("itp", "", "line 1: there is no column job_id"),
        ("itp", PHILLY, "line 1: there is no column job_id, submission_time"),
        ("itp", "a,a\n", "line 1: the column 'a' is named twice"),
        ("itp", "a," * 501 + "a\n", "line 1: there are 502 columns, more than 500"),
        ("itp", ITP.encode() + b"\xff,1,1,1\n", "is not UTF-8"),
        ("itp", gzip.compress((ITP + ITP_ROWS).encode(), mtime=0)[:-12], "cannot be read"),
        ("itp", b"\x1f\x8bnonsense", "cannot be read"),
        ("philly", PHILLY + "yesterday,1,1,1,x\n", "line 2: timestamp: expected a time"),
        ("openb", OPENB + "a,1,1,1,2000,,,,0,9,1\n", "line 2: gpu_milli"),
        ("sacct", SACCT + SACCT_ROWS[0].replace("01:00:00|", "").replace("|01:00:00", "|soon"), "line 2: elapsed"),
        ("sacct", SACCT + SACCT_ROWS[0].replace("gpu=2", "gpu=two"), "line 2: alloctres"),
        ("sacct", SACCT + "x" + SACCT_ROWS[0], "line 2: jobid"),
    ],
)
def test_what_is_malformed_is_told(tmp_path: Path, name: str, text: str | bytes, words: str) -> None:
    assert words in refused(tmp_path, name, text)


def test_a_log_that_is_not_there(tmp_path: Path) -> None:
    for path in (tmp_path / "gone.csv", tmp_path, Path("a\0b")):
        with pytest.raises(WorkloadError, match="cannot be read"):
            read_trace("itp", path, TraceSettings())


def test_sizes_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ROWS", 2)
    assert "more than 2 usable rows" in refused(tmp_path, "itp", ITP + ITP_ROWS)


# Whatever comes in.

SOUND = {
    "itp": ITP_ROWS.split(),
    "philly": ["2017-10-09 07:01:55,66.0,1,66.0,11cb48"],
    "openb": ["half,6000,1,1,460,,LS,Running,0,100,40", "cpu,9000,1,0,0,,LS,Running,0,100,0"],
    "sacct": SACCT_ROWS,
}
HEADERS = {"itp": ITP, "philly": PHILLY, "openb": OPENB, "sacct": SACCT}
CELLS = st.one_of(
    st.sampled_from(
        ["", "0", "1", "8", "-1", "1e300", "nan", "Unknown", "2024-03-01T00:00:00", "0001-01-01T00:00:00+23:59",
         "5-01:02:03", "cpu=4,gres/gpu=2", "gres/gpu=", "RUNNING", "COMPLETED", "12.batch", "12_[1-2]", "12_3", "٣",
         "1_0", '"', "x,y"]
    ),
    st.integers(-5, 10**7).map(str),
    st.text(max_size=12),
)  # fmt: skip


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.data())
def test_fuzzed_tables_raise_nothing_but_workload_errors_and_counts_are_conserved(tmp_path: Path, data) -> None:
    name = data.draw(st.sampled_from(sorted(FORMATS)))
    header = HEADERS[name]
    delimiter = "|" if name == "sacct" else ","
    rows = data.draw(st.lists(st.sampled_from(SOUND[name]).map(lambda line: line.split(delimiter)), max_size=5))
    for row in rows:  # mostly sound, so that some tables pass
        for index in data.draw(st.lists(st.integers(0, len(row) - 1), max_size=2)):
            row[index] = data.draw(CELLS)
    text = header + "".join(delimiter.join(row) + "\n" for row in rows)
    try:
        trace = read(tmp_path, name, text.encode("utf-8", "surrogatepass"))
    except WorkloadError as error:
        if "\n" in str(error):
            raise
    else:
        assert balanced(trace)
        assert read_workload(describe_workload(trace.workload)) == trace.workload


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    rows=st.lists(
        st.tuples(st.integers(0, 10**6), st.integers(0, 10**5), st.integers(0, 1200)), min_size=1, max_size=12
    ),
    jobs=st.integers(0, 5),
    start=st.integers(0, 100),
    hours=st.integers(0, 100),
    nodes=st.integers(0, 3),
    shrink=st.sampled_from([0, 0.5, 1]),
)  # fmt: skip
def test_counts_and_work_are_conserved(tmp_path: Path, rows, jobs, start, hours, nodes, shrink) -> None:
    text = ITP + "".join(f"j{index},{submit},{took},{gpus}\n" for index, (submit, took, gpus) in enumerate(rows))
    try:
        trace = read(tmp_path, "itp", text, jobs=jobs, start_hours=start, hours=hours, nodes=nodes, shrink=shrink)
    except WorkloadError as error:
        if "no job can be used" not in str(error):
            raise
        return
    assert trace.rows == len(rows)
    assert balanced(trace)
    for job in trace.workload.jobs:
        _, took, gpus = rows[int(job.id[1:])]
        assert seconds_at(trace, job.id, gpus or 1) == pytest.approx(took, rel=1e-8)


# Real logs, where they lie beside the checkout.


@pytest.mark.parametrize(
    ("name", "file", "rows", "jobs"),
    [
        ("philly", "philly/philly.csv.gz", 82_247, 82_247),
        ("itp", "elasticflow-itp/raw/cluster01.csv", 1_595, 1_595),
        ("openb", "alibaba-gpu-2023-openb/openb_pod_list_default.csv", 8_152, 7_255),
    ],
)
def test_real_logs(name: str, file: str, rows: int, jobs: int) -> None:
    path = DATA / file
    if not path.exists():
        pytest.skip(f"{file} is not in ../shared/data beside the checkout")
    trace = read_trace(name, path, TraceSettings())
    assert (trace.rows, len(trace.workload.jobs)) == (rows, jobs)
    assert balanced(trace)
