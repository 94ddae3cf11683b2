"""What slurm.conf says of what tasks are given; the amounts are those that Slurm gave to such jobs."""

from __future__ import annotations

import pytest

from dl2d.core.resources import Resources
from dl2d_slurm.jobs.allocation_beyond_demand import AllocationRules
from dl2d_slurm.submission.sbatch_options import threads_of_core

CONFIG = """Configuration data as of 2026-11-30T06:00:00
DefMemPerCPU            = 100
JobDefaults             = (null)
MaxMemPerNode           = UNLIMITED
SelectType              = select/cons_tres
SelectTypeParameters    = CR_CORE_MEMORY
SLURM_VERSION           = 22.05.8
"""
PARTITION = (
    "PartitionName=gpu AllowGroups=ALL Default=YES QoS=N/A Nodes=n[1-2] OverSubscribe=NO State=UP TotalCPUs=16 "
    "TotalNodes=2 JobDefaults=(null) DefMemPerNode=UNLIMITED MaxMemPerNode=UNLIMITED\n"
)
THREADS = (
    "NodeName=n1 Arch=x86_64 CoresPerSocket=4 CPUAlloc=0 CPUEfctv=8 CPUTot=8 CPULoad=0.1 Gres=gpu:2 RealMemory=4000 "
    "AllocMem=0 Sockets=1 Boards=1 State=DOWN ThreadsPerCore=2 Partitions=gpu Reason=why Sockets=3 [root@now]\n"
)
NO_THREADS = THREADS.replace("n1", "n2").replace("CoresPerSocket=4", "CoresPerSocket=8")


def config(**more: str) -> str:
    text = CONFIG
    for name, value in more.items():
        text = "\n".join(line for line in text.splitlines() if not line.startswith(name)) + f"\n{name} = {value}\n"
    return text


def partition(**more: str) -> str:
    text = PARTITION
    for name, value in more.items():
        unset = name.replace("PerCPU", "PerNode")
        text = " ".join(f"{name}={value}" if f"{word}=".startswith(f"{unset}=") else word for word in text.split(" "))
    return text


DEFAULT = config()
NO_MEMORY = config(SelectTypeParameters="CR_CORE", MaxMemPerCPU="300")
MAX = config(MaxMemPerCPU="300")
LATER = config(MaxMemPerCPU="300", SLURM_VERSION="26.05.5")
PER_NODE = config(DefMemPerCPU="0", DefMemPerNode="700")


