"""Guides followed literally: the commands of a page in one shell, from its first to its last."""

from __future__ import annotations

import getpass
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import debian_package
import pytest
import systemd_machine
import yarn_cluster
from daemon_process import DaemonProcess
from free_ports import free_port
from slurm_cluster import SlurmCluster, User, cgroup_configuration, why_not
from systemd_machine import SystemdMachine

from dl2d.cli.jobs.job_file import JobFile
from dl2d.core.job_request_parser import RequestRules

ROOT = Path(__file__).parents[2]
#: folders of the packages that the tests use
THIRD_PARTY = [path for path in sys.path if path.endswith("site-packages")]
pytestmark = pytest.mark.slow


def section(page: str, heading: str) -> list[tuple[str, str]]:
    """Language and text of the code blocks under a heading of a page."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    body = re.split(rf"^## {re.escape(heading)}$", text, flags=re.MULTILINE)[1]
    body = re.split(r"^## ", body, flags=re.MULTILINE)[0]
    return re.findall(r"^```(\w+)\n(.*?)^```$", body, re.MULTILINE | re.DOTALL)


def test_a_job_on_one_machine(tmp_path: Path) -> None:
    install, follow, stop = (text for language, text in section("users-guide.md", "Try it on one machine"))
    # What is installed here is tested; tests/packaging builds and installs the wheel.
    steps = [line for line in install.splitlines() if not line.startswith(("python3 -m venv", "venv/bin/pip"))]
    assert len(install.splitlines()) - len(steps) == 2
    script = "\n".join(["set -e", *steps, follow, stop, "wait"])
    script = script.replace("$PWD/venv/bin", str(Path(sys.executable).parent))
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "DL2D_API__PORT": str(free_port())}
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    log = (tmp_path / "trial" / "daemon.log").read_text()
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{log}"
    checked, _, rest = done.stdout.partition("submitted job")
    assert {line.split()[0] for line in checked.splitlines() if line} == {"ok"}
    assert "finished" in rest
    assert list((tmp_path / "trial" / "state" / "local" / "output").glob("*/worker-0.log"))


def job_of_the_yarn_guide(folder: Path) -> Path:
    """The job file of the guide to YARN, beside its training script."""
    text = next(text for _, text in section("yarn.md", "Install") if "train_digits.py" in text and "epochs" in text)
    (folder / "train_digits.py").write_text((ROOT / "examples" / "train_digits.py").read_text())
    file = folder / "job.yaml"
    file.write_text(text.replace("/opt/dl2d/bin/python", sys.executable))
    return file


@pytest.mark.yarn
@pytest.mark.skipif(bool(yarn_cluster.why_not()), reason=yarn_cluster.why_not() or "YARN is there")
def test_the_first_job_on_yarn(tmp_path: Path) -> None:
    settings, certificate, *commands = (text for language, text in section("yarn.md", "Install")[1:])
    job_of_the_yarn_guide(tmp_path)
    check, start, _, submit = commands
    assert start.count("systemctl") == 2
    certificate = certificate.replace("DNS:head.cluster", "IP:127.0.0.1")
    for there, here in (("/opt/dl2d/daemon.pem", "daemon.pem"), ("/etc/dl2d/key.pem", "key.pem")):
        settings, certificate = (text.replace(there, str(tmp_path / here)) for text in (settings, certificate))
    user, port = getpass.getuser(), free_port()
    proxy = {f"hadoop.proxyuser.{user}.hosts": "127.0.0.1", f"hadoop.proxyuser.{user}.users": "*"}
    page = (ROOT / "docs" / "yarn.md").read_text(encoding="utf-8")
    table = dict(re.findall(r"^\| `(yarn\.[^`]+)`(?: \([^)]*\))? \| `([^`]+)`", page, re.MULTILINE))
    assert table["yarn.nodemanager.sleep-delay-before-sigkill.ms"] == "5000"
    with yarn_cluster.YarnCluster(nodes=1, core=proxy, properties=table) as cluster:
        (tmp_path / "dl2d.yaml").write_text(
            settings.replace("/opt/dl2d/bin", str(Path(sys.executable).parent))
            .replace("http://rm1:8088", cluster.address)
            .replace("https://head.cluster:8910", f"https://127.0.0.1:{port}")
            .replace("user: dl2d ", f"user: {user} ")
        )
        steps = [
            "set -e",
            certificate,
            check,
            "echo END",
            "dl2d run & until dl2d status; do sleep 0.5; done",
            submit.replace("--watch", ""),
        ]
        steps += ["until dl2d status --all | grep -q finished; do sleep 3; done", "dl2d history", "kill %1", "wait"]
        bin_folder = str(Path(sys.executable).parent)
        script = (
            "\n".join(steps)
            .replace("/opt/dl2d/bin/", f"{bin_folder}/")
            .replace("until dl2d", f"until {bin_folder}/dl2d")
        )
        environment = {
            "PATH": f"{bin_folder}:/usr/bin:/bin", "HOME": str(tmp_path), "DL2D_CONFIG": str(tmp_path / "dl2d.yaml"),
            "DL2D_API__PORT": str(port), "DL2D_STATE_DIR": str(tmp_path / "state"), "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        done = subprocess.run(
            ["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300,
            check=False,
        )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    checked = done.stdout.partition("END")[0]
    assert {line.split()[0] for line in checked.splitlines() if line} == {"ok"}
    assert "Services REST interface answers" in checked


@pytest.mark.nightly
def test_the_job_file_of_the_yarn_guide_runs_on_this_machine(tmp_path: Path) -> None:
    file = job_of_the_yarn_guide(tmp_path)
    nodes = [{"name": "n", "count": 2, "resources": {"cpu": 4, "memory": "8G"}}]
    local = {"name": "local", "local": {"state_dir": str(tmp_path / "local"), "nodes": nodes}}
    with DaemonProcess(tmp_path, {"resource_manager": local}) as daemon:
        command = [sys.executable, "-m", "dl2d.cli", "submit", "--wait", "-c", str(daemon.config), str(file)]
        done = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr + daemon.said()


@pytest.fixture
def cluster() -> Iterator[SlurmCluster]:
    with SlurmCluster(nodes=2) as cluster:
        yield cluster


@pytest.fixture
def head(tmp_path: Path) -> Iterator[SystemdMachine]:
    """A machine called "head" with Debian's Slurm, not configured, and the package that ``make deb`` leaves."""
    package = debian_package.build(tmp_path)
    with SystemdMachine(*(Path(path) for path in THIRD_PARTY if path.startswith("/tmp/"))) as machine:
        for name in ("munge", "slurmctld", "slurmd"):
            (machine.root / f"etc/systemd/system/{name}.service").unlink()
        for folder in ("opt/dl2d", "etc/dl2d", "var/lib/dl2d"):  # the machine that runs the tests may have them
            shutil.rmtree(machine.root / folder, ignore_errors=True)
        dist = machine.root / "srv" / "dl2d" / "dist"
        dist.mkdir(parents=True)
        shutil.copy(package, dist)
        (machine.root / "etc" / "hosts").write_text("127.0.0.1 localhost\n192.0.2.1 head head.cluster\n")
        machine.boot()
        machine.run("hostname", "head", check=True)
        machine.run("useradd", "--no-log-init", "--create-home", "--shell", "/bin/sh", "alice", check=True)
        yield machine


