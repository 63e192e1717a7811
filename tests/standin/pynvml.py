"""NVIDIA's management library as nvidia-ml-py gives it, for the GPUs of the stand-in: what is in use of one, by all."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from cuda.bindings._process import uuid_of
from machine import VARIABLE, is_alive, used_bytes

__all__ = [
    "NVMLError",
    "nvmlDeviceGetHandleByUUID",
    "nvmlDeviceGetMemoryInfo",
    "nvmlInit",
    "nvmlShutdown",
]

_users = 0


class NVMLError(Exception):
    """What the library says no with."""


@dataclass
class _Memory:
    total: int
    free: int
    used: int


def _folder() -> Path:
    if not _users:
        raise NVMLError("Uninitialized")
    return Path(os.environ[VARIABLE])


def nvmlInit() -> None:
    global _users
    if VARIABLE not in os.environ:
        raise NVMLError("Driver Not Loaded")
    _users += 1


def nvmlShutdown() -> None:
    global _users
    if not _users:
        raise NVMLError("Uninitialized")
    _users -= 1


def nvmlDeviceGetHandleByUUID(uuid: str) -> int:
    config = json.loads((_folder() / "config").read_text())
    for gpu in range(config["gpus"]):
        if uuid_of(gpu) == uuid:
            return gpu
    raise NVMLError("Not Found")


def nvmlDeviceGetMemoryInfo(handle: int) -> _Memory:
    folder = _folder()
    total = json.loads((folder / "config").read_text())["total_bytes"]
    ledgers = [json.loads(path.read_text()) for path in folder.glob("*.ledger") if is_alive(path)]
    used = used_bytes(ledgers, handle)
    return _Memory(total, total - used, used)
