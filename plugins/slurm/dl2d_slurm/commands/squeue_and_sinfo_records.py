"""Records in the answers of squeue and sinfo: how they are asked for, and how answers are cut into them.

Fields that people write themselves may hold any character, line breaks and the separator included: comments, job
names and an admin's reason, but also types of generic resources (``--gres=gpu:a|b:1``), accounts and container names.
So each field ends with a terminator that is drawn at random for each query: nobody can write text that looks like
another field or a record of its own.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence

from dl2d_slurm.commands.commands import Answer, Commands

#: Makes both commands print times as seconds since 1970.
TIMES_AS_SECONDS: Mapping[str, str] = {"SLURM_TIME_FORMAT": "%s", "TZ": "UTC"}
#: With these squeue and sinfo show all of the cluster, and nothing of the others of a federation.
ALL_LOCAL = ("--noheader", "--all", "--local")
#: Show slurm.conf as slurmctld has it, and the configuration of all partitions and of all nodes, each on a line.
SHOW_CONFIG = ("scontrol", "show", "config")
SHOW_PARTITIONS = ("scontrol", "--all", "--local", "--oneliner", "show", "partition")
SHOW_NODES = ("scontrol", "--all", "--local", "--oneliner", "show", "node")
#: Starts each terminator: squeue reads leading digits as the field's width.
SEPARATOR = "|"
#: A field of a record of ``scontrol show``.
_SHOWN = re.compile(r"(?:^|\s)(\w+)=(\S+)")


def new_terminator() -> str:
    """A terminator for one query, which nobody can guess; short, since an answer has it once for each field."""
    return secrets.token_hex(6)


def format_option(fields: Sequence[str], terminator: str) -> str:
    """The ``--Format`` option for some fields; ``terminator-`` ends each field but the last of a record."""
    return "--Format=" + "-,".join(f"{name}:{SEPARATOR}{terminator}" for name in fields)


def records(text: str, fields: Sequence[str], terminator: str) -> Iterator[dict[str, str] | str]:
    """Cut an answer into records; text that is none comes as it is, and so does a record without its end."""
    *pieces, remainder = re.split(f"{re.escape(SEPARATOR + terminator)}(?!-)", text)
    for record in pieces:
        values = record.split(f"{SEPARATOR}{terminator}-")
        if len(values) == len(fields):
            yield {name: value.strip() for name, value in zip(fields, values, strict=True)}
        elif record.strip():
            yield record.strip()
    if remainder.strip():
        yield remainder.strip()


def shown_fields(line: str, field: re.Pattern[str] = _SHOWN) -> dict[str, str]:
    """Fields of a record of ``scontrol show``, by name: of several of one name the first, since what follows may be a
    text that somebody has written. ``field`` matches the name and the value of one.
    """
    return dict(reversed(field.findall(line)))


def query_jobs(commands: Commands, fields: Sequence[str], ids: Iterable[str]) -> tuple[Answer, list[dict[str, str]]]:
    """Ask squeue for fields of some jobs; returns its answer, and the records in it that can be read."""
    terminator = new_terminator()
    answer = commands.run(
        *("squeue", *ALL_LOCAL, "--states=all", f"--jobs={','.join(ids)}"),
        format_option(fields, terminator),
        more=TIMES_AS_SECONDS,
    )
    found = records(answer.stdout, fields, terminator)
    return answer, [record for record in found if not isinstance(record, str)]