def why_no_head() -> str:
    """Why the guide to Slurm cannot be followed here, or ""."""
    missing = why_not() or systemd_machine.why_not() or debian_package.why_not()
    if not missing and not Path(f"/usr/bin/python3.{sys.version_info.minor}").exists():
        missing = "the tests run with another version of Python than /usr/bin/python3, which lacks their PyTorch"
    return missing


def as_root(head: SystemdMachine, text: str) -> str:
    path = "PATH=/usr/sbin:/usr/bin:/sbin:/bin"
    return head.run("env", "-i", path, "HOME=/root", "sh", "-ec", text, check=True)


def as_alice(head: SystemdMachine, text: str) -> str:
    return head.run("runuser", "-l", "alice", "-c", f"set -e\n{text}", check=True)


def write(head: SystemdMachine, path: str, text: str) -> None:
    head.run("sh", "-c", 'printf %s "$1" > "$2"', "write", text, path, check=True)


def follow_the_guide_to_slurm(head: SystemdMachine) -> tuple[str, list[str]]:
    """Follow it up to the environment of an ordinary user; the batch script and the commands of its first job."""
    blocks = [text for _, text in section("slurm.md", "Install")]
    packages, slurm_conf, start_slurm, install, settings, certificate, start, probe, own, job, submit, *more = blocks
    after_slurm = re.sub(r"\\\n", "", f"{install}{certificate}{start}{probe}{own}{submit}")
    assert len(after_slurm.splitlines()) == 10

    # Slurm counts more CPUs than this machine has, and cannot use its control groups.
    assert packages.startswith("apt install ")
    local = "TaskPlugin=task/none\nSlurmdParameters=config_overrides\n"
    write(head, "/etc/slurm/slurm.conf", slurm_conf.replace("proctrack/cgroup", "proctrack/linuxproc") + local)
    write(head, "/etc/slurm/cgroup.conf", cgroup_configuration(used=False))
    as_root(head, start_slurm)
    head.wait_until(lambda: as_root(head, "sinfo -h -o %T").split() == ["idle"], "the node is idle")

    *build, package = install.splitlines()
    assert build[-1] == "make deb"
    as_root(head, f"cd /srv/dl2d; {package}")
    write(head, "/etc/dl2d/dl2d.yaml", settings)
    as_root(head, certificate)
    checked = as_root(head, start)
    assert {line.split()[0] for line in checked.splitlines() if not line.startswith("Created symlink")} == {"ok"}
    assert "the daemon writes it when it starts" in checked
    probed = as_root(head, probe)
    assert {line.split()[0] for line in probed.splitlines()} == {"ok"}, probed
    assert "is of user alice" in probed
    assert re.search(r"probe: certificate +verified", probed)

    # PyTorch and what else is required are those of the tests.
    assert own.endswith('[demo]"\n')
    as_alice(head, own.replace('[demo]"', '" --no-deps --no-index --quiet'))
    packages = f"/home/alice/elastic/lib/python3.{sys.version_info.minor}/site-packages/t.pth"
    write(head, packages, "\n".join(THIRD_PARTY) + "\n")
    return job, [submit, *more]


