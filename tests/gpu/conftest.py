"""Everything in this folder needs a GPU, and is skipped with the reason where there is none.

Nothing is imported from CUDA or torch before that is known.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import pytest

IS_FAKE = bool(os.environ.get("FAKECUDA"))
"""Whether the driver is that of tests/fakecuda, where the processor copies: sizes are smaller then."""


@functools.cache
def missing() -> str:
    """Why there is no GPU here; empty where there is one."""
    from kvdepot.devices.cuda.driver import load
    from kvdepot.errors import DeviceError

    try:
        return "" if load().devices() else "the driver has no GPU for this process"
    except DeviceError as exc:
        return str(exc)


@pytest.fixture(autouse=True, scope="session")
def _a_gpu() -> None:
    if missing():
        pytest.skip(f"needs a GPU: {missing()}")


@pytest.fixture(scope="session")
def torch_on_gpu() -> Any:
    """torch, where it can use the GPU."""
    torch = pytest.importorskip("torch", reason="needs torch")
    if not torch.cuda.is_available():
        pytest.skip("this torch cannot use the GPU")
    return torch
