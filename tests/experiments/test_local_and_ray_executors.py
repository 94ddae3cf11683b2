from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from experiments.runners import broken, deadly, endless, quick, spoiled
from variants import first

from dl2d.experiments.definition import Case, Experiment
from dl2d.experiments.local_and_ray_executors import LocalProcesses, Ray
from dl2d.experiments.participants import plain
from dl2d.experiments.run_simulation import Cell, cells_of


def cells(seeds: int = 3, name: str = "case") -> tuple[Cell, ...]:
    return cells_of(
        Experiment(
            name="x", version="1", description="x", cases=(Case(name=name, sources=("generator:dl2",)),),
            participants=(plain("drf"), plain("fifo")), baseline="drf", seeds=tuple(range(seeds)),
        )
    )  # fmt: skip


@pytest.mark.parametrize("processes", [1, 3])
def test_every_cell_is_run_once_in_another_process(processes: int) -> None:
    given = cells()
    found = list(LocalProcesses(processes).map(quick, given))
    assert sorted((each.policy, each.seed) for each in found) == sorted((cell.policy, cell.seed) for cell in given)
    assert {each.policy: each.result.avg_jct for each in found if each.seed == 2} == {"drf": 6.0, "fifo": 9.0}


def test_a_failing_cell_does_not_spoil_the_others() -> None:
    errors = {(each.policy, each.seed): each.error for each in LocalProcesses(2).map(spoiled, cells()) if each.error}
    assert errors == {("fifo", 1): "cannot decide"}
    found = list(LocalProcesses(2).map(broken, cells()))
    assert {each.error for each in found if each.policy == "fifo"} == {"KeyError: 'nothing'"}
    assert all("in broken" in each.trace for each in found if each.policy == "fifo")
    assert all(each.result is not None for each in found if each.policy == "drf")


@pytest.mark.parametrize("processes", first(1, (3, 1)))
def test_a_process_that_dies_costs_its_own_cell_alone(processes: int) -> None:
    found = list(LocalProcesses(processes).map(deadly, cells(4)))
    assert len(found) == 8
    errors = {(each.policy, each.seed): each.error for each in found if each.error}
    assert errors == {("fifo", 1): "its process died; the kernel may have killed it because memory was used up"}


def test_closing_ends_what_is_running(tmp_path: Path) -> None:
    results = LocalProcesses(2).map(endless, cells(2, str(tmp_path)))
    assert next(results).seed == 0
    assert next(results).seed == 0
    while not (started := list(tmp_path.iterdir())):
        os.sched_yield()
    results.close()
    while any(psutil.pid_exists(int(path.name)) for path in started):  # its time limit is that of the test
        os.sched_yield()


class FakeRay:
    """The part of Ray that is used, run at once in this process; the second task of all is lost with its machine."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.exceptions = SimpleNamespace(RayError=OSError)
        self.tasks = 0

    def is_initialized(self) -> bool:
        return False

    def init(self, **options: Any) -> None:
        self.calls.append("init")

    def shutdown(self) -> None:
        self.calls.append("shutdown")

    def remote(self, **options: Any) -> Callable[[Any], Any]:
        assert options["num_cpus"] == 1

        def submit(run: Callable[..., Any], *arguments: Any) -> str:
            self.tasks += 1
            number = self.tasks
            self.results[f"task-{number}"] = lambda: run(*arguments)
            return f"task-{number}"

        self.results: dict[str, Any] = {}
        return lambda run: SimpleNamespace(remote=lambda *arguments: submit(run, *arguments))

    def wait(self, references: list[str], num_returns: int) -> tuple[list[str], list[str]]:
        return references[-num_returns:], references[:-num_returns]

    def get(self, reference: str) -> Any:
        if reference == "task-2":
            raise OSError("the node died")
        return self.results[reference]()

    def cancel(self, reference: str, *, force: bool) -> None:
        assert force
        self.calls.append(f"cancel {reference}")


def test_ray_runs_every_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", fake)
    found = list(Ray().map(spoiled, cells()))
    errors = {(each.policy, each.seed): each.error for each in found if each.error}
    assert errors == {("drf", 1): "OSError: the node died", ("fifo", 1): "cannot decide"}
    assert sorted((each.policy, each.seed) for each in found) == sorted((cell.policy, cell.seed) for cell in cells())
    assert fake.calls == ["init", "shutdown"]


def test_ray_is_told_to_stop_what_is_not_wanted_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", fake)
    results = Ray().map(quick, cells(2))
    next(results)
    results.close()
    assert fake.calls == ["init", "cancel task-1", "cancel task-2", "cancel task-3", "shutdown"]
