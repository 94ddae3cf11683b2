"""A private PostgreSQL for tests: own data folder, Unix socket only, gone without a trace when stopped."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psycopg
from psycopg import sql

from dl2d.store import schema_version

_BINARIES = Path("/usr/lib/postgresql")
_SECONDS = 60


class PostgresMissing(Exception):
    """PostgreSQL's server programs are not installed here, or there is no user to run them as."""


class PostgresServer:
    """A running server; ``start`` makes one and ``stop`` ends and removes it.

    It listens on a socket in its own folder only, so no port is taken and nobody else can reach it.
    """

    def __init__(self, *, fsync: bool = False) -> None:
        self._fsync = "on" if fsync else "off"
        self._programs = _programs()
        self._user = _user()
        # Sockets' paths may have 107 bytes, which pytest's folders can exceed.
        self._folder = Path(tempfile.mkdtemp(prefix="dl2d-pg-"))
        self._data = self._folder / "data"
        self._names = itertools.count()
        if self._user is not None:
            os.chown(self._folder, self._user.pw_uid, self._user.pw_gid)

    def start(self) -> None:
        """Initialise and start; does not return before the server answers."""
        try:
            self._run("initdb", "-D", self._data, "-U", "dl2d", "--auth=trust", "--no-sync", "-E", "UTF8", "--locale=C")
            self.resume()
        except BaseException:
            self.stop()
            raise

    def resume(self) -> None:
        """Start the server again after ``pause``."""
        settings = {
            "listen_addresses": "''",
            "unix_socket_directories": f"'{self._folder}'",
            "fsync": self._fsync,
            "max_connections": 60,
        }
        options = " ".join(f"-c {name}={value}" for name, value in settings.items())
        self._run("pg_ctl", "-D", self._data, "-l", self._folder / "log", "-w", "-t", _SECONDS, "-o", options, "start")

    def pause(self) -> None:
        """Stop the server, as in an outage; connections are cut, data is kept."""
        self._run("pg_ctl", "-D", self._data, "-w", "-t", _SECONDS, "-m", "immediate", "stop")

    def stop(self) -> None:
        """End the server and remove all it had."""
        if (self._data / "postmaster.pid").exists():
            self.pause()
        shutil.rmtree(self._folder)

    def url(self, database: str) -> str:
        """URL of a database for SQLAlchemy."""
        return f"postgresql://dl2d@/{database}?host={self._folder}"

    @contextlib.contextmanager
    def database(self) -> Iterator[str]:
        """URL of a new and empty database, which is dropped afterwards."""
        name = f"test_{next(self._names)}"
        self._execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        try:
            yield self.url(name)
        finally:
            self._execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))

    def emptied(self) -> str:
        """URL of a database with the present schema, without rows and connections; each call returns the same one."""
        url = self._kept
        self._execute(sql.SQL("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = 'kept'"))
        with psycopg.connect(url, autocommit=True) as connection:
            tables = connection.execute(
                "SELECT tablename FROM pg_tables WHERE schemaname = 'public' AND tablename <> 'dl2d_schema_version'"
            ).fetchall()
            names = sql.SQL(", ").join(sql.Identifier(name) for (name,) in tables)
            connection.execute(sql.SQL("TRUNCATE {} RESTART IDENTITY CASCADE").format(names))
        return url

    @functools.cached_property
    def _kept(self) -> str:
        self._execute(sql.SQL("CREATE DATABASE kept"))
        schema_version.upgrade(self.url("kept"))
        return self.url("kept")

    def _execute(self, statement: sql.Composable) -> None:
        with psycopg.connect(host=str(self._folder), user="dl2d", dbname="postgres", autocommit=True) as connection:
            connection.execute(statement)

    def _run(self, program: str, *arguments: object) -> None:
        account = (
            {} if self._user is None else {"user": self._user.pw_uid, "group": self._user.pw_gid, "extra_groups": []}
        )
        done = subprocess.run(
            [str(self._programs / program), *map(str, arguments)],
            cwd=self._folder,
            env={"PATH": "/usr/bin:/bin", "LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE if program == "initdb" else subprocess.DEVNULL,
            timeout=2 * _SECONDS,
            check=False,
            **account,
        )
        if done.returncode:
            log = self._folder / "log"
            said = log.read_text(errors="replace")[-2000:] if log.exists() else (done.stderr or b"").decode()
            raise RuntimeError(f"{program} ended with {done.returncode}: {said}")


def _programs() -> Path:
    found = sorted(_BINARIES.glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    if not found or shutil.which("pg_lsclusters") is None:
        raise PostgresMissing("PostgreSQL's server is not installed")
    return found[-1].parent


def _user() -> pwd.struct_passwd | None:
    """The account to run as: PostgreSQL refuses root. None for our own."""
    if os.geteuid() != 0:
        return None
    try:
        return pwd.getpwnam("postgres")
    except KeyError:
        raise PostgresMissing("PostgreSQL does not run as root and there is no user postgres") from None
