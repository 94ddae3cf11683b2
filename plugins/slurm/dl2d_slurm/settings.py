"""Settings of the Slurm resource manager: ``resource_manager.slurm`` in the config file."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields

from dl2d.core.errors import ConfigError
from dl2d_slurm.watching import WatchRule, parse_rules

_PREFIX = "resource_manager.slurm"
_CLUSTER = re.compile(r"[A-Za-z0-9_-]{1,64}")
_PARTITION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(,[A-Za-z0-9_][A-Za-z0-9_.-]*)*")
_TIME = re.compile(r"UNLIMITED|\d+(?::\d+){0,2}|\d+-\d+(?::\d+){0,2}", re.IGNORECASE)
_OPTION = re.compile(r"--[a-z][a-z-]*(=.*)?")
#: Options of sbatch that are dl2d's own business.
_RESERVED = frozenset(
    {
        *("account", "array", "chdir", "comment", "cpus-per-task", "export", "gid", "gres", "job-name", "mem"),
        *("no-requeue", "nodelist", "nodes", "ntasks", "output", "parsable", "partition", "propagate", "qos"),
        *("requeue", "test-only", "uid", "wait", "wrap"),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmSettings:
    """Checked settings of the Slurm resource manager."""

    #: Name of the cluster, the first part of its jobs' keys; "" asks Slurm for its ClusterName.
    cluster: str = ""
    #: Partition whose nodes dl2d sees and in which tasks run (a comma list is allowed); "" for all nodes, and for each
    #: task the partition of its anchor.
    partition: str = ""
    #: Path of slurm.conf; "" leaves it to $SLURM_CONF and Slurm's own default.
    slurm_conf: str = ""
    #: Socket of the munged that proofs are checked with; "" for munge's own default.
    munge_socket: str = ""
    #: After this many seconds a command of Slurm counts as unanswered.
    command_timeout_seconds: float = 30.0
    #: A snapshot younger than this is given out again, unless a task was started or stopped since; 0 never.
    poll_floor_seconds: float = 0.0
    #: Most tasks that are submitted in a second, on average; a burst of one second's worth is allowed.
    submit_rate_per_second: float = 20.0
    #: Time limit of task jobs in sbatch's form (``2-00:00:00``); "" for the partition's default.
    time_limit: str = ""
    #: Memory in MiB of a task that demands none; 0 leaves it to the partition's default, which may be a whole node.
    default_memory_mib: int = 0
    #: More options for sbatch, such as ``--reservation=ml``.
    sbatch_options: tuple[str, ...] = ()
    #: Which jobs of users who know nothing of dl2d train, and what: the first rule that takes a job counts.
    watch: tuple[WatchRule, ...] = ()

    @classmethod
    def parse(cls, given: Mapping[str, object]) -> SlurmSettings:
        """Check settings as they come from the config file; the keys are this record's fields.

        Raises
        ------
        ConfigError
            A key is unknown or has a bad value; names the key in full.
        """
        known = [field.name for field in fields(cls)]
        for key in given:
            if key not in known:
                raise ConfigError(f"{_PREFIX}.{key}: unknown key (known: {', '.join(known)})")
        defaults = cls()
        return cls(
            cluster=_text(given, "cluster", _CLUSTER, "up to 64 letters, digits, _ or -"),
            partition=_text(given, "partition", _PARTITION, "a partition's name or a comma list of them"),
            slurm_conf=_path(given, "slurm_conf"),
            munge_socket=_path(given, "munge_socket"),
            command_timeout_seconds=_number(given, "command_timeout_seconds", defaults.command_timeout_seconds, 1, 600),
            poll_floor_seconds=_number(given, "poll_floor_seconds", defaults.poll_floor_seconds, 0, 3600),
            submit_rate_per_second=_number(given, "submit_rate_per_second", defaults.submit_rate_per_second, 0.1, 1000),
            time_limit=_text(given, "time_limit", _TIME, "a time as sbatch knows it, e.g. 2-00:00:00 or UNLIMITED"),
            default_memory_mib=int(_number(given, "default_memory_mib", defaults.default_memory_mib, 0, 2**40)),
            sbatch_options=_options(given, "sbatch_options"),
            watch=parse_rules(given.get("watch"), f"{_PREFIX}.watch"),
        )


def _text(given: Mapping[str, object], key: str, form: re.Pattern[str], expected: str) -> str:
    value = given.get(key)
    if value is None or value == "":
        return ""
    # YAML reads 60 and 12:30:00 as numbers; the latter is lost, the former is meant.
    text = str(value) if isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool)) else ""
    if not form.fullmatch(text):
        raise ConfigError(f"{_PREFIX}.{key}: expected {expected} (quote it in YAML), got {value!r}")
    return text


def _path(given: Mapping[str, object], key: str) -> str:
    value = given.get(key)
    if value is None or value == "":
        return ""
    if not isinstance(value, str) or not value.startswith("/") or "\0" in value:
        raise ConfigError(f"{_PREFIX}.{key}: expected an absolute path, got {value!r}")
    return value


def _number(given: Mapping[str, object], key: str, default: float, least: float, most: float) -> float:
    value = given.get(key)
    if value is None:
        return default
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not good or not least <= value <= most:  # type: ignore[operator]
        raise ConfigError(f"{_PREFIX}.{key}: expected a number from {least:g} to {most:g}, got {value!r}")
    return float(value)  # type: ignore[arg-type]


def _options(given: Mapping[str, object], key: str) -> tuple[str, ...]:
    value = given.get(key)
    if value is None:
        return ()
    if not isinstance(value, list | tuple):
        raise ConfigError(f"{_PREFIX}.{key}: expected a list of options, got {value!r}")
    for option in value:
        if not isinstance(option, str) or not _OPTION.fullmatch(option):
            raise ConfigError(f"{_PREFIX}.{key}: expected options such as --reservation=ml, got {option!r}")
        if option[2:].partition("=")[0] in _RESERVED:
            raise ConfigError(f"{_PREFIX}.{key}: {option!r} is set by dl2d itself")
    return tuple(value)