def plain(shown: str) -> str:
    """What a terminal shows without its control sequences."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)


def digits(head: SystemdMachine) -> tuple[str, int]:
    """State and workers of the guide's job as its user sees them."""
    jobs = json.loads(as_alice(head, "dl2d status --all --json"))["jobs"]
    return next(((job["state"], job["allocation"]["workers"]) for job in jobs), ("", 0))


@pytest.mark.slurm
@pytest.mark.skipif(bool(why_no_head()), reason=why_no_head() or "all is there")
def test_the_first_job_on_slurm(head: SystemdMachine) -> None:
    job, (submit, watch, *_) = follow_the_guide_to_slurm(head)
    short = job.replace("epochs=200", "epochs=30").replace("--epochs 200", "--epochs 30")
    assert len(job) - len(short) == 2
    write(head, "/home/alice/digits.sh", short)
    as_alice(head, submit)
    head.wait_until(lambda: digits(head)[0] == "running", "it trains", timeout=120)
    status, why = watch.splitlines()
    told = as_alice(head, f"{status.removesuffix('--watch')}; {why}")
    assert re.search(r"\bdigits\b.*\brunning\b", told), told
    assert re.search(r"allocation +0w\+0ps -> \dw\+\dps", told), told
    most = 0

    def ended() -> bool:
        nonlocal most
        state, workers = digits(head)
        most = max(most, workers)
        return state in ("finished", "failed", "lost", "cancelled")

    head.wait_until(ended, "the job has ended", timeout=400)
    said = as_root(head, "dl2d status --all; dl2d history; cat /home/alice/*.out")
    assert "finished" in said, said
    assert most == 3, said


