"""Ranges of a learned policy's inputs in its training, and the test whether a snapshot is far out of them.

The statistics of a snapshot are: ``jobs``, the number of jobs; ``nodes``, the number of nodes that take tasks; and
``jobs_per_node``. A checkpoint holds the smallest and largest value of each in its training (``input_ranges`` in its
training record). A snapshot is out of range if a statistic is more than ``FACTOR`` times the largest value, or less
than the smallest value divided by it. A checkpoint without ranges is not tested.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from dl2d.core.cluster import Snapshot

#: Key in a checkpoint's training record.
INPUT_RANGES = "input_ranges"
#: How far beyond the range of training a policy still decides.
FACTOR = 10.0
_WORDS = {"jobs": "jobs", "nodes": "nodes", "jobs_per_node": "jobs per node"}


def training_ranges(
    workloads: Iterable[tuple[int, int]], known: Mapping[str, list[float]] | None = None
) -> dict[str, list[float]]:
    """Ranges of statistics in workloads, each given as its numbers of jobs and nodes; some of its jobs are present.

    They include the ``known`` ranges.
    """
    ranges = dict(known or {})
    for jobs, nodes in workloads:
        for name, low, high in (
            ("jobs", 1, jobs), ("nodes", nodes, nodes), ("jobs_per_node", 1 / max(nodes, 1), jobs / max(nodes, 1)),
        ):  # fmt: skip
            least, largest = ranges.get(name, (low, high))
            ranges[name] = [min(least, low), max(largest, high)]
    return ranges


def widened(training: Mapping[str, Any], workloads: Iterable[tuple[int, int]]) -> dict[str, Any]:
    """A training record whose ranges include further workloads, such as whole days of which parts were trained on."""
    return {**training, INPUT_RANGES: training_ranges(workloads, training.get(INPUT_RANGES))}


def recorded_ranges(snapshots: Iterable[Snapshot]) -> dict[str, list[float]]:
    """Ranges of statistics in recorded snapshots."""
    return training_ranges(map(_jobs_and_nodes, snapshots))


def out_of_range(snapshot: Snapshot, training: Mapping[str, Any]) -> str:
    """Which statistic of a snapshot is out of the ranges in a checkpoint's training record; empty if none is."""
    ranges = training.get(INPUT_RANGES)
    if not isinstance(ranges, Mapping) or not snapshot.jobs:
        return ""
    jobs, nodes = _jobs_and_nodes(snapshot)
    for name, value in (("jobs", jobs), ("nodes", nodes), ("jobs_per_node", jobs / max(nodes, 1))):
        low, high = ranges.get(name, (0.0, float("inf")))
        if not low / FACTOR <= value <= high * FACTOR:
            return f"{value:g} {_WORDS[name]}; its weights are for {low:g} to {high:g}"
    return ""


def range_in_words(training: Mapping[str, Any]) -> str:
    """With how many jobs and nodes a policy decides, by the ranges in its training record."""
    (fewest, most), (least_nodes, most_nodes) = (training[INPUT_RANGES][name] for name in ("jobs", "nodes"))
    alone = "" if most > 1 else "no two of the recorded jobs were there at the same time: "
    return (
        f"{alone}it decides with up to {most * FACTOR:g} jobs at once (recorded: {fewest:g} to {most:g}) on "
        f"{max(math.ceil(least_nodes / FACTOR), 1)} to {most_nodes * FACTOR:g} nodes, the fallback with more"
    )


def _jobs_and_nodes(snapshot: Snapshot) -> tuple[int, int]:
    return len(snapshot.jobs), sum(node.is_open for node in snapshot.nodes)
