"""Histograms of values that the deciding thread sees. Counting a value is one bisection: a microsecond at most."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from kvdepot.protocol.status import Histogram

AGES_S = (
    1.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 1800.0, 3600.0, 7200.0, 14400.0, 28800.0, 86400.0, 172800.0,
    604800.0,
)  # fmt: skip
SAVED_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0)
TOKENS = (
    64.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0, 32768.0, 65536.0, 131072.0, 262144.0, 1048576.0,
)  # fmt: skip
RATES = (1e6, 1e7, 3e7, 1e8, 2e8, 5e8, 1e9, 2e9, 4e9, 8e9, 16e9)
"""Bytes per second."""


class Buckets:
    __slots__ = ("_bounds", "_counts", "_name", "_unit", "sum")

    def __init__(self, name: str, unit: str, bounds: Sequence[float]) -> None:
        """See `status.Histogram`."""
        self._name, self._unit, self._bounds = name, unit, bounds
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0  # of the values

    def count(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    def figure(self) -> Histogram:
        return Histogram(self._name, self._unit, list(self._bounds), list(self._counts), self.sum)
