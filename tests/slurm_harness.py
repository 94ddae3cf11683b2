"""The Slurm manager under the contract suite: a private Slurm of two nodes, without jobs at the start of each test."""

from __future__ import annotations

import os
import sys
import time

from rm_harness import Harness
from slurm_cluster import SlurmCluster, User

from dl2d.core.jobs import Owner
from dl2d_slurm.manager import SlurmManager
from dl2d_slurm.settings import SlurmSettings


class SlurmHarness(Harness):
    """Tasks belong to an ordinary user, or to root where ordinary users may not run the tests' interpreter."""

    unknown_handle = "4000000000"
    #: Slurm kills it outright.
    asks_what_is_left = False
    #: What slurmd and the shell set, on top of the launch's own.
    own_variables = (
        *("DL2_", "SLURM", "CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"),
        *("HYDRA_", "I_MPI_HYDRA_", "OMPI_MCA_plm_slurm", "PRTE_MCA_plm_slurm"),
        *("ENVIRONMENT", "HOSTNAME", "TMPDIR", "PWD", "OLDPWD", "SHLVL"),
    )

    def __init__(self, cluster: SlurmCluster, user: User) -> None:
        super().__init__()
        self.cluster = cluster
        self.nodes = cluster.nodes
        if cluster.run("test", "-x", os.path.realpath(sys.executable), user=user, check=False).status == 0:
            self.owner, self._user = Owner(user.name, user.uid, user.gid), user
        else:
            self.owner, self._user = Owner("root", 0, 0), None
        self.cwd = user.home / self.mark
        self.cwd.mkdir()
        os.chown(self.cwd, self.owner.uid, self.owner.gid)
        self.manager = self.open()

    def open(self) -> SlurmManager:
        environ = {"PATH": self.cluster.manager_path, "SLURM_CONF": str(self.cluster.conf)}
        watch = [{"partition": self.cluster.partition, "name": "bert-*", "model": "bert"}]
        given = {"munge_socket": str(self.cluster.munge_socket), "watch": watch, "rpcs_per_minute": 1_000_000}
        given |= self.cluster.backend
        # Tests list without end until something has happened.
        return SlurmManager(SlurmSettings.parse(given), clock=time.time, environ=environ, uid=self.cluster.manager_uid)

    def foreign(self) -> str:
        options = ("--ntasks=3", "--nodes=2", "--cpus-per-task=2", "--time=60", "--job-name=bert-1", "--parsable")
        script = "#!/bin/sh\nexec sleep 600\n"
        return self.cluster.run("sbatch", *options, user=self._user, stdin=script).stdout.strip()

    def restart(self) -> None:
        self.manager.close()
        self.manager = self.open()

    def end_all(self) -> None:
        try:
            super().end_all()
        finally:
            self.manager.close()
            self.cluster.clear()
