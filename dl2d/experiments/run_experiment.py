"""Runs of experiments: a folder per run and a file per finished cell, so that an interrupted run can be resumed.

==================  ====================================================================================
definition.yaml     what was run, exactly; with ``inputs/`` it is all that is needed to run it again
inputs/             the files that the definition names
cells/, series/     a file per finished cell, and its series over time
prepared/           what was trained or tuned first, each in a folder called after the digest of what it is made of
results.json        results of all cells: the same bytes whenever and wherever it is run
timings.json        how long it took
environment.json    versions and machine
==================  ====================================================================================
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from dl2d.atomic_file import write_atomically
from dl2d.core.errors import Dl2dError, PluginError
from dl2d.core.json_codec import as_plain, decode_file, encode
from dl2d.experiments.definition import (
    Experiment,
    digest,
    file_digest,
    files_of,
    read_experiment,
    with_sources,
    write_experiment,
)
from dl2d.experiments.local_and_ray_executors import Executor
from dl2d.experiments.participant_training import Preparation, Prepared
from dl2d.experiments.provenance import code_digest, environment
from dl2d.experiments.run_simulation import (
    Cell,
    Finished,
    Runner,
    cells_of,
    check_cell,
    failed,
    prepare_cell,
    replay_cell,
)
from dl2d.simulation.result_time_series import SlotSeries
from dl2d.simulation.workload.workload_source_by_name import named_file

DEFINITION, RESULTS, TIMINGS, ENVIRONMENT = "definition.yaml", "results.json", "timings.json", "environment.json"
_CELLS, _SERIES, _INPUTS, _PREPARED = "cells", "series", "inputs", "prepared"


class ExperimentError(Dl2dError):
    """An experiment cannot be run here, or has not been."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run as read from its folder."""

    folder: Path
    experiment: Experiment
    digest: str
    cells: tuple[Cell, ...]
    #: Finished cells by number, without their series: see ``read_series``.
    finished: Mapping[int, Finished]
    #: How many different states of the code the finished cells were run with.
    codes: int

    @property
    def failures(self) -> tuple[Finished, ...]:
        """Cells that were run and failed."""
        return tuple(done for _, done in sorted(self.finished.items()) if done.error)

    @property
    def missing(self) -> tuple[Cell, ...]:
        """Cells that have no result yet."""
        return tuple(
            cell for cell in self.cells if cell.number not in self.finished or self.finished[cell.number].error
        )

    @property
    def preparations(self) -> tuple[tuple[Preparation, Prepared | None], ...]:
        """Distinct preparations of all cells, each with its result; None if it has not been done yet."""
        once: dict[str, Preparation] = {}
        for cell in self.cells:
            if cell.preparation is not None:
                once.setdefault(cell.preparation.key, cell.preparation)
        return tuple((each, each.read(self.folder / _PREPARED)) for each in once.values())

    @property
    def unprepared(self) -> tuple[Cell, ...]:
        """One of the missing cells for each preparation that has not been made."""
        firsts: dict[str, Cell] = {}
        for cell in self.missing:
            if cell.preparation is not None:
                firsts.setdefault(cell.preparation.key, cell)
        within = self.folder / _PREPARED
        return tuple(
            cell for cell in firsts.values() if cell.preparation is not None and cell.preparation.read(within) is None
        )

    def seconds(self, preparation: Preparation) -> float:
        """Seconds that a preparation took; 0 if it has not been done yet."""
        return preparation.seconds(self.folder / _PREPARED)


class _Kept(msgspec.Struct, frozen=True, kw_only=True):
    """A cell's file."""

    digest: str
    code: str
    finished: Finished


def check_experiment(experiment: Experiment) -> tuple[str, ...]:
    """Load every workload and policy once without running a simulation; returns a note for each workload.

    Raises ``WorkloadError`` or ``PluginError``.
    """
    notes = []
    for case in experiment.cases:
        first = replace(experiment, cases=(case,), seeds=experiment.seeds[:1])
        try:
            said = [check_cell(cell) for cell in cells_of(first)]
        except PluginError as error:
            problem = str(error).removeprefix("--policy: ")
            raise PluginError(f"experiment {experiment.name}, workload {case.name}: {problem}") from None
        notes.append(f"{case.name}: {said[0]}" if said[0] else case.name)
    return tuple(notes)


