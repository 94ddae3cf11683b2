from __future__ import annotations

import math
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from learning.dl2_paper.made_workloads import SMALL, TRAINING, VALIDATION, a_workload
from msgspec import structs
from policies.snapshots import NO_PS, a_job, a_snapshot, ask, cluster
from recorded_site import Listening
from simulation.drawn import drawn

from dl2d.core.cluster import Snapshot
from dl2d.core.decision import Constraint, Decision, JobDecision, Reason
from dl2d.core.errors import CheckpointError, TooFewSamples
from dl2d.core.jobs import NOTHING, Allocation
from dl2d.core.policy import Policy
from dl2d.core.progress_callback import silent
from dl2d.learning.dl2_paper.demonstrations import demonstrations_of, demonstrations_with_floors
from dl2d.learning.dl2_paper.imitation_learning import (
    fit,
    grows_jobs_while_others_wait,
    imitate_recordings,
    imitation_loss,
    known_scheduler,
    usual_sizes,
)
from dl2d.learning.dl2_paper.networks import adopt, begin, described, policy_network, weights_of
from dl2d.learning.dl2_paper.samples import Demonstrations
from dl2d.learning.dl2_paper.settings import NetworkKind, Settings, SupervisedLoss
from dl2d.learning.dl2_paper.training_loop import continuing, train
from dl2d.learning.site_records.recorded_decisions import Recording
from dl2d.placement.load_balance import LoadBalance
from dl2d.policies.common.checkpoint import Checkpoint
from dl2d.policies.common.training_input_ranges import INPUT_RANGES
from dl2d.policies.dl2_paper.observation import Layout, ObservationEncoding
from dl2d.policies.dl2_paper.policy import Dl2PaperPolicy
from dl2d.policies.drf import Drf
from dl2d.policies.fifo import Fifo
from dl2d.policies.srtf import Srtf
from dl2d.simulation.policy_by_name import replay_by_name
from dl2d.simulation.replay import Rules, replay
from dl2d.simulation.simulation_presets import PresetName, preset
from dl2d.simulation.vectorized.workload_arrays import Library
from dl2d.simulation.workload.workload_file import Workload
from dl2d.simulation.workload.workload_source_by_name import load_source

QUICK = Settings(window=10, hidden=32, minibatch=256, samples=256)
#: Of jobs of each type, whatever else is there.
USUAL = {"small": Allocation(1, 1), "wide": Allocation(4, 1), "served": Allocation(2, 4)}


#: A policy of two actions that are as likely as one another, and of which a third is forbidden.
LOGITS, MASKS = torch.tensor([[1.0, 1.0, 9.0]]), torch.tensor([[True, True, False]])


@pytest.mark.parametrize(
    ("kind", "one_right", "both_right"),
    [
        (SupervisedLoss.CROSS_ENTROPY, math.log(2), math.log(2)),
        (SupervisedLoss.SQUARE, 0.5, 0.0),
        (SupervisedLoss.ABSOLUTE, 1.0, 0.0),
    ],
)
def test_the_three_losses_by_hand(kind: SupervisedLoss, one_right: float, both_right: float) -> None:
    one, both = torch.tensor([[False, True, False]]), torch.tensor([[True, True, False]])
    assert float(imitation_loss(LOGITS, MASKS, one, kind)) == pytest.approx(one_right)
    assert float(imitation_loss(LOGITS, MASKS, both, kind)) == pytest.approx(both_right), "both are to be as likely"
    uneven = torch.tensor([[3.0, 1.0, 9.0]])
    assert float(imitation_loss(uneven, MASKS, both, kind)) > both_right + 0.1


@pytest.mark.parametrize("kind", list(SupervisedLoss))
def test_each_loss_leads_to_the_teachers_action(kind: SupervisedLoss) -> None:
    layout = Layout(window=1, types=1, resources=1, extras=False)
    network = policy_network(NetworkKind.DENSE, layout, 8)
    begin(network, torch.Generator().manual_seed(0))
    rng = np.random.default_rng(0)
    observations = rng.random((64, layout.length)).astype(np.float32)
    actions = (observations[:, 0] > 0.5).astype(np.int64) * 3
    shown = Demonstrations(
        observations=observations,
        masks=np.ones((64, 4), dtype=np.bool_),
        actions=actions,
        rights=np.eye(4)[actions] > 0,
    )
    settings = Settings(supervised_loss=kind, supervised_updates=200, minibatch=64, supervised_rate=1e-2)
    losses = fit(network, shown, settings, rng)
    assert losses[-1] < 0.5 * losses[0]
    best = network(torch.from_numpy(observations)).argmax(dim=1).numpy()
    assert (best == actions).mean() > 0.9


