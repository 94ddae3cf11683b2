"""Options of sbatch for anchors, from squeue and ``#SBATCH`` lines, and for all tasks, from the settings."""

from __future__ import annotations

import re
import shlex
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from dl2d.core.errors import Rejected
from dl2d_slurm.commands.values_in_command_output import (
    EXCLUSIVE_FIELDS,
    TIME_SPAN,
    count,
    name_or_empty,
    time_span,
    timestamp,
    value_or_empty,
)

#: Fields of squeue with these options, beside ``EndTime``.
ANCHOR_FIELDS = ("Partition", "Nice", "Reservation", "Account", "QOS", "Feature", "WCKey")
#: Fields of squeue with refused options, which are asked for when a job registers.
REFUSED_FIELDS = ("Container", "MCSLabel", *EXCLUSIVE_FIELDS)
#: Options with which a job cannot register, since its tasks would run without them, and why.
_REFUSED = {
    "exclusive": "tasks of elastic jobs share their nodes",
    "container": "tasks would run outside of it; start the container in the command of dl2-run",
    "mcs-label": "it is not passed on to tasks",
    "clusters": "tasks run in the cluster of the daemon",
    "hetjob": "its coordinator runs in a single batch job",
}
#: Field of squeue in which ``job_submit.lua`` keeps dl2d's own options; users cannot change it.
OWN_OPTIONS_FIELD = "admin_comment"
#: Maximum length of the lines with these options.
_MAX_OWN_OPTIONS = 4096
#: Maximum length of a script's ``#SBATCH`` lines together. The time to split one grows with the square of its length.
_MAX_DIRECTIVES = 32_768
#: Maximum number of lines of a script before its first command: each takes a microsecond or two.
_MAX_LINES = 4096
_NO_TIME_LIMIT = frozenset({"UNLIMITED", "INFINITE", "-1"})
_DIRECTIVE = re.compile(r"#SBATCH\s*(.*)")
_SHORT = {
    "-A": "--account", "-a": "--array", "-B": "--extra-node-info", "-b": "--begin", "-C": "--constraint",
    "-c": "--cpus-per-task", "-D": "--chdir", "-d": "--dependency", "-e": "--error", "-F": "--nodefile", "-G": "--gpus",
    "-H": "--hold", "-i": "--input", "-J": "--job-name", "-k": "--no-kill", "-L": "--licenses", "-M": "--clusters",
    "-m": "--distribution", "-N": "--nodes", "-n": "--ntasks", "-O": "--overcommit", "-o": "--output",
    "-p": "--partition", "-q": "--qos", "-S": "--core-spec", "-s": "--oversubscribe", "-t": "--time",
    "-w": "--nodelist", "-x": "--exclude",
}  # fmt: skip
#: Options without a value among these.
_FLAGS = frozenset({"--hold", "--no-kill", "--overcommit", "--oversubscribe"})
#: Options whose value may be the next word, even if that begins with ``-``. Of others, such a word is an option.
_WITH_VALUE = (frozenset(_SHORT.values()) - _FLAGS) | {
    *("--bb", "--bbf", "--cluster-constraint", "--comment", "--container", "--cores-per-socket", "--cpu-freq"),
    *("--cpus-per-gpu", "--deadline", "--delay-boot", "--export", "--export-file", "--gid", "--gpu-bind", "--gpu-freq"),
    *("--gpus-per-node", "--gpus-per-socket", "--gpus-per-task", "--gres", "--gres-flags", "--mail-type"),
    *("--mail-user", "--mcs-label", "--mem", "--mem-per-cpu", "--mem-per-gpu", "--mincpus", "--ntasks-per-core"),
    *("--ntasks-per-gpu", "--ntasks-per-node", "--ntasks-per-socket", "--prefer", "--priority", "--profile"),
    *("--reservation", "--signal", "--sockets-per-node", "--switches", "--thread-spec", "--threads-per-core"),
    *("--time-min", "--tmp", "--uid", "--wckey", "--wrap"),
}
#: Options of which a user is not told that they do not hold for tasks. All but ``--array``, by which each task of the
#: array is an elastic job, hold for them; ``--chdir`` and ``--export`` through the anchor's folder and environment.
_NOT_REMARKED = frozenset(
    {
        *("account", "array", "chdir", "constraint", "exclude", "export", "nice", "partition", "qos", "reservation"),
        *("time", "wckey"),
    }
)


class AnchorOptions(msgspec.Struct, frozen=True, gc=False):
    """Options of a batch job that are its task jobs' too."""

    #: When it reaches its time limit, seconds since 1970; 0 where squeue does not say, or it has none.
    ends: int = 0
    #: Partition, or a list with commas.
    partition: str = ""
    reservation: str = ""
    #: Expression over features of nodes (``--constraint``).
    features: str = ""
    nice: int = 0
    wckey: str = ""
    #: Nodes on which it must not run, as a node list.
    exclude: str = ""
    account: str = ""
    qos: str = ""
    #: Whether squeue says that it has no time limit.
    unlimited: bool = False

    @classmethod
    def of(cls, record: Mapping[str, str]) -> AnchorOptions:
        """The options in a record of squeue."""
        nice, ends = record["Nice"], timestamp(record["EndTime"])
        return cls(
            ends,
            name_or_empty(record["Partition"]),
            value_or_empty(record["Reservation"]),
            value_or_empty(record["Feature"]),
            int(nice) if nice.isascii() and nice.isdecimal() and len(nice) <= 10 else 0,
            name_or_empty(record["WCKey"]).removeprefix("*"),
            account=name_or_empty(record["Account"]),
            qos=name_or_empty(record["QOS"]),
            unlimited=not ends and record["TimeLimit"] == "UNLIMITED",
        )

    @property
    def reservations(self) -> tuple[str, ...]:
        """Names of its reservations, in any of which it may run."""
        return tuple(self.reservation.split(",")) if self.reservation else ()

    def for_tasks(self) -> Iterator[str]:
        """The options of sbatch with which a task job is submitted, without partition and time."""
        if self.reservation:
            yield f"--reservation={self.reservation}"
        if self.features:
            yield f"--constraint={self.features}"
        if self.exclude:
            yield f"--exclude={self.exclude}"
        # A negative value needs an administrator's rights, and is not passed on.
        if self.nice > 0:
            yield f"--nice={self.nice}"
        if self.wckey:
            yield f"--wckey={self.wckey}"


