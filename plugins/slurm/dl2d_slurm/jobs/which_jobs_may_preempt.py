"""Preemption: for which elastic jobs Slurm may end or suspend running jobs (``PreemptType`` in slurm.conf)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from dl2d.core.resource_manager import EligibleNodes
from dl2d_slurm.commands.values_in_command_output import count
from dl2d_slurm.submission.sbatch_options import AnchorOptions


@dataclass(frozen=True, slots=True)
class Preemption:
    """Which jobs are preempted by which."""

    #: ``PriorityTier`` of each partition, where jobs of a higher one preempt those of a lower one; else empty.
    tiers: Mapping[str, int] = field(default_factory=dict)
    #: Partitions whose jobs are not preempted.
    spared: frozenset[str] = frozenset()
    #: Whether jobs preempt by QOS. Which QOS preempts which is not known: slurmctld does not tell it.
    by_qos: bool = False

    @classmethod
    def of(cls, config: Mapping[str, str], partitions: Collection[Mapping[str, str]]) -> Preemption:
        """Preemption by the settings of slurm.conf and the records of partitions, as ``scontrol`` shows them."""
        kind = config.get("PreemptType", "")
        if kind == "preempt/qos":
            return cls(by_qos=True)
        if kind != "preempt/partition_prio":
            return cls()
        tiers = {each["PartitionName"]: count(each.get("PriorityTier", "")) or 0 for each in partitions}
        return cls(tiers, frozenset(each["PartitionName"] for each in partitions if each.get("PreemptMode") == "OFF"))

    def may_preempt(
        self,
        anchors: Mapping[str, AnchorOptions],
        eligible: Mapping[str, EligibleNodes | None],
        running: Iterable[tuple[str, str, Iterable[str]]],
    ) -> frozenset[str]:
        """Those anchors whose tasks may preempt a running job on a node that they may use (``RmListing``).

        ``running`` are partition, QOS and nodes of each job. With ``preempt/qos`` any job of another QOS counts as one
        that may be preempted.
        """
        if not (self.tiers or self.by_qos):
            return frozenset()
        nodes: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
        for partition, qos, names in running:
            nodes[partition, qos].update(names)

        def of_anchor(handle: str) -> bool:
            usable = eligible[handle]
            return any(
                self._preempts(anchors[handle], partition, qos)
                and (usable is None or not usable.nodes.isdisjoint(names))
                for (partition, qos), names in nodes.items()
            )

        return frozenset(handle for handle in anchors if of_anchor(handle))

    def _preempts(self, options: AnchorOptions, partition: str, qos: str) -> bool:
        if self.by_qos:
            return qos != options.qos
        tier = max(self.tiers.get(name, 0) for name in options.partition.split(","))
        return partition not in self.spared and self.tiers.get(partition, tier) < tier