def test_demonstrations_are_what_the_teacher_does_and_void_is_one_of_them() -> None:
    workloads = [drawn(seed, jobs=6) for seed in range(2)]
    library = Library.of(workloads)
    encoding = ObservationEncoding(
        window=4,
        models=library.models,
        resources=library.resources,
        first_bundles=True,
        slot_seconds=1200.0,
        extras=True,
    )
    found = demonstrations_of("drf", workloads, encoding, rng=np.random.default_rng(0))
    assert found.masks[np.arange(len(found)), found.actions].all()
    assert found.masks[:, :-1].any(axis=1).all()
    assert (found.actions == 12).any()
    assert (found.actions < 12).any()


def slots(count: int, nodes: int = 6) -> list[Recording]:
    """Slots in which users had asked for what is usual for their type, and a manager had given it."""
    rng = np.random.default_rng(0)
    found = []
    for number in range(count):
        jobs = [
            a_job(place, model=str(rng.choice(sorted(USUAL))), epochs=float(rng.integers(1, 50)))
            for place in range(int(rng.integers(1, 6)))
        ]
        snapshot = structs.replace(a_snapshot(jobs, cluster(nodes, cpu=16, gpu=8)), slot=number)
        reason = Reason(Constraint.SATISFIED, "as the user asked")
        decided = tuple(JobDecision(job=job.key, allocation=USUAL[job.request.model], reason=reason) for job in jobs)
        found.append(Recording(snapshot, Decision("static", "1", decided), LoadBalance()))
    return found


def test_static_sizes_of_users_are_learned() -> None:
    found = imitate_recordings(slots(60), replace(QUICK, supervised_updates=150), slot_seconds=60.0, seed=0, min_jobs=1)
    assert found.comparison is not None
    assert found.comparison.slots == 12
    assert found.comparison.same > 0.9
    assert found.comparison.differing < 0.05
    assert found.yardstick is not None
    assert found.yardstick.drf.same < found.comparison.same
    # All these jobs are new: as before, they would have nothing.
    assert (found.yardstick.as_before.same, found.yardstick.as_before.differing) == (0.0, 1.0)
    assert found.losses[-1] < found.losses[0]
    assert found.checkpoint.training["supervised"]["policies"] == ["static"]
    assert found.checkpoint.training[INPUT_RANGES] == {"jobs": [1, 5], "nodes": [6, 6], "jobs_per_node": [1 / 6, 5 / 6]}
    policy = Dl2PaperPolicy(found.checkpoint)
    jobs = [a_job(0, model="wide"), a_job(1, model="small")]
    sizes = ask(policy, a_snapshot(jobs, cluster(6, cpu=16, gpu=8))).allocations()
    assert sizes == {jobs[0].key: USUAL["wide"], jobs[1].key: USUAL["small"]}


def test_what_a_policy_decided_under_load_is_learned() -> None:
    rng = np.random.default_rng(1)
    found = []
    for number in range(60):
        jobs = [a_job(place, max_workers=8, max_ps=8) for place in range(int(rng.integers(1, 8)))]
        snapshot: Snapshot = structs.replace(a_snapshot(jobs, cluster(3, cpu=9, gpu=6)), slot=number)
        found.append(Recording(snapshot, ask(Drf(), snapshot), LoadBalance()))
    learned = imitate_recordings(found, QUICK, slot_seconds=60.0, seed=0, min_jobs=1)
    assert learned.comparison is not None
    assert learned.comparison.differing < 0.1


