"""A real Slurm of 16 nodes with a random fault in every period: each job ends with the weights of a static run.

    DL2D_FAULT_SECONDS=3600 pytest -m slow tests/end_to_end/test_slurm_faults.py -s

lets faults happen for an hour, one a minute; CI's run has one every six seconds, six in all.
``DL2D_FAULT_SEED`` repeats the order of the faults (not their effects: processes are never the same twice).
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from daemon_process import DaemonProcess
from end_to_end.test_slurm_cluster import static_digest
from slurm_cluster import SlurmCluster, User, why_not

from dl2d.core.jobs import JobKey, JobState

WORKER = Path(__file__).parent.parent / "pslite" / "numpy_worker.py"
SECONDS = float(os.environ.get("DL2D_FAULT_SECONDS", "36"))
PERIOD = 60.0 if SECONDS >= 600 else 6.0
SEED = int(os.environ.get("DL2D_FAULT_SEED", str(time.time_ns() % 1_000_000)))
JOBS_AT_ONCE = 3

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.slow,
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "Slurm is there"),
    pytest.mark.timeout(int(SECONDS * 1.5) + 900),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    with SlurmCluster(nodes=16, cpus=2, memory=1000, gpus=0) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def alice(cluster: SlurmCluster) -> User:
    user = cluster.add_user("alice")
    cluster.add_python(user)
    for name, source in (("regression.py", WORKER.with_name("regression.py")), ("train.py", WORKER)):
        (user.home / name).write_text(source.read_text())
    return user


class Faults:
    """The faults that may happen, and what has happened so far."""

    def __init__(self, cluster: SlurmCluster, daemon: DaemonProcess, user: User, rng: random.Random) -> None:
        self.counts: Counter[str] = Counter()
        self._cluster = cluster
        self._daemon = daemon
        self._user = user
        self._rng = rng
        #: What is to be undone at the beginning of the next period.
        self._mends: list[Callable[[], None]] = []

    def next(self) -> None:
        """Undo what lasts from the period before, then let one fault happen."""
        self.end()
        fault = self._rng.choice((self.daemon, self.controller, self.node, self.task, self.task, self.drain))
        self.counts[fault.__name__] += 1
        print(f"{time.strftime('%T')} fault: {fault.__name__}", flush=True)
        fault()

    def end(self) -> None:
        for mend in self._mends:
            mend()
        self._mends.clear()

    def daemon(self) -> None:
        """The daemon is killed; it starts again at once or in the next period."""
        self._daemon.kill()
        self._later(self._daemon.start)

    def controller(self) -> None:
        """Slurmctld is killed; it has had the time to write down which jobs were submitted, every 5 s."""
        time.sleep(6)
        self._cluster.kill("slurmctld")
        self._later(lambda: self._cluster.start_controller(fresh=False))

    def node(self) -> None:
        """The slurmd of a node is killed."""
        name = self._rng.choice(self._cluster.nodes)
        self._cluster.kill(name)
        self._later(lambda: self._cluster.start_node(name))

    def task(self) -> None:
        """One process of the user's jobs is killed: a coordinator, a server, a worker, or the dl2-run of a task."""
        found = [process for process in psutil.process_iter() if self._may_die(process)]
        if found:
            with contextlib.suppress(psutil.NoSuchProcess):
                self._rng.choice(found).kill()

    def _may_die(self, process: psutil.Process) -> bool:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.uids().real == self._user.uid and "python" in process.name():
                parent = process.parent()
                # The dl2-run that the user submitted is the job: Slurm reports the job as failed when it is killed.
                submitted = process.environ().get("SLURM_JOB_NAME", "").startswith("job-")
                return not (submitted and parent is not None and parent.name() == "slurmstepd")
        return False

    def drain(self) -> None:
        """A node is drained for a period."""
        name = self._rng.choice(self._cluster.nodes)
        self._cluster.run("scontrol", "update", f"nodename={name}", "state=drain", "reason=test", check=False)
        self._mends.append(
            lambda: self._cluster.run("scontrol", "update", f"nodename={name}", "state=resume", check=False)
        )

    def _later(self, mend: Callable[[], None]) -> None:
        if self._rng.random() < 0.5:
            mend()
        else:
            self._mends.append(mend)


