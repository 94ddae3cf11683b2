"""The session of a worker whose model lies on parameter servers.

The script's thread computes and exchanges; a second thread keeps the control connection, answers heartbeats while the
first one computes, and opens what a coming plan needs.  Taking a new plan into use is then a matter of looking it up.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Unpack

from pslite.fault_points import FaultPoint
from pslite.job.job_spec import JobSpec
from pslite.job.sample_assignment import ASK_AGAIN_SECONDS, SampleRange, Seen
from pslite.job.weight_blocks import Block
from pslite.net.authentication import Identity
from pslite.net.messages import AskSamples, AtBarrier, Describe, Severed
from pslite.numeric.gradient_sums import Array, Bundle, Contribution, Supply
from pslite.worker.control_connection import MemberOptions, Membership
from pslite.worker.ps.data_connections import DataPlane
from pslite.worker.ps.events_from_other_threads import ControlEvents
from pslite.worker.ps.frame_receiver import FrameReceiver
from pslite.worker.ps.gradient_sender import GradientSender
from pslite.worker.ps.initial_state import InitialState
from pslite.worker.ps.known_plans import PlanTable
from pslite.worker.ps.model_buffers import ModelBuffers
from pslite.worker.ps.recovery_from_server_loss import RECONNECT_SECONDS, Recovery
from pslite.worker.ps.state_fetch import StateFetch
from pslite.worker.ps.step_exchange import StepExchange
from pslite.worker.training_session import Share, StartState


class Worker(Membership):
    """One worker of an elastic job.

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
        #: whether the job had begun when this worker came
        self.joined_late = False
        self._plans = PlanTable(identity.task)
        self._events = ControlEvents(self._plans, self._progress, self._send, self._check, self._faults)
        self._handler = self._events
        self._plane = DataPlane(identity, self._plans, self._events.put, self._faults)
        self._events.plane = self._plane
        # the parts that need the job's description
        self._model: ModelBuffers
        self._fetch: StateFetch
        self._steps: StepExchange
        if spec is not None:
            self.describe(spec)
        self._barriers = 0
        self._questions = 0
        #: whether this worker writes files; None until the end
        self._writes_files: bool | None = None

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
        """Filled by the adapter with initial weights before `start`; holds the weights of `version` afterwards.

        Returns a different bundle after each step; the old one stays unchanged until the new version is complete.  In
        an open job it is always the same one: from the first push of a step on, new weights replace the old ones as
        they arrive.
        """
        return self._model.weights

    @property
    def share(self) -> Share:
        """What this worker does in the next step."""
        return self._steps.share

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
        """Whether servers look into gradients that lie in shared memory: those need not be sent."""
        return any(link.local for link in self._plane.links.values())

    @property
    def first_worker_segments(self) -> frozenset[int]:
        """Segments of which the first worker had a gradient in the last step, as far as that is known."""
        return frozenset(self._progress.first_worker_segments)

    @property
    def is_chief(self) -> bool:
        """Whether this worker is the first of the plan in force that is alive; does not change after the end."""
        return self._plans.is_first if self._writes_files is None else self._writes_files

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
        sender = GradientSender(model, plans, progress, plane)
        self._fetch = fetch = StateFetch(model, plans, progress, plane)
        initial = InitialState(model, plans, progress, plane, self._send, self._say)
        plane.receiver = FrameReceiver(model, plans, progress, plane, fetch, faults)
        self._events.model, self._events.initial = model, initial
        self._events.recovery = Recovery(plans, progress, plane, sender, initial, fetch, faults)
        self._steps = StepExchange(model, plans, progress, sender, self._events, self._reports, faults)

    def attach(self) -> None:
        """Join the job before it is known what to train; returns when `rank_and_size` is valid.

        Raises what `start` raises.
        """
        self._connect(None)
        self._events.wait(lambda: self._events.seat is not None)

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
        self._events.wait(lambda: not progress.missing)
        prepared = self._plans.prepared
        assert prepared is not None
        self._model.show(progress.awaited)
        self.joined_late = prepared.previous is not None
        self._steps.enter(prepared, progress.awaited)
        progress.computes = True
        self._reports.meter.begin()

    def _connect(self, spec: JobSpec | None) -> None:
        self._open()
        self._plane.identity = self._identity
        self._join(spec)

    def extend(self, spec: JobSpec, weights: Mapping[int, Array]) -> None:
        """Ask for further segments after the first step: `spec` begins with the present one.

        `weights` has the added segments' weights by their numbers, shape (size,); the first worker's are used.  All
        workers go on with steps until `spec` and `blocks` have the segments; `supply` is another one then.
        """
        self._events.initial.asked = spec, weights
        self._send(Describe(spec=spec))

    def start_from(self, given: StartState) -> None:
        """Have the job begin with that state, if this is its first worker; call it before `start`."""
        self._events.initial.given = given

    def finish(self) -> None:
        """Say that the last version is reached, and wait until everybody has it: others may need what this worker has.

        The workers of an open job do not wait for each other: it has no common last version.  The control thread
        lives on until the script ends.
        """
        self._faults.reached(FaultPoint.FINISH)
        self._reports.report(force=True)
        chief = self.spec.open and self.is_chief
        self._reports.finished(chief=chief)
        if not self.spec.open:
            self._events.wait(lambda: bool(self._events.chief))
            chief = self._events.chief == self._identity.task
        self._writes_files = chief
        self._plane.stop_reopening()
        self._events.discard()

    def _close(self) -> None:
        self._events.close()

    # --- waiting --------------------------------------------------------------------------------------------------

    def barrier(self) -> None:
        """Wait until every worker of the job does.

        Where others train meanwhile, they do this worker's part; it then goes on from their version and their plan.
        """
        self._barriers += 1
        self._send(AtBarrier())
        self._events.wait(lambda: self._events.barriers_open >= self._barriers, patient=True)
        if self._events.missed_steps:
            self._steps.catch_up()
        elif self._plans.current is not None:
            self._steps.set_share()  # the others do their part themselves again

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

        events.wait(answered)
        assert events.samples is not None
        return events.samples.samples

    def fetch(self) -> list[Array]:
        """Return weights and optimizer state of every block at the present version, as the servers have them.

        Call it between steps: servers cannot go on to the next version without this worker's push.  Each array
        has shape (1 + slots, size).
        """
        states = self._fetch.begin(range(len(self.blocks)))
        self._events.wait(lambda: self._fetch.done, patient=True)
        return states

    def updates(self, blocks: Sequence[int]) -> list[int]:
        """Return how many steps had a gradient of each of some blocks. Call it between steps."""
        self._fetch.begin(blocks)
        self._events.wait(lambda: self._fetch.done, patient=True)
        return [self.version - self._fetch.uncounted_steps[number] for number in blocks]

    def _check(self) -> None:
        """Handle what other threads have queued."""
        super()._check()
        self._events.take_all()
        client = self._client
        if client is not None:
            for server, reason in self._plane.overdue(lambda since: client.late(since, RECONNECT_SECONDS)):
                self._send(Severed(task=server, reason=reason))

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
        return self._steps.exchange(contributions, loss, samples)