def begin_run(experiment: Experiment, folder: Path, *, resume: bool = False) -> Run:
    """Create the folder of a run, or resume the run that it holds.

    Raises
    ------
    ExperimentError
        The folder has something in it (and ``resume`` is not set), has another experiment, or cannot be written.
    WorkloadError
        A file of the definition cannot be read.
    """
    try:
        if (folder / DEFINITION).exists():
            if not resume:
                raise ExperimentError(
                    f"{folder} has a run already; --resume goes on with it, --out names another folder"
                )
            found = read_run(folder)
            if found.digest != (wanted := digest(experiment)):
                raise ExperimentError(
                    f"{folder} has another experiment, {found.experiment.name} version {found.experiment.version} with "
                    f"digest {found.digest[:12]}, not {wanted[:12]}; --out names another folder"
                )
            _write_json(folder / ENVIRONMENT, environment())
            return found
        if folder.exists() and any(folder.iterdir()):
            raise ExperimentError(f"{folder} is not empty and has no run of an experiment; --out names another folder")
        for name in (_CELLS, _SERIES):
            (folder / name).mkdir(parents=True, exist_ok=True)
        _write_json(folder / ENVIRONMENT, environment())
        bundled = _bundle(experiment, folder)
        write_atomically(folder / DEFINITION, write_experiment(bundled))  # last: with it the folder is a run
    except OSError as error:
        raise ExperimentError(f"{error.filename or folder}: {error.strerror or error}") from None
    return read_run(folder)


def read_run(folder: Path) -> Run:
    """A run from its folder, whether it came to its end or not.

    Raises ``ExperimentError`` where there is none, ``WorkloadError`` where its definition was spoiled.
    """
    path = folder / DEFINITION
    if not path.is_file():
        raise ExperimentError(f"{folder} has no run of an experiment: there is no {DEFINITION}")
    experiment = read_experiment(path)
    fingerprint = digest(experiment)
    cells = cells_of(experiment)
    finished: dict[int, Finished] = {}
    codes: set[str] = set()
    for cell in cells:
        kept = decode_file(_cell_path(folder, cell), _Kept)  # a cell whose file is damaged is run again
        if kept is not None and kept.digest == fingerprint:
            finished[cell.number] = kept.finished
            codes.add(kept.code)
    return Run(
        folder=folder, experiment=experiment, digest=fingerprint, cells=cells, finished=finished, codes=len(codes)
    )


def read_series(run: Run, cell: Cell) -> SlotSeries | None:
    """Time series of a finished cell; None if it has none or its file is damaged."""
    return decode_file(_cell_path(run.folder, cell, _SERIES), SlotSeries)


def run_cells(
    run: Run,
    executor: Executor,
    *,
    runner: Runner = replay_cell,
    preparer: Runner = prepare_cell,
    clock: Callable[[], float] = time.monotonic,
    progress: Callable[[Finished], None] | None = None,
) -> Run:
    """Run the missing cells of a run, keep each as soon as it is finished, and write results when all were run.

    What a workload's cells have to be prepared with is made before them, where it is not there. ``progress`` is told
    of that, too.

    Stopped by whatever is raised (Ctrl-C), it leaves the finished cells for a later call.

    Raises
    ------
    ExperimentError
        The folder cannot be written.
    """
    code = code_digest()
    begin = clock()
    numbers = {(cell.case.name, cell.policy, cell.seed): cell for cell in run.cells}
    finished = dict(run.finished)
    results = _case_by_case(run, executor, runner, preparer, progress)
    try:
        for done in results:
            cell = numbers[done.case, done.policy, done.seed]
            if done.series is not None:
                write_atomically(_cell_path(run.folder, cell, _SERIES), encode(done.series) + b"\n")
            kept = _Kept(digest=run.digest, code=code, finished=_portable(replace(done, series=None), run.folder))
            write_atomically(_cell_path(run.folder, cell), encode(kept) + b"\n")  # last: with it the cell is finished
            finished[cell.number] = kept.finished
            if progress is not None:
                progress(kept.finished)
        done_run = replace(read_run(run.folder), finished=finished)
        write_atomically(run.folder / RESULTS, _results(done_run))
        _write_json(run.folder / TIMINGS, _timings(done_run, clock() - begin, len(run.missing)))
    except OSError as error:
        raise ExperimentError(f"{error.filename or run.folder}: {error.strerror or error}") from None
    finally:
        results.close()
    return done_run


