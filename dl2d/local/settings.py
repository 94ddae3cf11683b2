"""Settings of the local resource manager: ``resource_manager.local`` in the config file."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Self

import psutil
from pydantic import PlainValidator, model_validator

from dl2d.core.cluster import Node
from dl2d.core.errors import shown
from dl2d.core.input_validation import ClusterName, Demand, Items, ManagerSettings, Record, Text, Whole, bad
from dl2d.core.resources import Resources

MAX_NODES = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalNodes(Record):
    """Entry of ``nodes``: one node of this name, or with a count ``NAME-1``, ``NAME-2`` and so on."""

    name: Annotated[str, Text(63, r"[A-Za-z0-9][A-Za-z0-9._-]*", "up to 63 letters, digits, . _ or -")]
    resources: Demand
    count: Annotated[int, Whole(1, MAX_NODES)] | None = None

    ignored_keys: ClassVar[frozenset[str]] = frozenset()

    def each(self) -> list[Node]:
        """The nodes one by one."""
        if self.count is None:
            return [Node(self.name, self.resources)]
        return [Node(f"{self.name}-{index}", self.resources) for index in range(1, self.count + 1)]


def _folder(given: object) -> Path:
    if not isinstance(given, str | os.PathLike):
        raise bad("", f"expected a path, got {shown(given)} (a folder for the tasks' records and output)")
    path = Path(given)
    if not path.is_absolute():
        raise bad("", f"must be an absolute path, got {str(path)!r}")
    return path


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSettings(ManagerSettings):
    """Checked settings of the local resource manager."""

    #: Name of the cluster, the first part of its jobs' keys.
    cluster: ClusterName = "local"
    #: Folder for records and output; made where it does not exist.
    state_dir: Annotated[Path, PlainValidator(_folder)]
    #: Empty: this machine.
    declared: Annotated[tuple[LocalNodes, ...], Items(MAX_NODES)] = ()

    file_keys: ClassVar[Mapping[str, str]] = {"declared": "nodes"}
    section: ClassVar[str] = "resource_manager.local"

    @property
    def nodes(self) -> tuple[Node, ...]:
        """All nodes, one by one."""
        return tuple(node for entry in self.declared for node in entry.each()) or (_this_machine(),)

    @model_validator(mode="after")
    def _nodes_are_different(self) -> Self:
        if sum(entry.count or 1 for entry in self.declared) > MAX_NODES:
            raise bad("nodes", f"expected at most {MAX_NODES} nodes in all")
        names: set[str] = set()
        for number, entry in enumerate(self.declared):
            for node in entry.each():
                if node.name in names:
                    raise bad(f"nodes[{number}].name", f"a node called {node.name!r} is already declared")
                names.add(node.name)
        return self


def _this_machine() -> Node:
    name = re.sub(r"[^A-Za-z0-9._-]", "-", platform.node().split(".")[0]).lstrip("._-")[:63] or "local"
    memory = psutil.virtual_memory().total // 2**20
    return Node(name, Resources.of(cpu=len(os.sched_getaffinity(0)), memory=memory))
