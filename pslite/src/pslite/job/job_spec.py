"""The description of a job: what is trained, with which optimizer, on how many samples.

It is plain validated data: the first worker sends it, every other worker must have an equal one, and servers build
their optimizer from it.  No code travels.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from pslite.errors import SpecError
from pslite.job.learning_rates import Constant, Schedule
from pslite.job.message_base_class import WireRecord

MAX_EPOCHS = 1_000_000
MAX_SAMPLES = 2**40
MAX_VERSIONS = 2**62
MAX_BYTES = 2**40
MAX_SHARDS = 4096
MAX_STALENESS = 1024
MAX_PATH = 4096
MAX_BLOCK_BYTES = 1 << 20
#: beside those that are as large as they may be
MAX_BLOCKS = 100_000
MIN_BLOCK_BYTES = 1 << 10
#: small models are cut finer than MAX_BLOCK_BYTES so that several servers can share them
AIM_BLOCKS = 32

#: types of weights
DType = Literal["float32", "float64"]
ITEM_BYTES = {"float32": 4, "float64": 8}


def _check(ok: bool, message: str) -> None:  # noqa: FBT001  (a condition and its message, nothing to name)
    if not ok:
        raise SpecError(message)


def _number(name: str, value: float, low: float, high: float, *, open_high: bool = False) -> None:
    inside = math.isfinite(value) and low <= value and (value < high if open_high else value <= high)
    _check(inside, f"{name} is {value!r}: it must be a number from {low:g} to {'below ' if open_high else ''}{high:g}")


def _one_of(name: str, value: str, accepted: tuple[str, ...]) -> None:
    _check(value in accepted, f"{name} is {value!r}: it must be {' or '.join(map(repr, accepted))}")


class SGD(WireRecord, tag="sgd", kw_only=True):
    """Stochastic gradient descent with momentum and weight decay, as torch.optim.SGD computes it (no dampening)."""

    lr: float
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    schedule: Schedule = Constant()
    #: the momentum is of steps, not of gradients, which differs where the rate changes (MXNet's form)
    rate_in_momentum: bool = False

    def __post_init__(self) -> None:
        _number("SGD lr", self.lr, 0.0, 1e6)
        _number("SGD momentum", self.momentum, 0.0, 1.0, open_high=True)
        _number("SGD weight_decay", self.weight_decay, 0.0, 1e6)
        _check(not self.nesterov or self.momentum > 0, "SGD nesterov=True needs a momentum above 0")


class Adam(WireRecord, tag="adam", kw_only=True):
    """Adam (Kingma and Ba 2015) as torch.optim.Adam computes it; `decoupled=True` gives AdamW's weight decay."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = False
    schedule: Schedule = Constant()
    #: eps counts before the bias correction (section 2 of the paper, MXNet), not after it (torch)
    eps_first: bool = False

    def __post_init__(self) -> None:
        _check_adaptive("Adam", self)


class LAMB(WireRecord, tag="lamb", kw_only=True):
    """LAMB (You et al. 2020, algorithm 2): Adam with decoupled weight decay, each tensor's update scaled to the length
    of its weights; the lengths' bounds are not used (phi is the identity).
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-6
    weight_decay: float = 0.0
    schedule: Schedule = Constant()

    def __post_init__(self) -> None:
        _check_adaptive("LAMB", self)


def _check_adaptive(name: str, rule: Adam | LAMB) -> None:
    _number(f"{name} lr", rule.lr, 0.0, 1e6)
    _check(len(rule.betas) == 2, f"{name} betas is {rule.betas!r}: it must be two numbers")
    for index, beta in enumerate(rule.betas):
        _number(f"{name} betas[{index}]", beta, 0.0, 1.0, open_high=True)
    _number(f"{name} eps", rule.eps, 0.0, 1.0)
    _number(f"{name} weight_decay", rule.weight_decay, 0.0, 1e6)


class Mean(WireRecord, tag="mean"):
    """Not a descent: the value moves by the mean change over all samples. For buffers such as BatchNorm's."""


class Sum(WireRecord, tag="sum"):
    """Not a descent: the value becomes the sum of what is pushed. For scripts that update their weights themselves."""


#: what trains weights
Descent = SGD | Adam | LAMB
Optimizer = Descent | Mean | Sum


