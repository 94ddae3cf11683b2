"""Scripts as MXNet's users have them, unmodified, under the daemon: resized, with deaths, until their last epoch."""

from __future__ import annotations

import json
import os
import subprocess
from collections import Counter
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path

import numpy as np
import pytest
from daemon_process import BIN
from local_cluster import LocalCluster
from mxnet_jobs import Unavailable, environ, launch, make_environment

from dl2d.core.jobs import Allocation, JobKey, JobState, Role

SCRIPTS = Path(__file__).with_name("mxnet_scripts")
FOLDER = Path(__file__).parents[2] / "build" / "mxnet"
EPOCHS = 16
#: The script of which a step's indices are logged, the samples that it uses, and its batch.
WORKER = Path(__file__).parents[1] / "pslite" / "mxnet_worker.py"
SPLIT_SAMPLES, SPLIT_BATCH = 800, 20
#: What both jobs ask for.
PLACES = {
    "worker": {"cpu": 1, "places": 1}, "ps": {"cpu": 1, "servers": 1}, "max_workers": 8, "max_ps": 8, "min_ps": 1,
    "durability": "durable",
}  # fmt: skip

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def python() -> str:
    try:
        return make_environment(FOLDER)
    except (Unavailable, subprocess.TimeoutExpired) as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Handwritten digits for two of the scripts, and in LibSVM's format, below 5 or not, for the third."""
    from sklearn.datasets import load_digits  # noqa: PLC0415  (most workers of xdist run none of these tests)

    folder = tmp_path_factory.mktemp("digits")
    found = load_digits()
    np.savez(folder / "digits.npz", images=found.images, labels=found.target)
    # lines of equal length, since files in this format are split by bytes
    grey = (100 + np.arange(64) * 5 + found.images.reshape(-1, 64) // 4).astype(int)
    lines = [
        f"{int(label >= 5)} " + " ".join(f"{column}:1" for column in columns)
        for columns, label in zip(grey, found.target, strict=True)
    ]
    (folder / "digits.svm").write_text("\n".join(lines[:1200]) + "\n")
    (folder / "digits.svm.test").write_text("\n".join(lines[1200:1750]) + "\n")
    return folder


class Site(LocalCluster):
    """A cluster whose one limit per user says how many workers, and how many servers, a job has."""

    def __init__(self, directory: Path) -> None:
        nodes = [{"name": "n", "count": 1, "resources": {"cpu": 32, "places": 8, "servers": 8}}]
        manager = {"name": "local", "local": {"state_dir": str(directory / "local"), "nodes": nodes}}
        schedule = {"poll_seconds": 0.2, "slot_seconds": 1}
        super().__init__(directory, {"resource_manager": manager, "schedule": schedule, "guard": self._limits(2)})

    @staticmethod
    def _limits(tasks: int) -> dict[str, object]:
        # The policy, drf, gives a worker and a server at a time.
        return {"per_user": {"places": tasks, "servers": tasks}}

    def resize(self, job: JobKey, tasks: int) -> None:
        """Let the job have so many workers and as many servers, and wait until it has them."""
        self.settings["guard"] = self._limits(tasks)
        self.write()
        self.hang_up()
        self.wait_for_size(job, tasks, tasks)

    def wait_for_size(self, job: JobKey, workers: int, servers: int) -> None:
        """Wait until so many take part and train."""
        want = Allocation(workers, servers)
        self.wait_until(lambda: self.confirmed(job) == want, f"the job has {workers} workers, {servers} servers")
        self.wait_until(lambda: self._trained(job) == want, f"a step with {workers} workers, {servers} servers")

    def _trained(self, job: JobKey) -> Allocation:
        progress = self.job(job).progress
        return Allocation(progress.workers, progress.ps)

    def kill_task(self, job: JobKey, role: Role) -> None:
        """Kill the process of the last worker or server, and wait until another one has its place."""
        size = self.confirmed(job)
        last = max((each for each in self.tasks(job, live=True) if each.role is role), key=attrgetter("number"))
        self.process_of(last, "--epochs" if role is Role.WORKER else "pslite.launch.server_process").kill()
        self.wait_until(lambda: last.id not in {each.id for each in self.tasks(job, live=True)}, f"{last.id} is gone")
        self.wait_for_size(job, *size)

    def resize_and_kill(self, job: JobKey) -> None:
        """Resize the job from 2 of each role to 3, 1 and 3, and kill a task of each role and the coordinator."""
        self.wait_for_size(job, 2, 2)
        self.resize(job, 3)
        self.kill_task(job, Role.WORKER)
        self.resize(job, 1)
        self.resize(job, 3)
        self.kill_task(job, Role.PS)
        self.kill_coordinator(job)

    def shown(self, command: str, job: JobKey) -> str:
        """What ``dl2d`` prints for the job."""
        arguments = [BIN / "dl2d", *command.split(), job.id, "--config", self.config]
        return subprocess.run(arguments, check=True, capture_output=True, text=True, timeout=60).stdout

    def kill_coordinator(self, job: JobKey) -> None:
        """Kill the coordinator, and wait until the job trains with another one."""
        anchor = next(each for each in self.processes_of(job) if each.environ()["DL2_ROLE"] == "coordinator")
        (coordinator,) = anchor.children()
        coordinator.kill()
        self.wait_until(lambda: set(anchor.children()) - {coordinator}, "another coordinator is started")
        version = self.job(job).progress.version
        self.wait_until(lambda: self.job(job).progress.version > version, "the job trains again")


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with Site(tmp_path) as cluster:
        yield cluster


@pytest.mark.parametrize(
    "name",
    [*(pytest.param(name, marks=pytest.mark.nightly) for name in ("digits_dist", "fit")), "linear_classification"],
)
def test_an_unmodified_script_ends_with_all_its_checkpoints_and_stocks_accuracy(
    site: Site, python: str, data: Path, tmp_path: Path, name: str
) -> None:
    file = data / ("digits.svm" if name == "linear_classification" else "digits.npz")
    slow = tmp_path / "slow"
    slow.touch()

    def command(out: Path) -> list[str]:
        return [python, str(SCRIPTS / f"{name}.py"), f"--data={file}", f"--out={out}", f"--epochs={EPOCHS}"]

    request = {
        "name": name,
        "model": "other",
        "epochs": EPOCHS,
        "samples_per_epoch": 1200,
        "batch": 50,
        **PLACES,
    }
    ours = tmp_path / "ours"
    job = site.submit(request, [*command(ours), f"--slow={slow}"], **environ(PATH=f"{BIN}:{os.environ['PATH']}"))
    site.resize_and_kill(job)
    progress = site.job(job).progress
    # 1,200 samples in parts of two workers are 12 steps of 50 each
    assert progress.epoch == pytest.approx(progress.version / 12)
    assert progress.epoch < EPOCHS
    (line,) = json.loads(site.shown("status --json", job))["jobs"]
    assert progress.epoch <= line["epoch"] <= EPOCHS
    assert (line["allocation"]["workers"], line["allocation"]["ps"]) == (3, 3)
    assert "3w+3ps" in site.shown("why", job)
    slow.unlink()
    ended = site.ended(job)
    assert ended.state is JobState.FINISHED, ended.end_reason
    assert ended.progress.epoch == EPOCHS
    # a reader of LibSVM's format may give a part one batch more
    assert ended.progress.version in {12 * EPOCHS, 12 * EPOCHS + 1}
    for number in range(EPOCHS):
        # Gluon's example counts epochs from 0, Module's callback from 1
        assert any(Path(f"{ours}-{number + first:04d}.params").exists() for first in (0, 1)), number
    theirs = tmp_path / "theirs"
    if name == "linear_classification":  # with which MXNet's own servers wait for ever in the last epoch
        subprocess.run([*command(theirs), "--kv-store=local"], env=environ(), check=True, timeout=250)
    else:
        assert launch(command(theirs), 2, 1) == [0] * 4
    accuracy = {out: float(Path(f"{out}.accuracy").read_text()) for out in (ours, theirs)}
    assert abs(accuracy[ours] - accuracy[theirs]) < 0.05, accuracy


@pytest.mark.nightly
def test_with_the_split_of_one_line_each_sample_is_used_once_in_each_epoch(
    site: Site, python: str, data: Path, tmp_path: Path
) -> None:
    log, epochs = tmp_path / "log", 4
    command = [
        python, str(WORKER), "split", f"--data={data / 'digits.npz'}", f"--epochs={epochs}", "--sleep=0.4",
        f"--log={log}",
    ]  # fmt: skip
    request = {
        "name": "split",
        "model": "other",
        "epochs": epochs,
        "samples_per_epoch": SPLIT_SAMPLES,
        "batch": SPLIT_BATCH,
        **PLACES,
    }
    job = site.submit(request, command, **environ(PATH=f"{BIN}:{os.environ['PATH']}"))
    site.resize_and_kill(job)
    ended = site.ended(job)
    assert ended.state is JobState.FINISHED, ended.end_reason
    assert ended.progress.epoch == epochs
    used = Counter(int(word) for path in tmp_path.glob("log.*") for word in path.read_text().split())
    assert set(used) == set(range(SPLIT_SAMPLES))
    # A worker that is killed between its push and its line of the log has used a batch that it has not written down.
    assert max(used.values()) == epochs
    assert epochs * SPLIT_SAMPLES - used.total() in {0, SPLIT_BATCH}
