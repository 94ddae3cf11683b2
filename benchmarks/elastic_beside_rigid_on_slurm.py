"""How long rigid jobs wait on a real Slurm, and how long others take, when these are elastic and when they are static.

    python benchmarks/elastic_beside_rigid_on_slurm.py [--jobs 24] [--nodes 2] [--load 1.2] [--seeds 1]
        [--yields always]

A private Slurm on this machine (root; see tests/slurm_cluster.py), whose nodes have 4 GPUs without hardware. Arrivals
are Poisson and lengths lognormal as in Philly, cut to 15 minutes to 3 hours, and all of it 60 times as fast; jobs
demand 1, 2 or 4 GPUs. Half of them are rigid and sleep. The others train with 16 samples a step and a fixed time for
each sample of a worker: first at their static sizes, each in one batch job without dl2d (``dl2-run --standalone``),
then as elastic jobs of the daemon, with the policy drf and up to 4 workers. The jobs are the same each time, their
times those of Slurm, in whole seconds. How much longer each rigid job waited beside elastic jobs is given with an error
of two standard deviations of its mean. Slurm's priorities are first come, first served; it has backfill, for which
jobs have time limits.
"""

from __future__ import annotations

import math
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from elastic_beside_rigid_jobs import Work, jobs_of
from harness import options_of, show

# isort: split
from daemon_process import DaemonProcess
from slurm_cluster import SlurmCluster, User

GPUS = 4
CPUS = 4 * GPUS
#: Number of GPUs of a job, with weights.
SIZES: Mapping[int, float] = {1: 0.5, 2: 0.25, 4: 0.25}
FASTER = 60.0
#: Before it is made faster.
SHORTEST, LONGEST = 900.0, 10_800.0
BATCH, STEPS_PER_EPOCH = 16, 10
#: Seconds of a step of one worker.
STEP = 1.0
STATIC = "static sizes"
TRAIN = Path(__file__).parents[1] / "tests" / "pslite" / "numpy_worker.py"


@dataclass(frozen=True, slots=True)
class Times:
    """When a job was submitted, started and ended."""

    submitted: int
    started: int
    ended: int


def faster_jobs_of(seed: int, count: int, nodes: int, load: float) -> list[Work]:
    """Jobs that offer this load, a fraction of the cluster's GPUs; every other one is rigid."""
    works = jobs_of(seed, count, nodes * GPUS, load, SIZES, SHORTEST, LONGEST)
    return [
        replace(work, at=work.at / FASTER, seconds=work.seconds / FASTER, rigid=work.number % 2 == 0) for work in works
    ]


def epochs_of(work: Work) -> int:
    """Epochs that take as long as a job with as many workers."""
    return max(1, round(work.seconds * work.gpus / (STEP * STEPS_PER_EPOCH)))


def script_of(work: Work, daemon: DaemonProcess | None) -> str:
    """The batch script of a job, for Slurm alone or for a daemon."""
    if work.rigid:
        limit = minutes(work.seconds)
        return (
            f"#!/bin/sh\n#SBATCH -c {work.gpus} --mem=50 --gres=gpu:{work.gpus} --time={limit}\n"
            f"exec sleep {work.seconds:.0f}\n"
        )
    train = (
        f'python "$HOME/{TRAIN.name}" --samples {BATCH * STEPS_PER_EPOCH} --batch {BATCH} --epochs {epochs_of(work)}'
        f" --sample-seconds {STEP / BATCH}"
    )
    if daemon is None:
        cpus, memory, limit = work.gpus + 2, 100 * (work.gpus + 2), minutes(2 * work.seconds)
        return f"""#!/bin/sh
#SBATCH -c {cpus} --mem={memory} --gres=gpu:{work.gpus} --time={limit}
exec dl2-run --standalone --workers {work.gpus} --servers 1 {train}
"""
    return f"""#!/bin/sh
#SBATCH -c 1 --mem=100 --time=60
#DL2 model=other samples_per_epoch={BATCH * STEPS_PER_EPOCH} batch={BATCH} epochs={epochs_of(work)}
#DL2 max_workers={GPUS} max_ps=1 worker=cpu:1,gpu:1,memory:100 ps=cpu:1,memory:100
export DL2_DAEMON={daemon.url}
exec dl2-run {train}
"""


