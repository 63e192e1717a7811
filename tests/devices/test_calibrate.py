"""Calibration on a fake driver: the choice of copy paths, and the memory of a context."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdepot.adapters import LMCacheMPWorkerAdapter
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


def figures(speeds: dict[str, dict[int, float]], is_store: bool) -> list[Any]:
    from kvdepot.devices.cuda.calibrate import Figure

    return [Figure(way, is_store, size, gbps) for way, sizes in speeds.items() for size, gbps in sizes.items()]


def test_small_copies_go_one_way_and_large_ones_another(machine: Machine) -> None:
    from kvdepot.devices.cuda.calibrate import choose

    found = figures({"dma": {4 * KIB: 5.0, 64 * KIB: 51.0}, "kernel": {4 * KIB: 45.0, 64 * KIB: 54.0}}, False)
    found += figures({"dma": {4 * KIB: 50.0, 64 * KIB: 54.0}, "kernel": {4 * KIB: 52.0, 64 * KIB: 55.0}}, True)
    assert choose(found) == {False: [(0, "kernel"), (64 * KIB, "dma")], True: [(0, "dma")]}


def test_of_ways_about_as_fast_the_one_is_taken_that_keeps_least_of_the_gpu_busy(machine: Machine) -> None:
    from kvdepot.devices.cuda.calibrate import choose

    found = figures({"kernel": {KIB: 50.0}, "staged": {KIB: 46.0}, "dma": {KIB: 44.0}}, False)
    found += figures({"kernel": {KIB: 50.0}, "staged": {KIB: 44.0}, "dma": {KIB: 44.0}}, True)
    assert choose(found) == {False: [(0, "staged")], True: [(0, "kernel")]}


def test_the_bus_itself_is_no_way_to_choose(machine: Machine) -> None:
    from kvdepot.devices.cuda.calibrate import PEAK, choose

    found = [one for is_store in (True, False) for one in figures({PEAK: {MIB: 60.0}, "dma": {KIB: 1.0}}, is_store)]
    assert choose(found) == {False: [(0, "dma")], True: [(0, "dma")]}


SPEEDS = st.floats(0.01, 1000.0)


@given(
    st.lists(st.integers(1, 1 << 24), min_size=1, max_size=7, unique=True).flatmap(
        lambda sizes: st.fixed_dictionaries(
            {way: st.fixed_dictionaries(dict.fromkeys(sizes, SPEEDS)) for way in ("dma", "kernel", "staged")}
        )
    )
)
def test_at_every_size_that_was_measured_the_way_taken_is_nearly_the_best(speeds: dict[str, dict[int, float]]) -> None:
    from kvdepot.devices.cuda.calibrate import choose

    steps = choose(figures(speeds, True) + figures(speeds, False))
    for direction in (True, False):
        assert steps[direction][0][0] == 0
        assert [size for size, _ in steps[direction]] == sorted({size for size, _ in steps[direction]})
        for size in speeds["dma"]:
            taken = next(way for least, way in reversed(steps[direction]) if size >= least)
            assert speeds[taken][size] >= 0.9 * max(of[size] for of in speeds.values())


# -- measuring


def holdings(machine: Machine) -> list[Any]:
    """What this process has of the driver: contexts, device memory, pinned memory, streams, ..."""
    held = machine.held_by(os.getpid())
    return [held[what] for what in ("contexts", "memory", "held")]


def test_measuring_copies_every_size_every_way_and_gives_all_memory_back(machine: Machine) -> None:
    from kvdepot.devices.cuda import calibrate, driver
    from kvdepot.devices.cuda.gpus import Gpu

    cuda = driver.load()
    (first, _) = cuda.devices()
    assert machine.used_bytes(0) == 0
    gpu = Gpu(cuda, first, 64 * MIB)
    try:
        with cuda.current(gpu.context), gpu.copy_paths.slot():
            pass  # it stays, for the next copy
        before = holdings(machine)
        found = calibrate.measure(gpu)
        assert holdings(machine) == before
        ways = gpu.copy_paths.available
    finally:
        gpu.close()
    assert set(ways) == {"dma", "kernel", "staged"}
    measured = {(one.way, one.is_store, one.size) for one in found if one.way != calibrate.PEAK}
    sizes = {size for _, _, size in measured}
    assert sizes == set(calibrate.SIZES[: len(sizes)]) and sizes
    assert measured == {(way, is_store, size) for way in ways for is_store in (True, False) for size in sizes}
    assert [one.is_store for one in found if one.way == calibrate.PEAK] == [True, False]
    assert all(one.gbps > 0 for one in found)
    assert machine.used_bytes(0) == 0


@pytest.mark.parametrize("function", ["cuMemAlloc", "cuMemHostAlloc", "cuStreamCreate", "copy"])
def test_a_driver_that_refuses_while_it_is_measured_is_an_error_and_nothing_stays_behind(
    machine: Machine, function: str
) -> None:
    from kvdepot.devices.cuda import calibrate, driver
    from kvdepot.devices.cuda.gpus import Gpu
    from kvdepot.errors import DeviceError

    cuda = driver.load()
    gpu = Gpu(cuda, list(cuda.devices())[1], 64 * MIB)
    try:
        machine.fail(function, "CUDA_ERROR_OUT_OF_MEMORY", pid=os.getpid())
        with pytest.raises(DeviceError, match="CUDA_ERROR_OUT_OF_MEMORY"):
            calibrate.measure(gpu)
        machine.heal()
    finally:
        machine.heal()
        gpu.close()
    assert machine.used_bytes(1) == 0


# -- accounting


def test_what_a_context_takes_is_what_is_in_use_more_than_before_it_was_made(machine: Machine) -> None:
    from kvdepot.devices.cuda import calibrate, driver

    cuda = driver.load()
    uuid, device = next(iter(cuda.devices().items()))
    took, context = calibrate.cost_of(uuid, lambda: cuda.retain(device))
    try:
        assert took == machine.used_bytes(0) > 0
        assert cuda.current(context)
    finally:
        cuda.release(device)


def test_what_a_context_takes_is_unknown_where_memory_was_given_back_meanwhile(machine: Machine) -> None:
    from kvdepot.devices.cuda import calibrate, driver

    cuda = driver.load()
    uuid, device = next(iter(cuda.devices().items()))
    cuda.retain(device)
    assert calibrate.cost_of(uuid, lambda: cuda.release(device)) == (None, None)


@pytest.mark.parametrize("uuid", ["GPU-00000000-0000-0000-0000-000000000000", ""])
def test_what_a_context_takes_is_unknown_where_nvml_does_not_know_the_gpu(machine: Machine, uuid: str) -> None:
    from kvdepot.devices.cuda import calibrate

    assert calibrate.cost_of(uuid, lambda: "made") == (None, "made")


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
def test_calibrate_prints_each_gpu_with_both_directions_and_the_way_taken_for_each_size(machine: Machine) -> None:
    done = calibrated(machine)
    assert done.returncode == 0 and done.stderr == ""
    assert len(re.findall(r"GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", done.stdout)) == 2
    assert done.stdout.count("stores (GPU to host)") == done.stdout.count("retrieves (host to GPU)") == 2
    rows = re.findall(r"^ +4 KiB +[\d.]+ +[\d.]+ +[\d.]+  (\w+)$", done.stdout, re.MULTILINE)
    assert len(rows) == 4 and set(rows) <= {"dma", "staged", "kernel"}
    assert machine.used_bytes(0) == machine.used_bytes(1) == 0


@pytest.mark.faults
def test_calibrate_measures_the_gpu_that_is_named_by_number_or_uuid(machine: Machine) -> None:
    from kvdepot.devices.cuda import driver

    (one,) = json.loads(calibrated(machine, "--gpu", "1", "--json").stdout)
    (same,) = json.loads(calibrated(machine, "--gpu", one["uuid"], "--json").stdout)
    assert same["uuid"] == one["uuid"] == list(driver.load().devices())[1]
    assert {"way", "is_store", "size", "gbps"} == set(one["figures"][0])


def test_calibrate_without_staging_memory_says_that_only_the_copy_engines_are_left(machine: Machine) -> None:
    done = calibrated(machine, "--gpu", "0", KVDEPOT_GPU_STAGING_MIB="0")
    assert done.returncode == 0
    assert "the copy kernel is not available: gpu_staging_mib is too small" in done.stdout
    assert not re.search(r"(kernel|staged)$", done.stdout, re.MULTILINE)


@pytest.mark.parametrize("wanted", ["2", "GPU-00000000-0000-0000-0000-000000000000"])
def test_calibrate_names_the_gpus_there_are_when_another_is_meant(machine: Machine, wanted: str) -> None:
    done = calibrated(machine, "--gpu", wanted)
    assert done.returncode == 1
    assert re.fullmatch(rf"kvdepot: no GPU {wanted}; available: 0 = GPU-\S+, 1 = GPU-\S+\n", done.stderr)


def test_calibrate_without_cuda_python_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "cuda.py").write_text("raise ImportError('not installed')")
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-m", "kvdepot.cli", "calibrate"],
        env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=HANG_S, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert re.fullmatch(r"kvdepot: .*pip install 'cuda-bindings\S+ 'nvidia-ml-py\S+'\n", done.stderr)
    assert done.stdout == ""


# -- the server


@pytest.mark.faults
def test_the_status_tells_what_is_held_of_each_gpu_in_use_and_of_no_other(
    machine: Machine, start_depot: StartDepot, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvdepot.devices.cuda import driver

    monkeypatch.setenv("LD_LIBRARY_PATH", machine.environment()["LD_LIBRARY_PATH"])
    depot = start_depot("--gpu-staging-mib", "16", arena_mib=8)
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
        assert 0 < told["staging_bytes"] <= 16 * MIB and told["context_bytes"] > 0
        assert told["staging_bytes"] + told["context_bytes"] == held
        for what in ("stores", "retrieves"):
            line = re.compile(rf"INFO {uuid}: {what} use (dma|staged|kernel) .*GB/s")
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
