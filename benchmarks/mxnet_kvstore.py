"""How long does a step of MXNet's KVStore take, with how much CPU time and memory: our servers beside MXNet 1.9.1's.

    python benchmarks/mxnet_kvstore.py [--python build/mxnet/bin/python] [--tensors resnet50 one] [--cells 1,1 2,1 2,2]
        [--ways stock tcp tls unix shm tcp-replicas shm-replicas] [--rounds 10] [--warm 3] [--repeats 3]

One script (`work`), the same for both: every key is pushed and pulled, then all is waited for; momentum SGD on the
servers.  Stock is `dist_sync` over TCP on the loopback interface; ours is the same name under dl2-run, over TCP, TCP
with TLS (the default between hosts), Unix sockets and shared memory (the default on one host).  In every cell (tensors,
workers, servers) all are run by turns, `--repeats` times; of each the median is taken, and its ratio to stock's.  CPU
time is that of all processes of a job, user and system, over the measured rounds, without the making of gradients.

Memory, in MB: `worker` is what a worker's resident memory was at most above that of a process with the same arrays and
no KVStore.  For servers and the coordinator (stock: the scheduler) it is the largest process of that kind.  `all` is
that of all processes of the job at the end, pages that several have mapped counted once (PSS).

Needs a Python that has MXNet (`--python`); the tests make one in build/mxnet.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import secrets
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psutil
from harness import by_turns, command_of, cpu_seconds, free_port, options_of, resnet50_shapes, show

ROOT = Path(__file__).resolve().parent.parent
#: in the environment of all processes of one run, so that their CPU time can be found
MARK = "KVSTORE_BENCHMARK"
WAYS = {
    "stock": {},
    "tcp": {"DL2_TRANSPORT": "tcp", "DL2_ENCRYPT": "control"},
    "tls": {"DL2_TRANSPORT": "tcp"},
    "unix": {"DL2_TRANSPORT": "unix"},
    "shm": {},
    "tcp-replicas": {"DL2_TRANSPORT": "tcp", "DL2_ENCRYPT": "control", "DL2_DURABILITY": "durable"},
    "shm-replicas": {"DL2_DURABILITY": "durable"},
}

SETS = {"resnet50": resnet50_shapes, "one": lambda: [(25_000_000,)]}
COLUMNS = ("worker", "server", "coordinator", "all")


def processes(mark: str) -> Iterator[tuple[psutil.Process, str]]:
    """Give each process that has this mark in its environment, and its kind."""
    for process in psutil.process_iter():
        try:
            environ, command = process.environ(), " ".join(process.cmdline())
        except psutil.Error:
            continue  # it has ended, or is another user's
        if environ.get(MARK) != mark:
            continue
        role = environ.get("DMLC_ROLE")
        if "server_process" in command or role == "server":
            yield process, "server"
        elif role == "scheduler" or ("pslite.run" in command and "DL2_ROLE" not in environ):
            yield process, "coordinator"
        else:
            yield process, "agent" if "pslite.run" in command else "worker"


def memory(mark: str) -> dict[str, float]:
    """Return the highest resident memory so far of each kind of process, and the sum for all now, in MB."""
    found: dict[str, float] = {"all": 0.0}
    for process, kind in processes(mark):
        with contextlib.suppress(OSError, psutil.Error):
            status = Path(f"/proc/{process.pid}/status").read_text()
            highest = int(status.partition("VmHWM:")[2].split()[0]) / 1024
            found[kind] = max(found.get(kind, 0.0), highest)
            found["all"] += process.memory_full_info().pss / 2**20
    return found


def work(options: argparse.Namespace) -> None:
    """Be a worker, of either kind."""
    import mxnet as mx  # noqa: PLC0415  (the benchmark itself runs without)

    shapes = SETS[options.tensors[0]]()
    weights = [mx.nd.ones(shape) for shape in shapes]
    gradients = [mx.nd.ones(shape) for shape in shapes]
    mx.nd.waitall()
    if options.role == "alone":
        print(psutil.Process().memory_info().rss / 2**20)
        return

    def marked() -> Iterator[psutil.Process]:
        return (process for process, _ in processes(os.environ[MARK]))

    kv = mx.kv.create("dist_sync")
    rank = kv.rank
    for key, weight in enumerate(weights):
        kv.broadcast(key, weight, out=weight)
    kv.set_optimizer(mx.optimizer.SGD(learning_rate=0.1, momentum=0.9, rescale_grad=1 / kv.num_workers))
    mx.nd.waitall()
    rounds: list[float] = []
    cpu = refresh = 0.0
    for number in range(options.warm + options.rounds):
        if number == options.warm:
            kv._barrier()  # noqa: SLF001  (both have it by this name)
            cpu = cpu_seconds(marked()) if rank == 0 else 0.0
        began_refresh = time.process_time()
        for gradient in gradients:  # as a backward pass would: stock's pull leaves the weights in them
            gradient[:] = 0.01
        mx.nd.waitall()
        refresh += (time.process_time() - began_refresh) * (number >= options.warm)
        began = time.perf_counter()
        for key, (gradient, weight) in enumerate(zip(gradients, weights, strict=True)):
            kv.push(key, gradient, priority=-key)
            kv.pull(key, out=weight, priority=-key)
        mx.nd.waitall()
        if number >= options.warm:
            rounds.append(time.perf_counter() - began)
    kv._barrier()  # noqa: SLF001
    cpu = cpu_seconds(marked()) - cpu if rank == 0 else 0.0
    found = memory(os.environ[MARK]) if rank == 0 else {}
    kv._barrier()  # noqa: SLF001  (until then nobody ends)
    last = float(weights[-1].reshape(-1)[0].asscalar())
    ms = statistics.median(rounds) * 1e3 if rank == 0 else 0.0
    said = {"ms": ms, "cpu_ms": (cpu - refresh) / options.rounds * 1e3, "weight": last, "memory": found}
    sys.stdout.write(json.dumps(said) + "\n")


def run(options: argparse.Namespace, tensors: str, workers: int, servers: int, way: str) -> dict[str, float]:
    """Run a job; return what its first worker has measured."""
    work_command = command_of(options, "worker", options.python, tensors=[tensors])
    environ = {
        **os.environ,
        **WAYS[way],
        MARK: secrets.token_hex(8),
        "PYTHONPATH": str(ROOT / "pslite" / "src"),
    }
    if way == "stock":
        text = stock(work_command, environ, workers, servers)
    else:
        command = [sys.executable, "-m", "pslite.run", "--quiet", f"--workers={workers}", f"--servers={servers}", "--"]
        text = subprocess.run(
            [*command, *work_command], env=environ, stdout=subprocess.PIPE, check=True, timeout=600
        ).stdout.decode()
    workers_said = [json.loads(line) for line in text.splitlines()]
    if len({round(said["weight"], 5) for said in workers_said}) != 1:
        raise SystemExit(f"{way}: the workers have different weights: {text}")
    return {
        "ms": max(said["ms"] for said in workers_said),
        "cpu_ms": sum(said["cpu_ms"] for said in workers_said),
        "weight": workers_said[0]["weight"],
        **next(said["memory"] for said in workers_said if said["memory"]),
    }


def stock(command: list[str], environ: dict[str, str], workers: int, servers: int) -> str:
    """Run a command as MXNet's own launcher does; return what it has printed."""
    environ = {
        **environ,
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": str(free_port()),
        "DMLC_NODE_HOST": "127.0.0.1",
        "DMLC_NUM_WORKER": str(workers),
        "DMLC_NUM_SERVER": str(servers),
    }
    roles = ["scheduler", *["server"] * servers, *["worker"] * workers]
    processes = [
        subprocess.Popen(command, env={**environ, "DMLC_ROLE": role}, stdout=subprocess.PIPE) for role in roles
    ]
    text = "".join(process.communicate(timeout=600)[0].decode() for process in processes)
    if any(process.returncode for process in processes):
        raise SystemExit(f"stock MXNet ended with {[process.returncode for process in processes]}")
    return text


