"""What the tables of the store share: base class, column types, and the conversion of records to rows and back.

A column has the name of the record's field that it holds, so only what differs is written down, beside the table.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import zlib
from collections.abc import Callable, Iterable
from typing import Annotated, Any, Generic, TypeVar, cast

import msgspec
from sqlalchemy import BigInteger, Column, Double, ForeignKey, Integer, LargeBinary, MetaData, Row, Table, Text, text
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import Connection, Dialect
from sqlalchemy.orm import DeclarativeBase, mapped_column
from sqlalchemy.types import TypeDecorator, TypeEngine

from dl2d.core.errors import StoreError
from dl2d.core.json_codec import decode, encode
from dl2d.core.resources import Resources

T = TypeVar("T")
E = TypeVar("E", bound=enum.StrEnum)
Values = dict[str, Any]

#: Values that one statement may take; SQLite's default limit is 32,766.
MAX_VALUES = 10_000
# A snapshot of 1,000 jobs (3.9 MB) takes 5 ms and shrinks to 70 kB; level 6 takes 12 ms to come to 56 kB.
_ZLIB_LEVEL = 3
_MAX_RECORD_BYTES = 1 << 30
#: Type of the numbers that a database assigns: SQLite does so only where the type is exactly INTEGER (64 bits there).
NUMBER = BigInteger().with_variant(Integer(), "sqlite")

#: Defaults of columns that rows of an earlier version lack.
EMPTY, ZERO = text("''"), text("0")


class FreeText(TypeDecorator[str]):
    """Text from users; what a database cannot store (NUL, unpaired surrogates) becomes a replacement character."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:  # noqa: ARG002 (SQLAlchemy's signature)
        """Make the text storable."""
        return None if value is None else value.replace("\0", "\ufffd").encode("utf-8", "replace").decode("utf-8")


class Finite(TypeDecorator[float]):
    """A number; NULL for what is not finite, which SQLite could not store."""

    impl = Double
    cache_ok = True

    def process_bind_param(self, value: float | None, dialect: Dialect) -> float | None:  # noqa: ARG002 (SQLAlchemy's signature)
        """Replace NaN and infinity by NULL."""
        return value if value is not None and math.isfinite(value) else None


class Choice(TypeDecorator[E]):
    """A member of an enumeration, stored as its text."""

    impl = Text
    cache_ok = True

    def __init__(self, kind: type[E]) -> None:
        super().__init__()
        self.kind = kind

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:  # noqa: ARG002 (SQLAlchemy's signature)
        """Text of a member."""
        return None if value is None else str(value)

    def process_result_value(self, value: str | None, dialect: Dialect) -> E | None:  # noqa: ARG002 (SQLAlchemy's signature)
        """Member of a text."""
        return None if value is None else self.kind(value)


class Json(TypeDecorator[T]):
    """A record as JSON. Rows hold the text; ``Mapping.record`` decodes it, since it can say whose row is damaged."""

    impl: type[TypeEngine[Any]] = Text
    cache_ok = True

    def __init__(self, kind: type[T]) -> None:
        super().__init__()
        self.kind = kind

    def process_bind_param(self, value: T | None, dialect: Dialect) -> str | bytes | None:  # noqa: ARG002 (SQLAlchemy's signature)
        """Encode a record."""
        return None if value is None else encode(value).decode()

    def decode(self, stored: str | bytes) -> T:
        """Decode a record.

        Raises
        ------
        msgspec.MsgspecError, zlib.error, ValueError
            It is damaged, or another version wrote it.
        """
        return decode(stored, self.kind)


class CompressedJson(Json[T]):
    """A large record as JSON, compressed by zlib where that is shorter."""

    impl = LargeBinary
    cache_ok = True

    def process_bind_param(self, value: T | None, dialect: Dialect) -> bytes | None:  # noqa: ARG002 (SQLAlchemy's signature)
        """Encode and compress a record."""
        if value is None:
            return None
        plain = encode(value)
        packed = zlib.compress(plain, _ZLIB_LEVEL)
        return packed if len(packed) < len(plain) else plain

    def decode(self, stored: str | bytes) -> T:
        """Decompress and decode a record."""
        plain = cast("bytes", stored)
        if plain[:1] not in {b"{", b"["}:
            stream = zlib.decompressobj()
            plain = stream.decompress(plain, _MAX_RECORD_BYTES)
            if not stream.eof:
                raise ValueError(f"it is cut short or larger than {_MAX_RECORD_BYTES} bytes")
        return decode(plain, self.kind)


class Demand(Json[Resources]):
    """Resources by name, JSON."""

    cache_ok = True

    def __init__(self) -> None:
        super().__init__(Resources)

    def process_bind_param(self, value: Resources | None, dialect: Dialect) -> str | None:  # noqa: ARG002 (SQLAlchemy's signature)
        """Encode amounts by name."""
        return None if value is None else encode(value.as_dict()).decode()

    def decode(self, stored: str | bytes) -> Resources:
        """Decode amounts by name."""
        return _demand(stored)


