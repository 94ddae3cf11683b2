from __future__ import annotations

import numpy as np

from dl2d.throughput.level import _quantile


def test_quantiles_are_numpys() -> None:
    rng = np.random.default_rng(4)
    for count in range(1, 60):
        for values in (rng.normal(size=count), np.round(rng.normal(size=count), 1)):
            for part in (0.25, 0.5, 0.9):
                assert _quantile(values.tolist(), part) == np.quantile(values, part)
