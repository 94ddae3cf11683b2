"""Global norms (clipping, LAMB): servers send sums of squares of their blocks, and are told what scales a step."""

from __future__ import annotations

from pslite.coordinator.state.coordinator_context import Job
from pslite.coordinator.state.job_state import MemberState
from pslite.net.messages import Factors, Norm
from pslite.numeric.norms import Tensors
from pslite.numeric.optimizers import clip_factor


def add(job: Job, _member: MemberState, message: Norm) -> None:
    """Add up sums of squares; with the last block's the norm over the whole model is known, and a step is applied."""
    state, step = job.state, (message.version, message.of)
    squares = job.squares.setdefault(step, {})
    squares.update(message.squares)
    servers = state.servers_in_force()
    known = job.step_record.factors.get(message.of)
    if known is not None and known.version == message.version:
        # who asks has replaced a server that died before it was told; other blocks have done the step
        del job.squares[step]
        job.tell(servers, known)
        return
    tensors = Tensors(job.spec, state.blocks) if message.of == "update" else None
    if len(squares) < (len(state.blocks) if tensors is None else len(tensors.blocks_sharing_tensors)):
        return
    del job.squares[step]
    if tensors is not None:
        factors = tensors.trust(squares)
    else:
        factors = {0: clip_factor(job.spec.clip_norm, [squares[block.number][0] for block in state.blocks])}
    found = Factors(version=message.version, of=message.of, factors=factors)
    job.step_record.factors[message.of] = found
    job.step_record_changed = True
    job.tell(servers, found)
