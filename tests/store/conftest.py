from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from migrated import sqlite_store
from postgres_server import PostgresMissing, PostgresServer

from dl2d.core.store import TickStore
from dl2d.store.sql_store import SqlStore
from dl2d.testing import MemoryStore

_POSTGRES = pytest.param("postgresql", marks=pytest.mark.postgres)


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    try:
        server = PostgresServer()
    except PostgresMissing as missing:
        pytest.skip(str(missing))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def postgres_url(postgres: PostgresServer) -> Iterator[str]:
    with postgres.database() as url:
        yield url


@pytest.fixture(params=["file", _POSTGRES])
def empty_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A database that outlives its store and has no schema yet."""
    if request.param == "postgresql":
        return request.getfixturevalue("postgres_url")
    return f"sqlite:///{tmp_path}/dl2d.sqlite"


@pytest.fixture
def kept_postgres_url(postgres: PostgresServer) -> str:
    return postgres.emptied()


@pytest.fixture(params=["file", _POSTGRES])
def kept_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A database that outlives its store."""
    if request.param == "postgresql":
        return request.getfixturevalue("kept_postgres_url")
    return sqlite_store(tmp_path / "dl2d.sqlite")


@pytest.fixture(params=["simulation", "memory", "file", _POSTGRES])
def any_store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TickStore]:
    """Every store that a tick can run on: the simulator's, and the SQL store on each database."""
    if request.param == "simulation":
        yield MemoryStore()
    else:
        yield from _sql_store(request, tmp_path)


@pytest.fixture(params=["memory", "file", _POSTGRES])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SqlStore]:
    yield from _sql_store(request, tmp_path)


def _sql_store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SqlStore]:
    match request.param:
        case "memory":
            url = "sqlite://"
        case "file":
            url = sqlite_store(tmp_path / "dl2d.sqlite")
        case _:
            url = request.getfixturevalue("kept_postgres_url")
    with closing(SqlStore(url)) as store:
        yield store
