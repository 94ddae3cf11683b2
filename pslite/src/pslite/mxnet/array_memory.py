"""The memory of MXNet's arrays, as numpy sees it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from typing import Any

import mxnet as mx
import numpy as np
from mxnet.base import _LIB, check_call
from numpy.typing import NDArray

from pslite.errors import SpecError
from pslite.job.job_spec import DType

Array = NDArray[Any]


def trainable(name: str, array: Any) -> DType:
    """Return an array's type.

    Raises
    ------
    SpecError
        the array is sparse, or of a type that cannot be trained.

    """
    if array.stype != "default":
        raise SpecError(f"{name} is stored as {array.stype}: only dense arrays (stype='default') can be trained")
    kind = np.dtype(array.dtype).name
    if kind == "float32":
        return "float32"
    if kind == "float64":
        return "float64"
    raise SpecError(f"{name} has type {kind}: only float32 and float64 can be trained; cast it to float32")


def reading(array: Any, like: Array | None = None) -> Array:
    """Return the values of an array, shape (size,), once MXNet has computed them: no copy if it is in the CPU's memory.

    What is returned may be looked at until MXNet writes to the array again; `like` as for `memory`.
    """
    array.wait_to_read()
    return memory(array, like) if near(array) else array.asnumpy().reshape(-1)


def near(array: Any) -> bool:
    """Whether an array lies in the CPU's memory."""
    return bool(array.context.device_type.startswith("cpu"))


def write(array: Any, values: Array) -> None:
    """Set an array to values of shape (size,) and of its type.  Call mx.nd.waitall() before."""
    if near(array):
        np.copyto(memory(array, values), values)
    else:
        array[:] = mx.nd.array(values.reshape(array.shape), dtype=values.dtype)


def gather(arrays: Sequence[Any], out: Array) -> None:
    """Put the sum of arrays that several devices have made into `out`, shape (size,)."""
    add_up((reading(array, out) for array in arrays), out)


def add_up(values: Iterable[Array], out: Array) -> None:
    """Put the sum of arrays of one shape into `out`."""
    for number, each in enumerate(values):
        if number:
            np.add(out, each, out=out)
        else:
            np.copyto(out, each)


def memory(array: Any, like: Array | None = None) -> Array:
    """Return the memory of an array that is near, shape (size,), while MXNet does nothing with it.

    `like` is an array of its size and type, if there is one: MXNet takes long to say them.  The array lives as long as
    what is returned.
    """
    # asked for anew each time: MXNet may put an array into a layout of its own, and elsewhere, in between
    pointer = ctypes.c_void_p()
    check_call(_LIB.MXNDArrayGetData(array.handle, ctypes.byref(pointer)))
    kind: np.dtype[Any] = np.dtype(array.dtype) if like is None else like.dtype
    size = array.size if like is None else like.size
    there: Any = (ctypes.c_char * (size * kind.itemsize)).from_address(pointer.value or 0)
    there.owner = array
    return np.frombuffer(memoryview(there), dtype=kind)
