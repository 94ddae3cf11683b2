"""What a model on a GPU needs of its process: page-locked host memory, and kernels whose results repeat."""

from __future__ import annotations

import contextlib
import os
import weakref
from typing import Any

import torch

from pslite.numeric.gradient_sums import Bundle

#: fixed workspaces, without which torch says that matrix products may not repeat
_CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG", ":4096:8"


def repeatable_kernels() -> None:
    """Have torch choose kernels that give the same bits each time; where there is none torch warns.

    If the script has called `torch.use_deterministic_algorithms(True)`, that stays: errors instead of warnings.
    """
    os.environ.setdefault(*_CUBLAS_WORKSPACE)
    torch.backends.cudnn.benchmark = False
    if not torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(True, warn_only=True)


class PinnedMemory:
    """Bundles whose memory the GPU reads and writes itself, without a copy by the processor in between."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seen: weakref.WeakSet[Bundle] = weakref.WeakSet()

    def pin(self, bundle: Bundle) -> None:
        """Page-lock a bundle's memory for as long as it is there; if the system refuses, copies are only slower."""
        if bundle in self._seen or not bundle.memory.size:
            return
        self._seen.add(bundle)
        cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        address = bundle.memory.ctypes.data
        with torch.cuda.device(self._device):
            if int(cudart.cudaHostRegister(address, bundle.memory.size, 0)) == 0:
                weakref.finalize(bundle, cudart.cudaHostUnregister, address).atexit = False
                return
        # the next kernel would report the error as its own
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=self._device)
