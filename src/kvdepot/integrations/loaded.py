"""When this process began, as far as a model's files are concerned: vLLM loads its plugins before it reads any."""

from __future__ import annotations

import time

__all__ = ["loaded_since"]

_loaded_since = time.time()


def loaded_since() -> float:
    """Unix time at which this process had not read any of a model's files yet."""
    return _loaded_since
