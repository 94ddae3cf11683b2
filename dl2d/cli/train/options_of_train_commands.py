"""What the ways of ``dl2d train`` share: their options, and the workloads that are named."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import typer

from dl2d.cli.shared_options import options_given
from dl2d.config.settings import DEFAULT_PATH, Settings, load_settings
from dl2d.core.input_validation import not_one_of
from dl2d.policies.common.checkpoint import FORMER_DESIGNS
from dl2d.simulation.workload.workload_file import Workload
from dl2d.simulation.workload.workload_source_by_name import is_drawn, load_source, matching_files

#: Seeds of what is drawn for validation begin here.
_VALIDATION_SEEDS = 1_000_000


class Design(enum.StrEnum):
    """The policy that is trained."""

    DL2 = "dl2"
    #: The DL2 paper's own (docs/internals/dl2-paper.md).
    DL2_PAPER = "dl2-original"


def read_design(name: str) -> Design:
    """The design of this name, which may be that of an earlier version."""
    try:
        return Design(FORMER_DESIGNS.get(name, name))
    except ValueError:
        raise typer.BadParameter(not_one_of(name, [*Design])) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """Options of ``dl2d train``; which of them apply depends on what is trained (``dl2d.cli.train.train``)."""

    workload: tuple[str, ...]
    validate: tuple[str, ...]
    out: Path
    iterations: int
    seed: int
    hidden: int
    draws: int
    teacher: str | None
    start: Path | None
    offline: bool
    minutes: float | None
    compare: bool
    resume: bool
    days: int | None
    gate: bool
    as_json: bool

    @property
    def checkpoint(self) -> Path:
        """Folder of the checkpoint that is written."""
        return self.out / "checkpoint"


def training_workloads(
    given: Sequence[str], validate: Sequence[str], seed: int, draws: int
) -> tuple[list[Workload], list[Workload]]:
    """Workloads to train on and those to choose the best weights by, from what the user named."""
    held_out = max(draws // 4, 1)
    train_on: list[Workload] = []
    from_files: list[Workload] = []
    validation = [one for source in validate for one in _load(source, seed + _VALIDATION_SEEDS, held_out)]
    for source in given:
        generated = is_drawn(source)
        (train_on if generated else from_files).extend(_load(source, seed * 10_000, draws))
        if generated and not validate:
            validation += _load(source, seed + _VALIDATION_SEEDS, held_out)
    if validate:
        return train_on + from_files, validation
    if len(from_files) == 1 and not train_on:
        return from_files, from_files
    kept = len(from_files) - len(from_files) // 5
    return train_on + from_files[:kept], validation + from_files[kept:]


def _load(source: str, seed: int, draws: int) -> list[Workload]:
    if is_drawn(source):
        return [load_source(source, seed=seed + number).workload for number in range(draws)]
    return [load_source(file, seed=seed).workload for file in matching_files(source)]


def refuse_inapplicable(context: typer.Context, names: Iterable[str], way: str) -> None:
    """Exit status 2 where one of these options was given, which would be ignored."""
    given = options_given(context)
    if options := ", ".join(given[name] for name in names if name in given):
        raise typer.BadParameter(f"{options} cannot be used with {way}")


def site_settings(config: Path | None, store: str | None) -> Settings:
    """The settings of a site, with ``store`` as the URL of its store; without a configuration, the defaults.

    Without both, the configuration is the one at its usual place. Raises ``ConfigError``.
    """
    if config is None and store:
        return Settings.model_validate({"policy": {"name": "dl2"}, "store": {"url": store}})
    settings = load_settings(config or DEFAULT_PATH)
    if not store:
        return settings
    return settings.model_copy(update={"store": settings.store.model_copy(update={"url": store})})