@pytest.mark.parametrize(
    ("settings", "partitions", "nodes", "demand", "given"),
    [
        (DEFAULT, PARTITION, "n1", {"cpu": 1}, (2, 200)),
        (DEFAULT, PARTITION, "n1", {"cpu": 2}, (2, 200)),
        (DEFAULT, PARTITION, "n1", {"cpu": 3}, (4, 400)),
        (DEFAULT, PARTITION, "n1", {"cpu": 1, "gpu": 1}, (2, 200)),
        (DEFAULT, PARTITION, "n1", {"cpu": 1, "memory": 500}, (2, 500)),
        (DEFAULT, PARTITION, "n2", {"cpu": 1}, (1, 100)),
        (DEFAULT, PARTITION, "n2", {"cpu": 3, "memory": 1050}, (3, 1050)),
        # The least of what its nodes and partitions give; nodes of which nothing is known give no more.
        (DEFAULT, PARTITION, "n1 n2", {"cpu": 1}, (1, 100)),
        (DEFAULT, PARTITION, "n1 n3", {"cpu": 1}, (1, 100)),
        (PER_NODE, PARTITION, "n1", {"cpu": 3}, (4, 700)),
        (config(SelectTypeParameters="CR_SOCKET_MEMORY"), PARTITION, "n1", {"cpu": 1}, (8, 800)),
        (config(SelectTypeParameters="CR_CORE_MEMORY,CR_ONE_TASK_PER_CORE"), PARTITION, "n1", {"cpu": 3}, (4, 400)),
        # Slurm says that such a job has the CPUs that it asked for, and that its node has given away whole cores.
        (config(SelectTypeParameters="CR_CPU_MEMORY"), PARTITION, "n1", {"cpu": 3}, (4, 300)),
        (NO_MEMORY, PARTITION, "n1", {"cpu": 1}, (2, 0)),
        (NO_MEMORY, PARTITION, "n2", {"cpu": 1, "memory": 700}, (3, 700)),
        (MAX, PARTITION, "n2", {"cpu": 1, "memory": 500}, (2, 500)),
        (MAX, PARTITION, "n2", {"cpu": 1, "memory": 700}, (3, 700)),
        (MAX, PARTITION, "n1", {"cpu": 1, "memory": 700}, (4, 700)),
        (MAX, PARTITION, "n2", {"cpu": 2, "memory": 601}, (2, 601)),
        (MAX, PARTITION, "n2", {"cpu": 2, "memory": 1300}, (4, 1300)),
        (MAX, PARTITION, "n2", {"cpu": 3, "memory": 1050}, (3, 1050)),
        (MAX, PARTITION, "n1", {"cpu": 3, "memory": 1050}, (4, 1050)),
        (MAX, PARTITION, "n2", {"cpu": 3, "memory": 1900}, (6, 1900)),
        (MAX, PARTITION, "n2", {"cpu": 1, "memory": 700, "gpu": 1}, (1, 700)),
        (LATER, PARTITION, "n2", {"cpu": 1, "memory": 700}, (3, 700)),
        (LATER, PARTITION, "n2", {"cpu": 2, "memory": 1300}, (5, 1300)),
        (LATER, PARTITION, "n1", {"cpu": 2, "memory": 1300}, (6, 1300)),
        (LATER, partition(DefMemPerNode="900"), "n1", {"cpu": 1, "gpu": 1}, (4, 900)),
        (LATER, partition(MaxMemPerCPU="50"), "n2", {"cpu": 1, "gpu": 1}, (2, 100)),
        (DEFAULT, partition(DefMemPerCPU="250", MaxMemPerCPU="300"), "n2", {"cpu": 2}, (2, 500)),
        (DEFAULT, partition(DefMemPerCPU="250", MaxMemPerCPU="300"), "n2", {"cpu": 1, "memory": 500}, (2, 500)),
        (config(MaxMemPerCPU="400"), partition(DefMemPerNode="900"), "n2", {"cpu": 1}, (3, 900)),
        (config(MaxMemPerCPU="400"), partition(DefMemPerNode="900"), "n2", {"cpu": 2}, (2, 900)),
        (config(MaxMemPerCPU="400"), partition(DefMemPerNode="900"), "n2", {"cpu": 1, "gpu": 1}, (1, 900)),
        (DEFAULT, partition(MaxMemPerCPU="50"), "n2", {"cpu": 2}, (4, 200)),
        (DEFAULT, partition(MaxMemPerCPU="50"), "n2", {"cpu": 1, "gpu": 1}, (2, 100)),
        (DEFAULT, partition(JobDefaults="DefCpuPerGPU=3,DefMemPerGPU=1200"), "n2", {"cpu": 2, "gpu": 2}, (2, 2400)),
        (DEFAULT, partition(JobDefaults="DefCpuPerGPU=3,DefMemPerGPU=1200"), "n2", {"cpu": 2}, (2, 200)),
        (
            DEFAULT,
            partition(JobDefaults="DefCpuPerGPU=3,DefMemPerGPU=1200"),
            "n2",
            {"cpu": 4, "gpu": 1, "memory": 300},
            (4, 300),
        ),
        (config(JobDefaults="DefMemPerGPU=1200"), PARTITION, "n2", {"cpu": 1, "gpu": 1}, (1, 1200)),
        # No default: squeue shows no memory of such a job.
        (config(DefMemPerCPU="0"), PARTITION, "n2", {"cpu": 1}, (1, 0)),
    ],
)
def test_what_a_task_gets(
    settings: str, partitions: str, nodes: str, demand: dict[str, float], given: tuple[float, float]
) -> None:
    rules = AllocationRules.of(settings, partitions, THREADS + NO_THREADS)
    found = rules.given("gpu", nodes.split(), 0)
    assert found is not None
    share = Resources.of(demand).maximum(found(Resources.of(demand)))
    assert (share.get("cpu"), share.get("memory"), share.get("gpu")) == (*given, demand.get("gpu", 0))