def observed(count: int) -> list[Recording]:
    """Slots in which a site's scheduler ran workers alone, at sizes that users had chosen; as many waited for room."""
    rng = np.random.default_rng(2)
    found = []
    for number in range(count):
        jobs = [a_job(place, static=True, **NO_PS, epochs=float(rng.integers(1, 50))) for place in range(4)]
        snapshot = structs.replace(a_snapshot(jobs, cluster(2, cpu=8, gpu=4)), slot=number)
        sizes = [Allocation(4, 0)] * 2 + [NOTHING] * 2
        reason = Reason(Constraint.OBSERVED, "as the scheduler has it")
        decided = tuple(JobDecision(job.key, size, reason) for job, size in zip(jobs, sizes, strict=True))
        found.append(Recording(snapshot, Decision("observed", "1", decided), LoadBalance()))
    return found


def test_what_was_learned_from_jobs_without_servers_starts_jobs_with_servers() -> None:
    """It gave workers alone once, as to those that it had seen, and the jobs waited for ever beside free GPUs."""
    learned = imitate_recordings(observed(40), QUICK, slot_seconds=60.0, seed=0, min_jobs=1)
    assert learned.checkpoint.settings["first_bundles"] is False
    jobs = [a_job(0), a_job(1, min_workers=2, min_ps=2), a_job(2, **NO_PS | {"max_workers": 4})]
    for count, seen in ((3, jobs), (1, jobs[:1])):
        sizes = ask(Dl2PaperPolicy(learned.checkpoint), a_snapshot(seen, cluster(4, cpu=20, gpu=4))).allocations()
        assert sum(sizes[job.key] >= job.request.min_size for job in seen) == count


def test_what_was_learned_from_who_serves_jobs_whole_starts_every_job_that_has_room() -> None:
    """FIFO gave the jobs that it knew all that they may have; others, of other models, waited on an idle cluster."""
    rng, found = np.random.default_rng(1), []
    for number in range(40):
        jobs = [a_job(place, epochs=float(rng.integers(1, 50)), max_workers=4, max_ps=4) for place in range(5)]
        snapshot = structs.replace(a_snapshot(jobs, cluster(2, cpu=8, gpu=4)), slot=number)
        found.append(Recording(snapshot, ask(Fifo(), snapshot), LoadBalance()))
    learned = imitate_recordings(found, QUICK, slot_seconds=60.0, seed=0, min_jobs=1)
    assert learned.checkpoint.settings["first_bundles"] is False
    jobs = [a_job(place, model="other", **NO_PS | {"max_workers": 4}) for place in range(8)]
    for seen in (jobs, jobs[:1]):
        sizes = ask(Dl2PaperPolicy(learned.checkpoint), a_snapshot(seen, cluster(4, cpu=8, gpu=2))).allocations()
        assert all(size.workers for size in sizes.values())


def test_what_was_learned_from_fixed_sizes_gives_elastic_jobs_these_sizes() -> None:
    """All of them began with a worker once, which no recorded job did, and the gate refused it for that."""
    learned = imitate_recordings(observed(40), QUICK, slot_seconds=60.0, seed=0, min_jobs=1)
    jobs = [a_job(place, **NO_PS) for place in range(4)]
    decided = ask(Dl2PaperPolicy(learned.checkpoint), a_snapshot(jobs, cluster(2, cpu=8, gpu=4))).allocations()
    assert sorted(decided[job.key].workers for job in jobs) == [0, 0, 4, 4]


def of_mixed_sizes(count: int) -> list[Recording]:
    """Slots in which users of one model type had asked for 1, 2 or 4 workers, and a manager had given them."""
    rng, found = np.random.default_rng(3), []
    for number in range(count):
        sizes = [Allocation(int(rng.choice([1, 2, 4])), 0) for _ in range(4)]
        jobs = [
            a_job(4 * number + place, static=True, **NO_PS, epochs=float(rng.integers(1, 50))) for place in range(4)
        ]
        snapshot = structs.replace(a_snapshot(jobs, cluster(4, cpu=8, gpu=4)), slot=number)
        reason = Reason(Constraint.OBSERVED, "as the scheduler has it")
        decided = tuple(JobDecision(job.key, size, reason) for job, size in zip(jobs, sizes, strict=True))
        found.append(Recording(snapshot, Decision("observed", "1", decided), LoadBalance()))
    return found


