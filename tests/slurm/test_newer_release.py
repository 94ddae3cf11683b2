"""The tests with a real Slurm and with options of sbatch, on the releases of Debian 13 and of Debian's testing.

Debian 12 has Slurm 22.05; commands of later releases print other things, and plug-ins are built for one release.
The tests run in a root of their own, with Debian's packages and this interpreter with its packages.
Each test makes its root and removes it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from slurm_cluster import PYSLURM

# Making the root takes minutes, and so do the tests in it.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

run = partial(subprocess.run, check=False, capture_output=True, text=True)

REPOSITORY = Path(__file__).parents[2]
#: Debian's distribution with each of these releases of Slurm.
SUITES = {"24.11": "trixie", "26.05": "forky"}
PACKAGES = (
    "munge,slurmctld,slurmd,slurm-client,slurm-wlm-basic-plugins,slurm-wlm-jwt-plugin,slurmrestd,iproute2,procps,"
    "gcc,libc6-dev,libslurm-dev,liblua5.1-0"
)
ACCOUNTING = ",slurmdbd,mariadb-server"
TESTS = (
    *("tests/slurm/test_real_slurm.py", "tests/slurm/test_spank_plugin.py", "tests/end_to_end/test_slurm_options.py"),
    *("tests/end_to_end/test_slurm_without_root.py", "tests/slurm/jobs/test_job_reason_codes.py"),
    # Of the contract suite the backends that Debian 12's Slurm is too old for; anchors of Slurm are submitted by users.
    *("tests/contract", "-k", "not test_resource_manager or ((slurm-rest or slurm-pyslurm) and not anchor)"),
)
#: Of all tests with a real Slurm: whole clusters, by all backends. The mixed load takes an hour; guides need systemd.
ALL_TESTS = (
    *("tests/slurm", "tests/contract", "tests/end_to_end", "-m", "slurm and not postgres"),
    "--ignore=tests/slurm/test_newer_release.py",
    *(f"--ignore=tests/end_to_end/{name}.py" for name in ("test_slurm_mixed_load", "test_guides")),
    # Anchors of Slurm are submitted by users.
    *("-k", "not (test_resource_manager and anchor)"),
)
LIBRARIES = "usr/lib/x86_64-linux-gnu"
#: The latest release of pyslurm is for Slurm 25.11; it can be built for 26.05 as docs/slurm.md says.
PYSLURM_RELEASE, PYSLURM_NAMED = "25.11.2", "26.5.0"
PYSLURM_FLAGS = (
    "-DSLURM_BACKWARD_COMPAT -Dslurm_free_ctl_conf=slurm_free_conf -DESLURM_ERROR_ON_DESC_TO_RECORD_COPY=SLURM_ERROR"
)
#: Run in mount and process namespaces of their own: all mounts and processes are gone when the command has ended.
ENTER = """
set -e
root=$1 python=$2 repository=$3; shift 3
mkdir -p "$root$repository" "$root/opt/python" "$root$python"
mount --rbind "$repository" "$root$repository"
if [ "$python" != /usr ]; then
    mount --bind "$python" "$root/opt/python"
    mount --bind "$python" "$root$python"
fi
mount -t proc proc "$root/proc"; mount --rbind /sys "$root/sys"; mount --rbind /dev "$root/dev"
exec chroot "$root" env --ignore-environment --chdir="$repository" \
    PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8 "$@"