def test_a_job_that_may_run_in_several_partitions_gets_at_least_what_each_gives() -> None:
    other = partition(DefMemPerCPU="250").replace("=gpu ", "=cpu ")
    rules = AllocationRules.of(config(DefMemPerCPU="400"), PARTITION + other, THREADS)
    given = {names: rules.given(names, ["n1"], 0) for names in ("gpu", "cpu", "gpu,cpu")}
    memory = {names: found(Resources.of(cpu=2)).get("memory") for names, found in given.items() if found}
    assert memory == {"gpu": 800, "cpu": 500, "gpu,cpu": 500}


@pytest.mark.parametrize(("partitions", "nodes"), [("", ["n1"]), ("new", ["n1"]), ("gpu,new", ["n1"]), ("gpu", [])])
def test_nothing_is_assumed_of_unknown_partitions_and_without_nodes(partitions: str, nodes: list[str]) -> None:
    assert AllocationRules.of(CONFIG, PARTITION, THREADS).given(partitions, nodes, 0) is None


def test_the_default_memory_of_the_settings_counts_instead_of_that_of_slurm() -> None:
    found = AllocationRules.of(config(JobDefaults="DefMemPerGPU=9"), PARTITION, THREADS).given("gpu", ["n1"], 640)
    assert found is not None
    assert found(Resources.of(cpu=1, gpu=1)).get("memory") == 640


def test_tasks_that_use_one_thread_of_each_core_get_the_others_too_without_memory_for_them() -> None:
    found = AllocationRules.of(CONFIG, PARTITION, THREADS).given("gpu", ["n1"], 0, threads=1)
    assert found is not None
    assert found(Resources.of(cpu=3)) == Resources.of(cpu=6, memory=300)


@pytest.mark.parametrize(
    ("options", "threads"),
    [
        ((), 0),
        (("--hint=nomultithread",), 1),
        (("--hint=multithread",), 0),
        (("--hint=compute_bound", "--nice=1"), 1),
        (("--threads-per-core=2",), 2),
        (("--threads-per-core=x",), 0),
    ],
)
def test_options_for_all_tasks_say_how_many_threads_of_a_core_they_use(options: tuple[str, ...], threads: int) -> None:
    assert threads_of_core(options) == threads


def test_absurd_amounts_do_no_harm() -> None:
    rules = AllocationRules.of(config(DefMemPerCPU="1844674407370955161"), PARTITION, THREADS)
    found = rules.given("gpu", ["n1"], 0)
    assert found is not None
    assert found(Resources.of(cpu=1e12)).as_dict() == {"cpu": 1e12, "memory": 1e12}


@pytest.mark.parametrize("text", ["", "slurm_load error: x\n", "NodeName= CPUTot=x Sockets=\nPartitionName=\n"])
def test_answers_that_cannot_be_read_say_nothing(text: str) -> None:
    rules = AllocationRules.of(text, text, text)
    assert rules.given("gpu", ["n1"], 0) is None
    assert not rules.gives_whole_nodes("gpu")


def test_to_how_many_seconds_backfill_rounds_times() -> None:
    assert AllocationRules.of(CONFIG, PARTITION, THREADS).backfill_seconds == 60
    given = config(SchedulerParameters="bf_interval=2,bf_resolution=300")
    assert AllocationRules.of(given, PARTITION, THREADS).backfill_seconds == 300
