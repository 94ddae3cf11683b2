"""Records what Slurm's commands answer to the manager's listing, for ``test_recorded_answers.py``.

Starts a private Slurm with jobs in many states and writes ``commands-<release>.json``. Run it again with each release
when the manager asks for something new; ``later_root`` of ``test_newer_release.py`` makes a root with a later one.

    PYTHONPATH=tests .venv/bin/python tests/slurm/recorded/record.py
"""

from __future__ import annotations

import json
import re
import socket
import time
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest import mock

from slurm_cluster import SlurmCluster

from dl2d_slurm.commands.commands import Answer, Commands
from dl2d_slurm.manager import SlurmManager
from dl2d_slurm.settings import SlurmSettings

RANDOM_WORD = re.compile(r"\|([0-9a-f]{12})")
TAG = "dl2:lab.1.1795253000:worker-{}"
NAME = "train|\"two\" 'nodes', ü 訓"
#: Jobs in the order of their submission, by the ids by which users know them: user, options of sbatch, what Slurm says
#: of them. Tasks 6 and 7 are those of array 5 that run.
JOBS: dict[str, tuple[str, tuple[str, ...], str]] = {
    "1": ("alice", ("--constraint=fast", "--exclude=n2", "--nice=5"), "RUNNING None"),
    "2": ("alice", ("--nodelist=n1", "--gres=gpu:a100:1", "--mem=500", f"--comment={TAG.format(1)}"), "RUNNING None"),
    "3": ("bob", ("--nodelist=n1,n2", "--ntasks=3", "--gres=gpu:1", f"--job-name={NAME}"), "RUNNING None"),
    "4": ("bob", ("--nodelist=n2", "--cpus-per-task=2"), "SUSPENDED None"),
    "5": ("alice", ("--nodelist=n2", "--array=1-4%2"), "PENDING JobArrayTaskLimit"),
    "8": ("alice", ("--nodelist=n2", "--job-name=true"), "COMPLETED None"),
    "9": ("alice", ("--nodelist=n2", "--job-name=exit 3"), "FAILED NonZeroExitCode"),
    "10": ("bob", ("--nodelist=n2",), "CANCELLED None"),
    "11": ("alice", ("--dependency=afterok:1",), "PENDING Dependency"),
    "12": ("alice", ("--hold", f"--comment={TAG.format(2)}"), "PENDING JobHeldUser"),
    "13": ("alice", ("--nodelist=n3", f"--comment={TAG.format(3)}"), "PENDING ReqNodeNotAvail"),
    "14": ("bob", ("--exclusive", "--gres=gpu:2", f"--comment={NAME}"), "PENDING Resources"),
    "15": ("alice", ("--nodelist=n1", "--gres=gpu:a100:2", f"--comment={TAG.format(4)}"), "PENDING Priority"),
    "16": ("bob", ("--constraint=fast&ib|ib", "--exclude=n1", "--cpus-per-task=8"), "PENDING Priority"),
}


#: Features of nodes.
FEATURES = {"n1": "fast", "n2": "fast,ib", "n4": "fast"}


def set_up(cluster: SlurmCluster) -> dict[str, str]:
    """Make the reservation, the drained node and the jobs; their users' neutral names by the real ones."""
    users = {name: cluster.add_user(name) for name in ("alice", "bob")}
    for node, features in FEATURES.items():
        for kind in ("availablefeatures", "activefeatures"):
            cluster.run("scontrol", "update", f"nodename={node}", f"{kind}={features}")
    reserved = ("reservationname=ml", "starttime=now", "duration=600", "nodes=n4", f"users={users['alice'].name}")
    cluster.run("scontrol", "create", "reservation", *reserved)
    cluster.run("scontrol", "update", "nodename=n3", "state=drain", 'reason=disk | "sda" fällt aus')
    for job, (user, options, said) in JOBS.items():
        body = next((name for name in ("true", "exit 3") if f"--job-name={name}" in options), "exec sleep 3600")
        assert cluster.submit_as(users[user], f"#!/bin/sh\n{body}\n", "--time=60", *options) == job
        if not said.startswith("PENDING") or job == "5":
            begun = "5_2" if job == "5" else job
            cluster.wait_until(lambda begun=begun: states(cluster).get(begun, "P")[0] != "P", f"{begun} runs")
        if said.startswith(("SUSPENDED", "CANCELLED")):
            cluster.run(*(("scontrol", "suspend") if said.startswith("S") else ("scancel",)), job)
    wanted = {(job, said) for job, (_, _, said) in JOBS.items()}
    cluster.wait_until(lambda: wanted <= states(cluster).items(), "all jobs are in their states")
    cluster.wait_until(
        lambda: "N/A" not in cluster.run("squeue", "-hj14", "-o%S").stdout, "a start of job 14 is planned"
    )
    return {user.name: name for name, user in users.items()}


def states(cluster: SlurmCluster) -> dict[str, str]:
    """State and first words of the reason of each job, by the id by which users know it, of an array the id alone."""
    said = cluster.run("squeue", "--noheader", "--states=all", "--format=%i %T %r").stdout
    pairs = (line.partition(" ")[::2] for line in said.splitlines())
    return {id_.partition("_[")[0]: state.partition(",")[0].strip() for id_, state in pairs}


def record(cluster: SlurmCluster, folder: Path) -> None:
    neutral = {**set_up(cluster), str(cluster.directory): "/srv/slurm"}
    run, calls = Commands.run, list[dict[str, Any]]()

    def noted(commands: Commands, *argv: str, **options: Any) -> Answer:
        answer = run(commands, *argv, **options)
        word = next((match[1] for part in argv if (match := RANDOM_WORD.search(part))), "WORD")
        stdout = answer.stdout
        for real, shown in {word: "WORD", **neutral}.items():
            stdout = stdout.replace(real, shown)
        stdout = re.sub(rf"\b{re.escape(socket.gethostname())}\b", "head", stdout)
        stdout = re.sub(r"OS=Linux \S+", "OS=Linux 6.1.0", stdout)
        asked = [part.replace(word, "WORD") for part in argv]
        calls.append({"argv": asked, "status": answer.status, "stdout": stdout.splitlines(keepends=True)})
        return answer

    at = time.time()
    environ = {"PATH": cluster.manager_path, "SLURM_CONF": str(cluster.conf)}
    with mock.patch.object(Commands, "run", noted):
        for watch in ([], [{"partition": "dl2", "name": "train|*", "model": "bert"}]):
            settings = SlurmSettings.parse({"backend": "command", "watch": watch})
            with closing(SlurmManager(settings, clock=lambda: at, environ=environ)) as manager:
                manager.listing()
    release = ".".join(cluster.run("squeue", "--version").stdout.split()[-1].split(".")[:2])
    text = json.dumps({"at": at, "answers": calls}, indent=1, ensure_ascii=False)
    (folder / f"commands-{release}.json").write_text(text + "\n")


if __name__ == "__main__":
    with SlurmCluster(gpu_types=("a100", "", "", ""), extra="PriorityType=priority/basic") as private_slurm:
        record(private_slurm, Path(__file__).parent)
