"""The placement of Optimus (Peng et al., EuroSys 2018, section 4.2)."""

from __future__ import annotations

from typing import ClassVar

from dl2d.placement.load_balance import LoadBalance


class Optimus(LoadBalance):
    """Lays each job evenly on the fewest nodes that hold it, for the less its tasks talk across nodes the better.

    Jobs are taken in ascending number of tasks, so that small ones need one node; nodes in the order of what they have
    available, most first. The first k = 1, 2, ... nodes on which a job's workers and its PSs can both be spread equally
    are its own. A job for which no k will do is placed task by task. Theorem 1 of the paper: where workers and PSs of a
    job are spread equally over equal nodes, fewer nodes mean less traffic for the busiest of them.

    Differences: tasks that run already stay where they are and count in the evenness. Nodes are ordered by all their
    resources (the paper by the CPU alone), and those without room for a worker and a PS are passed over, where the
    paper would give up at the first k nodes of a mixed cluster.
    """

    name: ClassVar[str] = "optimus"
    gathers: ClassVar[bool] = True
