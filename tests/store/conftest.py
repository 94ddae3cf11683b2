from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from postgres_server import PostgresMissing, PostgresServer

from dl2d.store import schema
from dl2d.store.sql import SqlStore

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
def kept_url(empty_url: str) -> str:
    """A database that outlives its store."""
    schema.upgrade(empty_url)
    return empty_url


@pytest.fixture(params=["memory", "file", _POSTGRES])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SqlStore]:
    url = {"memory": "sqlite://", "file": f"sqlite:///{tmp_path}/dl2d.sqlite"}.get(request.param)
    if url is None:
        url = request.getfixturevalue("postgres_url")
    schema.upgrade(url)
    with closing(SqlStore(url)) as store:
        yield store
