"""A private Kerberos realm for tests: a key distribution centre on loopback, all in one folder."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest
from free_ports import free_port

REALM = "DL2D.TEST"
_PATH = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
_KRB5_CONF = """[libdefaults]
 default_realm = {realm}
 dns_lookup_kdc = false
 dns_lookup_realm = false
 dns_canonicalize_hostname = false
 rdns = false
 udp_preference_limit = 1
[realms]
 {realm} = {{
  kdc = 127.0.0.1:{port}
 }}
"""
_KDC_CONF = """[kdcdefaults]
 kdc_listen = 127.0.0.1:{port}
 kdc_tcp_listen = 127.0.0.1:{port}
[realms]
 {realm} = {{
  database_name = {folder}/principal
  key_stash_file = {folder}/stash
  acl_file = {folder}/kadm5.acl
  max_life = 10h
 }}
"""


def why_not() -> str:
    """Why no realm can be started here; "" where one can."""
    missing = [name for name in ("krb5kdc", "kadmin.local", "kdb5_util") if shutil.which(name, path=_PATH) is None]
    return f"{', '.join(missing)} not installed: run make test-deps" if missing else ""


class KerberosRealm:
    """A running realm; a context manager that stops it and removes its files."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="dl2d-krb5-"))
        self.conf = self.folder / "krb5.conf"
        self._port = free_port()
        self._kdc: subprocess.Popen[bytes] | None = None
        self._env = {
            "PATH": _PATH, "KRB5_CONFIG": str(self.conf), "KRB5_KDC_PROFILE": str(self.folder / "kdc.conf"),
        }  # fmt: skip

    def __enter__(self) -> Self:
        values = {"realm": REALM, "port": self._port, "folder": self.folder}
        self.conf.write_text(_KRB5_CONF.format(**values))
        (self.folder / "kdc.conf").write_text(_KDC_CONF.format(**values))
        try:
            self._run("kdb5_util", "create", "-s", "-r", REALM, "-P", "of the tests")
            self._kdc = subprocess.Popen(["krb5kdc", "-n"], env=self._env, stdin=subprocess.DEVNULL)
            deadline = time.monotonic() + 20
            while True:
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._port), 1):
                    return self
                assert self._kdc.poll() is None, "krb5kdc has ended"
                assert time.monotonic() < deadline
                time.sleep(0.1)
        except BaseException:
            self.close()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        if self._kdc is not None:
            self._kdc.terminate()
            self._kdc.wait(20)
        shutil.rmtree(self.folder, ignore_errors=True)

    def keytab(self, principal: str, *options: str) -> str:
        """Add a principal; returns the path of a keytab with its keys."""
        path = self.folder / f"{principal.replace('/', '-')}.keytab"
        self._run("kadmin.local", "-r", REALM, "addprinc", *options, "-randkey", principal)
        self._run("kadmin.local", "-r", REALM, "ktadd", "-k", str(path), principal)
        return str(path)

    def _run(self, *command: str) -> None:
        done = subprocess.run(command, env=self._env, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"


@contextlib.contextmanager
def realm_for_this_process() -> Iterator[KerberosRealm]:
    """A realm that the Kerberos library of this process uses."""
    with KerberosRealm() as realm, pytest.MonkeyPatch.context() as patch:
        patch.setenv("KRB5_CONFIG", str(realm.conf))
        yield realm
