"""The systemd unit, checked by systemd's own tool."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

DL2D = Path(sys.executable).parent / "dl2d"

pytestmark = pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is not installed")


@pytest.fixture
def unit(tmp_path: Path) -> Path:
    text = subprocess.run([DL2D, "unit"], capture_output=True, text=True, check=True, timeout=60).stdout
    path = tmp_path / "dl2d.service"
    path.write_text(text)
    return path


def test_systemd_accepts_the_unit_without_a_remark(unit: Path) -> None:
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_systemd_accepts_the_drop_in_for_local_jobs(unit: Path) -> None:
    command = [DL2D, "unit", "--local-jobs"]
    text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    folder = unit.with_name("dl2d.service.d")
    folder.mkdir()
    (folder / "local-jobs.conf").write_text(text)
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_the_drop_in_for_local_jobs_takes_back_all_that_implies_rules_for_devices(unit: Path) -> None:
    """ProtectClock=yes implies DeviceAllow=, and before systemd 252 that alone forbids all other devices."""
    command = [DL2D, "unit", "--local-jobs"]
    drop_in = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    implying = {"PrivateDevices=yes", "ProtectClock=yes"}
    settings = [line for line in unit.read_text().splitlines() if line in implying or line.startswith("Device")]
    assert set(settings) == implying
    assert {setting.replace("yes", "no") for setting in settings} <= set(drop_in.splitlines())


def test_the_unit_names_this_installation(unit: Path) -> None:
    assert f"ExecStart={DL2D} run --config /etc/dl2d/dl2d.yaml\n" in unit.read_text()


def test_the_unit_lets_the_daemon_write_the_file_by_which_jobs_find_it(unit: Path, tmp_path: Path) -> None:
    default = f"{sys.prefix}/etc/dl2d" if Path(sys.prefix) not in (Path("/usr"), Path("/usr/local")) else "/etc/dl2d"
    config = tmp_path / "dl2d.yaml"
    config.write_text("api: {address_file: /shared/dl2d/job-api.json}\n")
    command = [DL2D, "unit", "--config", config]
    other = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    for text, folder in ((unit.read_text(), default), (other, "/shared/dl2d")):
        assert f'\nExecStartPre=-+/bin/sh -c "umask 022; mkdir -p {folder}"\n' in text
        assert f"\nReadWritePaths=-{folder}\n" in text


def test_the_unit_is_hardened(unit: Path) -> None:
    """Exposure by systemd's own measure, 0 (best) to 10: 2.0 at most although it runs as root, which Slurm demands."""
    command = ["systemd-analyze", "security", "--offline=true", "--threshold=20", "--no-pager", unit]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout[-400:]