def script(daemon: DaemonProcess, number: int) -> str:
    return f"""#!/bin/sh
#SBATCH -J job-{number} -c 1 --mem=100
#DL2 model=other samples_per_epoch=203 batch=20 epochs=60 max_workers=4 max_ps=2
#DL2 worker=cpu:1,memory:200 ps=cpu:1,memory:100
export DL2_DAEMON={daemon.url}
exec dl2-run python "$HOME/train.py" --epochs 60 --optimizer momentum --step-seconds 0.05 --durability durable \\
    --checkpoint "$HOME/checkpoints-{number}" --every 50
"""


def test_every_job_ends_with_the_weights_of_a_static_run(cluster: SlurmCluster, alice: User, tmp_path: Path) -> None:
    settings = {
        "resource_manager": cluster.resource_manager(),
        "jobs": {"drain_seconds": 20, "end_seconds": 5, "grace_seconds": 3},
    }
    rng = random.Random(SEED)
    submitted: list[str] = []
    want = static_digest(epochs=60)
    with DaemonProcess(tmp_path, settings) as daemon:
        faults = Faults(cluster, daemon, alice, rng)

        def found(job_id: str) -> tuple[JobKey, ...]:
            return tuple(job.key for job in daemon.store.find_jobs(job_id))

        def unfinished() -> list[str]:
            return [one for one in submitted if not any(daemon.job(key).state.ended for key in found(one))]

        def story(job_id: str) -> str:
            """What is known of a job, and the last words of its tasks."""
            keys = [job.key for job in daemon.store.find_jobs(job_id)]
            outputs = [alice.home / f"slurm-{job_id}.out", *alice.home.glob(f"dl2-{job_id}/*.out")]
            return "\n".join((
                f"job {job_id}: {[(str(daemon.job(key).state), daemon.job(key).end_reason) for key in keys]}",
                *(f"{task.id} {task.state} {task.note}" for key in keys for task in daemon.tasks(key)),
                *(f"--- {path.name}\n{path.read_text(errors='replace')[-2000:]}" for path in outputs if path.exists()),
            ))  # fmt: skip

        end = time.monotonic() + SECONDS
        while (now := time.monotonic()) < end:
            faults.end()
            while len(unfinished()) < JOBS_AT_ONCE:
                submitted.append(cluster.submit_as(alice, script(daemon, len(submitted))))
            # Slurm forgets jobs of the last seconds when it is killed, and a job that dies now was never dl2d's.
            daemon.wait_until(lambda: all(map(found, submitted)), "all jobs are registered")
            faults.next()
            time.sleep(max(0.0, now + PERIOD - time.monotonic()))
        faults.end()
        end = time.monotonic() + 300
        while unfinished() and time.monotonic() < end:
            time.sleep(1)
        assert not unfinished(), "\n".join((f"seed {SEED}", *map(story, unfinished()), daemon.said(200)))
        daemon.wait_until_empty(timeout=120)
        print(f"seed {SEED}: {len(submitted)} jobs, faults {dict(faults.counts)}")
        ends = {one: [daemon.job(key) for key in found(one)] for one in submitted}
        wrong = {
            one: [(str(job.state), job.end_reason, job.digest) for job in jobs]
            for one, jobs in ends.items()
            if [(job.state, job.digest) for job in jobs] != [(JobState.FINISHED, want)]
        }
        assert not wrong, "\n".join((f"seed {SEED}: {wrong}", *map(story, wrong), daemon.said(200)))
        cluster.wait_until(lambda: cluster.running() == [], "nothing is left")
