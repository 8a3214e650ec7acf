"""Quantiles of times, from the buckets of the metrics."""

from __future__ import annotations

import pytest

from sow_server.services.figures import quantile

BOUNDS = (1.0, 2.0, 4.0)


@pytest.mark.parametrize(
    ("share", "counts", "value"),
    [
        (0.5, (0, 10, 0, 0), 1.5),  # in the middle of its bucket
        (0.5, (10, 10, 0, 0), 1.0),
        (0.99, (50, 50, 0, 0), 1.98),
        (0.99, (0, 0, 0, 5), 4.0),  # beyond the last bound
        (0.5, (1, 0, 0, 1), 1.0),
    ],
)
def test_a_quantile_lies_evenly_in_its_bucket(share: float, counts: tuple[int, ...], value: float) -> None:
    assert quantile(share, BOUNDS, counts) == pytest.approx(value)
