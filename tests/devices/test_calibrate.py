"""Calibration on a fake driver: the choice of copy paths, and the memory of a context."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdepot.adapters import LMCacheMPWorkerAdapter
from kvdepot.devices.cuda.plan import DIRECTIONS
from tests.conftest import HANG_S, StartDepot, eventually
from tests.fakecuda.machine import Machine

pytestmark = pytest.mark.faults

GIB = 1 << 30
MIB = 1 << 20
KIB = 1 << 10


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    """Two GPUs, for this process and those it starts."""
    with closing(Machine()) as made:
        with made.here():
            yield made
        assert made.failures() == []


# -- the choice


def figures(speeds: dict[str, dict[int, float]], direction: str, share: float | None = None) -> list[Any]:
    from kvdepot.devices.cuda.calibrate import Figure

    return [
        Figure(path, direction, size, gbps, share) for path, sizes in speeds.items() for size, gbps in sizes.items()
    ]


def test_the_engines_kernels_wait_for_ours_only_where_that_is_twice_as_fast(machine: Machine) -> None:
    from kvdepot.devices.cuda.calibrate import choose

    found = figures({"staged": {KIB: 46.0}, "dma": {KIB: 22.0}}, "retrieve")
    found += figures({"staged": {KIB: 46.0}, "dma": {KIB: 24.0}}, "store")
    assert choose(found) == {"retrieve": [(0, "staged"), (28 * KIB, "dma")], "store": [(0, "dma")]}


def test_the_advice_is_the_size_from_which_both_directions_use_the_copy_engines(machine: Machine) -> None:
    from kvdepot.devices.cuda.calibrate import SIZES, dma_from

    assert dma_from({"store": [(0, "dma")], "retrieve": [(0, "staged"), (28 * KIB, "dma")]}) == 28 * KIB
    assert dma_from({"store": [(0, "staged"), (8 * KIB, "dma"), (MIB, "staged")], "retrieve": [(0, "dma")]}) == 8 * KIB
    assert dma_from({"store": [(0, "staged")], "retrieve": [(0, "dma")]}) > SIZES[-1]


SPEEDS = st.floats(0.01, 1000.0)
SHARES = st.floats(0.01, 1.0)
PATHS = ("dma", "staged")


@given(
    st.lists(st.integers(1, 1 << 24), min_size=1, max_size=7, unique=True).flatmap(
        lambda sizes: st.fixed_dictionaries(
            {path: st.fixed_dictionaries(dict.fromkeys(sizes, st.tuples(SPEEDS, SHARES))) for path in PATHS}
        )
    ),
    st.booleans(),
    st.sampled_from([0, 1, 28 * KIB, 1 << 30]),
)
def test_the_path_taken_is_dma_or_twice_as_fast_at_every_size_measured(
    measured: dict[str, dict[int, tuple[float, float]]], is_busy: bool, dma_from_bytes: int
) -> None:
    from kvdepot.devices.cuda.calibrate import Figure, choose

    found = [
        Figure(path, direction, size, gbps, share if is_busy else None)
        for direction in DIRECTIONS
        for path, sizes in measured.items()
        for size, (gbps, share) in sizes.items()
    ]
    steps = choose(found, dma_from_bytes)
    for direction in DIRECTIONS:
        assert steps[direction][0][0] == 0
        assert [size for size, _ in steps[direction]] == sorted({size for size, _ in steps[direction]})
        for size in measured["dma"]:
            allowed = PATHS[:1] if size >= dma_from_bytes and not is_busy else PATHS
            taken = next(path for least, path in reversed(steps[direction]) if size >= least)
            scores = {
                path: gbps * (share if is_busy else 1) for path in allowed for gbps, share in [measured[path][size]]
            }
            assert scores[taken] >= (0.5 if taken == "dma" else 1.0) * max(scores.values())
        if not is_busy:  # also between the sizes that were measured, and above them
            assert {path for size, path in steps[direction] if size >= dma_from_bytes} <= {"dma"}


# -- measuring


@contextmanager
def using(number: int) -> Iterator[Any]:
    """A GPU of the server, by its number."""
    from kvdepot.devices.cuda import driver
    from kvdepot.devices.cuda.gpus import Gpu

    cuda = driver.load()
    with closing(Gpu(cuda, list(cuda.devices())[number], 64 * MIB)) as gpu:
        yield gpu


def holdings(machine: Machine) -> list[Any]:
    """What this process has of the driver: contexts, device memory, pinned memory, streams, ..."""
    held = machine.held_by(os.getpid())
    return [held[what] for what in ("contexts", "memory", "held")]


def test_measuring_copies_every_size_every_way_and_gives_all_memory_back(machine: Machine) -> None:
    from kvdepot.devices.cuda import calibrate

    assert machine.used_bytes(0) == 0
    with using(0) as gpu:
        with gpu.driver.current(gpu.context), gpu.copy_paths.slot():
            pass  # it stays, for the next copy
        before = holdings(machine)
        found = calibrate.measure(gpu)
        assert holdings(machine) == before
        paths = gpu.copy_paths.available
    assert set(paths) == {"dma", "staged"}
    measured = {(one.path, one.direction, one.size) for one in found if one.path != calibrate.PEAK}
    sizes = {size for _, _, size in measured}
    assert sizes == set(calibrate.SIZES[: len(sizes)]) and sizes
    assert measured == {(path, direction, size) for path in paths for direction in DIRECTIONS for size in sizes}
    assert [one.direction for one in found if one.path == calibrate.PEAK] == ["store", "retrieve"]
    assert all(one.gbps > 0 for one in found)
    assert machine.used_bytes(0) == 0


@pytest.mark.parametrize(("path", "flags"), [("dma", {1: 2}), ("staged", {0: 2})], ids=str)
def test_the_hint_to_leave_the_multiprocessors_alone_reaches_the_driver(
    machine: Machine, path: str, flags: dict[int, int]
) -> None:
    from kvdepot.devices.cuda import calibrate, driver

    before = machine.counts(os.getpid())
    with using(0) as gpu:
        cuda = gpu.driver
        assert int(cuda.cu.CUmemcpyFlags.CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE) == driver.PREFER_OVERLAP
        with cuda.current(gpu.context), calibrate._scratch(cuda) as (device, host), gpu.copy_paths.slot() as slot:
            for direction in DIRECTIONS:
                gpu.copy_paths.run(calibrate._plan(direction, device, host, 4 * KIB, 8), slot, path)
    made = machine.counts(os.getpid()) - before
    assert {value: made[f"batch_flags_{value}"] for value in (0, 1) if made[f"batch_flags_{value}"]} == flags


def test_measuring_ends_when_its_clock_says_so(machine: Machine) -> None:
    from kvdepot.devices.cuda import calibrate

    ticks = count(0, 1.0)
    with using(0) as gpu:
        found = calibrate.measure(gpu, clock=lambda: next(ticks))
    assert {one.size for one in found if one.path != calibrate.PEAK} == {calibrate.SIZES[0]}
    assert {one.gbps for one in found if one.path == calibrate.PEAK} == {calibrate._SCRATCH_BYTES / 1e9}


@pytest.mark.parametrize("function", ["cuMemAlloc", "cuMemHostAlloc", "cuStreamCreate", "copy"])
def test_a_driver_that_refuses_a_measurement_is_an_error_and_keeps_nothing(machine: Machine, function: str) -> None:
    from kvdepot.devices.cuda import calibrate
    from kvdepot.errors import DeviceError

    with using(1) as gpu:
        machine.fail(function, "CUDA_ERROR_OUT_OF_MEMORY", pid=os.getpid())
        with pytest.raises(DeviceError, match="CUDA_ERROR_OUT_OF_MEMORY"):
            calibrate.measure(gpu)
        machine.heal()
    assert machine.used_bytes(1) == 0


# -- accounting


def test_what_a_context_takes_is_unknown_without_nvidia_ml_py(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvdepot.devices.cuda import calibrate, driver

    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert calibrate.cost_of(next(iter(driver.load().devices())), lambda: "made") == (None, "made")


# -- the command


def calibrated(machine: Machine, *flags: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvdepot.cli", "calibrate", *flags],
        env={**machine.environment(), **more}, capture_output=True, text=True, timeout=HANG_S, check=False,
    )  # fmt: skip


@pytest.mark.faults
def test_calibrate_prints_the_copy_path_of_each_gpu_direction_and_size(machine: Machine) -> None:
    done = calibrated(machine)
    assert done.returncode == 0 and done.stderr == ""
    assert len(re.findall(r"GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", done.stdout)) == 2
    assert done.stdout.count("stores (GPU to host)") == done.stdout.count("retrieves (host to GPU)") == 2
    rows = re.findall(r"^ +4 KiB +[\d.]+ +[\d.]+  (\w+)$", done.stdout, re.MULTILINE)
    assert len(rows) == 4 and set(rows) <= {"dma", "staged"}
    assert machine.used_bytes(0) == machine.used_bytes(1) == 0


@pytest.mark.parametrize("wanted", ["2", "GPU-00000000-0000-0000-0000-000000000000"])
def test_calibrate_names_the_gpus_there_are_when_another_is_meant(machine: Machine, wanted: str) -> None:
    done = calibrated(machine, "--gpu", wanted)
    assert done.returncode == 1
    assert re.fullmatch(rf"kvdepot: no GPU {wanted}; available: 0 = GPU-\S+, 1 = GPU-\S+\n", done.stderr)


# -- the server


@pytest.mark.faults
def test_the_status_tells_what_is_held_of_each_gpu_in_use_and_of_no_other(
    machine: Machine, start_depot: StartDepot, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvdepot.devices.cuda import driver

    monkeypatch.setenv("LD_LIBRARY_PATH", machine.environment()["LD_LIBRARY_PATH"])
    depot = start_depot("--gpu-staging-mib", "16", "--gpu-idle-s", "0", "--gpu-dma-from-kib", "0", arena_mib=8)
    assert depot.status()["devices"] == []
    cuda = driver.load()
    uuid, device = list(cuda.devices().items())[1]
    context = cuda.retain(device)
    with cuda.current(context):
        address = int(cuda.call("cuMemAlloc", MIB))
        before = machine.used_bytes(1)
        worker = LMCacheMPWorkerAdapter(depot.url, depot.context, "m", 1, 0, 16)
        try:
            worker.register_kv_caches({"layer": a_tensor(address, device)}, [0])
            (told,) = depot.status()["devices"]
            held = machine.used_bytes(1) - before
        finally:
            worker.shutdown()
        assert (told["uuid"], told["registrations"]) == (uuid, 1)
        assert {path for steps in told["copy_paths"].values() for _, path in steps} == {"dma"}
        assert 0 < told["staging_bytes"] <= 16 * MIB and told["context_bytes"] > 0
        assert told["staging_bytes"] + told["context_bytes"] == held
        for what in ("stores", "retrieves"):
            line = re.compile(rf"INFO {uuid}: {what} use dma .*GB/s")
            eventually(lambda line=line: line.search(depot.logged()))
        assert depot.status()["devices"] == []
        assert machine.used_bytes(1) == before
        assert machine.used_bytes(0) == 0
        cuda.call("cuMemFree", address)
    cuda.release(device)


def a_tensor(address: int, device: int) -> Any:
    """What is asked of a torch tensor of 1 MiB: 16 blocks of 64 KiB."""
    return SimpleNamespace(
        device=SimpleNamespace(type="cuda", index=device),
        dtype="torch.uint8",
        shape=(16, 64 * KIB),
        stride=lambda: (64 * KIB, 1),
        element_size=lambda: 1,
        storage_offset=lambda: 0,
        data_ptr=lambda: address,
        untyped_storage=lambda: SimpleNamespace(data_ptr=lambda: address, nbytes=lambda: MIB),
    )
