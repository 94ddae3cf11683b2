"""Types of numpy arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
#: In single precision, as networks have them.
Floats32 = NDArray[np.float32]
#: Arrays by name, such as the weights of a checkpoint.
Arrays = Mapping[str, NDArray[Any]]