def test_what_was_learned_from_mixed_fixed_sizes_gives_each_job_the_size_that_its_user_asks_for() -> None:
    """All jobs of a model type got one size once, since the network did not see what the user asks for."""
    learned = imitate_recordings(
        of_mixed_sizes(60), replace(QUICK, supervised_updates=200), slot_seconds=60.0, seed=0, min_jobs=1
    )
    assert learned.comparison.same == 1.0
    usual = Allocation(*learned.checkpoint.settings["usual_sizes"][0])
    asked = [4, 1, 2, 0]
    jobs = [a_job(place, **NO_PS, asked_size=Allocation(count, 0)) for place, count in enumerate(asked)]
    decided = ask(Dl2PaperPolicy(learned.checkpoint), a_snapshot(jobs, cluster(4, cpu=8, gpu=4))).allocations()
    assert [decided[job.key].workers for job in jobs] == [4, 1, 2, usual.workers]


def test_what_was_learned_from_fixed_sizes_beside_elastic_jobs_lets_these_grow_to_what_their_users_ask_for() -> None:
    """Its first step gave static jobs all of their size, so that the same jobs, elastic, stayed at one worker."""
    rng, found = np.random.default_rng(4), of_mixed_sizes(60)
    for place in range(0, 60, 3):
        jobs = [a_job(1000 + place + at, model="other", epochs=float(rng.integers(1, 50))) for at in range(3)]
        snapshot = structs.replace(a_snapshot(jobs, cluster(4, cpu=8, gpu=4)), slot=place)
        found[place] = Recording(snapshot, ask(Drf(), snapshot), LoadBalance())
    learned = imitate_recordings(found, replace(QUICK, supervised_updates=200), slot_seconds=60.0, seed=0, min_jobs=1)
    assert learned.checkpoint.settings["fixed_sizes"] is False
    asked = [4, 1, 2]
    jobs = [a_job(place, **NO_PS, asked_size=Allocation(count, 0)) for place, count in enumerate(asked)]
    decided = ask(Dl2PaperPolicy(learned.checkpoint), a_snapshot(jobs, cluster(4, cpu=8, gpu=4))).allocations()
    assert [decided[job.key].workers for job in jobs] == asked


def test_what_learns_on_sees_what_users_ask_for_as_its_start_does() -> None:
    """In simulated clusters and in the slots of live versions; once it saw nothing of it."""
    start = imitate_recordings(
        of_mixed_sizes(20), replace(QUICK, supervised_updates=5), slot_seconds=60.0, seed=0, min_jobs=1
    ).checkpoint
    assert start.settings["usual_sizes"]
    model = start.settings["models"][0]

    def of_the_site(workload: Workload) -> Workload:
        speed = next(iter(workload.speeds.values()))
        jobs = tuple(replace(job, model=model, asked_size=Allocation(2, 0)) for job in workload.jobs)
        return replace(workload, speeds={model: speed}, jobs=jobs)

    workloads = [of_the_site(a_workload(seed, jobs=4)) for seed in range(2)]
    seen: list[ObservationEncoding] = []

    def recorded(encoding: ObservationEncoding) -> None:
        seen.append(encoding)

    settings = continuing(replace(SMALL, iterations=1, extras=True), start)
    reached = train(workloads, workloads, settings, seed=0, start=start, recorded=recorded)
    assert reached.settings["usual_sizes"] == start.settings["usual_sizes"]
    assert [encoding.usual_sizes for encoding in seen] == [ObservationEncoding.of(start.settings).usual_sizes]
    Dl2PaperPolicy(reached)
    broken = replace(start, settings={**start.settings, "usual_sizes": [[1, 0]] * 5})
    with pytest.raises(CheckpointError, match=r"lacks what training needs: .*usual_sizes: 1 sizes are needed"):
        train(workloads, workloads, settings, seed=0, start=broken)


