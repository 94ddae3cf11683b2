"""What the documents show works: links lead somewhere, commands and options exist, files and queries are accepted."""

from __future__ import annotations

import re
import shlex
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from importlib import import_module
from pathlib import Path

import pytest
import typer
import yaml
from typer.main import get_command

from dl2d.cli.jobs.job_file import JobFile, read_batch_script
from dl2d.cli.main import COMMANDS
from dl2d.config.settings import Settings, load_settings
from dl2d.core.job_request_parser import RequestRules
from dl2d.store import schema_version

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("*/README.md"), *ROOT.glob("docs/**/*.md")])
GENERATED = ("cli-reference.md", "configuration-reference.md")
FENCED = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"^    (?=\S)(.+)$", re.MULTILINE)
RULES = RequestRules()


def blocks(page: Path) -> Iterator[tuple[str, str]]:
    """Language and text of each code block of a page."""
    for match in FENCED.finditer(page.read_text(encoding="utf-8")):
        yield match[2], re.sub(rf"^{match[1]}", "", match[3], flags=re.MULTILINE)


def shown(language: str) -> list[tuple[str, str]]:
    """Page and text of each code block of a language."""
    return [
        (str(page.relative_to(ROOT)), text)
        for page in PAGES
        if page.name not in GENERATED
        for kind, text in blocks(page)
        if kind == language
    ]


def anchors(page: Path) -> set[str]:
    """Names of a page's headings in links, as the usual renderers make them."""
    text = FENCED.sub("", page.read_text(encoding="utf-8"))
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_a_file_and_a_heading(page: Path) -> None:
    text = FENCED.sub("", page.read_text(encoding="utf-8"))
    wrong = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http://", "https://")):
            continue
        file, _, anchor = target.partition("#")
        found = (page.parent / file).resolve() if file else page
        if not found.exists() or (anchor and anchor not in anchors(found)):
            wrong.append(target)
    assert wrong == []


def test_every_page_can_be_reached_from_the_readme() -> None:
    todo, seen = [ROOT / "README.md"], set()
    while todo:
        page = todo.pop()
        if page in seen or page.suffix != ".md":
            continue
        seen.add(page)
        links = re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8"))
        todo += [(page.parent / link).resolve() for link in links if not link.startswith("http")]
    unreached = {page for page in PAGES if page.is_relative_to(ROOT / "docs")} - seen
    assert unreached == set()


def commands() -> list[tuple[str, str]]:
    """Page and text of each call of dl2d in a code block."""
    found = []
    for page in PAGES:
        if page.name in GENERATED:
            continue
        text = page.read_text(encoding="utf-8")
        lines = [line for kind, block in blocks(page) if kind in ("sh", "") for line in _joined(block)]
        outside = FENCED.sub("", text)
        lines += _joined("\n".join(INDENTED.findall(outside)))
        lines += [" ".join(line.split()) for line in re.findall(r"`(dl2d [a-z][^`]*)`", outside)]
        for line in lines:
            match = re.search(r"(?:^|[;&|] *|\b(?:time|sudo|\w+=\S+) )(dl2d [a-z].*)", line.strip())
            if match:
                found.append((str(page.relative_to(ROOT)), match[1]))
    return found


def _joined(block: str) -> list[str]:
    return re.sub(r"\\\n\s*", " ", block).splitlines()


@pytest.mark.parametrize(("page", "line"), commands(), ids=lambda value: value[:60])
def test_commands_and_their_options_exist(page: str, line: str) -> None:
    words = shlex.split(line, comments=True)[1:]
    words = words[: next((at for at, word in enumerate(words) if word in ("|", ">", "&", "&&", ";")), len(words))]
    module, attribute, *_ = COMMANDS[words[0]]
    found = getattr(import_module(f"dl2d.cli.{module}"), attribute)
    if not isinstance(found, typer.Typer):
        app = typer.Typer()
        app.command()(found)
        found = app
    command, rest = get_command(found), words[1:]
    while hasattr(command, "commands") and rest and rest[0] in command.commands:
        command, rest = command.commands[rest[0]], rest[1:]
    context = command.context_class(command)
    command.make_parser(context).parse_args([_plain(word) for word in rest])


def _plain(word: str) -> str:
    """A word of a synopsis as one of a command line: ``[--json]`` is ``--json``."""
    return word.strip("[]")


def test_most_commands_are_shown() -> None:
    used = {shlex.split(line, comments=True)[1] for _, line in commands()}
    assert set(COMMANDS) - used == set()


@pytest.mark.parametrize(("page", "text"), shown("yaml"), ids=lambda value: value[:40])
def test_yaml_files_are_accepted(page: str, text: str, tmp_path: Path) -> None:
    given = yaml.safe_load(text)
    file = tmp_path / "shown.yaml"
    file.write_text(text)
    if set(given) <= set(Settings.model_fields):
        load_settings(file)
    elif "command" in given:
        (tmp_path / str(given.get("cwd", "."))).mkdir(exist_ok=True)
        JobFile.read(file, RULES)
    else:
        assert page == "docs/experiments.md", "what kind of file is it?"


@pytest.mark.parametrize(
    ("page", "text"),
    [(page, text) for kind in ("sh", "bash") for page, text in shown(kind) if "#DL2" in text],
    ids=lambda value: value[:40],
)
def test_batch_scripts_are_accepted(page: str, text: str, tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text(text)
    assert read_batch_script(script, RULES).worker


@pytest.mark.parametrize(("page", "text"), shown("python"), ids=lambda value: value[:40])
def test_python_is_python(page: str, text: str) -> None:
    compile(text, page, "exec")


def test_queries(tmp_path: Path) -> None:
    schema_version.upgrade(f"sqlite:///{tmp_path}/x.sqlite")
    queries = [query for _, text in shown("sql") for query in text.split(";") if query.strip()]
    assert len(queries) >= 5
    with closing(sqlite3.connect(tmp_path / "x.sqlite")) as shell:
        if sqlite3.sqlite_version_info < (3, 38):
            shell.create_function("unixepoch", 0, lambda: 0)
        for query in queries:
            assert shell.execute(query).fetchall() == []
