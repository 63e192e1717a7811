"""The speed of a lane's loads: what decides whether an engine loads or computes (integrations/vllm/load_or_compute.py).

Used by client/lane.py. Only loads are measured: they go before stores at every slice, so a store delays a load by one
slice at most.
"""

from __future__ import annotations

from collections import deque

_SAMPLES = 32
"""The number of latest loads from which the speed is computed."""


class LoadSpeed:
    """Bytes per second of a lane's latest loads: half of their bytes came at this speed or faster. So one slow copy
    is soon forgotten, and many small copies do not hide the speed of large ones."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque(maxlen=_SAMPLES)  # bytes per second, and bytes

    def __repr__(self) -> str:
        return f"<LoadSpeed {self.bytes_s / 1e9:.2f} GB/s of {len(self._samples)} copies>"

    def add(self, size_bytes: int, took_s: float) -> None:
        """A copy has ended. Any thread."""
        if size_bytes > 0 and took_s > 0:
            self._samples.append((size_bytes / took_s, size_bytes))

    @property
    def bytes_s(self) -> float:
        """Bytes per second; 0.0 before the first load has ended. Any thread."""
        samples = sorted(self._samples, reverse=True)
        half = sum(size for _, size in samples) / 2
        for speed, size in samples:
            half -= size
            if half <= 0:
                return speed
        return 0.0