def test_the_network_sees_what_users_ask_for_only_of_a_scheduler_that_gives_it() -> None:
    def imitated(recordings: list[Recording]) -> Checkpoint:
        settings = replace(QUICK, supervised_updates=1)
        return imitate_recordings(recordings, settings, slot_seconds=60.0, seed=0, min_jobs=1).checkpoint

    of_fixed_sizes = imitated(observed(20))
    assert (of_fixed_sizes.settings["usual_sizes"], of_fixed_sizes.settings["fixed_sizes"]) == ([[4, 0]], True)
    with pytest.raises(CheckpointError, match="fixed_sizes: usual_sizes are needed"):
        Dl2PaperPolicy(replace(of_fixed_sizes, settings={**of_fixed_sizes.settings, "usual_sizes": []}))
    made = imitated(slots(20))
    assert (made.settings["usual_sizes"], made.settings["fixed_sizes"]) == ([], False)
    new = ("usual_sizes", "fixed_sizes")
    old = {name: value for name, value in made.settings.items() if name not in new}
    Dl2PaperPolicy(replace(made, settings=old))
    for sizes in ([[1, 0]] * 5, [[-1, 0]], [[1]], [3]):
        with pytest.raises(CheckpointError, match="weights and settings do not belong together"):
            Dl2PaperPolicy(replace(made, settings={**old, "usual_sizes": sizes}))


@pytest.mark.parametrize(
    ("asked", "usual"),
    [
        ([("bert", 4), ("bert", 4), ("gpt", 2)], ()),
        ([("bert", 4), ("bert", 2), ("bert", 4)], ((4, 0), NOTHING, NOTHING)),
        ([("bert", 4), ("bert", 0)], ()),  # unknown, as long as it waits
        ([("bert", 4), ("gpt", 8), ("gpt", 1), ("gpt", 1), ("bert", 4)], ((4, 0), (1, 0), NOTHING)),
        ([], ()),
    ],
)
def test_usual_sizes_are_those_of_most_jobs_of_fixed_size(asked: list[tuple[str, int]], usual: object) -> None:
    jobs = [
        a_job(place, static=True, model=model, asked_size=Allocation(size, 0))
        for place, (model, size) in enumerate(asked)
    ]
    elastic = [a_job(10 + place, model="bert", asked_size=Allocation(3, 0)) for place in range(5)]
    assert usual_sizes([*jobs, *elastic, *jobs[:1] * 9], ["bert", "gpt", "vgg-16"]) == usual


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize(
    ("sizes", "whole"),
    [
        ([(4, 4), (0, 0)], True),  # FIFO: one has much while another waits
        ([(1, 1), (1, 1), (0, 0)], False),
        ([(2, 2), (1, 1)], False),  # nobody waits
        ([], False),
    ],
)
def test_who_serves_jobs_whole_is_seen_by_those_that_wait(
    sizes: list[tuple[int, int]], whole: bool, static: bool
) -> None:
    jobs = [a_job(place, static=static) for place in range(len(sizes))]
    reason = Reason(Constraint.SATISFIED, "")
    decided = tuple(JobDecision(job.key, Allocation(*size), reason) for job, size in zip(jobs, sizes, strict=True))
    recording = Recording(a_snapshot(jobs, cluster(1, cpu=8)), Decision("some", "1", decided), LoadBalance())
    assert grows_jobs_while_others_wait([recording]) is whole


OVERLOADED = "generator:poisson?nodes=1&jobs={}&rate=0.5&stretch=8&median_seconds=3000&most_gpus=4&slot_seconds=1200"


def recorded(policy: Policy, workload: Workload) -> list[Recording]:
    """Slots in which jobs may be paused, as in the papers."""
    listening = Listening(policy)
    replay(workload, listening, LoadBalance(), timer=time.perf_counter)
    return [Recording(snapshot, decision, LoadBalance()) for snapshot, decision in listening.heard]


@pytest.mark.parametrize("policy", [Drf(), Fifo(), Srtf()])
def test_a_scheduler_is_known_by_its_sizes_and_asked_while_running_jobs_keep_their_minimum(policy: Policy) -> None:
    workload = load_source(OVERLOADED.format(20), seed=1).workload
    slots = recorded(policy, workload)
    assert not any(each.snapshot.floors for each in slots)
    found = known_scheduler(slots)
    assert found is not None
    assert found.name == policy.name
    for actor in (found, Drf()):
        shown = demonstrations_with_floors(found, actor, [workload], LoadBalance(), silent)
        assert any(each.snapshot.floors for each in shown)
        for each in shown:
            asked = policy.decide(each.snapshot, each.packing(), np.random.default_rng(0))
            assert each.decision.allocations() == asked.allocations()
            assert all(each.decision.allocations()[job].covers(floor) for job, floor in each.snapshot.floors)


