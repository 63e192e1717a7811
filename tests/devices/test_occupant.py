"""A process that keeps a GPU of the fake driver busy: copy paths measured beside it, and what is left when it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from functools import partial

import pytest

from kvdepot.devices.cuda.plan import DIRECTIONS
from kvdepot.processes import code_command
from tests.conftest import HANG_S, eventually
from tests.fakecuda.machine import Machine

pytestmark = pytest.mark.faults

MIB = 1 << 20


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """One GPU, for this process and those it starts."""
    with closing(Machine(gpus=1)) as made:
        for name, value in made.environment().items():
            monkeypatch.setenv(name, value)
        with made.here():
            yield made
        assert made.failures() == []


def first() -> str:
    from kvdepot.devices.cuda import driver

    return next(iter(driver.load().devices()))


def test_every_path_is_measured_with_what_it_leaves_to_the_other_process(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvdepot.devices.cuda import calibrate, driver
    from kvdepot.devices.cuda.gpus import Gpu
    from kvdepot.devices.cuda.occupant import Occupant

    monkeypatch.setattr(calibrate, "SIZES", (64 << 10,))
    monkeypatch.setattr(calibrate, "_BESIDE_S", 0.01)
    with closing(Gpu(driver.load(), first(), 64 * MIB)) as gpu, closing(Occupant(first())) as occupant:
        assert len(machine.contexts(0)) == 2
        before = occupant.count()
        found = calibrate.measure(gpu, occupant)
        assert occupant.count() > before
        paths = gpu.copy_paths.available
    measured = [(one.path, one.direction, one.size) for one in found if one.path != calibrate.PEAK]
    assert sorted(measured) == sorted(
        (path, direction, size) for path in paths for direction in DIRECTIONS for size in calibrate.SIZES
    )
    assert all(one.share is not None and 0 < one.share <= 1 for one in found if one.path != calibrate.PEAK)
    assert len(calibrate.table(found, calibrate.choose(found))) == 6
    assert machine.used_bytes(0) == 0


def test_an_interrupt_ends_calibrate_and_the_process_beside_it(machine: Machine) -> None:
    command = [sys.executable, "-m", "kvdepot.cli", "calibrate", "--busy"]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # it is ignored in a shell's background
    )  # fmt: skip
    eventually(lambda: len(machine.contexts(0)) == 2)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=HANG_S)
    assert process.returncode == 130 and "Traceback" not in said
    eventually(lambda: not machine.contexts(0))


def test_an_occupant_ends_when_the_process_that_started_it_is_killed(machine: Machine) -> None:
    code = "import sys; from kvdepot.devices.cuda.occupant import Occupant; Occupant(sys.argv[1]); print(); input()"
    process = subprocess.Popen(code_command(code, first()), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"\n"
    assert len(machine.contexts(0)) == 1
    process.kill()
    process.communicate(timeout=HANG_S)
    eventually(lambda: not machine.contexts(0))


def test_an_occupant_that_dies_is_an_error_of_the_measurement(machine: Machine) -> None:
    from kvdepot.devices.cuda import calibrate, driver
    from kvdepot.devices.cuda.gpus import Gpu
    from kvdepot.devices.cuda.occupant import Occupant
    from kvdepot.errors import DeviceError

    with closing(Gpu(driver.load(), first(), 0)) as gpu, closing(Occupant(first())) as occupant:
        (pid,) = machine.contexts(0) - {os.getpid()}
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(DeviceError, match="has ended: exit code -9"):
            calibrate.measure(gpu, occupant)
        with pytest.raises(DeviceError, match="has ended: exit code -9"):
            occupant.count()
    assert machine.used_bytes(0) == 0


def test_an_occupant_whose_gpu_does_not_answer_is_killed(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvdepot.devices.cuda import occupant
    from kvdepot.errors import DeviceError

    monkeypatch.setattr(occupant, "_START_S", 3.0)
    monkeypatch.setattr(occupant, "_END_S", 0.1)
    with machine.gate(), pytest.raises(DeviceError, match="has not started within 3 s"):
        occupant.Occupant(first())
    assert not machine.contexts(0)
