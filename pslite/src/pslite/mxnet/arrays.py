"""The memory of MXNet's arrays as numpy sees it, and row_sparse arrays: some rows of a table with their numbers."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Sequence
from typing import Any

import mxnet as mx
import numpy as np
from mxnet.base import _LIB, check_call
from numpy.typing import NDArray

from pslite.errors import SpecError, UsageError
from pslite.job.job_spec import Descent, DType, Part
from pslite.numeric.sparse_rows import Rows

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


STYPE = "row_sparse"


def is_sparse(array: Any) -> bool:
    """Whether an array is row_sparse, or its gradient is."""
    return array.stype == STYPE or (array.grad is not None and array.grad.stype == STYPE)


def lazy(optimizer: Any) -> bool:
    """Whether an optimizer leaves rows as they are, momentum included, that a row_sparse gradient does not have."""
    return isinstance(optimizer, (mx.optimizer.SGD, mx.optimizer.Adam)) and bool(optimizer.lazy_update)


def same_dense(rule: Descent) -> bool:
    """Whether a rule does nothing to rows with gradient zero, so that it does not matter if they are there."""
    return not rule.weight_decay and not getattr(rule, "momentum", 1.0)


def table_part(name: str, shape: tuple[int, ...]) -> Part:
    """Return how a table is described; one without columns has one."""
    return Part(name, shape if len(shape) > 1 else (*shape, 1))


def dense(arrays: Sequence[Any]) -> list[Any]:
    """Return arrays with all rows of those that are row_sparse."""
    return [array.tostype("default") if array.stype == STYPE else array for array in arrays]


def rows_of(arrays: Sequence[Any]) -> Rows:
    """Return the sum of gradients that several devices have made; a dense one has all rows."""
    found = [_rows(array) for array in arrays]
    total = found[0]
    for rows in found[1:]:
        total = total.plus(rows)
    return total


def _rows(array: Any) -> Rows:
    count = array.shape[0]
    if array.stype != STYPE:
        return Rows(np.arange(count, dtype=np.uint32), array.asnumpy().reshape(count, -1))
    numbers, values = array.indices.asnumpy(), array.data.asnumpy()
    values = values.reshape(numbers.size, math.prod(array.shape[1:]))
    if bool((numbers[1:] > numbers[:-1]).all()):
        return Rows(numbers.astype(np.uint32), values)
    return Rows.of(numbers, values)


def numbers_of(key: int | str, row_ids: Any, count: int) -> NDArray[np.int64]:
    """Return the numbers of the rows that a script asks for, ascending; they may come in any order and number.

    Raises
    ------
    UsageError
        there is no such row.

    """
    numbers = np.unique(row_ids.asnumpy()).astype(np.int64)
    if numbers.size and not 0 <= numbers[0] <= numbers[-1] < count:
        raise UsageError(
            f"row_ids of key {key!r} must be from 0 to {count - 1}, but go from {numbers[0]} to {numbers[-1]}"
        )
    return numbers


def put(out: Any, table: Array, numbers: NDArray[np.int64]) -> None:
    """Set a row_sparse array to some rows of a table, shape (elements,); it has no others then."""
    if not numbers.size:
        mx.nd.sparse.zeros(STYPE, out.shape, ctx=out.context, dtype=out.dtype).copyto(out)
        return
    values = table.reshape(out.shape)[numbers]
    mx.nd.sparse.row_sparse_array((values, numbers), shape=out.shape, ctx=out.context, dtype=out.dtype).copyto(out)