def test_fixed_sizes_are_of_no_known_scheduler() -> None:
    assert known_scheduler(observed(40)) is None


@pytest.mark.slow
def test_the_network_is_as_fast_as_srtf_under_overload_and_also_where_running_jobs_keep_their_minimum() -> None:
    workload = load_source(OVERLOADED.format(110), seed=0).workload
    settings_ = Settings(teacher="", supervised_updates=400)
    found = imitate_recordings(recorded(Srtf(), workload), settings_, slot_seconds=1200.0, seed=0, workloads=[workload])
    learned = Dl2PaperPolicy(found.checkpoint)
    tests = [load_source(OVERLOADED.format(40), seed=seed).workload for seed in range(1000, 1004)]
    for rules in (Rules(), Rules(floors=True)):
        own, teachers = (
            [replay(one, policy, LoadBalance(), rules=rules, timer=time.perf_counter).avg_jct for one in tests]
            for policy in (learned, Srtf())
        )
        assert sum(own) < 1.02 * sum(teachers), rules


def test_the_same_seed_gives_the_same_weights_and_another_others() -> None:
    given = slots(20)
    digests = [
        imitate_recordings(given, replace(QUICK, supervised_updates=5), slot_seconds=60.0, seed=seed, min_jobs=1)
        .checkpoint.digest
        for seed in (0, 0, 1)
    ]  # fmt: skip
    assert digests[0] == digests[1] != digests[2]


def test_learning_stops_when_it_gets_worse_on_held_out_slots_and_takes_the_best_weights() -> None:
    """Sizes that follow from nothing in the training slots, so that more updates learn them by heart."""
    rng = np.random.default_rng(5)
    at_random = []
    for number, each in enumerate(slots(30)):
        jobs = tuple(replace(entry, allocation=Allocation(int(rng.integers(1, 5)), 1)) for entry in each.decision.jobs)
        at_random.append(replace(each, decision=replace(each.decision, jobs=jobs)) if number < 18 else each)
    settings = replace(QUICK, supervised_updates=1000)
    found = imitate_recordings(at_random, settings, slot_seconds=60.0, seed=0, min_jobs=1)
    assert len(found.losses) < 500


def test_too_few_slots_are_told() -> None:
    with pytest.raises(
        TooFewSamples, match=r"2 slots with jobs are needed, the store has 1; record longer, or with a shorter"
    ):
        imitate_recordings(slots(1), QUICK, slot_seconds=60.0, seed=0, min_jobs=1)
    empty = Recording(a_snapshot([], cluster(1, cpu=1)), Decision("static", "1", ()), LoadBalance())
    with pytest.raises(TooFewSamples, match=r"the store has 0; record longer"):
        imitate_recordings([empty] * 3, QUICK, slot_seconds=60.0, seed=0, min_jobs=1)
    few = slots(9)
    count = len({job.key for each in few for job in each.snapshot.jobs})
    with pytest.raises(TooFewSamples, match=f"have {count} jobs, at least 20 are needed; record more, or lower --min-"):
        imitate_recordings(few, QUICK, slot_seconds=60.0, seed=0)


def beside_teacher(workloads: list[Workload], validation: list[Workload], settings: Settings) -> float:
    """Mean completion time of the imitating network, over that of its teacher."""
    made = train(workloads, validation, replace(settings, iterations=0), seed=0)
    (entry,) = [entry for entry in made.training["history"] if entry["phase"] == "imitation"]
    rules = preset(PresetName.DL2_PAPER)
    teacher = np.mean([replay_by_name(settings.teacher, one, rules).avg_jct for one in validation])
    return min(entry["greedy"], entry["sampled"]) / float(teacher)


@pytest.mark.parametrize("loss", list(SupervisedLoss))
def test_a_teacher_is_come_near_to_with_each_loss(loss: SupervisedLoss) -> None:
    settings = replace(QUICK, teacher="drf", supervised_loss=loss)
    assert beside_teacher(TRAINING, VALIDATION, settings) == pytest.approx(1.0, rel=0.1)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("teacher", ["drf", "fifo", "srtf", "tetris", "optimus"])
