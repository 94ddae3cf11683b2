"""Shares of GPUs (``gres/shard``, ``gres/mps``): each GPU of a node has an equal part of the node's.

Slurm gives no share of a GPU that a job holds whole, and no GPU whole of which a job holds a share. sinfo does not
count either as in use.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import lru_cache

from dl2d.core.resources import NO_RESOURCES, Resources
from dl2d_slurm.commands.values_in_command_output import count

_GPU = "gpu"
#: Names of shares.
_SHARES = ("shard", "mps")
#: Shares in use in ``GresUsed`` of sinfo, without ``(null)``: their type, and how many of which GPUs. Up to 22.05 the
#: number is that of the GPUs, ``shard:2(IDX:0-1)``; later ones show the shares of each GPU, ``shard:3(1/4,2/4)``.
_USED = re.compile(rf"(?:^|,)(?:{'|'.join(_SHARES)})(?::([^:,()]+))?:([0-9.]+[KMGT]?)\(([^()]*)\)", re.IGNORECASE)
#: More than any job can have: users may write any number.
_MAX_GPUS = 1e6
_OF_A_GPU = re.compile(r"([0-9]{1,9})/[0-9]+")


@lru_cache(16_384)
def with_shared_gpus(used: Resources, capacity: Resources, text: str) -> Resources:
    """What is used of a node, with the GPUs of which shares are in use by ``text``, which is ``GresUsed`` of sinfo, and
    the shares of GPUs that are in use.
    """
    shares = _shares(capacity)
    if not shares:
        return used
    amounts = used.as_dict()
    for name in shares:
        amounts[name] = amounts.get(name, 0) + used.get(_gpu(name)) * _per_gpu(name, capacity)
    for type_, gpus in _gpus_in_use(text):
        # Where shares have no type, they may be of any.
        types = (f"{_GPU}:{type_}",) if type_ else [name for name in capacity.as_dict() if name.startswith(f"{_GPU}:")]
        for name in (_GPU, *types):
            amounts[name] = amounts.get(name, 0) + gpus
    return Resources.of({name: min(amount, capacity.get(name)) for name, amount in amounts.items()})


@lru_cache(16_384)
def with_shares(held: Resources, capacity: Resources) -> Resources:
    """What a job holds of a node, with the shares of its GPUs, or the part of GPUs of which it holds shares."""
    more = [NO_RESOURCES]
    for name in _shares(capacity):
        gpu, per_gpu = _gpu(name), _per_gpu(name, capacity)
        shares = min(held.get(gpu) * per_gpu, capacity.get(name))
        more.append(Resources.of({name: shares, gpu: _part(held.get(name), per_gpu)}))
    return Resources.total((held, *more))


def has_shares(demand: Resources) -> bool:
    """Whether it is a demand on shares of GPUs."""
    return bool(_shares(demand))


def with_gpus_of_shares(demand: Resources, capacities: Iterable[Resources]) -> Resources:
    """What a waiting job demands, with the part of GPUs, at most, of which it demands shares on nodes such as these.

    So nothing takes the GPU whole of which it is to get shares.
    """
    most = NO_RESOURCES
    for capacity in capacities:
        part = {_gpu(name): _part(demand.get(name), _per_gpu(name, capacity)) for name in _shares(demand)}
        most = most.maximum(Resources.of(part))
    return demand + most


def _shares(resources: Resources) -> list[str]:
    """Names of shares among resources."""
    return [name for name in resources.as_dict() if name.partition(":")[0] in _SHARES]


def _gpu(share: str) -> str:
    """The GPUs of which something is a share: ``gpu:a100`` of ``shard:a100``."""
    _, colon, type_ = share.partition(":")
    return f"{_GPU}{colon}{type_}"


def _per_gpu(share: str, capacity: Resources) -> float:
    gpus = capacity.get(_gpu(share))
    return capacity.get(share) / gpus if gpus else 0.0


def _part(shares: float, per_gpu: float) -> float:
    """The part of a GPU that so many shares are; parts of all its shares are no more than the GPU."""
    return min(max(shares / per_gpu * 1000 // 1, 1) / 1000, _MAX_GPUS) if shares and per_gpu else 0.0


def _gpus_in_use(text: str) -> Iterator[tuple[str, int]]:
    """The types of GPUs, "" for any, and how many are in use by shares."""
    for type_, number, devices in _USED.findall(text.replace(":(null)", "")):
        of_each = _OF_A_GPU.findall(devices)
        gpus = sum(int(used) > 0 for used in of_each) if of_each else count(number) or 0
        if gpus:
            yield type_.lower(), gpus