#: Field of ``AnchorOptions``, by option of sbatch.
_SITE_OPTIONS = {"--reservation": "reservation", "--constraint": "features", "--exclude": "exclude"}


def site_options(given: Iterable[str]) -> dict[str, str]:
    """Fields of ``AnchorOptions`` that options for all task jobs (``sbatch_options``) set."""
    pairs = (option.partition("=") for option in given)
    return {_SITE_OPTIONS[name]: value for name, _, value in pairs if name in _SITE_OPTIONS}


def threads_of_core(given: Iterable[str]) -> int:
    """How many threads of each core tasks use at most by options for all task jobs; 0 where they do not say."""
    found = 0
    for name, _, value in (option.partition("=") for option in given):
        if name == "--hint":
            found = 0 if value == "multithread" else 1
        elif name == "--threads-per-core":
            found = count(value) or 0
    return found


#: Options of an anchor that is not listed.
NO_OPTIONS = AnchorOptions()


def time_limit_minutes(text: str) -> int | None:
    """Minutes of a ``--time`` of sbatch, rounded up as sbatch does; None for no limit. Raises ``ValueError``."""
    if text.upper() in _NO_TIME_LIMIT:
        return None
    match = TIME_SPAN.fullmatch(text)
    if match is None:
        raise ValueError(f"expected a time such as 90, 1:30:00 or 2-12:00:00, got {text!r}")
    return -(-time_span(*match.groups()) // 60) or None


def shown_options(record: Mapping[str, str], *, exclusive: bool) -> list[str]:
    """Names of the options that squeue shows of an anchor and that its tasks cannot have.

    ``exclusive``: whether its user asked for nodes of its own.
    """
    shown = {"container": record["Container"], "mcs-label": record["MCSLabel"]}
    shown |= {"exclusive": "yes"} if exclusive else {}
    return [name for name, value in shown.items() if value_or_empty(value)]


def refuse_options(names: Iterable[str]) -> None:
    """Raise ``Rejected`` for an option of an anchor that its tasks cannot have."""
    for name in names:
        refused = "container" if name.startswith("container-") else name
        if refused in _REFUSED:
            option = name if name == "hetjob" else f"--{name}"
            raise Rejected(f"{option} of sbatch cannot be used with an elastic job: {_REFUSED[refused]}")


def remarks(names: Iterable[str]) -> tuple[str, ...]:
    """What the user of a job should know of these options, which were given to sbatch; dl2d's own are left out."""
    own = dict.fromkeys(names)
    alone = [f"--{name}" for name in own if name not in _NOT_REMARKED and not name.startswith("dl2-")]
    return (f"of the options of sbatch, these do not hold for tasks: {', '.join(alone)}",) if alone else ()


def own_options(record: Mapping[str, str]) -> str:
    """The ``#DL2`` lines of an anchor's AdminComment; other lines of it are the site's. Raises ``Rejected``."""
    lines = [line for line in record[OWN_OPTIONS_FIELD].splitlines() if line.startswith("#DL2")]
    if sum(map(len, lines)) > _MAX_OWN_OPTIONS:
        raise Rejected(f"the #DL2 lines of the job's AdminComment are longer than {_MAX_OWN_OPTIONS} characters")
    return "\n".join(lines)


def options_of_script(script: str) -> list[str]:
    """Names of the options in a script's ``#SBATCH`` lines, which stand before its first command.

    Raises ``Rejected`` where they are too long to be read, or the lines before that command too many.
    """
    names: list[str] = []
    length = 0
    for number, line in enumerate(script.split("\n", _MAX_LINES)):
        if line.strip() and not line.lstrip().startswith("#"):
            break
        if number == _MAX_LINES:
            raise Rejected(f"the batch script has more than {_MAX_LINES} lines before its first command")
        match = _DIRECTIVE.match(line)
        if match is None:
            continue
        length += len(line)
        if length > _MAX_DIRECTIVES:
            raise Rejected(f"the #SBATCH lines of the batch script are longer than {_MAX_DIRECTIVES} characters")
        try:
            words = shlex.split(match[1], comments=True)
        except ValueError:  # sbatch has refused it, or takes it otherwise
            continue
        if words[:1] == ["hetjob"]:
            names.append("hetjob")
        names += (name.removeprefix("--") for name in _option_names(words))
    return names


def _option_names(words: Sequence[str]) -> Iterator[str]:
    """Long names of the options among the words of a ``#SBATCH`` line; values of options are passed over."""
    left = deque(words)
    while left:
        word = left.popleft()
        if word.startswith("--"):
            name, equals, _ = word.partition("=")
            has_value = bool(equals)
        else:
            name, has_value = _SHORT.get(word[:2], ""), len(word) > 2
        if name in _FLAGS and not word.startswith("--") and has_value:
            left.appendleft(f"-{word[2:]}")
        elif name in _WITH_VALUE and not has_value and left:
            left.popleft()
        if name:
            yield name