@functools.lru_cache(maxsize=1024)
def _demand(stored: str | bytes) -> Resources:
    """Decoded demand; most tasks ask for the same few."""
    return Resources.of(decode(stored, dict[str, float]))


def column(comment: str, *type_and_key: Any, **options: Any) -> Any:
    """A column with its comment, which says what it holds and in which unit; see ``mapped_column``."""
    return mapped_column(*type_and_key, comment=comment, **options)


#: Columns that several tables have, as types: what ``column`` says of one is added.
UserText = Annotated[str, mapped_column(FreeText())]
Moment = Annotated[float, column("seconds since 1970")]
JobNumber = Annotated[int, column("jobs.number", ForeignKey("jobs.number"), primary_key=True, autoincrement=False)]
SlotNumber = Annotated[int, column("slots.number", ForeignKey("slots.number"), primary_key=True, autoincrement=False)]
VersionNumber = Annotated[int, mapped_column(ForeignKey("policy_versions.number"))]
WorkersKey = Annotated[int, column("number of workers", primary_key=True, autoincrement=False)]
PsKey = Annotated[int, column("number of parameter servers", primary_key=True, autoincrement=False)]


class Base(DeclarativeBase):
    """All tables of dl2d.

    Times are seconds since 1970 (UTC) as floating-point numbers unless a name says otherwise. Jobs have a number of
    dl2d's, which the other tables refer to; below a job, names are as people know them (``worker-3``). Rows are
    deleted by age alone (``retention``). What a person asks for in SQL is a plain column; the rest of a record is JSON.
    """

    def __init_subclass__(cls) -> None:
        """A table's comment is the first line of its class's documentation."""
        super().__init_subclass__()
        cls.metadata.tables[cls.__tablename__].comment = (cls.__doc__ or "").partition("\n")[0]

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map: Any = {int: BigInteger(), float: Double(), str: Text(), bytes: LargeBinary()}  # noqa: RUF012


def table_of(model: type[Base]) -> Table:
    """The table behind a model, for statements on many rows that need no objects; ``select`` takes all its columns."""
    return cast("Table", model.__table__)


def upsert(connection: Connection, model: type[Base], *, replace: bool) -> Any:
    """A statement that adds rows; where one has a row's key already, it is replaced or (``replace=False``) kept."""
    return _upsert(connection.dialect.name, model, replace=replace)


@functools.cache
def _upsert(dialect: str, model: type[Base], *, replace: bool) -> Any:
    table = table_of(model)
    statement = (postgresql.insert if dialect == "postgresql" else sqlite.insert)(table)
    if not replace:
        return statement.on_conflict_do_nothing()
    key = [column.name for column in table.primary_key]
    values = {column.name: statement.excluded[column.name] for column in table.c if column.name not in key}
    return statement.on_conflict_do_update(index_elements=key, set_=values)


def batches(values: Iterable[Any], size: int = MAX_VALUES) -> Iterable[list[Any]]:
    """Values sorted (so that two writers lock rows in the same order) and cut to what one statement can take."""
    ordered = sorted(values)
    return (ordered[start : start + size] for start in range(0, len(ordered), size))


class Mapping(Generic[T]):
    """Conversion between records of one type and rows of one table, by the names that both have.

    Parameters
    ----------
    record
        A dataclass or msgspec struct.
    model
        The table.
    """

    def __init__(self, record: type[T], model: type[Base]) -> None:
        table = table_of(model)
        self._make: Callable[..., T] = record
        self._names = [name for name in _fields(record) if name in table.c]
        self._plain = [name for name in self._names if not isinstance(table.c[name].type, Json)]
        self._json = [table.c[name] for name in self._names if name not in self._plain]
        #: Columns that ``record`` reads.
        self.columns = [table.c[name] for name in self._names]

    def values(self, record: T, **more: object) -> Values:
        """Column values of a record; ``more`` are those of columns that are no fields, or differ from them."""
        return {**{name: getattr(record, name) for name in self._names}, **more}

    def record(self, row: Row[*tuple[Any, ...]], what: str, **more: object) -> T:
        """The record of a row; ``more`` are fields that are no columns, or differ from them.

        Raises ``StoreError`` if the row is damaged, or another version wrote it; the message begins with ``what``.
        """
        plain = {name: getattr(row, name) for name in self._plain if name not in more}
        decoded = {column.name: decoded_json(row, column, what) for column in self._json if column.name not in more}
        return self._make(**{**plain, **decoded, **more})


def decoded_json(row: Row[Any], column: Column[Any], what: str) -> Any:
    """The record in a JSON column of a row, None for NULL; raises ``StoreError`` as ``Mapping.record`` does."""
    stored = getattr(row, column.name)
    try:
        return None if stored is None else cast("Json[Any]", column.type).decode(stored)
    except (zlib.error, msgspec.MsgspecError, ValueError) as error:
        raise StoreError(
            f"{what} cannot be read: column {column.name}: {error}; it is damaged or from another version of dl2d"
        ) from error


def _fields(record: type[Any]) -> Iterable[str]:
    found = dataclasses.fields(record) if dataclasses.is_dataclass(record) else msgspec.structs.fields(record)
    return [field.name for field in found]
