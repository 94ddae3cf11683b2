"""The plug-ins of docs/internals/plugins.md, installed as a site would install them."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from policies.snapshots import ask, snapshots
from tick.world import World

from dl2d.core.errors import PluginError
from dl2d.core.resources import Resources
from dl2d.plugins import POLICIES, available, load_manager, load_placement, load_policy
from dl2d.testing import make_nodes
from dl2d.tick.policy_check.decision_check import check_decision

DOCUMENT = Path(__file__).parents[2] / "docs" / "internals" / "plugins.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", DOCUMENT.read_text(), flags=re.MULTILINE | re.DOTALL)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "site_dl2d.py").write_text("\n".join(blocks("python")))
    points = tomllib.loads("\n".join(blocks("toml")))["project"]["entry-points"]
    info = tmp_path / "site_dl2d-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: site-dl2d\nVersion: 1\n")
    sections = ["\n".join([f"[{group}]", *map(" = ".join, names.items())]) for group, names in points.items()]
    (info / "entry_points.txt").write_text("\n".join(sections) + "\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("site_dl2d", None)


@pytest.mark.usefixtures("site")
def test_the_documented_policy_decides_whole_ticks() -> None:
    assert "even" in available(POLICIES)
    world = World(cluster_nodes=make_nodes(4), policy=load_policy("even"), url="")
    try:
        keys = [world.submit(max_workers=8, max_ps=8) for _ in range(2)]
        world.settle()
        assert [world.has(key) for key in keys] == [(4, 4), (4, 4)]
    finally:
        world.close()


@pytest.mark.usefixtures("site")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=30)
@given(snapshots)
def test_the_documented_policy_answers_whatever_it_is_shown(snapshot: Any) -> None:
    policy = load_policy("even")
    decision = ask(policy, snapshot)
    check_decision(decision, snapshot)
    assert decision == ask(policy, snapshot)


@pytest.mark.usefixtures("site")
def test_the_documented_manager_and_placement_work_together() -> None:
    manager = load_manager("mine", {"nodes": {"a": {"cpu": 4}, "b": {"cpu": 8}}}, lambda: 5.0)
    assert [node.capacity for node in manager.listing().nodes] == [Resources.of(cpu=4), Resources.of(cpu=8)]
    assert manager.capabilities().cluster == "rehearsal"
    world = World(cluster_nodes=list(manager.listing().nodes), url="")
    context = world.context()
    try:
        placement = load_placement("pack")
        job = world.submit(worker=Resources.of(cpu=2), ps=Resources.of(cpu=1), max_workers=1, max_ps=1)
        world.context = lambda: _with(context, placement)  # type: ignore[method-assign]
        world.settle()
        assert world.nodes_of(job) == {"a"}
    finally:
        world.close()


@pytest.mark.usefixtures("site")
def test_a_placement_made_for_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    load_placement("pack")
    monkeypatch.delattr("site_dl2d.Pack.first_node_only")
    with pytest.raises(PluginError, match=r"^placement: plug-in 'pack' lacks first_node_only of dl2d\.core\.placement"):
        load_placement("pack")


def _with(context: Any, placement: Any) -> Any:
    return replace(context, deciders=replace(context.deciders, placement=placement))
