"""MXNet's row_sparse arrays: some rows of a table, their numbers, and the optimizers that are lazy about the others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import mxnet as mx
import numpy as np
from numpy.typing import NDArray

from pslite.errors import UsageError
from pslite.job.job_spec import Descent, Part
from pslite.numeric.sparse_rows import Rows

Array = NDArray[Any]
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