def test_every_teacher_is_come_near_to_within_a_hundred_updates(teacher: str) -> None:
    """On dl2d's own profiles, with too little room; the network may do better than its teacher."""
    workloads = [load_source("generator:dl2?nodes=24&jobs=40", seed=seed).workload for seed in range(12)]
    settings = Settings(teacher=teacher, supervised_updates=100, window=40)
    assert beside_teacher(workloads[:8], workloads[8:], settings) < 1.05


def test_learning_goes_on_from_a_checkpoint_with_new_output_layers() -> None:
    start = train(TRAINING, VALIDATION, replace(SMALL, iterations=0), seed=0)
    reached = train(TRAINING, VALIDATION, replace(SMALL, iterations=2), seed=1, start=start)
    phases = [entry["phase"] for entry in reached.training["history"]]
    assert phases[0] == "start"
    assert "imitation" not in phases


def test_what_types_and_resources_have_in_common_is_taken_over() -> None:
    start = train(TRAINING, VALIDATION, replace(SMALL, iterations=0), seed=0)
    old = ObservationEncoding.of(start.settings)
    assert old.models == ("servers", "workers")
    new = replace(old, models=("new", "workers", "servers"), resources=("cpu", "gpu"))
    for kind in NetworkKind:
        network = policy_network(kind, new.layout, 32)
        begin(network, torch.Generator().manual_seed(5))
        if kind is NetworkKind.DENSE:
            with pytest.raises(CheckpointError, match="another shape than the one to train"):
                adopt(network, start, new)
            continue
        adopt(network, start, new)
        first = network.named()["0"].weight.detach().numpy()
        was = start.weights["policy.0.weight"]
        assert (first[:, 2] == was[:, 0]).all()
        assert (first[:, 1] == was[:, 1]).all()
        assert first[:, 0] == pytest.approx(was[:, :2].mean(axis=1))
        assert (first[:, 3:-2] == was[:, 2:-1]).all()
        assert (first[:, -2] == was[:, -1]).all()
        assert (first[:, -1] == 0).all()
        # Without what only imitation needs to see.
        plain = replace(old, extras=False)
        network = policy_network(kind, plain.layout, 32)
        adopt(network, start, plain)
        first = network.named()["0"].weight.detach().numpy()
        assert (first == np.delete(was, range(old.width - 4, old.width), axis=1)).all()
        # With the sizes that users ask for, and without them again.
        asked = replace(old, usual_sizes=(Allocation(1, 0), Allocation(2, 0)))
        network = policy_network(kind, asked.layout, 32)
        adopt(network, start, asked)
        first = network.named()["0"].weight.detach().numpy()
        assert not first[:, [old.width - 4, old.width - 3]].any()
        network_without = policy_network(kind, old.layout, 32)
        with_asked = replace(
            start, weights=weights_of(network, "policy"), settings=described(asked, kind, sampled=False)
        )
        adopt(network_without, with_asked, old)
        assert (network_without.named()["0"].weight.detach().numpy() == was).all()


def test_a_start_that_sees_other_things_is_refused() -> None:
    start = train(TRAINING, VALIDATION, replace(SMALL, iterations=0), seed=0)
    dense = replace(SMALL, network=NetworkKind.DENSE, iterations=0)
    with pytest.raises(CheckpointError, match="sees 6 jobs at once, and window is 7"):
        train(
            TRAINING, VALIDATION, replace(dense, window=7), seed=0, start=train(TRAINING, VALIDATION, dense, seed=0)
        )  # fmt: skip
    with pytest.raises(CheckpointError, match="another shape than the one to train"):
        train(TRAINING, VALIDATION, replace(SMALL, hidden=16), seed=0, start=start)


def test_a_single_job_and_more_jobs_than_the_window_are_learned_from() -> None:
    few = [a_workload(seed, jobs=1) for seed in range(3)]
    train(few, few, replace(SMALL, iterations=1, samples=64, minibatch=16), seed=0)
    many = [a_workload(seed, jobs=20, nodes=4) for seed in range(3)]
    made = train(many, many, replace(SMALL, window=2, iterations=1), seed=0)
    Dl2PaperPolicy(made)
