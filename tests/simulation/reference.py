"""An independent simulator of the DL2 authors' rules, as plain as can be: what `--preset dl2-paper` is held against.

The cluster is emptied and refilled in each slot. A task, or a bundle of a worker and a PS as one, goes to the node with
the least used resources (sum over types, ties by index); the filling ends at the first that does not fit there. FIFO
gives each job in turn bundles up to its caps, SRTF does so by remaining fraction; DRF adds one bundle to the job with
the least dominant share. Optimus gives each job a worker, then a PS, then the single task that shortens any job's
remaining time the most, of equals the PS, until none shortens it; a job that wants a task beyond its cap gets no more.
A job that ends inside its last slot counts the used fraction.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def average_jct(workload: dict[str, Any], policy: str, speed: Callable[[dict[str, Any], int, int], float]) -> float:
    nodes = [group["resources"] for group in workload["cluster"] for _ in range(group["count"])]
    types = sorted({name for node in nodes for name in node})
    total = {name: sum(node.get(name, 0) for node in nodes) for name in types}
    jobs = workload["jobs"]
    left = {job["id"]: job["epochs"] for job in jobs}
    ended: dict[str, float] = {}
    slot = 0
    while len(ended) < len(jobs):
        present = [job for job in jobs if job["submit_slot"] <= slot and job["id"] not in ended]
        used = [dict.fromkeys(types, 0.0) for _ in nodes]
        has = {job["id"]: 0 for job in present}

        def put(demand: dict[str, float], used: list[dict[str, float]] = used) -> int | None:
            head = min(range(len(nodes)), key=lambda number: (sum(used[number].values()), number))
            if any(used[head][name] + demand.get(name, 0) > nodes[head].get(name, 0) for name in types):
                return None
            for name in types:
                used[head][name] += demand.get(name, 0)
            return head

        def bundle(job: dict[str, Any], put: Callable[[dict[str, float]], int | None] = put) -> bool:
            both = {name: job["worker"].get(name, 0) + job["ps"].get(name, 0) for name in types}
            return put(both) is not None

        def share(job: dict[str, Any], has: dict[str, int] = has) -> float:
            both = {name: job["worker"].get(name, 0) + job["ps"].get(name, 0) for name in types}
            return max(both[name] * has[job["id"]] / total[name] for name in types if total[name])

        growing = list(present)
        shape = {job["id"]: [0, 0] for job in present}
        if policy == "optimus":
            _climb(present, left, speed, put, shape)
            growing = []
        if policy == "srtf":
            growing.sort(key=lambda job: left[job["id"]] / job["epochs"])
        while growing:
            job = min(growing, key=share) if policy == "drf" else growing[0]
            if not bundle(job):
                break
            has[job["id"]] += 1
            if has[job["id"]] == min(job["max_workers"], job["max_ps"]):
                growing.remove(job)
        for job in present:
            workers, servers = shape[job["id"]] if policy == "optimus" else (has[job["id"]], has[job["id"]])
            runs = workers and servers
            done = speed(job, workers, servers) * workload["slot_seconds"] / job["samples_per_epoch"] if runs else 0.0
            if done >= left[job["id"]] > 0:
                ended[job["id"]] = slot - job["submit_slot"] + left[job["id"]] / done
            else:
                left[job["id"]] -= done
        slot += 1
    return sum(ended.values()) / len(ended)


def _climb(
    present: list[dict[str, Any]],
    left: dict[str, float],
    speed: Callable[[dict[str, Any], int, int], float],
    put: Callable[[dict[str, float]], int | None],
    shape: dict[str, list[int]],
) -> None:
    """Optimus' filling of one slot: in every round all jobs are looked at anew."""
    dropped: set[str] = set()
    while True:
        best, chosen, role = 0.0, None, 0
        for job in present:
            if job["id"] in dropped:
                continue
            workers, servers = shape[job["id"]]
            if not workers or not servers:
                gain, wanted = float("inf"), 1 if workers else 0
            else:
                now = _seconds(left[job["id"]], job, speed(job, workers, servers))
                gains = [
                    now - _seconds(left[job["id"]], job, speed(job, workers + 1, servers)),
                    now - _seconds(left[job["id"]], job, speed(job, workers, servers + 1)),
                ]
                wanted = 1 if gains[1] >= gains[0] else 0
                gain = gains[wanted]
            if gain > best:
                best, chosen, role = gain, job, wanted
        if chosen is None:
            return
        if shape[chosen["id"]][role] >= chosen[("max_workers", "max_ps")[role]]:
            dropped.add(chosen["id"])
            continue
        if put(chosen[("worker", "ps")[role]]) is None:
            return
        shape[chosen["id"]][role] += 1


def _seconds(epochs: float, job: dict[str, Any], speed: float) -> float:
    # Slower than anything, but finite: where neither size trains at all, neither is better.
    return epochs * job["samples_per_epoch"] / speed if speed > 0 else 1e30
