"""A private Slurm with accounting for tests: MariaDB and slurmdbd beside what ``SlurmCluster`` starts."""

from __future__ import annotations

import shutil
import subprocess
from typing import Any

from free_ports import free_ports
from slurm_cluster import PATH, SlurmCluster, User
from slurm_cluster import why_not as why_no_slurm

PROGRAMS = ("slurmdbd", "mariadbd", "mariadb-install-db", "mariadb", "sacctmgr")


def why_not() -> str:
    """Reason for which no private Slurm with accounting can run here, or "" if one can."""
    missing = [program for program in PROGRAMS if shutil.which(program, path=PATH) is None]
    return why_no_slurm() or (f"not installed: {', '.join(missing)}" if missing else "")


class AccountingCluster(SlurmCluster):
    """A private Slurm that enforces the limits of associations and qualities of service.

    Everybody's account is ``lab``, and root has an association, too. Options are those of ``SlurmCluster``.
    """

    def __init__(self, *, extra: str = "", **options: Any) -> None:
        self._database_port, self._port = free_ports(2)
        lines = (
            "AccountingStorageType=accounting_storage/slurmdbd",
            "AccountingStorageHost=localhost",
            f"AccountingStoragePort={self._port}",
            "AccountingStorageEnforce=associations,limits,qos",
            "AccountingStorageTRES=gres/gpu",
        )
        super().__init__(extra="\n".join((*lines, extra)), **options)
        self.extra += f"\nAccountingStoragePass={self.munge_socket}"

    def start_controller(self, *, fresh: bool = True) -> None:
        """Start slurmctld; the first time after MariaDB and slurmdbd."""
        if not (self.directory / "slurmdbd.conf").exists():
            self._start_database()
            self._start_slurmdbd()
        super().start_controller(fresh=fresh)

    def add_user(self, name: str) -> User:
        user = super().add_user(name)
        self.sacctmgr("add", "user", user.name, "account=lab")
        return user

    def sacctmgr(self, *argv: str) -> str:
        """What sacctmgr answers, run without questions."""
        return self.run("sacctmgr", "--immediate", *argv).stdout

    def _start_database(self) -> None:
        here = self.directory
        data, socket = here / "database", here / "database.sock"
        make = ("mariadb-install-db", "--no-defaults", f"--datadir={data}", "--skip-test-db", "--user=root")
        subprocess.run(
            (*make, "--auth-root-authentication-method=normal"), check=True, capture_output=True, timeout=120
        )
        self._running.run(
            "mariadbd",
            *("mariadbd", "--no-defaults", f"--datadir={data}", f"--socket={socket}", "--user=root"),
            *("--bind-address=127.0.0.1", f"--port={self._database_port}"),
            # slurmdbd warns of less; nothing here outlives the test
            *("--innodb-buffer-pool-size=64M", "--innodb-flush-log-at-trx-commit=0"),
        )
        grants = "".join(
            f"create user slurm@{host} identified by 'slurm'; grant all on *.* to slurm@{host};"
            for host in ("localhost", "127.0.0.1")
        )
        client = ("mariadb", "--no-defaults", f"--socket={socket}", "--user=root", "--execute", grants)
        self.wait_until(
            lambda: subprocess.run(client, check=False, capture_output=True, timeout=60).returncode == 0,
            "MariaDB has an account for slurmdbd",
        )

    def _start_slurmdbd(self) -> None:
        here = self.directory
        conf = here / "slurmdbd.conf"
        conf.touch(mode=0o600)
        lines = (
            *("AuthType=auth/munge", f"AuthInfo=socket={self.munge_socket}", "SlurmUser=root"),
            *("DbdHost=localhost", f"DbdPort={self._port}", f"LogFile={here}/log/slurmdbd"),
            *(f"PidFile={here}/run/slurmdbd.pid", "StorageType=accounting_storage/mysql", "StorageHost=127.0.0.1"),
            *(f"StoragePort={self._database_port}", "StorageUser=slurm", "StoragePass=slurm"),
        )
        conf.write_text("\n".join(lines) + "\n")
        # it looks for its configuration beside that of Slurm
        self._running.run("slurmdbd", "env", f"SLURM_CONF={self.conf}", "slurmdbd", "-D")
        add = ("sacctmgr", "--immediate", "add", "cluster", self.name)
        self.wait_until(lambda: self.run(*add, check=False).status == 0, "slurmdbd knows the cluster")
        self.sacctmgr("add", "account", "lab")
        self.sacctmgr("add", "user", "root", "account=lab")
