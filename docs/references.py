"""Writes the references of the configuration, the command line and the database, from the code.

    python docs/references.py           # writes docs/{configuration,cli,sql}-reference.md
    python docs/references.py --check   # exit status 1 if one of them is not current

Types, defaults and ranges of configuration keys are those of the schema (``dl2d.config.settings``); what a key means
is the comment above it in ``etc/dl2d.yaml``. What the command line says of itself is the help of each command; what
the database says of itself are the comments on its tables and views.
"""

from __future__ import annotations

import argparse
import enum
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import annotated_types
import typer
import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from typer.models import ArgumentInfo, OptionInfo

from dl2d.cli.main import COMMANDS
from dl2d.config.settings import Settings, shipped
from dl2d.store.sql_views import views
from dl2d.store.tables.row_mapping import Base

_FOLDER = Path(__file__).parent
_NOTE = "<!-- Written by docs/references.py; change the code or etc/dl2d.yaml, then run `make references`. -->\n\n"


def configuration() -> str:
    """Reference of the configuration file."""
    text = shipped("etc/dl2d.yaml").read_text(encoding="utf-8")
    defaults, described = yaml.safe_load(text), comments(text)
    fields = dict(_fields(Settings))
    out = [_NOTE, "# Configuration reference\n\nHow the file is read: [configuration](configuration.md).\n"]
    section = None
    for key, comment in described.items():
        value = _at(defaults, key)
        if isinstance(value, dict) and value:
            continue
        where = key.rpartition(".")[0]
        if where != section:
            section = where
            about = " ".join(described[part] for part in _parents(where)).strip()
            out.append(f"\n## {where or 'Top level'}\n\n{about}\n\n".replace("\n\n\n", "\n"))
            out.append("| key | default | values | meaning |\n|---|---|---|---|\n")
        values = _values(fields[key]) if key in fields else ""
        out.append(f"| `{key}` | {_shown(value)} | {values} | {_cell(comment)} |\n")
    return "".join(out)


def comments(text: str) -> dict[str, str]:
    """By dotted key of a documented YAML file: the comment above it, or above the keys before it without a blank line.

    Keys that are commented out count, too.
    """
    found: dict[str, str] = {}
    path: list[tuple[int, str]] = []
    comment: list[str] = []
    last = ""
    for line in text.splitlines():
        match = re.fullmatch(r"( *)(?:# )?([a-z_]+):(?: .*)?", line)
        if match is None:
            comment = [*comment, line.strip(" #")] if line.strip().startswith("#") else []
            last = last if line.strip() else ""
            continue
        indent = len(match[1])
        path = [(depth, key) for depth, key in path if depth < indent] + [(indent, match[2])]
        last = " ".join(comment) or last
        comment = []
        found[".".join(key for _, key in path)] = last
    return found


