"""Values in the answers of Slurm's commands: numbers, times, generic resources, node lists, a job's owner."""

from __future__ import annotations

import pwd
import re
import sys
from collections.abc import Mapping
from functools import lru_cache
from itertools import product
from math import prod

from dl2d.core.jobs import Owner
from dl2d.core.resources import Resources

_NO_NAME = frozenset({"", "(null)", "N/A", "n/a"})
_ABSENT = _NO_NAME | {"None", "none", "None assigned"}
_COUNT = re.compile(r"(\d+(?:\.\d+)?)([KMGT]?)", re.IGNORECASE)
_FACTORS = {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3, "T": 1024**4}
_RESOURCE = re.compile(r"[a-z][a-z0-9_.:/-]{0,63}")
_PARENTHESES = re.compile(r"\([^()]*\)")
#: A time span as Slurm reads and writes it; its numbers are arguments of ``time_span``.
TIME_SPAN = re.compile(r"(?:([0-9]{1,10})-)?([0-9]{1,10})(?::([0-9]{1,10}))?(?::([0-9]{1,10}))?")
#: Slurm shows a job without a limit, in a partition without one, as one of a year.
_YEAR = 365 * 86_400.0
#: Maximum length of a node list that is read: a user may have Slurm keep one that names the same nodes again and again.
_MAX_LIST = 16_384
#: Maximum length of one that no user can write.
MAX_ADMIN_LIST = 1_000_000
#: Maximum number of names in either.
_MAX_HOSTS = 20_000
#: What stands between the names: users, not Slurm, write blanks and commas without a name.
_SEPARATORS = re.compile(r"[,\s]+")
_RANGE = r"[0-9]{1,9}(?:-[0-9]{1,9})?"
_ENTRY = re.compile(rf"(?:[^,\[\]\s]|\[{_RANGE}(?:,{_RANGE})*\])+")
_HOST_LIST = re.compile(f"{_ENTRY.pattern}(?:,{_ENTRY.pattern})*")

#: Fields of squeue that say with whom a job does not share its nodes. Releases before 26.05 know no
#: ``Exclusive`` and print nothing for it; since then ``OverSubscribe`` is NO for most jobs and says nothing of this.
EXCLUSIVE_FIELDS = ("OverSubscribe", "Exclusive")
#: Partitions whose jobs all get nodes of their own; the second form is that of Slurm 26.05. And the SelectType with
#: which they do in all partitions that do not say otherwise.
EXCLUSIVE_PARTITION = re.compile(
    r"^PartitionName=(\S+) .*\b(?:OverSubscribe=EXCLUSIVE|Exclusive=(?:NODE|TOPO))\b", re.MULTILINE
)
LINEAR = "select/linear"
_NODES = re.compile(r"(?:^|,)node=([0-9]{1,6})(?:,|$)")


def owner_of(record: Mapping[str, str]) -> Owner | None:
    """The owner of a job by a record of squeue; None where it does not say whose the job is."""
    if not record["UserID"].isdecimal() or not record["GroupID"].isdecimal():
        return None
    return Owner(
        user=record["UserName"],
        uid=int(record["UserID"]),
        gid=int(record["GroupID"]),
        account=name_or_empty(record["Account"]),
        partition=name_or_empty(record["Partition"]),
        qos=name_or_empty(record["QOS"]),
    )


def may_be_unknown(user: str) -> bool:
    """Whether a user's name is what squeue writes where the name service does not know a uid: nobody, or the uid."""
    return user == "nobody" or user.isdecimal()


def is_known(owner: Owner) -> bool:
    """Whether the name service knew the owner of a job when squeue was asked."""
    if not may_be_unknown(owner.user):
        return True
    try:
        return pwd.getpwuid(owner.uid).pw_name == owner.user
    except (KeyError, OverflowError):
        return False


def time_span(days: str | None, *parts: str | None) -> int:
    """Seconds of a time span as Slurm reads and writes it, from its numbers; those that it does not have are None.

    ``parts`` are minutes, minutes and seconds, or hours, minutes and seconds; after days hours come first.
    """
    numbers = [int(part) for part in parts if part is not None]
    if days is None and len(numbers) < 3:
        numbers.insert(0, 0)
    hours, minutes, seconds = (*numbers, 0, 0)[:3]
    return int(days or 0) * 86_400 + hours * 3600 + minutes * 60 + seconds


def exclusive_kind(record: Mapping[str, str]) -> str:
    """Who does not share a job's nodes with it, by a record of squeue with ``EXCLUSIVE_FIELDS``; "" for nobody.

    ``NODE`` and ``TOPO``: any other job; ``USER``: other users' jobs; ``MCS``: those with other labels.
    """
    if record["Exclusive"]:
        kind = record["Exclusive"]
    else:
        kind = "NODE" if record["OverSubscribe"] == "NO" else record["OverSubscribe"]
    return kind if kind in ("NODE", "TOPO", "USER", "MCS") else ""