def _case_by_case(
    run: Run, executor: Executor, runner: Runner, preparer: Runner, progress: Callable[[Finished], None] | None
) -> Generator[Finished]:
    """Results of the missing cells, workload by workload: the first is whole before the last is prepared."""
    within = run.folder.resolve() / _PREPARED
    #: By preparation, what was wrong with it.
    unmade: dict[str, str] = {}
    for case in run.experiment.cases:
        cells = [cell for cell in run.missing if cell.case == case]
        wanting = [replace(cell, prepared=within) for cell in run.unprepared if cell.case == case]
        if wanting:
            keys = {(cell.policy, cell.seed): cell.preparation.key for cell in wanting if cell.preparation is not None}
            with closing(executor.map(preparer, wanting)) as prepared:
                for done in prepared:
                    if done.error:
                        unmade[keys[done.policy, done.seed]] = done.error
                    if progress is not None:
                        progress(done)
        ready = []
        for cell in cells:
            problem = unmade.get(cell.preparation.key) if cell.preparation is not None else None
            if problem is None:
                ready.append(replace(cell, prepared=within) if cell.preparation is not None else cell)
            else:
                yield failed(cell, f"could not be prepared: {problem}")
        if ready:
            yield from executor.map(runner, ready)


def _results(run: Run) -> str:
    """One line per cell, so that two runs can be compared with ``diff``."""
    head = {"experiment": run.experiment.name, "version": run.experiment.version, "digest": run.digest}
    lines = ",\n".join(f"  {json.dumps(_entry(done), sort_keys=True)}" for done in _in_order(run))
    fields = "".join(f" {json.dumps(key)}: {json.dumps(value)},\n" for key, value in head.items())
    if made := [as_plain(each) for _, each in run.preparations if each is not None]:
        each_line = ",\n".join(f"  {json.dumps(each, sort_keys=True)}" for each in made)
        fields += f' "prepared": [\n{each_line}\n ],\n'
    return f'{{\n{fields} "cells": [\n{lines}\n ]\n}}\n'


def _entry(done: Finished) -> dict[str, Any]:
    entry: dict[str, Any] = {"workload": done.case, "policy": done.policy, "seed": done.seed}
    return {**entry, **as_plain(done.result)} if done.result is not None else {**entry, "error": done.error}


def _timings(run: Run, seconds: float, cells: int) -> dict[str, Any]:
    return {
        "last_run": {"seconds": seconds, "cells": cells},
        "cells": [
            {"workload": done.case, "policy": done.policy, "seed": done.seed, **as_plain(done.timings)}
            for done in _in_order(run)
            if done.timings is not None
        ],
    }


def _in_order(run: Run) -> Sequence[Finished]:
    return [done for _, done in sorted(run.finished.items())]


def _portable(done: Finished, folder: Path) -> Finished:
    """Errors without the place of the folder, for which two runs would differ."""
    here = f"{folder.resolve()}{os.sep}"
    return replace(done, error=done.error.replace(here, "")) if done.error else done


def _cell_path(folder: Path, cell: Cell, kind: str = _CELLS) -> Path:
    slug = re.sub(r"[^A-Za-z0-9.]+", "-", f"{cell.case.name}-{cell.policy}").strip("-")[:60]
    return folder / kind / f"{cell.number:04d}-{slug}-{cell.seed}.json"


def _bundle(experiment: Experiment, folder: Path) -> Experiment:
    """Copy the files that are named into the folder; returns the experiment that names the copies."""
    names: dict[str, str] = {}  # by name the digest of its content
    copies: dict[str, str] = {}  # by path the name of its copy
    for path in files_of(experiment):
        content = file_digest(Path(path))
        name = Path(path).name
        number = 1
        while names.get(name, content) != content:
            number += 1
            name = f"{number}-{Path(path).name}"
        if name not in names:
            (folder / _INPUTS).mkdir(exist_ok=True)
            shutil.copyfile(path, folder / _INPUTS / name)
            names[name] = content
        copies[path] = name

    def copy_of(source: str) -> str:
        file = named_file(source)
        return source if file is None else f"{file[0]}{_INPUTS}/{copies[file[1]]}{file[2]}"

    return with_sources(experiment, copy_of)


def _write_json(path: Path, value: object) -> None:
    write_atomically(path, json.dumps(value, indent=1, allow_nan=False) + "\n")