def _fields(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _fields(field.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name, field


def _values(field: FieldInfo) -> str:
    """Which values a key takes: choices, or the bounds of a number."""
    kind = field.annotation
    if get_origin(kind) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(kind))
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return ", ".join(f"`{member.value}`" for member in kind)
    if kind is bool:
        return "`true`, `false`"
    limits = []
    for rule in field.metadata:
        for name, sign in (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<")):
            if isinstance(rule, getattr(annotated_types, name.capitalize())):
                limits.append(f"{sign} {getattr(rule, name):,}")
    return ", ".join(limits)


def _at(tree: Any, key: str) -> Any:
    for part in key.split("."):
        tree = tree.get(part) if isinstance(tree, dict) else None
    return tree


def _parents(key: str) -> list[str]:
    parts = key.split(".")
    return [".".join(parts[: count + 1]) for count in range(len(parts))] if key else []


def _shown(value: object) -> str:
    if value is None:
        return "see meaning"
    return "empty" if value == "" else f"`{yaml.safe_dump(value, default_flow_style=True, width=1000).splitlines()[0]}`"


def _cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", "\\|").replace("<", "&lt;").strip()


def commands() -> str:
    """Reference of the command line."""
    out = [
        _NOTE,
        "# Command reference\n\nWhat all commands have in common, and examples: [users' guide](users-guide.md).\n",
    ]
    for name, (module, attribute, *_) in COMMANDS.items():
        found = getattr(import_module(f"dl2d.cli.{module}"), attribute)
        out += _group(found, f"dl2d {name}") if isinstance(found, typer.Typer) else _command(found, f"dl2d {name}")
    return "".join(out)


def database() -> str:
    """Reference of the database: every table and view with its columns."""
    about = (
        "Queries: [SQL cookbook](sql-cookbook.md). Times in tables are seconds since 1970 (UTC); views have timestamps."
    )
    out = [_NOTE, f"# Database reference\n\n{about}\n\n## Views\n"]
    for view in views():
        out += _columns(view.name, view.comment, view.columns.items())
    out.append("\n## Tables\n")
    for table in sorted(Base.metadata.sorted_tables, key=lambda table: table.name):
        keys = ((column, next(iter(column.foreign_keys)).target_fullname) for column in table.c if column.foreign_keys)
        refers = {column.name: f" (refers to `{target}`)" for column, target in keys}
        columns = ((column.name, (column.comment or "") + refers.get(column.name, "")) for column in table.c)
        out += _columns(table.name, table.comment or "", columns)
    return "".join(out)


def _columns(name: str, about: str, columns: Iterable[tuple[str, str]]) -> list[str]:
    rows = [f"| `{column}` | {_cell(said)} |\n" for column, said in columns]
    return [f"\n### {name}\n\n{about}\n\n| column | meaning |\n|---|---|\n", *rows]


def _group(app: typer.Typer, name: str) -> list[str]:
    callback = app.registered_callback
    about = _about(callback.callback) if callback is not None and callback.callback is not None else app.info.help
    if callback is not None and callback.callback is not None and app.info.invoke_without_command is True:
        out = _command(callback.callback, name)
    else:
        out = [f"\n## {name}\n\n{_prose(about)}\n"] if isinstance(about, str) else []
    for command in app.registered_commands:
        assert command.callback is not None
        out += _command(command.callback, f"{name} {command.name or command.callback.__name__.replace('_', '-')}")
    for group in app.registered_groups:
        assert group.typer_instance is not None
        out += _group(group.typer_instance, f"{name} {group.name}")
    return out


def _command(function: Callable[..., object], name: str) -> list[str]:
    hints = get_type_hints(function, include_extras=True)
    usage, rows = [name], []
    for parameter in inspect.signature(function).parameters.values():
        if hints[parameter.name] is typer.Context:
            continue
        kind, *said = get_args(hints[parameter.name])
        info = next((each for each in said if isinstance(each, OptionInfo | ArgumentInfo)), None)
        if info is None or info.hidden:
            continue
        if isinstance(info, ArgumentInfo):
            title = (info.metavar or parameter.name.upper()).strip("[]")
            usage.append(title if parameter.default is inspect.Parameter.empty else f"[{title}]")
        else:
            title = ", ".join(_option_names(parameter.name, kind, info))
        rows.append(
            f"| `{title.replace('|', chr(92) + '|')}` | {_default(parameter, info)} | {_meaning(kind, info)} |\n"
        )
    usage.insert(1, "[OPTIONS]")
    table = ["\n| argument or option | default | meaning |\n|---|---|---|\n", *rows] if rows else []
    return [f"\n## {name}\n\n{_prose(_about(function))}\n\n```\n{' '.join(usage)}\n```\n", *table]


def _option_names(name: str, kind: object, info: OptionInfo) -> list[str]:
    # Inside Annotated, typer takes the first name for a default until it builds the command.
    first = [info.default] if isinstance(info.default, str) else []
    names = [*first, *(info.param_decls or ())] or [f"--{name.replace('_', '-')}"]
    return names if kind is bool else [f"{each} {info.metavar or name.upper().replace('_', '-')}" for each in names]


def _default(parameter: inspect.Parameter, info: OptionInfo | ArgumentInfo) -> str:
    default = info.show_default if isinstance(info.show_default, str) else parameter.default
    if default in (None, "", (), False, inspect.Parameter.empty):
        return ""
    return f"`{default.value if isinstance(default, enum.Enum) else default}`"


def _meaning(kind: Any, info: OptionInfo | ArgumentInfo) -> str:
    enums = [part for part in (kind, *get_args(kind)) if isinstance(part, type) and issubclass(part, enum.Enum)]
    notes = [f"one of {', '.join(f'`{member.value}`' for member in part)}" for part in enums]
    limits = [("at least", info.min), ("at most", info.max)]
    notes += [f"{word} {limit:,}" for word, limit in limits if limit is not None]
    if info.envvar:
        notes.append(f"environment: `{info.envvar}`")
    return _cell(info.help or "") + (f" ({'; '.join(notes)})" if notes else "")


def _about(function: Callable[..., object]) -> str:
    return (inspect.getdoc(function) or "").split("\f")[0]


def _prose(text: str) -> str:
    return "\n\n".join(re.sub(r"\s+", " ", part).strip() for part in text.replace("\b", "").split("\n\n"))


REFERENCES = {"configuration-reference.md": configuration, "cli-reference.md": commands, "sql-reference.md": database}


def main() -> None:
    """Write the references, or check them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    for name, make in REFERENCES.items():
        file, text = _FOLDER / name, make()
        if check and (not file.exists() or file.read_text(encoding="utf-8") != text):
            sys.exit(f"{file} is not current: run `make references`")
        if not check:
            file.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
