"""Two GPUs of the fake driver, and a server's devices on a small arena; a file's `IDLE_S` is how long GPUs are kept."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing

import pytest

from kvdepot.devices import Devices
from kvdepot.memory.arena import Arena
from tests.devices.conformance import arena_of
from tests.devices.copy_paths import STAGING, prepare
from tests.fakecuda.machine import Machine


@pytest.fixture(scope="module")
def gpus() -> Iterator[Machine]:
    with closing(Machine()) as made, made.here():
        yield made


@pytest.fixture
def machine(gpus: Machine) -> Iterator[Machine]:
    """Two GPUs of which the server must have left both at the end."""
    yield gpus
    gpus.heal()
    assert os.getpid() not in gpus.contexts(0) | gpus.contexts(1)
    assert gpus.failures() == []


@pytest.fixture
def arena() -> Iterator[Arena]:
    with arena_of(24) as made:
        yield made


@pytest.fixture
def devices(
    machine: Machine, arena: Arena, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[Devices]:
    made = Devices(arena, STAGING, getattr(request.module, "IDLE_S", 0.0))
    prepare(made, monkeypatch)
    yield made
    machine.heal()
    made.close()
