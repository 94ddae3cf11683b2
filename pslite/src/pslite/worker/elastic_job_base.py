"""Base class of the `ElasticJob` of each framework: the loop over batches, and the exchange after each step.

An adapter says how its framework's tensors lie in the flat arrays (`Layout`), how it draws random numbers and how it
makes a batch of samples; everything that fixes the result of a job is here, and which session a process has.
"""

from __future__ import annotations

import math
import os
import random
import warnings
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, TypedDict, Unpack

import numpy as np
from numpy.typing import NDArray

from pslite.errors import SpecError, UsageError
from pslite.job.environment_passed_to_tasks import own_environment
from pslite.job.job_spec import Descent, DType, JobSpec, Mean, Part, Segment, block_bytes_for
from pslite.job.printable_text import tell
from pslite.job.sample_order import permutation, stream
from pslite.job.shard_and_block_assignment import DEFAULT_SHARDS, sample_slice
from pslite.launch.environment_parsing import TaskEnvironment, architecture_of, durability_of, role_of, task_environment
from pslite.numeric.gradient_sums import Bundle, GradientSums
from pslite.worker.ps.worker import Worker
from pslite.worker.single_process_session import SingleSession

if TYPE_CHECKING:
    from pslite.worker.allreduce.worker import AllReduceWorker

#: a session that is opened before the model is described
OpenSession = Worker | SingleSession
Session: TypeAlias = "OpenSession | AllReduceWorker"


def session_for(spec: JobSpec) -> Session:
    """Return the session of this process: a worker of an elastic job, or the whole job if there is none.

    Raises `UsageError` if the environment is incomplete, or this process is no worker.
    """
    environ = own_environment(os.environ)
    if spec.architecture == "allreduce" and role_of(environ) == "worker":
        from pslite.worker.allreduce.worker import AllReduceWorker  # noqa: PLC0415  (it needs torch, which others do not have)

        place = task_environment(environ, "worker")
        host = environ.get("DL2_HOST", "")
        return AllReduceWorker(place.identity, place.coordinator, spec, say=partial(_say, place), host=host)
    return _session(spec)


def open_session() -> OpenSession:
    """Return a session that is opened before the model is described; as `session_for` otherwise."""
    return _session(None)


def _session(spec: JobSpec | None) -> OpenSession:
    """Return the session that the environment asks for.

    Raises `UsageError` if the environment is incomplete, or this process is no worker.
    """
    environ = own_environment(os.environ)
    if role_of(environ) == "worker":
        place = task_environment(environ, "worker")
        return Worker(place.identity, place.coordinator, spec, say=partial(_say, place))
    role = environ.get("DL2_ROLE")
    if role:
        raise UsageError(f"DL2_ROLE is {role!r}: a training script runs in workers; start it by dl2-run")
    return SingleSession(spec)


def _say(place: TaskEnvironment, text: str) -> None:
    """Write a line for the user."""
    if os.environ.get("DL2_QUIET") != "1":
        tell(place.identity.task, text)


Indices = NDArray[np.int64]


class Layout(Protocol):
    """How a model's tensors lie in the flat arrays of the job."""

    #: the arrays
    segments: tuple[Segment, ...]
    #: digest of what all workers must have alike although it is not trained, "" for nothing
    fixed: str

    def adopt(self, weights: Bundle) -> None:
        """Put the model's values into the flat arrays."""

    def load(self, weights: Bundle) -> None:
        """Bring new weights and buffers into the model."""

    def load_buffers(self, weights: Bundle) -> None:
        """Set the model's buffers to the version's values."""

    def collect_buffers(self, weights: Bundle, bundle: Bundle, samples: int, *, add: bool) -> None:
        """Put the change of the buffers, times the number of samples that made it, where the gradients go.

        With `add` it is added to what is there.
        """


#: what tensors of one segment have in common: type, optimizer, and the name of one that is a sparse table, or ""
Kind = tuple[DType, Descent, str]


def segments_of(kinds: Mapping[Kind, Sequence[Part]], buffers: Sequence[Part]) -> tuple[Segment, ...]:
    """Return the segments of a model: one for each kind of parameters, then one for its buffers, if it has any."""
    segments = [
        Segment(dtype=dtype, optimizer=rule, parts=tuple(parts), sparse=bool(table))
        for (dtype, rule, table), parts in kinds.items()
    ]
    if buffers:
        segments.append(Segment(dtype="float64", optimizer=Mean(), parts=tuple(buffers)))
    return tuple(segments)


class LoopSettings(TypedDict, total=False):
    """Settings that the `ElasticJob` of every adapter takes by these names, explained in `LoopJob`.

    What is not given is as in `JobSpec`; the seed is then 0 and the mode "fast".
    """

    seed: int
    mode: Literal["exact", "fast", "async"]
    staleness: int
    shards: int | None
    clip_norm: float
    clip_value: float
    wire: Literal["float32", "bfloat16", "float16"]
    durability: Literal["none", "durable"]
    on_loss: Literal["restore", "fail"]
    checkpoint: str | os.PathLike[str] | None
    checkpoint_every: int
    resume: bool


