"""The time before which this process had read none of a model's files: vLLM loads its plugins before it reads any."""

from __future__ import annotations

import time

_loaded_since = time.time()


def loaded_since() -> float:
    """Unix time at which this process had not yet read any of a model's files."""
    return _loaded_since