class Part(WireRecord):
    """One tensor inside a segment: its name and its shape."""

    name: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


class Segment(WireRecord):
    """Tensors of one type and one optimizer, laid end to end in one flat array."""

    dtype: DType
    optimizer: Optimizer
    parts: tuple[Part, ...]
    #: one table of which a step touches a few rows (the first axis): only those are pushed, and updated
    sparse: bool = False
    #: of a sparse one: rows that a step does not touch stay as they are whatever the optimizer (MXNet's lazy_update)
    lazy: bool = False
    #: whether it was added after the first step (open jobs)
    late: bool = False
    #: of a late one: updates of others before it was added, from which on its optimizer's schedule goes
    since: int = 0
    #: its largest block, in bytes; 0 for the job's
    block_bytes: int = 0

    def __post_init__(self) -> None:
        _number("since", self.since, 0, MAX_VERSIONS)
        _number("block_bytes", self.block_bytes, 0, MAX_BLOCK_BYTES)
        if not self.sparse:
            return
        name, rule = self.parts[0].name if self.parts else "?", self.optimizer
        _check(len(self.parts) == 1 and len(self.parts[0].shape) > 1, f"{name} is sparse: it must be one table of rows")
        _check(
            isinstance(rule, SGD | Adam)
            and (self.lazy or not (rule.weight_decay or (isinstance(rule, SGD) and rule.momentum))),
            f"{name} is sparse: its optimizer must be SGD without momentum and weight decay, or Adam without weight "
            "decay; parameters can have one of their own (groups)",
        )
        _check(self.row * ITEM_BYTES[self.dtype] <= MAX_BLOCK_BYTES, f"{name} has rows of more than 1 MiB")

    @property
    def row(self) -> int:
        """Number of elements of a row of a sparse segment; 0 for any other."""
        return math.prod(self.parts[0].shape[1:]) if self.sparse else 0

    @property
    def size(self) -> int:
        """Number of elements."""
        return sum(part.size for part in self.parts)

    @property
    def nbytes(self) -> int:
        """Bytes of one copy of the segment."""
        return self.size * ITEM_BYTES[self.dtype]

    def block_size(self, block_bytes: int) -> int:
        """Return the elements of each of its blocks but the last, whole rows, in a job with blocks of so many bytes."""
        unit = self.row or 1
        return max(1, (self.block_bytes or block_bytes) // (ITEM_BYTES[self.dtype] * unit)) * unit


# logs and checkpoints of earlier versions have more fields
class JobSpec(WireRecord, kw_only=True, forbid_unknown_fields=False):
    """All that fixes the result of a job, apart from its initial weights and the user's code.

    Raises
    ------
    SpecError
        a value is out of range; the message names it.

    """

    segments: tuple[Segment, ...]
    #: samples in the data set
    samples: int
    #: samples in one update, over all workers; the last update of an epoch takes what is left
    batch: int
    #: 0 for an open job
    epochs: int
    seed: int
    #: "open": each worker has a loop and samples of its own, and the job ends when the first worker's loop does;
    #: "async": a push is applied when it comes
    mode: Literal["exact", "fast", "open", "async"]
    #: logical shards of the batch
    shards: int
    #: largest block, in bytes
    block_bytes: int
    #: digest of what every worker must have alike although it is not trained (frozen parameters); "" if there is none
    fixed: str = ""
    #: largest norm of the mean gradient over the whole model; longer ones are scaled down to it. 0 for any
    clip_norm: float = 0.0
    #: largest absolute value of an element of the mean gradient; 0 for any
    clip_value: float = 0.0
    #: how gradients of float32 weights travel; sums and weights keep their type
    wire: Literal["float32", "bfloat16", "float16"] = "float32"
    #: "durable": every block has a replica on another server, which is never behind what a worker has been told
    durability: Literal["none", "durable"] = "none"
    #: what happens if state is lost with a member: the job goes back to its newest checkpoint, or fails
    on_loss: Literal["restore", "fail"] = "restore"
    #: folder of checkpoints, which every server, the first worker and the coordinator can reach; "" for none
    checkpoint: str = ""
    #: versions from one checkpoint to the next
    checkpoint_every: int = 0
    #: whether the job goes on from the newest checkpoint in the folder
    resume: bool = True
    #: of an open job: what the mean over the workers of their gradients is multiplied by
    scale: float = 1.0
    #: of an open job: epochs that its script has done in an earlier job, if it says so, and at which version
    epochs_before: int = 0
    versions_before: int = 0
    #: in async mode: by how many versions a worker may be ahead of the slowest
    staleness: int = 0
    #: parameters live on servers, or every worker has all of them and gradients are added up among workers
    architecture: Literal["ps", "allreduce"] = "ps"

    def __post_init__(self) -> None:
        _number("epochs", self.epochs, 0 if self.open else 1, 0 if self.open else MAX_EPOCHS)
        _number("scale", self.scale, 0.0, 1e300)
        _number("epochs_before", self.epochs_before, 0, MAX_EPOCHS)
        _number("versions_before", self.versions_before, 0, MAX_VERSIONS)
        _number("the number of samples in the data set", self.samples, 1, MAX_SAMPLES)
        _number("batch_size", self.batch, 1, MAX_SAMPLES)
        _check(
            self.batch <= self.samples,
            f"batch_size is {self.batch}, more than the {self.samples} samples of the data set",
        )
        _number("seed", self.seed, -(2**63), 2**63 - 1)
        _number("shards", self.shards, 1, MAX_SHARDS if self.open else min(self.batch, MAX_SHARDS))
        _number("block_bytes", self.block_bytes, 8, MAX_BLOCK_BYTES)
        _check(len(self.fixed) <= 64, "fixed is longer than a SHA-256 digest in hexadecimal (64 digits)")
        _number("clip_norm", self.clip_norm, 0.0, 1e300)
        _number("clip_value", self.clip_value, 0.0, 1e300)
        _check(not (self.clip_norm and self.clip_value), "clip_norm and clip_value are both given: use one")
        _number("checkpoint_every", self.checkpoint_every, 0, MAX_EPOCHS * MAX_SAMPLES)
        _check(
            not self.checkpoint or (self.checkpoint.startswith("/") and len(self.checkpoint) <= MAX_PATH),
            f"checkpoint is {self.checkpoint!r}: it must be the absolute path of a folder",
        )
        _number("staleness", self.staleness, 0, MAX_STALENESS)
        _check(not self.staleness or self.asynchronous, f'staleness is {self.staleness}: it needs mode="async"')
        _one_of("durability", self.durability, ("none", "durable"))
        _one_of("on_loss", self.on_loss, ("restore", "fail"))
        table = next((segment.parts[0].name for segment in self.segments if segment.sparse), "")
        if self.asynchronous:
            refused = "this is not possible in async mode, where workers do not take their steps together"
            _check(not self.clip_norm, f"clip_norm is {self.clip_norm}: {refused}")
            _check(self.durability == "none", f"durability is {self.durability!r}: {refused}")
            for segment in self.segments:
                name = segment.parts[0].name if segment.parts else "?"
                _check(not isinstance(segment.optimizer, LAMB), f"the optimizer of {name} is LAMB: {refused}")
            _check(not table, f"{table} is sparse: {refused}")
        if self.architecture == "allreduce":
            refused = "this is not possible in an all-reduce job"
            _check(self.mode in ("exact", "fast"), f"mode is {self.mode!r}: {refused}")
            _check(self.wire == "float32", f"wire is {self.wire!r}: {refused}")
            _check(not table, f"{table} is sparse: {refused}")
            _check(self.durability == "none", f"durability is {self.durability!r}: {refused}")
        _check(bool(self.segments), "the model has no trainable parameters")
        for segment in self.segments:
            for part in segment.parts:
                _check(all(n > 0 for n in part.shape), f"{part.name} has shape {part.shape}: it has no elements")
            _check(bool(segment.parts), "a segment has no tensors")
        nbytes = sum(segment.nbytes for segment in self.segments)
        _number("the model's size in bytes", nbytes, 1, MAX_BYTES)
        blocks = sum(-(-segment.size // segment.block_size(self.block_bytes)) for segment in self.segments)
        _check(
            blocks <= MAX_BLOCKS + nbytes // MAX_BLOCK_BYTES,
            f"the model of {nbytes} bytes has {blocks} blocks, each of which costs every step a message: make "
            f"block_bytes larger, or the model of fewer and larger tensors (for {MAX_BLOCKS} blocks at most)",
        )

    def agrees(self, other: JobSpec) -> bool:
        """Whether workers that say this and that train the same.

        In an open job the first worker's optimizer is used, whatever the others': their scripts may have made its rate
        of the number of workers, which has changed since, or begin at a newer checkpoint.
        """
        if not (self.open and other.open):
            return self == other
        return self._shape() == other._shape()

    def extends(self, other: JobSpec) -> bool:
        """Return whether this is the job that `other` describes, perhaps with late segments added at its end."""
        count = len(other.segments)
        if not all(segment.late for segment in self.segments[count:]):
            return False
        return msgspec.structs.replace(self, segments=self.segments[:count]).agrees(other)

    def without_late(self) -> JobSpec:
        """Return the job as it was at its first step."""
        return msgspec.structs.replace(self, segments=tuple(s for s in self.segments if not s.late))

    def _shape(self) -> JobSpec:
        segments = tuple(
            msgspec.structs.replace(segment, optimizer=SGD(lr=0.0) if segment.sparse else Sum(), since=0)
            for segment in self.segments
        )
        return msgspec.structs.replace(
            self, segments=segments, scale=1.0, clip_value=0.0, epochs_before=0, versions_before=0
        )

    @property
    def steps_per_epoch(self) -> int:
        """Updates in one epoch."""
        return -(-self.samples // self.batch)

    @property
    def open(self) -> bool:
        """Whether the workers, not the job, say which samples there are and how many updates."""
        return self.mode == "open"

    @property
    def updated_by_scripts(self) -> bool:
        """Whether scripts update the weights and servers only add gradients: nobody has weights for a new worker."""
        return any(isinstance(segment.optimizer, Sum) for segment in self.segments)

    @property
    def asynchronous(self) -> bool:
        """Whether a push is applied when it comes; in an open job that is so if workers may be ahead of others."""
        return self.mode == "async" or (self.open and self.staleness > 0)

    @property
    def total_versions(self) -> int:
        """Updates in the whole job; more than there can be in an open one."""
        return MAX_VERSIONS if self.open else self.steps_per_epoch * self.epochs

    def divisor(self, optimizer: Optimizer, version: int, leaves: int) -> float:
        """Return what a sum of gradients of `leaves` workers (in an open job) or of samples is divided by."""
        if not self.open:
            return self.position(version)[2]
        if isinstance(optimizer, Mean):
            return leaves
        return leaves / self.scale if self.scale else math.inf

    def position(self, version: int) -> tuple[int, int, int]:
        """Return (epoch, first position in the epoch's order, number of samples) of step `version`."""
        if self.open:
            return 0, 0, 1
        epoch, step = divmod(version, self.steps_per_epoch)
        first = step * self.batch
        return epoch, first, min(self.batch, self.samples - first)


def block_bytes_for(total_bytes: int) -> int:
    """Return the block size for a model of `total_bytes`: 1 MiB, or smaller so that it has some tens of blocks."""
    aim = total_bytes // AIM_BLOCKS
    return max(MIN_BLOCK_BYTES, min(MAX_BLOCK_BYTES, aim - aim % 64))


def differences(ours: JobSpec, theirs: JobSpec) -> list[str]:
    """Return one line for each thing in which two job descriptions differ, naming it and both values."""
    found = [
        f"{name}: {getattr(ours, name)!r} here, {getattr(theirs, name)!r} there"
        for name in JobSpec.__struct_fields__
        if name != "segments" and getattr(ours, name) != getattr(theirs, name)
    ]
    if ours.segments == theirs.segments:
        return found
    mine, others = _tensors(ours), _tensors(theirs)
    for name in sorted(mine.keys() | others.keys()):
        a, b = mine.get(name), others.get(name)
        if a != b:
            found.append(f"tensor {name}: {a or 'absent'} here, {b or 'absent'} there")
    return found or ["the order of the model's tensors"]


def _tensors(spec: JobSpec) -> dict[str, str]:
    return {
        part.name: f"{list(part.shape)} {segment.dtype} {segment.optimizer}"
        for segment in spec.segments
        for part in segment.parts
    }
