"""Job files: YAML for ``dl2d submit``, and the same job as a batch script for sites where sbatch takes it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import yaml

from dl2d.core.errors import RequestError
from dl2d.core.job_request_parser import RequestRules, parse_request, read_directives
from dl2d.core.jobs import JobRequest

#: A job file is a page of text; a larger file was named by mistake.
_MAX_BYTES = 1024 * 1024
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OWN_KEYS = ("command", "cwd", "env")
_SBATCH = re.compile(r"#SBATCH\s+(.*)")
#: An option of dl2d at the beginning of sbatch's arguments, with its value.
_OPTION = re.compile(r"--dl2-([a-z-]+)(?:=|\s+)(.+)", re.DOTALL)
#: Options of sbatch whose names are not those of their keys.
_SHORT_OPTIONS = {"sizes": "allowed_workers", "arch": "architecture"}
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class JobFile:
    """Contents of a job file: the request as written, the command, its folder and environment."""

    #: Path of the file, for messages.
    where: str
    request: Mapping[str, object]
    argv: tuple[str, ...]
    #: Working folder as given; None for the one that the command line runs in.
    cwd: str | None
    env: Mapping[str, str]

    #: The request, checked as the daemon checks it.
    checked: JobRequest

    @classmethod
    def read(cls, path: Path, rules: RequestRules, overrides: Mapping[str, object] | None = None) -> JobFile:
        """Read a YAML job file; ``overrides`` replace its values.

        Raises
        ------
        RequestError
            It cannot be read, is not YAML, or its keys or values are bad; names all that are.
        """
        where = str(path)
        content = _load(read_bounded(path), where) | dict(overrides or {})
        request = {key: value for key, value in content.items() if key not in _OWN_KEYS}
        problems: list[tuple[str, str]] = []

        def value_of(read: Callable[[], T]) -> T | None:
            try:
                return read()
            except RequestError as error:
                problems.extend(((error.key, error.problem), *error.others))
                return None

        checked = value_of(lambda: parse_request(request, rules=rules))
        argv = value_of(lambda: _command(content.get("command")))
        cwd = value_of(lambda: _cwd(content.get("cwd")))
        env = value_of(lambda: _environment(content.get("env")))
        if checked is None or argv is None or env is None or problems:
            raise RequestError(*problems[0], where=where, others=problems[1:])
        return cls(where=where, request=request, argv=argv, cwd=cwd, env=env, checked=checked)

    def directives(self) -> dict[str, str]:
        """Keys and values of the request as ``#DL2`` lines have them.

        Raises ``RequestError`` if a value cannot stand in a ``#DL2`` line.
        """
        given = {key: value for key, value in self.request.items() if value is not None}
        return {key: _directive(key, value, self.where) for key, value in given.items()}

    def as_batch_script(self, cwd: Path) -> str:
        """The job as a script for sbatch: ``#DL2`` lines, the environment, and the command run by ``dl2-run``.

        Raises
        ------
        RequestError
            A value cannot stand in a ``#DL2`` line.
        """
        lines = ["#!/bin/bash"]
        name = self.request.get("name") or self.request.get("model")
        if name:
            lines.append(f"#SBATCH --job-name={re.sub(r'[^A-Za-z0-9_.-]', '_', str(name))}")
        for key, text in self.directives().items():
            lines.append(f'#DL2 {key}="{text}"' if re.search(r"\s", text) else f"#DL2 {key}={text}")
        lines += ["", f"cd -- {shlex.quote(str(cwd / self.cwd if self.cwd else cwd))} || exit"]
        lines += [f"export {key}={shlex.quote(value)}" for key, value in self.env.items()]
        runner = () if Path(self.argv[0]).name == "dl2-run" else ("dl2-run",)
        lines.append("exec " + shlex.join((*runner, *self.argv)))
        script = "\n".join(lines) + "\n"
        read_directives(script, where=self.where)
        return script


def read_batch_script(path: Path, rules: RequestRules) -> JobRequest:
    """The request in a batch script's ``#DL2`` lines and options of sbatch, which win over these; checked.

    Raises ``RequestError`` if a line, key or value is bad; names it.
    """
    script = read_bounded(path)
    directives = read_directives(script, where=str(path)) | _submission_options(script, str(path))
    if not directives:
        raise RequestError("#DL2", "the batch script has no #DL2 lines, which say what the job needs",
                           where=str(path))  # fmt: skip
    return parse_request(directives, rules=rules, where=str(path))


def _submission_options(script: str, where: str) -> dict[str, object]:
    """dl2d's options in ``#SBATCH`` lines, which stand before the first command, by keys of ``#DL2`` lines."""
    found: dict[str, object] = {}
    for number, line in enumerate(script.splitlines(), start=1):
        if line.strip() and not line.startswith("#"):
            break
        match = _SBATCH.match(line)
        try:
            words = shlex.split(match[1], comments=True) if match else []
        except ValueError as error:
            raise RequestError("#SBATCH", str(error), where=f"{where}, line {number}") from error
        for at, word in enumerate(words):
            if not word.startswith("--dl2-"):
                continue
            option = _OPTION.fullmatch(word if "=" in word else " ".join(words[at : at + 2]))
            if option is None:
                raise RequestError(word, "has no value", where=f"{where}, line {number}")
            found[_SHORT_OPTIONS.get(option[1], option[1].replace("-", "_"))] = option[2]
    return found


