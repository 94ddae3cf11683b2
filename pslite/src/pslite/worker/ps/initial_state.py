"""The state with which a job begins, and the weights of blocks that are added to it later."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from pslite.errors import UsageError
from pslite.job.job_spec import JobSpec, differences
from pslite.net.messages import Message, Restored
from pslite.net.tensor_frames import INIT, RESTORE, Header, bytes_of
from pslite.numeric.gradient_sums import Array
from pslite.storage.checkpoint_files import Checkpoint, to_resume
from pslite.worker.progress_reports import Progress
from pslite.worker.ps.data_connections import DataPlane
from pslite.worker.ps.known_plans import PlanTable, PreparedPlan
from pslite.worker.ps.model_buffers import ModelBuffers
from pslite.worker.training_session import StartState


@dataclass(eq=False)
class InitialState:
    """Sends the first weights of a job, or of blocks that are added, if this worker is the one to do so."""

    _model: ModelBuffers
    _plans: PlanTable
    _progress: Progress
    _plane: DataPlane
    #: takes messages for the coordinator
    _send: Callable[[Message], None]
    #: takes lines for the user
    _say: Callable[[str], None]
    #: what the job begins with instead of the chief's own weights
    given: StartState | Checkpoint | None = None
    #: the last description that this worker has asked for, and the weights of the segments that it adds
    asked: tuple[JobSpec, Mapping[int, Array]] | None = None
    #: the last plan to whose added blocks this worker has sent weights
    _began_added: int = 0

    def begin(self, plan: int, checkpoint: int) -> None:
        """Begin the job as its chief: with this worker's weights, or with those of a checkpoint."""
        progress = self._progress
        prepared = self._plans.begin(plan)
        assert prepared is not None
        self.given = found = self.given or to_resume(self._model.spec, checkpoint)
        progress.awaited = 0
        if found is not None:
            progress.awaited = found.version
            self._say(f"the job goes on from version {found.version}: {found.place}")
            self._send(Restored(version=found.version))
        progress.began = True
        self.send_blocks(progress.missing)

    def send_blocks(self, numbers: Collection[int]) -> None:
        """Send servers their blocks; one without a connection, or its successor, is sent what it lacks later."""
        plan, model = self._plans.current, self._model
        assert plan is not None
        if self.given is None:
            for number in numbers:
                view = model.arriving(0).views[number]
                self._plane.send(plan.owner(number).task, Header(INIT, plan.number, number, 0, view.nbytes, 0, 0), view)
            return
        version = self._progress.awaited
        for block, state in self.given.states():
            model.arriving(version).views[block.number][:] = bytes_of(state[0])
            if block.number in numbers:
                whole = bytes_of(state)
                header = Header(RESTORE, plan.number, block.number, 0, whole.nbytes, version, version)
                self._plane.send(plan.owner(block.number).task, header, whole)

    def expect(self, added: Collection[int]) -> None:
        """Wait for these blocks too, if this worker is about to begin under the plan that adds them."""
        if not self._progress.entered:
            self._progress.missing |= set(added)

    def begin_added(self, coming: PreparedPlan, again: Collection[int] = ()) -> None:
        """Send servers the weights of blocks that the coming plan adds, if this is the worker to do so.

        It has the next version of all other blocks then, so that every worker waits for these.  `again` are blocks
        whose server may not have got them.
        """
        plan, missing = coming.plan, self._progress.missing
        done = self._began_added == plan.number
        if (done and not again) or not missing <= set(coming.added):
            return
        if not missing or coming.first_stayer(self._plans.gone) != self._plans.task:
            return
        self._began_added = plan.number
        model, version = self._model, self._progress.awaited
        spec, weights = self.asked or (model.spec, {})
        if not (spec.extends(model.known_spec) and model.known_spec.extends(spec)):
            raise UsageError(
                "the first worker has left the job while it gave further keys their values, and the next one does not "
                "give the same keys theirs: start the job again ("
                + "; ".join(differences(model.known_spec, spec)[:10])
                + ")"
            )
        for number in missing.intersection(again) if done else sorted(missing):
            block = model.known_blocks[number]
            link = self._plane.links.get(plan.owner(number).task)
            view = bytes_of(weights[block.segment][block.offset : block.offset + block.size])
            if link is not None:
                link.send(Header(INIT, plan.number, number, 0, view.nbytes, version, version), view)
                self._plane.flush(link)
