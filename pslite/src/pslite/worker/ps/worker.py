"""The session of a worker whose model lies on parameter servers.

The script's thread computes and exchanges; a second thread keeps the control connection, answers heartbeats while the
first one computes, and opens what a coming plan needs.  Taking a new plan into use is then a matter of looking it up.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Unpack

from pslite.errors import UsageError
from pslite.fault_points import FaultPoint
from pslite.job.job_spec import JobSpec
from pslite.job.sample_assignment import ASK_AGAIN_SECONDS, SampleRange, Seen
from pslite.job.weight_blocks import Block
from pslite.net.authentication import Identity
from pslite.net.messages import (
    AskSamples,
    AtBarrier,
    Describe,
    Digests,
    Drained,
    Finished,
    FromCoordinator,
    Severed,
)
from pslite.numeric.gradient_sums import Array, Bundle, Contribution, Supply
from pslite.storage.checkpoint_files import Saver
from pslite.worker.control_connection import MemberOptions, Membership
from pslite.worker.ps.control_events import ControlEvents
from pslite.worker.ps.data_connections import VERDICT_SECONDS, DataPlane
from pslite.worker.ps.frame_receiver import FrameReceiver
from pslite.worker.ps.gradient_sender import GradientSender
from pslite.worker.ps.initial_state import InitialState
from pslite.worker.ps.known_plans import PlanTable, PreparedPlan
from pslite.worker.ps.model_buffers import ModelBuffers
from pslite.worker.ps.recovery import Recovery
from pslite.worker.ps.state_fetch import StateFetch
from pslite.worker.training_session import Share, StartState


class Worker(Membership):
    """One worker of an elastic job; see `pslite.worker.training_session.Session`.

    Parameters
    ----------
    spec
        the job as this worker's script describes it; must equal the other workers'.  None: `describe` gives it later.

    The others are those of `Membership`.

    """

    def __init__(
        self, identity: Identity, coordinator: str, spec: JobSpec | None, **options: Unpack[MemberOptions]
    ) -> None:
        super().__init__(identity, coordinator, **options)
        self.share: Share
        #: whether the job had begun when this worker came
        self.joined_late = False
        self._plans = PlanTable(identity.task)
        self._events = ControlEvents(self._plans, self._send, self._faults)
        self._plane = DataPlane(identity, self._plans, self._events.put, self._faults)
        self._events.plane = self._plane
        # the parts that need the job's description
        self._model: ModelBuffers
        self._sender: GradientSender
        self._initial: InitialState
        self._fetch: StateFetch
        self._saver: Saver | None = None
        if spec is not None:
            self.describe(spec)
        #: tree nodes that the next call of `exchange` has to bring
        self._due: tuple[int, ...] = ()
        self._barriers = 0
        self._questions = 0
        #: whether this worker writes files; None until the end
        self._writes_files: bool | None = None
        #: whether the script waits for something that can be done when the last version is there
        self._patient = False
        #: whether the next push is the first under its plan
        self._report_first_push = False

    # --- what there is --------------------------------------------------------------------------------------------

    @property
    def spec(self) -> JobSpec:
        """The job."""
        return self._model.spec

    @property
    def blocks(self) -> tuple[Block, ...]:
        """Its blocks."""
        return self._model.blocks

    @property
    def weights(self) -> Bundle:
        """The weights of `version`."""
        return self._model.weights

    @property
    def supply(self) -> Supply:
        """Where memory for gradients comes from."""
        return self._model.supply

    @property
    def next_weights(self) -> Bundle:
        """Where the next version's weights will arrive."""
        return self._model.arriving(self.version + 1)

    @property
    def memory_is_shared(self) -> bool:
        """Whether servers look into gradients that lie in shared memory."""
        return any(link.local for link in self._plane.links.values())

    @property
    def led(self) -> frozenset[int]:
        """Segments of which the first worker had a gradient in the last step."""
        return frozenset(self._progress.led)

    @property
    def is_chief(self) -> bool:
        """Whether this worker is the first of the plan in force that is alive; does not change after the end."""
        if self._writes_files is not None:
            return self._writes_files
        return self._plans.workers()[:1] == [self._identity.task]

    @property
    def rank_and_size(self) -> tuple[int, int]:
        """Rank and number of workers, by the plan in force; before the first plan by the tasks' numbers."""
        if self._plans.current is None:
            return self._events.seat or (0, 1)
        there = self._plans.workers()
        return there.index(self._identity.task), len(there)

    # --- joining and leaving --------------------------------------------------------------------------------------

    def describe(self, spec: JobSpec) -> None:
        """Say what is trained, and allocate memory for it."""
        plans, progress, plane, faults = self._plans, self._progress, self._plane, self._faults
        self._model = model = ModelBuffers(spec)
        self._sender = sender = GradientSender(model, plans, progress, plane)
        self._fetch = fetch = StateFetch(model, plans, progress, plane)
        self._initial = initial = InitialState(
            self._identity.task, model, plans, progress, plane, send=self._send, say=self._say
        )
        plane.receiver = FrameReceiver(model, plans, progress, plane, fetch, initial, faults)
        self._events.model, self._events.initial = model, initial
        self._events.recovery = Recovery(plans, progress, plane, sender, initial, fetch, faults)
        if model.replica is not None and spec.checkpoint:
            self._saver = self._saver_of(spec)
        self.share = Share(spec, 1, 0)

    def attach(self) -> None:
        """Join the job before it is known what to train; returns when `rank_and_size` is valid.

        Raises what `start` raises.
        """
        self._connect(None)
        self._pump(lambda: self._events.seat is not None)

    def start(self) -> None:
        """Join the job; returns when the first weights are here.

        Raises
        ------
        AuthenticationError
            the coordinator refused this worker.
        JobFailed
            the job failed meanwhile.
        Drained
            this worker is not needed.

        """
        if self._client is None:
            self._connect(self.spec)
        else:
            self._send(Describe(spec=self.spec))
        progress = self._progress
        progress.missing = set(range(len(self.blocks)))
        self._pump(lambda: not progress.missing)
        prepared = self._plans.prepared
        assert prepared is not None
        self._model.show(progress.awaited)
        self.joined_late = prepared.previous is not None
        self._enter(prepared, progress.awaited)
        self._computes = True
        self._meter.begin()

    def _connect(self, spec: JobSpec | None) -> None:
        self._open()
        self._plane.identity = self._identity
        self._join(spec)

    def extend(self, spec: JobSpec, weights: Mapping[int, Array]) -> None:
        """Ask for further segments, with the first worker's weights; steps go on until `spec` has them."""
        self._initial.asked = spec, weights
        self._send(Describe(spec=spec))

    def start_from(self, given: StartState) -> None:
        """Have the job begin with that state, if this is its first worker; call it before `start`."""
        self._initial.given = given

    def finish(self) -> None:
        """Say that the last version is reached, and wait until everybody has it: others may need what this worker has.

        The workers of an open job do not wait for each other: it has no common last version.  The control thread
        lives on until the script ends.
        """
        self._faults.reached(FaultPoint.FINISH)
        self._report_progress(force=True)
        chief = self.spec.open and self.is_chief
        if self._model.replica is not None and (chief or not self.spec.open):
            self._send(Digests(blocks=self._model.replica.digests()))
        self._send(Finished(version=self.version, suspension_ms=self._suspensions, chief=chief))
        if not self.spec.open:
            self._pump(lambda: bool(self._events.chief))
            chief = self._events.chief == self._identity.task
        self._writes_files = chief
        self._plane.stop_reopening()
        self._events.discard()
        if self._saver is not None:
            self._saver.close()

    def sever(self) -> None:
        """Cut every connection at once, as the death of this process would (for tests; from any thread)."""
        super().sever()
        self._plane.sever()

    def _close(self) -> None:
        self._events.close()
        self._plane.close()

    def _may_leave(self) -> bool:
        return self._last < 0 or (self._progress.awaited > self._last and not self._patient)

    # --- waiting --------------------------------------------------------------------------------------------------

    def barrier(self) -> None:
        """Wait until every worker of the job does.

        Where others train meanwhile, they do this worker's part; it then goes on from their version and their plan.
        """
        self._barriers += 1
        self._send(AtBarrier())
        self._await(lambda: self._events.barriers_open >= self._barriers)
        if self._events.missed_steps:
            self._catch_up()
        elif self._plans.current is not None:
            self._set_share()  # the others do their part themselves again

    def ask_samples(self, dataset: str, samples: int, seen: Seen, count: int) -> SampleRange:
        """Return up to `count` samples that no other worker has in this epoch; none if the epoch is over."""
        self._questions += 1
        question = AskSamples(
            number=self._questions, dataset=dataset, samples=samples, count=count, version=max(0, self.version),
            seen=seen,
        )  # fmt: skip
        asked, events = 0.0, self._events

        def answered() -> bool:
            nonlocal asked
            if events.samples is not None and events.samples.number == question.number:
                return True
            if time.monotonic() - asked > ASK_AGAIN_SECONDS:
                asked = time.monotonic()
                self._send(question)
            return False

        self._pump(answered)
        assert events.samples is not None
        return events.samples.samples

    def _catch_up(self) -> None:
        """Go on from the weights that the servers have: others have trained while this worker was away."""
        progress = self._progress
        progress.expect_newest(len(self.blocks))
        self._events.recovery.ask_for_missing()
        self._await(lambda: not progress.missing)
        later = self._plans.later(min(progress.arrived.values())[1])
        if later is not None and len(later.plan.owners) > len(self.blocks):
            progress.missing = set(range(len(self.blocks), len(later.plan.owners)))
            self._events.recovery.ask_for_missing()
            self._await(lambda: not progress.missing)
        progress.any_version = False
        version, number = min(progress.arrived.values())
        progress.version = progress.awaited = version
        self._model.show(version)
        self._skip_to(self._plans.later(number))
        behind = {block for block, (here, _) in progress.arrived.items() if here == version}
        if len(behind) < len(self.blocks):
            self._complete_torn_step(behind)
        else:
            self._skip_to(self._plans.following(version))

    def _skip_to(self, prepared: PreparedPlan | None) -> None:
        """Enter a plan that is in force already, if there is one, or leave the job if this worker is not in it."""
        if prepared is not None:
            self._plans.next = None
            self._leave_unless_member(prepared)
            self._enter(prepared, self.version)
        self._set_share()

    def _complete_torn_step(self, behind: set[int]) -> None:
        """Complete a step of which the last worker that trained pushed some blocks before it died: of the others, 0."""
        progress, zeros = self._progress, self.supply.take()
        progress.missing, progress.awaited = behind, self.version + 1
        self._begin_push()
        while progress.missing:
            undone = tuple(node for node in self._due if node not in self._sender.nodes) or self._left_undone()
            self._sender.push([Contribution(node, zeros) for node in undone])
            self._pump(lambda: not progress.missing or bool(self._left_undone()))
        self._complete_step()

    def fetch(self) -> list[Array]:
        """Return weights and optimizer state of every block at the present version, as the servers have them.

        Call it between steps: servers cannot go on to the next version without this worker's push.  Each array
        has shape (1 + slots, size).
        """
        if self._model.replica is not None:
            return [state.copy() for state in self._model.replica.states]
        states = self._fetch.begin(range(len(self.blocks)))
        self._await(lambda: self._fetch.done)
        return states

    def updates(self, blocks: Sequence[int]) -> list[int]:
        """Return how many steps had a gradient of each of some blocks. Call it between steps."""
        if self._model.replica is not None:
            return self._model.replica.updates(blocks, self.version)
        self._fetch.begin(blocks)
        self._await(lambda: self._fetch.done)
        return [self.version - self._fetch.steps_without_gradient[number] for number in blocks]

    def _await(self, done: Callable[[], bool]) -> None:
        """Wait for what others of an open job may want too when its first worker has ended."""
        self._patient = True
        try:
            self._pump(done)
        finally:
            self._patient = False

    def _pump(self, done: Callable[[], bool]) -> None:
        computed, self._computes = self._computes, False
        self._plane.pump(done, self._check)
        self._computes = computed

    def _waits_for(self) -> tuple[str, ...]:
        plans, progress = self._plans, self._progress
        with contextlib.suppress(RuntimeError):  # they are coming in
            missing = progress.missing if plans.current is not None else ()
            return tuple({plans.owner_at(number, progress.awaited) for number in missing} - {""})
        return ()

    def _check(self) -> None:
        """Look at what other threads have to say."""
        super()._check()
        self._events.take_all()
        client = self._client
        if client is not None:
            for server, reason in self._plane.overdue(lambda since: client.late(since, VERDICT_SECONDS)):
                self._send(Severed(task=server, reason=reason))

    def _handle_other(self, message: FromCoordinator) -> None:
        self._events.hear(message)

    def _wake(self) -> None:
        self._plane.wake()

    # --- a step ---------------------------------------------------------------------------------------------------

    def exchange(self, contributions: Sequence[Contribution], loss: float, samples: int) -> tuple[int, ...]:
        """Push this step's gradient sums and wait for the next version.

        Parameters
        ----------
        contributions
            one for each node of `share.nodes`; in a further call for the same step, of those that the last returned.
        loss
            sum of the losses of this worker's samples.
        samples
            their number.

        Returns
        -------
        Nodes that a worker has left undone which is gone: to be computed and given to another call.  None where the
        version is complete.

        Raises
        ------
        Drained
            this was the worker's last step.
        JobFailed
            the job failed.

        """
        if {contribution.node for contribution in contributions} != set(self._due):
            raise UsageError(
                f"the gradients given for step {self.version} must be those of the tree nodes {self._due}, each once"
            )
        self._meter.end()
        self._meter.add(self.share.amount(self._due))
        self._suspension.start()
        self._events.take_all()
        self._suspension.stop()
        self._begin_push()
        first = not self._sender.nodes
        self._sender.push(contributions)
        self._note_progress(loss, samples)
        self._events.take_all()
        following = self._plans.following(self.version + 1)
        added = following.added if following is not None else ()
        if first:
            self._progress.expect(self.version + 1, len(self.blocks) + len(added))
        if following is not None and not self._left_undone():
            self._leave_unless_member(following)
        missing = self._progress.missing

        def done() -> bool:
            coming = self._plans.following(self.version + 1) if added else None
            if coming is not None:
                self._initial.begin_added(coming)
            # What was queued is sent before its arrays are used for something else.
            return not missing or bool(self._left_undone() and not self._plane.unsent)

        self._pump(done)
        if missing:
            self._due = self._left_undone()
        else:
            self._complete_step()
        self._meter.begin()
        return self._due if missing else ()

    def _left_undone(self) -> tuple[int, ...]:
        """Return the nodes of dead workers that this one computes in this step and has not pushed yet."""
        return tuple(node for node in self._plans.inherited if node not in self._sender.nodes)

    def _complete_step(self) -> None:
        """Take the next version into use: all blocks of it are here."""
        model, before = self._model, self.version
        model.advance(before)
        self._progress.version += 1
        if model.replica is not None and self._saver is not None and self.is_chief:
            for block, state in zip(model.blocks, model.replica.states, strict=True):
                self._saver.take(block.number, self.version, state)
        self._sender.begin_step()
        self._note_step()
        following = self._plans.following(self.version)
        if following is None:
            self._set_share()
        else:
            self._plans.next = None
            self._enter(following, self.version)

    def _set_share(self) -> None:
        """Set what is computed in the coming step: this worker's own part, and that of dead ones."""
        plan = self._plans.current
        assert plan is not None
        self.share = Share(self.spec, len(plan.workers), plan.worker_index(self._identity.task), plan.shares)
        self.share.nodes += self._plans.inherited
        self._due = self.share.nodes

    def _enter(self, prepared: PreparedPlan, version: int) -> None:
        """Take a plan into use: it is in force from `version` on."""
        plan = prepared.plan
        self._faults.reached(FaultPoint.ENTER_PLAN, plan)
        self._progress.entered = True
        self._model.enter(len(plan.owners))
        if prepared.added:
            self._initial.asked = None  # its memory is freed
        self._was_member = self._plans.enter(prepared, version)
        self._progress.version = version
        self._set_share()
        self._report_first_push = True
        self._initial.send_to_newcomers()
        if plan.stop and self._was_member:
            # The way of the DL2 paper, for comparison: stand still at the clock until everything has moved.
            self._suspension.start()
            self._pump(lambda: self._events.resumed >= plan.number)
            self._suspension.stop()

    def _begin_push(self) -> None:
        """Report the suspension if this is the first push under a plan."""
        plan = self._plans.current
        assert plan is not None
        if self._report_first_push:
            self._report_first_push = False
            self._report_suspension(plan.number)
        self._suspension.total_ms = 0.0

    def _leave_unless_member(self, following: PreparedPlan) -> None:
        """Leave the job with this step if the next plan is without this worker; does not return then."""
        if following.plan.worker_index(self._identity.task) < 0:
            self._pump(lambda: not self._plane.unsent)
            self._plane.leaving = True
            self._report_progress(force=True)
            self._send(Drained(plan=following.plan.number))
            self._pump(lambda: False)
