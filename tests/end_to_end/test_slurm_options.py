"""Options of dl2d in sbatch on a real Slurm: SPANK plug-in, job_submit.lua, daemon and dl2-run together."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from daemon_process import DaemonProcess
from slurm_cluster import SlurmCluster, User
from slurm_cluster import why_not as why_no_slurm
from spank_plugin import SOURCE, build, why_no_lua, why_not

from dl2d.core.jobs import JobState

#: A plug-in of a user's own that passes on what it likes.
FORGED = """
#include <slurm/spank.h>
#include <stdlib.h>
SPANK_PLUGIN(forged, 1)
int slurm_spank_init_post_opt(spank_t spank, int count, char **arguments)
{
    (void)count, (void)arguments;
    return spank_job_control_setenv(spank, "DL2_MODEL", getenv("FORGED"), 1);
}
"""
GUIDE = Path(__file__).parents[2] / "docs" / "slurm.md"
WORKER = Path(__file__).parent.parent / "pslite" / "numpy_worker.py"
REASON = why_no_slurm() or why_not() or why_no_lua()

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.slow,
    pytest.mark.skipif(bool(REASON), reason=REASON or "all of it is there"),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    cluster = SlurmCluster(nodes=2, extra="JobSubmitPlugins=lua")
    build(cluster.directory / "dl2d_spank.so")
    (cluster.directory / "plugstack.conf").write_text(f"optional {cluster.directory}/dl2d_spank.so\n")
    shutil.copy(SOURCE / "job_submit.lua", cluster.directory)
    with cluster:
        yield cluster


@pytest.fixture(scope="module")
def alice(cluster: SlurmCluster) -> User:
    user = cluster.add_user("alice")
    cluster.add_python(user)
    for file in (WORKER, WORKER.with_name("regression.py")):
        shutil.copy(file, user.home)
    return user


@pytest.fixture
def daemon(cluster: SlurmCluster, tmp_path: Path) -> Iterator[DaemonProcess]:
    with DaemonProcess(tmp_path, {"resource_manager": cluster.resource_manager()}) as daemon:
        yield daemon
    cluster.clear()


@pytest.fixture
def sites_own_script(cluster: SlurmCluster) -> Iterator[None]:
    """The guide's example of a site's own job_submit.lua, in place of ours."""
    script, kept = cluster.directory / "job_submit.lua", cluster.directory / "dl2d.lua"
    example = re.search(r"```lua\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    assert example is not None
    text = example[1].replace("/etc/slurm/dl2d.lua", str(kept))
    script.rename(kept)
    script.write_text(text.replace("-- the site's own rules", 'job_desc.wckey = "site" --'))
    yield
    kept.replace(script)
    script.touch()


def admin_comment(cluster: SlurmCluster, job: str) -> str:
    said = cluster.run("squeue", "-h", "-t", "all", "-j", job, "-O", "admin_comment:300").stdout.strip()
    return "" if said == "(null)" else said


def test_a_job_has_the_size_of_its_options_which_nobody_changes_later(
    cluster: SlurmCluster, alice: User, daemon: DaemonProcess
) -> None:
    gate = alice.home / "hold-job"
    gate.touch()
    text = f"""#!/bin/sh