"""


@contextmanager
def later_root(release: str, packages: str = PACKAGES) -> Iterator[Path]:
    """A Debian with this release of Slurm, in which this interpreter runs."""
    if os.geteuid() != 0 or not shutil.which("debootstrap") or not shutil.which("unshare"):
        pytest.skip("a Debian root with a later Slurm needs root, debootstrap and unshare: make test-deps")
    sites = run(["apt-get", "indextargets", "--format", "$(SITE)", "Created-By: Packages"]).stdout.split()
    folder = Path(tempfile.mkdtemp(prefix="dl2-newer-slurm-"))
    try:
        folder.chmod(0o755)  # ordinary users run tasks in it
        command = ["debootstrap", "--variant=minbase", f"--include={packages}", SUITES[release], str(folder)]
        script = "/usr/share/debootstrap/scripts/sid"  # debootstrap of Debian 12 knows no later release by name
        try:
            made = run([*command, *sites[:1], script], timeout=420)
        except subprocess.TimeoutExpired:
            pytest.skip("debootstrap made no root with a later Slurm within seven minutes")
        if made.returncode != 0:
            pytest.skip(f"debootstrap made no root with a later Slurm: {made.stdout.strip()[-300:]}")
        _add_interpreter(folder)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _add_interpreter(root: Path) -> None:
    """Add what this interpreter needs of the host: names of hosts, its command, libraries that the root lacks."""
    shutil.copy("/etc/hosts", root / "etc")
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for path in (f"bin/{version}", f"lib/{version}"):  # for ordinary users, to whom root's folders are closed
        (root / "usr" / path).symlink_to(f"/opt/python/{path}")
    prefix = Path(sys.base_prefix)
    if prefix == Path("/usr"):  # the root has a /usr of its own, so that this one cannot be mounted there
        copy = root / "opt" / "python"
        (copy / "bin").mkdir(parents=True)
        shutil.copy(prefix / "bin" / version, copy / "bin")
        shutil.copytree(prefix / "lib" / version, copy / "lib" / version, symlinks=True)
        (root / "usr" / "bin" / "python3").symlink_to(version)
    modules = [prefix / "bin" / version, *(prefix / "lib" / version / "lib-dynload").glob("*.so")]
    shown = run(["ldd", *map(str, modules)]).stdout
    libraries = {Path(line.split()[2]) for line in shown.splitlines() if " => /" in line}
    for library in (*libraries, Path("/", LIBRARIES, "libgomp.so.1")):
        wanted = root / LIBRARIES / library.name
        if library.exists() and not wanted.exists():
            shutil.copy(library, wanted)
    # That of MariaDB 11.8.9 refuses slurmdbd's queries ("5027 Number of columns in result set exceeds maximum").
    client = Path("/", LIBRARIES, "libmariadb.so.3")
    if client.exists():
        shutil.copy(client, root / LIBRARIES)


def add_pyslurm(root: Path) -> None:
    """Build pyslurm for this root's Slurm, with this interpreter and the compiler of this machine."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
        download = ["download", "--no-deps", "--no-binary", "pyslurm", "--dest", made, f"pyslurm=={PYSLURM_RELEASE}"]
        subprocess.run([*pip, *download], check=True, timeout=300)
        with tarfile.open(folder / f"pyslurm-{PYSLURM_RELEASE}.tar.gz") as source:
            source.extractall(folder, filter="data")
        source = folder / f"pyslurm-{PYSLURM_RELEASE}"
        version = source / "pyslurm" / "version.py"
        version.write_text(version.read_text().replace(PYSLURM_RELEASE, PYSLURM_NAMED))
        # Headers of the root's C library would be taken before those of the machine.
        shutil.copytree(root / "usr" / "include" / "slurm", folder / "include" / "slurm")
        environment = {
            "SLURM_INCLUDE_DIR": str(folder / "include"),
            "SLURM_LIB_DIR": str(root / LIBRARIES),
            "PYSLURM_BUILD_JOBS": "2",
            "CFLAGS": f"-O0 {PYSLURM_FLAGS}",
            "LDFLAGS": f"-Wl,-rpath,/{LIBRARIES}/slurm-wlm",
        }
        install = ["install", "--no-deps", "--target", f"{root}{PYSLURM}", str(source)]
        subprocess.run([*pip, *install], check=True, timeout=600, env={**os.environ, **environment})


def summary(root: Path, *tests: str, timeout: float) -> str:
    """Run tests in this root, of which some run and none fails; returns pytest's last line."""
    two = ("--numprocesses", "2", "--dist", "worksteal")  # they wait for most of their time
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-rs", *two, *tests]
    inside = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--propagation", "private", "bash", "-c", ENTER]
    done = run([*inside, "enter", str(root), sys.base_prefix, str(REPOSITORY), *command], timeout=timeout)
    print(done.stdout[-20_000:], done.stderr[-5000:])
    assert done.returncode == 0
    last = done.stdout.splitlines()[-1]
    assert " passed" in last
    return last


def test_what_depends_on_the_release_holds_for_a_later_one() -> None:
    with later_root("26.05") as root:
        add_pyslurm(root)
        assert "skipped" not in summary(root, "-m", "", *TESTS, timeout=900)


@pytest.mark.nightly
def test_what_depends_on_the_release_holds_for_the_first_one_with_a_slurmrestd_that_is_used() -> None:
    with later_root("24.11", PACKAGES + ACCOUNTING) as root:
        summary(root, "-m", "", "tests/end_to_end/test_slurm_limits.py", *TESTS, timeout=1500)


@pytest.mark.nightly
@pytest.mark.timeout(5400)
def test_all_that_holds_for_a_real_slurm_holds_for_a_later_release() -> None:
    with later_root("26.05", PACKAGES + ACCOUNTING) as root:
        add_pyslurm(root)
        summary(root, *ALL_TESTS, timeout=4800)
