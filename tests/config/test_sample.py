"""etc/dl2d.yaml documents every key of the schema, with its default."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel

from dl2d.config.settings import Settings, load_settings, shipped
from dl2d.local.settings import LocalSettings
from dl2d_slurm.settings import SlurmSettings
from dl2d_yarn.settings import YarnSettings

SAMPLE = shipped("etc/dl2d.yaml")


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DL2D_CONFIG", "DL2D_POLICY__NAME"):
        monkeypatch.delenv(name, raising=False)


def keys_of(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from keys_of(field.annotation, f"{prefix}{name}.")
        elif prefix + name not in ("resource_manager.local", "resource_manager.slurm", "resource_manager.yarn"):
            yield prefix + name


def plugin_keys() -> Iterator[str]:
    for section, record in (("local", LocalSettings), ("slurm", SlurmSettings), ("yarn", YarnSettings)):
        for field in dataclasses.fields(record):
            yield f"resource_manager.{section}.{record.file_keys.get(field.name, field.name)}"


def written_keys() -> dict[str, str]:
    """Dotted keys of the sample, also those that are commented out, with the comment above each."""
    found: dict[str, str] = {}
    path: list[tuple[int, str]] = []
    comment: list[str] = []
    for line in SAMPLE.read_text().splitlines():
        match = re.fullmatch(r"( *)(?:# )?([a-z_]+):(?: .*)?", line)
        if match is None:
            comment = [*comment, line.strip(" #")] if line.strip().startswith("#") else []
            continue
        indent = len(match[1])
        path = [(depth, key) for depth, key in path if depth < indent] + [(indent, match[2])]
        found[".".join(key for _, key in path)] = " ".join(comment)
        # One comment may stand above several keys.
    return found


def test_every_key_of_the_schema_stands_in_the_sample_and_no_other():
    sections = {name.rpartition(".")[0] for name in written_keys()}
    keys = {key for key in written_keys() if key not in sections}
    assert keys == {*keys_of(Settings), *plugin_keys()}


def test_every_key_has_a_comment():
    sections = {name.rpartition(".")[0] for name in written_keys()}
    bare = [key for key, comment in written_keys().items() if key not in sections and len(comment) < 12]
    assert bare == []


def test_the_sample_changes_nothing():
    """It holds the defaults."""
    sample = load_settings(SAMPLE)
    defaults = Settings()
    assert sample.model_dump(exclude={"resource_manager"}) == defaults.model_dump(exclude={"resource_manager"})
    assert sample.resource_manager.name == defaults.resource_manager.name
    assert SlurmSettings.parse(sample.resource_manager.slurm) == SlurmSettings.parse({})
    addresses = {"addresses": ["http://rm1:8088"]}
    assert YarnSettings.parse({**sample.resource_manager.yarn, **addresses}) == YarnSettings.parse(addresses)
    folder = {"state_dir": "/var/lib/dl2d/local"}
    assert LocalSettings.parse({**sample.resource_manager.local, **folder}) == LocalSettings.parse(folder)


def test_what_is_commented_out_is_good(tmp_path: Path):
    text = re.sub(
        r"^(\s*)# ((?:state_dir|nodes|addresses): ?.*|  - \{name.*)$", r"\1\2", SAMPLE.read_text(), flags=re.MULTILINE
    )
    file = tmp_path / "dl2d.yaml"
    file.write_text(text)
    settings = load_settings(file)
    parsed = LocalSettings.parse(settings.resource_manager.local)
    assert [node.name for node in parsed.nodes] == ["node-1", "node-2", "node-3", "node-4"]
    assert YarnSettings.parse(settings.resource_manager.yarn).addresses == ("http://rm1:8088",)
    assert set(yaml.safe_load(text)) == set(Settings.model_fields)