class LoopJob(ABC):
    """An elastic training job, seen from the user's script; iterate over it once.

    Parameters
    ----------
    layout
        how the model lies in flat arrays.
    dataset
        with `len` and an index; item i must be the same in every worker.
    batch_size
        samples in one update, over all workers, whatever their number.
    epochs
        how often each sample is used.
    seed
        of the order of samples and of every random number drawn in the loop.
    mode
        "fast", the default, does one forward and backward pass for each worker; "exact" gives the same weights, bit for
        bit, at any size, and does a pass for each shard; "async" applies a push when it comes: no worker waits for
        others, and nothing is exact.
    staleness
        in async mode: by how many versions a worker may be ahead of the slowest.
    shards
        logical parts of a batch: the most workers that can be used, and the passes of a step in exact mode. Part of the
        run: another number gives other bits. 16 unless given, or the samples of a batch if they are fewer.
    clip_norm
        largest norm of the gradient over all parameters; 0 for any.
    clip_value
        largest absolute value of an element of the gradient; 0 for any.
    wire
        type in which gradients of float32 parameters travel: "bfloat16" and "float16" halve what workers send.
    durability
        "durable": every server's part is kept by another one too, so that the job survives the death of one server,
        and loses nothing. Two servers at least; they answer when both have a step. "none": the job goes back to its
        newest checkpoint, or to its beginning, when a server dies. What dl2-run says, unless given; "none" if it says
        nothing.
    on_loss
        if state is lost with a server, or with the last worker: "restore": the job goes back; "fail": it ends.
    checkpoint
        folder in which the servers keep the last two checkpoints, weights and optimizer state; all tasks must be able
        to reach it.
    checkpoint_every
        versions from one checkpoint to the next; 0 for those of an epoch.
    resume
        go on from the newest checkpoint in the folder, whatever the number of workers and servers it was made with.
    architecture
        "ps": parameters live on servers; "allreduce": every worker has all of them, and there are no servers. What
        dl2-run says, unless given. The weights have the same bits in exact mode.

    Raises
    ------
    SpecError
        a value is not usable; the message names it.

    """

    def __init__(
        self,
        layout: Layout,
        dataset: Any,
        *,
        batch_size: int,
        epochs: int,
        architecture: Literal["ps", "allreduce"] | None = None,
        **settings: Unpack[LoopSettings],
    ) -> None:
        samples = len(dataset)
        shards, checkpoint = settings.pop("shards", None), settings.pop("checkpoint", None)
        every = settings.pop("checkpoint_every", 0) or -(-samples // max(1, batch_size))
        durability = settings.pop("durability", None) or durability_of(os.environ) or "none"
        others: dict[str, Any] = {"seed": 0, "mode": "fast", **settings}
        self.spec = JobSpec(
            segments=layout.segments,
            samples=samples,
            batch=batch_size,
            epochs=epochs,
            shards=max(1, min(DEFAULT_SHARDS, batch_size)) if shards is None else shards,
            block_bytes=block_bytes_for(sum(segment.nbytes for segment in layout.segments)),
            fixed=layout.fixed,
            checkpoint="" if checkpoint is None else os.path.abspath(checkpoint),  # noqa: PTH100 - keeps links as they are
            checkpoint_every=0 if checkpoint is None else every,
            durability=durability,
            architecture=architecture or architecture_of(os.environ),
            **others,
        )
        self._dataset = dataset
        self._values: Layout = layout
        self._session: Session = session_for(self.spec)
        layout.adopt(self._session.weights)
        self._sums = GradientSums(self.spec, self._session.supply)
        #: where the gradients of the batch just given go; None once they are there
        self._bundle: Bundle | None = None
        #: whether that has the gradients of another shard already, to which they are added
        self._add = False
        self._samples = 0
        self._loss = 0.0
        self._started = False
        #: whether the user was told of a loss that is no finite number
        self._diverged = False
        self._order: tuple[int, Indices] | None = None

    @staticmethod
    def check(dataset: Any, batch_size: Any, epochs: Any, settings: LoopSettings) -> None:
        """Check what an adapter is given before it looks at the model."""
        whole = {
            "batch_size": batch_size,
            "epochs": epochs,
            "seed": settings.get("seed", 0),
            "checkpoint_every": settings.get("checkpoint_every", 0),
            "staleness": settings.get("staleness", 0),
        }
        for name, value in whole.items():
            if isinstance(value, bool) or not isinstance(value, int):
                raise SpecError(f"{name} is {value!r}: it must be a whole number")
        mode = settings.get("mode", "fast")
        if mode not in ("exact", "fast", "async"):
            raise SpecError(f"mode is {mode!r}: it must be 'exact', 'fast' or 'async'")
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise SpecError(f"the data set ({type(dataset).__name__}) must have __len__ and __getitem__")

    @property
    def version(self) -> int:
        """Completed updates."""
        return self._session.version

    @property
    def total_versions(self) -> int:
        """Updates in the whole job."""
        return self.spec.total_versions

    @property
    def epoch(self) -> int:
        """The present epoch, from 0."""
        return min(self.version // self.spec.steps_per_epoch, self.spec.epochs - 1)

    @property
    def is_chief(self) -> bool:
        """Whether this is the worker that should write files; valid from the loop on."""
        return self._session.is_chief

    @property
    def digest(self) -> str | None:
        """Digest of the weights when the job runs in one process; otherwise the coordinator reports it."""
        return self._session.digest() if isinstance(self._session, SingleSession) else None

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches that this worker computes, until the job is done or this worker leaves it."""
        for step in self.steps():
            yield from step

    def steps(self) -> Iterator[Iterator[Any]]:
        """Yield for each version the batches of it that this worker computes; to take the last one ends the version.

        For trainers that count steps: where the batches of a version have ended, the weights are those of the next one.
        """
        if self._started:
            raise UsageError("the job has been iterated over already: create a new ElasticJob for another loop")
        self._started = True
        session = self._session
        session.start()
        self._values.load(session.weights)
        while session.version < self.spec.total_versions:
            version = session.version
            yield self._step(session)
            if session.version == version:
                raise UsageError(
                    f"the loop left step {version} before its last batch: take all batches of every step (no break "
                    "or return)"
                )
        session.finish()

    # --- what adapters use and say --------------------------------------------------------------------------------

    def _awaited_bundle(self) -> Bundle:
        """Return where the gradients of the batch just given go."""
        if self._bundle is None:
            raise UsageError("job.backward(loss) must be called once for each batch, inside the loop over the job")
        return self._bundle

    def _record(self, loss: float) -> None:
        """The gradients of the batch just given are there; its mean loss was `loss`.

        Raises
        ------
        UsageError
            it is no finite number in the first step of the job.

        """
        if not math.isfinite(loss) and not self._diverged:
            self._diverged = True
            text = (
                f"the loss of step {self.version} is {loss}: the weights will be no numbers either; use a smaller "
                "learning rate or clip_norm=, and check the data for missing values and the loss for log(0) and 0/0"
            )
            if not self.version:
                raise UsageError(text)
            warnings.warn(text, RuntimeWarning, stacklevel=3)
        self._loss += loss * self._samples
        self._bundle = None

    def _waits_for_backward(self) -> bool:
        return self._bundle is not None

    @abstractmethod
    def _seed(self, value: int) -> None:
        """Seed every generator of the framework with a 64-bit number."""

    @abstractmethod
    def _fetch(self, indices: Indices) -> Any:
        """Return the batch of these samples."""

    # --- a step ---------------------------------------------------------------------------------------------------

    def _step(self, session: Session) -> Iterator[Any]:
        spec = self.spec
        epoch, first, count = spec.position(session.version)
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, permutation(spec.seed, epoch, spec.samples))
        batch = self._order[1][first : first + count]
        nodes, again = session.share.nodes, False
        while nodes:
            self._sums.begin(session.share.leaves, nodes, again=again)
            samples = yield from self._compute(session, nodes, batch)
            nodes, again = session.exchange(self._sums.contributions, self._loss, samples), True
        self._values.load(session.weights)

    def _compute(self, session: Session, nodes: Sequence[int], batch: Indices) -> Generator[Any, None, int]:
        """Have the loop's body compute the gradients below some nodes of the tree; returns the number of samples."""
        spec, share, version, count = self.spec, session.share, session.version, len(batch)
        self._loss, samples = 0.0, 0
        for leaf, low, high in share.parts(nodes):
            start, stop = sample_slice(low, high, spec.shards, count)
            if stop == start:
                self._sums.add(leaf, self._sums.take())
            else:
                bundle, self._add = self._sums.take_for(leaf)
                samples += stop - start
                self._seed_all(stream(spec.seed, version, leaf))
                self._values.load_buffers(session.weights)
                batch_part = self._fetch(batch[start:stop])
                self._bundle, self._samples = bundle, stop - start
                yield batch_part
                if self._waits_for_backward():
                    raise UsageError("the loop's body did not call job.backward(loss) for a batch")
                self._values.collect_buffers(session.weights, bundle, stop - start, add=self._add)
                self._sums.add(leaf, bundle)
        return samples

    def _seed_all(self, value: int) -> None:
        """Seed every generator that a user's data set or model is likely to draw from."""
        self._seed(value)
        random.seed(value)
        np.random.seed(value & 0xFFFFFFFF)  # noqa: NPY002  (the user's code may use the global generator)
