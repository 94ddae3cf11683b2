"""The steps of a worker: pushing gradients, waiting for the next version, and taking new plans into use in between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pslite.errors import UsageError
from pslite.fault_points import FaultPoint, FaultPoints
from pslite.numeric.gradient_sums import Contribution
from pslite.worker.progress_reports import Progress, ProgressReports
from pslite.worker.ps.events_from_other_threads import ControlEvents
from pslite.worker.ps.gradient_sender import GradientSender
from pslite.worker.ps.known_plans import PlanTable, PreparedPlan
from pslite.worker.ps.model_buffers import ModelBuffers
from pslite.worker.training_session import Share


@dataclass(eq=False)
class StepExchange:
    """What the script's thread exchanges with servers from version to version, once the first weights are here."""

    _model: ModelBuffers
    _plans: PlanTable
    _progress: Progress
    _sender: GradientSender
    _events: ControlEvents
    _reports: ProgressReports
    _faults: FaultPoints
    #: this worker's part of the coming step; set with the first plan
    share: Share = field(init=False)
    #: tree nodes that the next call of `exchange` has to bring
    _due: tuple[int, ...] = ()
    #: whether the next push is the first under its plan
    _report_first_push: bool = False

    def exchange(self, contributions: Sequence[Contribution], loss: float, samples: int) -> tuple[int, ...]:
        """Push this step's gradient sums and wait for the next version; see `Worker.exchange`."""
        progress, reports, events = self._progress, self._reports, self._events
        if {contribution.node for contribution in contributions} != set(self._due):
            raise UsageError(
                f"the gradients given for step {progress.version} must be those of the tree nodes {self._due}, "
                "each once"
            )
        reports.meter.end()
        reports.meter.add(self.share.amount(self._due))
        reports.suspension.start()
        events.take_all()
        reports.suspension.stop()
        self._begin_push()
        first = not self._sender.nodes
        self._sender.push(contributions)
        reports.add_loss(loss, samples)
        events.take_all()
        following = self._plans.following(progress.version + 1)
        added = following.added if following is not None else ()
        if first:
            progress.expect(progress.version + 1, len(self._model.blocks) + len(added))
        if following is not None and not self._left_undone():
            self._leave_unless_member(following)
        missing = progress.missing

        def done() -> bool:
            coming = self._plans.following(progress.version + 1) if added else None
            if coming is not None:
                events.initial.begin_added(coming)
            # What was queued is sent before its arrays are used for something else.
            return not missing or bool(self._left_undone() and not events.plane.unsent)

        events.wait(done)
        if missing:
            self._due = self._left_undone()
        else:
            self._complete_step()
        reports.meter.begin()
        return self._due if missing else ()

    def catch_up(self) -> None:
        """Go on from the weights that the servers have: others have trained while this worker was away."""
        progress, blocks, recovery = self._progress, self._model.blocks, self._events.recovery
        progress.expect_newest(len(blocks))
        recovery.ask_for_missing()
        self._events.wait(lambda: not progress.missing, patient=True)
        later = self._plans.later(min(progress.arrived.values())[1])
        if later is not None and len(later.plan.owners) > len(blocks):
            progress.missing = set(range(len(blocks), len(later.plan.owners)))
            recovery.ask_for_missing()
            self._events.wait(lambda: not progress.missing, patient=True)
        progress.any_version = False
        version, number = min(progress.arrived.values())
        progress.version = progress.awaited = version
        self._model.show(version)
        self._skip_to(self._plans.later(number))
        behind = {block for block, (here, _) in progress.arrived.items() if here == version}
        if len(behind) < len(self._model.blocks):
            self._complete_torn_step(behind)
        else:
            self._skip_to(self._plans.following(version))

    def enter(self, prepared: PreparedPlan, version: int) -> None:
        """Take a plan into use: it is in force from `version` on."""
        plan = prepared.plan
        self._faults.reached(FaultPoint.ENTER_PLAN, plan)
        self._progress.entered = True
        self._model.enter(len(plan.owners))
        if prepared.added:
            self._events.initial.asked = None  # its memory is freed
        self._reports.was_member = self._plans.enter(prepared, version)
        self._progress.version = version
        self.set_share()
        self._report_first_push = True

    def set_share(self) -> None:
        """Set what is computed in the coming step: this worker's own part, and that of dead ones."""
        plan = self._plans.current
        assert plan is not None
        self.share = Share(self._model.spec, len(plan.workers), plan.worker_index(self._plans.task), plan.shares)
        self.share.nodes += self._plans.inherited
        self._due = self.share.nodes

    def _left_undone(self) -> tuple[int, ...]:
        """Return the nodes of dead workers that this one computes in this step and has not pushed yet."""
        return tuple(node for node in self._plans.inherited if node not in self._sender.nodes)

    def _begin_push(self) -> None:
        """Report the suspension if this is the first push under a plan."""
        plan = self._plans.current
        assert plan is not None
        if self._report_first_push:
            self._report_first_push = False
            self._reports.first_push(plan.number)
        self._reports.suspension.total_ms = 0.0

    def _complete_step(self) -> None:
        """Take the next version into use: all blocks of it are here."""
        progress = self._progress
        progress.version += 1
        self._model.show(progress.version)
        self._sender.begin_step()
        self._reports.step_ended()
        following = self._plans.following(progress.version)
        if following is None:
            self.set_share()
        else:
            self._plans.next = None
            self.enter(following, progress.version)

    def _complete_torn_step(self, behind: set[int]) -> None:
        """Complete a step of which the last worker that trained pushed some blocks before it died: of the others, 0."""
        progress, zeros = self._progress, self._model.supply.take()
        progress.missing, progress.awaited = behind, progress.version + 1
        self._begin_push()
        while progress.missing:
            undone = tuple(node for node in self._due if node not in self._sender.nodes) or self._left_undone()
            self._sender.push([Contribution(node, zeros) for node in undone])
            self._events.wait(lambda: not progress.missing or bool(self._left_undone()))
        self._complete_step()

    def _skip_to(self, prepared: PreparedPlan | None) -> None:
        """Enter a plan that is in force already, if there is one, or leave the job if this worker is not in it."""
        if prepared is not None:
            self._plans.next = None
            self._leave_unless_member(prepared)
            self.enter(prepared, self._progress.version)
        self.set_share()

    def _leave_unless_member(self, following: PreparedPlan) -> None:
        """Leave the job with this step if the next plan is without this worker; does not return then."""
        if following.plan.worker_index(self._plans.task) < 0:
            plane = self._events.plane
            self._events.wait(lambda: not plane.unsent)
            plane.leaving = True
            self._reports.drained(following.plan.number)
            self._events.wait(lambda: False)