def minutes(seconds: float) -> int:
    """A time limit as users give it, with a minute to spare."""
    return math.ceil(seconds / 60) + 1


@contextmanager
def daemon_on(cluster: SlurmCluster, yields: str) -> Iterator[DaemonProcess]:
    """The daemon with times as much shorter as the jobs'."""
    settings = {
        "resource_manager": cluster.resource_manager(sharing=[{"yield": yields}], rpcs_per_minute=6000),
        "schedule": {"poll_seconds": 1, "slot_seconds": 10},
    }
    with tempfile.TemporaryDirectory() as folder, DaemonProcess(Path(folder), settings) as daemon:
        yield daemon


def times_of(cluster: SlurmCluster) -> dict[str, Times]:
    """Times of all jobs that have ended, but for tasks; whoever has not completed fails the benchmark."""
    fields = "JobID:|,Name:|,State:|,SubmitTime:|,StartTime:|,EndTime:"
    said = cluster.run("squeue", "-h", "-t", "all", f"--Format={fields}", env={"SLURM_TIME_FORMAT": "%s"}).stdout
    found = {}
    for line in said.splitlines():
        job, name, state, *times = (word.strip() for word in line.split("|"))
        if state in ("PENDING", "RUNNING", "COMPLETING") or not name.startswith("job-"):
            continue
        if state != "COMPLETED":
            raise SystemExit(f"job {job} is {state}:\n{cluster.run('squeue', '-t', 'all').stdout}")
        found[job] = Times(*map(int, times))
    return found


def run(cluster: SlurmCluster, users: tuple[User, User], works: Sequence[Work], yields: str) -> list[Times]:
    """Submit the jobs as they come, and wait until all have ended; their times in the same order."""
    rigid_user, other_user = users
    with ExitStack() as stack:
        daemon = None if yields == STATIC else stack.enter_context(daemon_on(cluster, yields))
        begin, jobs = time.monotonic(), []
        for work in works:
            time.sleep(max(0.0, begin + work.at - time.monotonic()))
            user = rigid_user if work.rigid else other_user
            jobs.append(cluster.submit_as(user, script_of(work, daemon), f"--job-name=job-{len(jobs)}"))
        end = time.monotonic() + 1800
        while missing := set(jobs) - (times := times_of(cluster)).keys():
            if time.monotonic() > end:
                raise SystemExit(f"not ended: {sorted(missing)}\n{daemon.said() if daemon else ''}{cluster.logs()}")
            time.sleep(2)
    cluster.clear()
    return [times[job] for job in jobs]


def main() -> None:
    given = options_of(__doc__, jobs=24, nodes=2, load=1.2, seeds=1, yields=["always"])
    waits: dict[str, list[int]] = {}
    memory = f"DefMemPerCPU=50\nMinJobAge={24 * 3600}"
    with SlurmCluster(nodes=given.nodes, cpus=CPUS, memory=8000, gpus=GPUS, extra=memory) as cluster:
        users = cluster.add_user("rigid"), cluster.add_user("other")
        cluster.add_python(users[1])
        for file in (TRAIN, TRAIN.with_name("regression.py")):
            shutil.copy(file, users[1].home)
        runs = [faster_jobs_of(seed, given.jobs, given.nodes, given.load) for seed in range(given.seeds)]
        for yields in (STATIC, *given.yields):
            began, waits[yields], completions = time.monotonic(), [], []
            for works in runs:
                for work, times in zip(works, run(cluster, users, works, yields), strict=True):
                    if work.rigid:
                        waits[yields].append(times.started - times.submitted)
                    else:
                        completions.append(times.ended - times.submitted)
            more = [with_ - without for with_, without in zip(waits[yields], waits[STATIC], strict=True)]
            show(
                elastic_jobs_yield=yields, rigid_mean_wait=statistics.fmean(waits[yields]),
                rigid_longest_wait=max(waits[yields]), more_than_static=statistics.fmean(more),
                error=2 * statistics.stdev(more) / math.sqrt(len(more)),
                other_mean_completion=statistics.fmean(completions),
                other_median_completion=statistics.median(completions), took=time.monotonic() - began,
            )  # fmt: skip


if __name__ == "__main__":
    main()