#SBATCH -J elastic -c 1 --mem=50
#SBATCH --dl2-model=other --dl2-worker=cpu:2,memory:200 --dl2-ps=cpu:1,memory:100 --dl2-max-workers=1
#DL2 samples_per_epoch=203 batch=20 epochs=3 max_ps=1
sbatch --wrap true
export DL2_DAEMON={daemon.url} PSLITE_PACE_FILE={gate}
exec dl2-run python "$HOME/numpy_worker.py" --epochs 60 --step-seconds 0.01
"""
    # The environment of the submission is not that of the job: what the plug-in sets is there all the same.
    options = ("--dl2-epochs=60", "--dl2-max-workers=3", "--export=PATH,HOME,MUNGE_SOCKET,SLURM_CONF")
    job_id = cluster.submit_as(alice, text, *options)
    kept = "model=other epochs=60 worker=cpu:2,memory:200 ps=cpu:1,memory:100 max_workers=3"
    assert admin_comment(cluster, job_id) == f"#DL2 {kept}"

    daemon.wait_until(lambda: daemon.store.find_jobs(job_id), "the job is registered", timeout=90)
    job = daemon.store.find_jobs(job_id)[0]
    assert (job.request.epochs, job.request.max_workers, job.request.samples_per_epoch) == (60, 3, 203)
    daemon.wait_until(lambda: daemon.confirmed(job.key) == (3, 1), "it has what its options say", timeout=90)

    task = daemon.tasks(job.key, live=True)[0].handle
    for changed in ((job_id, "AdminComment=#DL2 max_workers=9"), (task, "AdminComment=x"), (task, "Comment=x")):
        assert cluster.run("scontrol", "update", f"JobId={changed[0]}", changed[1], user=alice, check=False).status != 0
    assert admin_comment(cluster, job_id) == f"#DL2 {kept}"
    inner = cluster.run("squeue", "-h", "-t", "all", "-n", "wrap", "-o", "%i").stdout.split()
    assert [admin_comment(cluster, each) for each in inner] == [""]  # of the job that the script submits itself

    gate.unlink()
    daemon.wait_for_end(job.key, timeout=240)
    assert daemon.job(job.key).state is JobState.FINISHED


def test_a_wrong_value_is_refused_at_submission(cluster: SlurmCluster, alice: User) -> None:
    before = cluster.running()
    said = cluster.run("sbatch", "--dl2-epochs=abc", "--wrap=true", user=alice, check=False)
    assert said.status != 0
    assert "--dl2-epochs: expected a number, more than 0 and at most 1e+06, got 'abc'" in said.stderr
    said = cluster.run("sbatch", user=alice, check=False, stdin="#!/bin/sh\n#SBATCH --dl2-worker=cpu\ntrue\n")
    assert "--dl2-worker: expected amounts of resources such as" in said.stderr
    assert cluster.running() == before
    assert "--dl2-max-workers=N" in cluster.run("sbatch", "--help", user=alice).stdout


@pytest.mark.parametrize("value", ['a"b', "a b", "a\n#DL2 epochs=9", "x" * 257])
def test_values_that_the_plugin_would_not_pass_are_refused_by_slurmctld(
    cluster: SlurmCluster, alice: User, tmp_path: Path, value: str
) -> None:
    (tmp_path / "forged.c").write_text(FORGED)
    folder = alice.home / "forged"
    folder.mkdir(exist_ok=True)
    shutil.copy(cluster.conf, folder)
    compiled = ("gcc", "-shared", "-fPIC", "-o", str(folder / "forged.so"), str(tmp_path / "forged.c"))
    cluster.run(*compiled)
    (folder / "plugstack.conf").write_text(f"required {folder}/forged.so\n")
    environ = {"SLURM_CONF": str(folder / "slurm.conf"), "FORGED": value}
    said = cluster.run("sbatch", "--wrap=true", user=alice, env=environ, check=False)
    assert (said.status, "the value of an option of dl2d is too long, or has " in said.stderr) == (1, True), said
    job = cluster.run("sbatch", "--parsable", "--wrap=true", user=alice, env=environ | {"FORGED": "a"}).stdout.strip()
    assert admin_comment(cluster, job) == "#DL2 model=a"


@pytest.mark.usefixtures("sites_own_script")
def test_a_job_submit_script_of_the_sites_own_can_keep_the_options(cluster: SlurmCluster, alice: User) -> None:
    job = cluster.submit_as(alice, "#!/bin/sh\n", "--dl2-epochs=3", "--dl2-sizes=1,2")
    assert admin_comment(cluster, job) == "#DL2 epochs=3 allowed_workers=1,2"
    assert cluster.run("squeue", "-h", "-t", "all", "-j", job, "-O", "WCKey").stdout.strip() == "site"
    task = cluster.submit_as(alice, "#!/bin/sh\n", "--hold", "--comment=dl2:lab.1.2:worker-0")
    assert cluster.run("scontrol", "update", f"jobid={task}", "comment=x", user=alice, check=False).status != 0
    cluster.run("scancel", task)
