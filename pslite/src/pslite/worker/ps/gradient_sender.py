"""Sends the gradient sums of a step to the servers that own its blocks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary, ref

from pslite.job.membership_plan import Plan
from pslite.job.weight_blocks import Block
from pslite.net.tensor_frames import MAX_REGIONS, PUSH, SKIP, Header, Link, region_header
from pslite.numeric.gradient_encoding import wire_bytes
from pslite.numeric.gradient_sums import Bundle, Contribution
from pslite.worker.progress_reports import Progress
from pslite.worker.ps.data_connections import DataPlane
from pslite.worker.ps.known_plans import PlanTable
from pslite.worker.ps.model_buffers import ModelBuffers


@dataclass(eq=False)
class GradientSender:
    """Pushes each block of a contribution to its owner: in shared memory, as rows, in 16 bits, or as it is."""

    _model: ModelBuffers
    _plans: PlanTable
    _progress: Progress
    _plane: DataPlane
    #: what was pushed in this step, for servers that take the place of others
    _sent: list[Contribution] = field(default_factory=list)
    #: numbers of bundles whose memory is shared, and by number the bundle that each server knows
    _region_numbers: WeakKeyDictionary[Bundle, int] = field(default_factory=WeakKeyDictionary)
    _known: WeakKeyDictionary[Link, dict[int, ref[Bundle]]] = field(default_factory=WeakKeyDictionary)

    @property
    def nodes(self) -> set[int]:
        """Tree nodes whose sums were pushed in this step."""
        return {contribution.node for contribution in self._sent}

    def begin_step(self) -> None:
        """Forget what was pushed: the next version is complete, and its memory is used again."""
        self._sent.clear()

    def push(self, contributions: Sequence[Contribution]) -> None:
        """Send all blocks of contributions to this step."""
        self._sent += contributions
        self._send(contributions, self._model.blocks)

    def push_again(self, blocks: Iterable[int]) -> None:
        """Send some blocks of all that was pushed in this step again; those of a coming plan were not pushed."""
        known = self._model.blocks
        self._send(self._sent, [known[number] for number in blocks if number < len(known)])

    def _send(self, contributions: Sequence[Contribution], blocks: Iterable[Block]) -> None:
        plan = self._plans.current
        assert plan is not None
        bundles = [contribution.bundle for contribution in contributions]
        fillers = {bundle.fill: bundle.idle for bundle in bundles if bundle.fill is not None}
        for block in blocks:
            link = self._plane.links.get(plan.owner(block.number).task)
            if link is None:
                continue  # its server is gone; the one that takes its place is sent everything
            for fill, idle in fillers.items():
                if block.segment not in idle:
                    fill(block)
            for contribution in contributions:
                bundle = contribution.bundle
                if block.segment in bundle.idle:
                    link.send(self._header(SKIP, plan, block, contribution.node, 0))
                    continue
                looked_into = link.local and not block.is_sparse and bundle.is_own(block.segment)
                self._send_block(link, plan, block, contribution, self._share(link, bundle) if looked_into else 0)
            if fillers:
                self._plane.flush(link)

    def _send_block(self, link: Link, plan: Plan, block: Block, contribution: Contribution, region: int) -> None:
        bundle, encoding = contribution.bundle, self._model.encoding
        rows = bundle.rows[block.segment].within(block) if block.is_sparse else None
        length = wire_bytes(self._model.spec, block) if rows is None else rows.nbytes
        narrow = encoding if length != block.nbytes else None
        header = self._header(PUSH, plan, block, contribution.node, block.nbytes if region else length, region)
        if region:
            link.send(header)
        elif rows is not None:
            link.send(header, *rows.views())
        elif narrow is None:
            link.send(header, bundle.views[block.number])
        else:
            link.send(header, bundle.packed(block, narrow))
            self._plane.flush(link)  # it travels while the next ones are packed

    def _header(self, kind: int, plan: Plan, block: Block, node: int, length: int, region: int = 0) -> Header:
        version, first, coming = self._progress.version, self._plans.first, self._plans.next or (0, 0)
        return Header(kind, plan.number, block.number, node, length, version, first, *coming, region=region)

    def _share(self, link: Link, bundle: Bundle) -> int:
        """Return the number by which a server knows a bundle's shared memory, 0 if there is none.

        The server is handed its descriptor, unless it has it.  Numbers of bundles that are gone are given out
        again: the server then forgets their memory.
        """
        number = self._region_numbers.get(bundle, 0)
        if not number:
            used = set(self._region_numbers.values())
            number = next((free for free in range(1, MAX_REGIONS + 1) if free not in used), 0)
            if bundle.region.fd < 0 or not number:
                return 0
            self._region_numbers[bundle] = number
        known = self._known.setdefault(link, {})
        if number not in known or known[number]() is not bundle:
            known[number] = ref(bundle)
            link.hand(region_header(number), bundle.region.fd)
        return number