def is_batch_script(path: Path) -> bool:
    """Whether a file is a script and not YAML: it begins with ``#!``."""
    return read_bounded(path).startswith("#!")


def parse_override(text: str) -> tuple[str, object]:
    """``key=value`` of ``--set``; the value is read as YAML, so that ``worker={cpu: 2}`` works.

    Raises ``RequestError`` if the text is not ``key=value``.
    """
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise RequestError("--set", f"{text!r} is not key=value")
    try:
        return key.strip().replace("-", "_"), yaml.safe_load(value)
    except yaml.YAMLError:
        return key.strip().replace("-", "_"), value


def read_bounded(path: Path) -> str:
    """Text of a job file or batch script. Raises ``RequestError`` where it cannot be read, is too large or no text."""
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
        if len(data) > _MAX_BYTES:
            raise RequestError("FILE", f"is larger than {_MAX_BYTES} bytes, so it is not a job file", where=str(path))
        return data.decode()
    except OSError as error:
        raise RequestError("FILE", f"cannot be read: {error.strerror}", where=str(path)) from error
    except UnicodeDecodeError as error:
        raise RequestError("FILE", f"is not text: {error}", where=str(path)) from error


def _load(text: str, where: str) -> dict[str, object]:
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        problem = " ".join(str(error).split())
        raise RequestError("FILE", f"is not YAML: {problem}", where=where) from None
    if not isinstance(content, dict):
        raise RequestError("FILE", f"expected keys and values, got a {type(content).__name__}", where=where)
    return {str(key): value for key, value in content.items()}


def _command(value: object) -> tuple[str, ...]:
    if value is None or value in ("", []):
        raise RequestError("command", "missing; add for example `command: python train.py`")
    if isinstance(value, str):
        try:
            return tuple(shlex.split(value))
        except ValueError as error:
            raise RequestError("command", f"{error}, in {value!r}") from None
    if isinstance(value, list) and all(isinstance(word, str | int | float) for word in value):
        return tuple(str(word) for word in value)
    raise RequestError("command", f"expected text or a list of words, got {value!r}")


def _cwd(value: object) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or not value:
        raise RequestError("cwd", f"expected the path of a folder, got {value!r}")
    return value


def _environment(value: object) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise RequestError("env", f"expected names and values, got {value!r}")
    given = {}
    for name, content in value.items():
        if not isinstance(name, str) or not _VARIABLE.fullmatch(name):
            raise RequestError(f"env.{name}", "is not a valid name of an environment variable")
        if name.startswith("DL2_"):
            raise RequestError(f"env.{name}", "is reserved: variables that begin with DL2_ are set by dl2d")
        if not isinstance(content, str | int | float) or isinstance(content, bool):
            raise RequestError(f"env.{name}", f"expected text (quote it in YAML), got {content!r}")
        given[name] = str(content)
    return given


def _directive(key: str, value: object, where: str) -> str:
    """A value as it stands in a ``#DL2`` line."""
    if isinstance(value, dict):
        text = ",".join(f"{name}:{amount}" for name, amount in value.items())
    elif isinstance(value, list):
        text = ",".join(map(str, value))
    else:
        text = str(value)
    if any(sign in text for sign in "\"'\r\n\0"):
        raise RequestError(
            key, f"{text!r} contains a quote or a line break, which is not allowed in a #DL2 line", where=where
        )
    return text