@pytest.mark.nightly
@pytest.mark.slurm
@pytest.mark.skipif(bool(why_no_head()), reason=why_no_head() or "all is there")
@pytest.mark.timeout(1800)
def test_an_ordinary_job_beside_the_first_one_on_slurm(head: SystemdMachine) -> None:
    job, (submit, watch, rigid, *_) = follow_the_guide_to_slurm(head)
    long = job.replace("epochs=200", "epochs=5000").replace("--epochs 200", "--epochs 5000")  # on any machine
    assert len(long) - len(job) == 2
    write(head, "/home/alice/digits.sh", long)
    as_alice(head, submit)
    head.wait_until(lambda: digits(head) == ("running", 3), "it has grown", timeout=120)
    status, why = watch.splitlines()
    assert status == "dl2d status --watch"
    # In a terminal of its own, to the end of the machine.
    as_alice(head, f"script --quiet --flush --command '{status}' watched > /dev/null 2>&1 < /dev/null &")
    head.wait_until(lambda: re.search(r"\bdigits\b.*\brunning\b", plain(as_alice(head, "cat watched"))), "it is shown")

    def slurm_state(name: str) -> str:
        return as_root(head, f"squeue -h -t all -n {name} -o %T").strip()

    as_alice(head, rigid)
    head.wait_until(lambda: slurm_state("rigid") == "RUNNING", "the ordinary job starts", timeout=120)
    assert slurm_state("digits") == "RUNNING"
    head.wait_until(lambda: digits(head) == ("running", 1), "its user sees that it shrank", timeout=60)
    assert re.search("room (made|is kept) for your job", as_alice(head, why))
    head.wait_until(lambda: slurm_state("rigid") == "COMPLETED", "the ordinary job ends", timeout=120)
    # Whether it grows again depends on the speeds that it has measured meanwhile.
    can_grow = "the next decision can give it room"
    head.wait_until(lambda: "for your job" not in as_alice(head, why), can_grow, timeout=400)
    assert digits(head)[0] == "running"
    (job_id,) = (each["id"] for each in json.loads(as_alice(head, "dl2d status --json"))["jobs"])
    as_alice(head, f"scancel {job_id}")
    head.wait_until(lambda: digits(head)[0] == "cancelled", "it has ended", timeout=120)


@pytest.mark.nightly
@pytest.mark.slurm
@pytest.mark.skipif(bool(why_not()), reason=why_not() or "Slurm is there")
def test_the_job_file_of_the_yarn_guide_runs_on_slurm(cluster: SlurmCluster, tmp_path: Path) -> None:
    alice: User = cluster.add_user("alice")
    cluster.add_python(alice)
    job = JobFile.read(job_of_the_yarn_guide(alice.home), RequestRules(), {"command": ["python", "train_digits.py"]})
    slurm = cluster.resource_manager()
    with DaemonProcess(tmp_path, {"resource_manager": slurm}) as daemon:
        lines = job.as_batch_script(alice.home).splitlines()
        number = cluster.submit_as(alice, "\n".join([lines[0], f"export DL2_DAEMON={daemon.url}", *lines[1:], ""]))
        daemon.wait_until(lambda: daemon.store.find_jobs(number), "the job is registered", timeout=120)
        key = daemon.store.find_jobs(number)[0].key
        daemon.wait_for_end(key, timeout=240)
        assert daemon.job(key).state == "finished", daemon.job(key).end_reason