def has_whole_nodes(record: Mapping[str, str]) -> bool:
    """Whether no other job gets anything of a job's nodes, by a record of squeue with ``EXCLUSIVE_FIELDS``."""
    return exclusive_kind(record) in ("NODE", "TOPO")


@lru_cache(4096)
def parse_gres(text: str) -> Mapping[str, int]:
    """Amounts of generic resources: ``gpu:a100:4(S:0-1),nvme:1`` has ``gpu`` 4, ``gpu:a100`` 4 and ``nvme`` 1."""
    amounts: dict[str, int] = {}
    bare = _PARENTHESES.sub("", text.replace(":(null)", "").replace("(null)", ""))
    for entry in bare.split(","):
        parts = [part for part in entry.strip().removeprefix("gres:").removeprefix("gres/").split(":") if part]
        if not parts:
            continue
        number = count(parts[-1]) if len(parts) > 1 else None
        names = parts[:2] if number is None else parts[:-1][:2]
        amount = 1 if number is None else number
        for name in dict.fromkeys((names[0], ":".join(names))):
            amounts[name] = amounts.get(name, 0) + amount
    return amounts


def resources_of(cpus: str, memory: str, gres: Mapping[str, int]) -> Resources:
    """Resources by dl2d's names, from numbers of CPUs and MiB and amounts of generic resources by Slurm's names."""
    amounts: dict[str, float] = {"cpu": count(cpus) or 0, "memory": count(memory.rstrip("+")) or 0}
    for name, amount in gres.items():
        lower = name.lower()
        if _RESOURCE.fullmatch(lower) and lower not in ("cpu", "memory"):
            amounts[lower] = amounts.get(lower, 0) + amount
    return Resources.of({name: min(amount, 1e12) for name, amount in amounts.items()})


def count(text: str) -> int | None:
    """A whole number, perhaps with a K, M, G or T behind it; None where the text is none."""
    match = _COUNT.fullmatch(text.strip()) if text.isascii() else None
    return round(float(match[1]) * _FACTORS[match[2].upper()]) if match and len(text) < 20 else None


def node_count(tres: str) -> int:
    """Number of nodes in a list of resources, ``cpu=2,mem=1G,node=1``; 0 if there is none."""
    found = _NODES.search(tres)
    return int(found[1]) if found else 0


def timestamp(text: str) -> int:
    """A time in seconds since 1970, 0 where there is none."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= 12 else 0


def value_or_empty(text: str) -> str:
    """The text, or "" where Slurm writes a word for nothing."""
    return "" if text in _ABSENT else text


def name_or_empty(text: str) -> str:
    """The name of an account, QOS, partition or wckey, which may be ``none``; "" where a job has none."""
    return "" if text in _NO_NAME else text


def limit_seconds(text: str) -> float | None:
    """A time limit as squeue shows it: ``30:00``, ``2:00:00``, ``1-12:00:00``; None for none."""
    match = TIME_SPAN.fullmatch(text)
    if match is None:
        return None
    total = float(time_span(*match.groups()))
    return total if 0 < total < _YEAR else None


@lru_cache(4096)
def hosts(text: str, max_length: int = _MAX_LIST) -> tuple[str, ...]:
    """Names in a node list: ``n[1-2,07],gpu1`` is n1, n2, n07 and gpu1. What is no such list, or too long, is one name.

    A list is too long with more than ``max_length`` characters or 20,000 names.
    """
    plain = _SEPARATORS.sub(",", text).strip(",") if len(text) <= max_length else ""
    names = _names(plain) if _HOST_LIST.fullmatch(plain) else None
    return names or ((text,) if text else ())


def has_unread_list(text: str) -> bool:
    """Whether a text is a list of nodes that ``hosts`` cannot read, or that is too long: it returns it as one name."""
    return not {",", "["}.isdisjoint(text) and hosts(text) == (text,)


def _names(text: str) -> tuple[str, ...] | None:
    """Names in a node list, each once; None for too many. They are counted before they are made."""
    names: dict[str, None] = {}
    total = 0
    for entry in dict.fromkeys(_ENTRY.findall(text)):
        # Every second part stood in brackets.
        parts = [
            [_numbers(each) for each in part.split(",")] if odd % 2 else part
            for odd, part in enumerate(entry.replace("]", "[").split("["))
        ]
        number = prod(sum(len(numbers) for numbers, _ in part) for part in parts if not isinstance(part, str))
        total += number
        if not number or total > _MAX_HOSTS:
            return None
        choices = (
            [part] if isinstance(part, str) else [f"{each:0{width}}" for numbers, width in part for each in numbers]
            for part in parts
        )
        # Lists that are kept share their names.
        names |= dict.fromkeys(map(sys.intern, map("".join, product(*choices))))
    return tuple(names)


def _numbers(text: str) -> tuple[range, int]:
    """The numbers of ``8`` or ``08-11``, and how many digits each has at least."""
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1), len(first)
