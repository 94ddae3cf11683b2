"""Settings of the local resource manager: ``resource_manager.local`` in the config file."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from dl2d.core.errors import ConfigError, RequestError
from dl2d.core.resources import Resources, parse_resources

MOST_NODES = 10_000
_PREFIX = "resource_manager.local"
_CLUSTER = re.compile(r"[A-Za-z0-9_-]{1,64}")
_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


@dataclass(frozen=True, slots=True)
class LocalNode:
    """A node as the config declares it."""

    name: str
    capacity: Resources


@dataclass(frozen=True, slots=True)
class LocalSettings:
    """Checked settings of the local resource manager."""

    #: Name of the cluster, the first part of its jobs' keys.
    cluster: str
    #: Folder for records and output; made where it does not exist.
    state_dir: Path
    nodes: tuple[LocalNode, ...]

    @classmethod
    def parse(cls, given: Mapping[str, object]) -> LocalSettings:
        """Check settings as they come from the config file; see docs/local.md for the keys.

        Raises
        ------
        ConfigError
            A key is unknown or missing, or has a bad value; names the key in full.
        """
        _refuse_unknown(given, ("cluster", "state_dir", "nodes"), _PREFIX)
        cluster = given.get("cluster", "local")
        if not isinstance(cluster, str) or not _CLUSTER.fullmatch(cluster):
            raise ConfigError(f"{_PREFIX}.cluster: expected up to 64 letters, digits, _ or -, got {cluster!r}")
        folder = given.get("state_dir")
        if not isinstance(folder, str | os.PathLike) or not str(folder):
            missing = "missing" if folder is None else f"expected a path, got {folder!r}"
            raise ConfigError(f"{_PREFIX}.state_dir: {missing} (a folder for the tasks' records and output)")
        path = Path(folder)
        if not path.is_absolute():
            raise ConfigError(f"{_PREFIX}.state_dir: must be an absolute path, got {str(path)!r}")
        return cls(cluster, path, _nodes(given.get("nodes")))


def _nodes(given: object) -> tuple[LocalNode, ...]:
    key = f"{_PREFIX}.nodes"
    if given is None:
        return (_this_machine(),)
    if isinstance(given, str | bytes) or not isinstance(given, Sequence) or not given:
        raise ConfigError(f"{key}: expected a list of {{name, count, resources}}, got {given!r}")
    nodes: dict[str, LocalNode] = {}
    for number, item in enumerate(given):
        for node in _expand(item, f"{key}[{number}]", MOST_NODES - len(nodes)):
            if node.name in nodes:
                raise ConfigError(f"{key}[{number}].name: a node called {node.name!r} is already declared")
            nodes[node.name] = node
    return tuple(nodes.values())


def _expand(item: object, key: str, most: int) -> list[LocalNode]:
    if not isinstance(item, Mapping):
        raise ConfigError(f"{key}: expected {{name, count, resources}}, got {item!r}")
    _refuse_unknown(item, ("name", "count", "resources"), key)
    name = item.get("name")
    if not isinstance(name, str) or not _NODE.fullmatch(name):
        raise ConfigError(f"{key}.name: expected up to 63 letters, digits, . _ or -, got {name!r}")
    if "resources" not in item:
        raise ConfigError(f"{key}.resources: missing (write e.g. {{cpu: 8, gpu: 2}})")
    try:
        capacity = parse_resources(item["resources"], f"{key}.resources")
    except RequestError as error:
        raise ConfigError(str(error)) from None
    if not capacity.thousandths:
        raise ConfigError(f"{key}.resources: a node must have something, got {item['resources']!r}")
    count = item.get("count")
    if count is None:
        return [LocalNode(name, capacity)]
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= most:
        raise ConfigError(f"{key}.count: expected a whole number from 1 to {most}, got {count!r}")
    return [LocalNode(f"{name}-{index}", capacity) for index in range(1, count + 1)]


def _this_machine() -> LocalNode:
    name = re.sub(r"[^A-Za-z0-9._-]", "-", platform.node().split(".")[0]).lstrip("._-")[:63] or "local"
    memory = psutil.virtual_memory().total // 2**20
    return LocalNode(name, Resources.of(cpu=len(os.sched_getaffinity(0)), memory=memory))


def _refuse_unknown(given: Mapping[str, object], known: Sequence[str], prefix: str) -> None:
    for key in given:
        if key not in known:
            raise ConfigError(f"{prefix}.{key}: unknown key; known are {', '.join(known)}")