def main() -> None:
    """Run everything, and print a line for each."""
    options = options_of(
        __doc__, python=str(ROOT / "build" / "mxnet" / "bin" / "python"), tensors=list(SETS),
        cells=["1,1", "2,1", "2,2"], ways=[way for way in WAYS if "replicas" not in way], rounds=10, warm=3, repeats=3,
    )  # fmt: skip
    if options.role:
        work(options)
        return
    if not Path(options.python).exists():
        raise SystemExit(f"{options.python} is not there: run tests/pslite/test_mxnet.py, or give --python")
    for tensors, cell in itertools.product(options.tensors, options.cells):
        workers, servers = map(int, cell.split(","))
        alone = subprocess.check_output(command_of(options, "alone", options.python, tensors=[tensors]))
        runs = by_turns(options.ways, options.repeats, partial(run, options, tensors, workers, servers))
        if len({round(one["weight"], 4) for many in runs.values() for one in many}) != 1:
            raise SystemExit(f"they do not compute the same: {runs}")
        base: dict[str, float] = {}
        for way, many in runs.items():
            found = {name: statistics.median(one[name] for one in many) for name in ("ms", "cpu_ms", *COLUMNS)}
            base = base or found
            found["worker"] -= float(alone)
            faster, less_cpu = (base[name] / found[name] for name in ("ms", "cpu_ms"))
            show(tensors=tensors, cell=cell, way=way, faster=faster, less_cpu=less_cpu, **found)


if __name__ == "__main__":
    main()
