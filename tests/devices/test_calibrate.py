"""Calibration on a fake driver: the choice of copy paths, and the memory of a context."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdepot.adapters import LMCacheMPWorkerAdapter
from kvdepot.config import Config
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


def figures(speeds: dict[str, dict[int, float]], is_store: bool, share: float | None = None) -> list[Any]:
    from kvdepot.devices.cuda.calibrate import Figure

    return [Figure(way, is_store, size, gbps, share) for way, sizes in speeds.items() for size, gbps in sizes.items()]


def both(*shared: tuple[str, dict[int, float], float | None]) -> list[Any]:
    """Figures that are the same in both directions: copy path, GB/s by size, share that the occupant kept."""
    return [
        one
        for is_store in (True, False)
        for way, speeds, share in shared
        for one in figures({way: speeds}, is_store, share)
    ]


def test_small_copies_go_one_way_and_large_ones_another(machine: Machine) -> None:
    from kvdepot.devices.cuda.calibrate import choose

    found = figures({"dma": {4 * KIB: 5.0, 16 * KIB: 51.0}, "kernel": {4 * KIB: 45.0, 16 * KIB: 54.0}}, False)
    found += figures({"dma": {4 * KIB: 50.0, 16 * KIB: 54.0}, "kernel": {4 * KIB: 52.0, 16 * KIB: 55.0}}, True)
    assert choose(found) == {False: [(0, "kernel"), (16 * KIB, "dma")], True: [(0, "dma")]}


def test_of_paths_about_as_fast_the_one_that_keeps_least_of_the_gpu_busy_is_taken(machine: Machine) -> None:
    from kvdepot.devices.cuda.calibrate import choose

    found = figures({"kernel": {KIB: 50.0}, "staged": {KIB: 46.0}, "dma": {KIB: 44.0}}, False)
    found += figures({"kernel": {KIB: 50.0}, "staged": {KIB: 44.0}, "dma": {KIB: 44.0}}, True)
    assert choose(found) == {False: [(0, "staged"), (28 * KIB, "dma")], True: [(0, "kernel"), (28 * KIB, "dma")]}


def test_the_bus_itself_is_no_way_to_choose(machine: Machine) -> None:
    from kvdepot.devices.cuda.calibrate import PEAK, choose

    found = [one for is_store in (True, False) for one in figures({PEAK: {MIB: 60.0}, "dma": {KIB: 1.0}}, is_store)]
    assert choose(found) == {False: [(0, "dma")], True: [(0, "dma")]}


def test_an_idle_gpu_chooses_no_kernel_for_copies_of_28_kib_and_more(machine: Machine) -> None:
    from kvdepot.devices.cuda.calibrate import choose, describe

    sizes = (16 * KIB, 64 * KIB, 2 * MIB)
    found = both(("dma", dict.fromkeys(sizes, 10.0), None), ("kernel", dict.fromkeys(sizes, 50.0), None))
    assert choose(found)[False] == choose(found)[True] == [(0, "kernel"), (28 * KIB, "dma")]
    assert choose(found, 0)[False] == [(0, "dma")]
    assert choose(found, 64 * KIB)[False] == [(0, "kernel"), (64 * KIB, "dma")]
    assert choose(found, 8 * MIB)[False] == [(0, "kernel"), (8 * MIB, "dma")]
    lines = describe([*found, *both(("one copy", {64 * MIB: 55.0}, None))], choose(found))
    assert lines[0] == "stores use kernel (50.0 GB/s), dma from 28 KiB on (10.0 GB/s); one large copy 55.0 GB/s"


def test_sizes_that_an_idle_gpu_had_no_time_for_are_left_to_the_copy_engines(machine: Machine) -> None:
    from kvdepot.devices.cuda.calibrate import choose

    found = both(("dma", {4 * KIB: 1.0}, None), ("overlap", {4 * KIB: 0.5}, None), ("staged", {4 * KIB: 9.0}, None))
    assert choose(found)[True] == [(0, "staged"), (28 * KIB, "dma")]


def test_the_hint_to_overlap_is_given_unless_it_makes_copies_slower(machine: Machine) -> None:
    from kvdepot.devices.cuda.calibrate import choose

    found = figures({"dma": {KIB: 10.0, 64 * KIB: 50.0}, "overlap": {KIB: 9.5, 64 * KIB: 30.0}}, True)
    found += figures({"dma": {KIB: 10.0, 64 * KIB: 50.0}, "overlap": {KIB: 5.0, 64 * KIB: 50.0}}, False)
    assert choose(found) == {
        True: [(0, "overlap"), (64 * KIB, "dma")],
        False: [(0, "dma"), (64 * KIB, "overlap")],
    }


def test_figures_beside_a_busy_gpu_choose_for_every_size(machine: Machine) -> None:
    from kvdepot.devices.cuda.calibrate import choose

    sizes = (4 * KIB, 64 * KIB)
    found = both(("dma", dict.fromkeys(sizes, 10.0), 0.98), ("kernel", dict.fromkeys(sizes, 50.0), 0.9))
    assert choose(found) == choose(found, 0) == {True: [(0, "kernel")], False: [(0, "kernel")]}


def test_beside_a_busy_gpu_a_path_pays_for_what_it_takes_from_the_other_process(machine: Machine) -> None:
    from kvdepot.devices.cuda.calibrate import choose

    dma, staged = ("dma", {4 * KIB: 5.0, 64 * KIB: 25.0}, 1.0), ("staged", {4 * KIB: 12.0, 64 * KIB: 40.0}, 0.8)
    found = both(dma, staged, ("kernel", {4 * KIB: 20.0, 64 * KIB: 50.0}, 0.4))
    assert choose(found)[True] == [(0, "staged")]
    found = both(dma, (*staged[:2], 0.5), ("kernel", {4 * KIB: 20.0, 64 * KIB: 50.0}, 0.2))
    assert choose(found)[True] == [(0, "staged"), (64 * KIB, "dma")]


def test_the_advice_is_the_size_from_which_both_directions_use_the_copy_engines(machine: Machine) -> None:
    from kvdepot.devices.cuda.calibrate import SIZES, dma_from

    mixed = [(0, "kernel"), (8 * KIB, "overlap"), (16 * KIB, "staged"), (64 * KIB, "dma"), (MIB, "overlap")]
    assert dma_from({True: [(0, "dma")], False: [(0, "overlap")]}) == 0
    assert dma_from({True: [(0, "dma")], False: [(0, "staged"), (28 * KIB, "dma")]}) == 28 * KIB
    assert dma_from({True: mixed, False: [(0, "staged"), (28 * KIB, "dma")]}) == 28 * KIB
    assert dma_from({True: [(0, "dma"), (MIB, "kernel")], False: [(0, "dma")]}) == 0
    assert dma_from({True: [(0, "kernel")], False: [(0, "dma")]}) > SIZES[-1]


def test_the_setting_and_the_choice_have_the_same_default(machine: Machine) -> None:
    from kvdepot.devices.cuda import DMA_FROM_BYTES

    assert Config().gpu_dma_from_kib << 10 == DMA_FROM_BYTES


SPEEDS = st.floats(0.01, 1000.0)
SHARES = st.floats(0.01, 1.0)
PATHS = ("dma", "overlap", "kernel", "staged")


@given(
    st.lists(st.integers(1, 1 << 24), min_size=1, max_size=7, unique=True).flatmap(
        lambda sizes: st.fixed_dictionaries(
            {way: st.fixed_dictionaries(dict.fromkeys(sizes, st.tuples(SPEEDS, SHARES))) for way in PATHS}
        )
    ),
    st.booleans(),
    st.sampled_from([0, 1, 28 * KIB, 1 << 30]),
)
def test_the_path_taken_is_nearly_the_best_of_those_allowed_at_every_size_measured(
    measured: dict[str, dict[int, tuple[float, float]]], is_busy: bool, dma_from_bytes: int
) -> None:
    from kvdepot.devices.cuda.calibrate import Figure, choose

    found = [
        Figure(way, is_store, size, gbps, share if is_busy else None)
        for is_store in (True, False)
        for way, sizes in measured.items()
        for size, (gbps, share) in sizes.items()
    ]
    steps = choose(found, dma_from_bytes)
    for direction in (True, False):
        assert steps[direction][0][0] == 0
        assert [size for size, _ in steps[direction]] == sorted({size for size, _ in steps[direction]})
        for size in measured["dma"]:
            allowed = PATHS[:2] if size >= dma_from_bytes and not is_busy else PATHS
            taken = next(way for least, way in reversed(steps[direction]) if size >= least)
            scores = {way: gbps * (share if is_busy else 1) for way in allowed for gbps, share in [measured[way][size]]}
            assert scores[taken] >= 0.9 * max(scores.values())
        if not is_busy:  # also between the sizes that were measured, and above them
            assert {way for size, way in steps[direction] if size >= dma_from_bytes} <= set(PATHS[:2])


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
    assert set(ways) == {"dma", "overlap", "kernel", "staged"}
    measured = {(one.way, one.is_store, one.size) for one in found if one.way != calibrate.PEAK}
    sizes = {size for _, _, size in measured}
    assert sizes == set(calibrate.SIZES[: len(sizes)]) and sizes
    assert measured == {(way, is_store, size) for way in ways for is_store in (True, False) for size in sizes}
    assert [one.is_store for one in found if one.way == calibrate.PEAK] == [True, False]
    assert all(one.gbps > 0 for one in found)
    assert machine.used_bytes(0) == 0


@pytest.mark.parametrize(
    ("way", "flags"),
    [("dma", {0: 2}), ("overlap", {1: 2}), ("staged", {0: 2}), ("kernel", {})],
    ids=lambda value: str(value),
)
def test_the_hint_to_overlap_reaches_the_driver_on_its_copy_path_alone(
    machine: Machine, way: str, flags: dict[int, int]
) -> None:
    from kvdepot.devices.cuda import calibrate, driver
    from kvdepot.devices.cuda.gpus import Gpu

    cuda = driver.load()
    assert int(cuda.cu.CUmemcpyFlags.CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE) == driver.PREFER_OVERLAP
    before = machine.counts(os.getpid())
    gpu = Gpu(cuda, next(iter(cuda.devices())), 64 * MIB)
    try:
        with cuda.current(gpu.context), calibrate._scratch(cuda) as (device, host), gpu.copy_paths.slot() as slot:
            for is_store in (True, False):
                gpu.copy_paths.run(calibrate._plan(device, host, 4 * KIB, 8), is_store, slot, way)
    finally:
        gpu.close()
    made = machine.counts(os.getpid()) - before
    assert {value: made[f"batch_flags_{value}"] for value in (0, 1) if made[f"batch_flags_{value}"]} == flags


def test_kernels_wait_for_a_busy_gpu_and_the_copy_engines_do_not(machine: Machine) -> None:
    """On the clock of the fake driver, whose model is another process's time slices of 1.6 ms."""
    from kvdepot.devices.cuda import calibrate, driver
    from kvdepot.devices.cuda.gpus import Gpu

    def measured() -> tuple[dict[tuple[str, int], float], list[tuple[int, str]]]:
        found = calibrate.measure(gpu, clock=machine.clock)
        return {(one.way, one.size): one.gbps for one in found if not one.is_store}, calibrate.choose(found)[False]

    with closing(Gpu(driver.load(), next(iter(driver.load().devices())), 64 * MIB)) as gpu:
        idle, choice = measured()
        machine.load(is_busy=True)
        try:
            busy, choice_of_busy = measured()
        finally:
            machine.load(is_busy=False)
    assert choice[0][1] in ("kernel", "staged") and choice[-1][1] in ("dma", "overlap")
    assert [path in ("dma", "overlap") for _, path in choice_of_busy] == [True]
    for path in ("kernel", "staged"):
        assert busy[path, 16 * KIB] < idle[path, 16 * KIB] / 2
    assert round(busy["dma", 16 * KIB] / idle["dma", 16 * KIB], 1) == 1


def test_measuring_ends_when_its_clock_says_so(machine: Machine) -> None:
    from kvdepot.devices.cuda import calibrate, driver
    from kvdepot.devices.cuda.gpus import Gpu

    ticks = count(0, 1.0)
    cuda = driver.load()
    gpu = Gpu(cuda, next(iter(cuda.devices())), 64 * MIB)
    try:
        found = calibrate.measure(gpu, clock=lambda: next(ticks))
    finally:
        gpu.close()
    assert {one.size for one in found if one.way != calibrate.PEAK} == {calibrate.SIZES[0]}
    assert {one.gbps for one in found if one.way == calibrate.PEAK} == {calibrate._SCRATCH_BYTES / 1e9}


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
    rows = re.findall(r"^ +4 KiB +[\d.]+ +[\d.]+ +[\d.]+ +[\d.]+  (\w+)$", done.stdout, re.MULTILINE)
    assert len(rows) == 4 and set(rows) <= {"dma", "overlap", "staged", "kernel"}
    assert machine.used_bytes(0) == machine.used_bytes(1) == 0


@pytest.mark.faults
def test_calibrate_measures_the_gpu_that_is_named_by_number_or_uuid(machine: Machine) -> None:
    from kvdepot.devices.cuda import driver

    (one,) = json.loads(calibrated(machine, "--gpu", "1", "--json").stdout)
    (same,) = json.loads(calibrated(machine, "--gpu", one["uuid"], "--json").stdout)
    assert same["uuid"] == one["uuid"] == list(driver.load().devices())[1]
    assert {"way", "is_store", "size", "gbps", "share"} == set(one["figures"][0])


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
        assert {way for steps in told["ways"].values() for _, way in steps} <= {"dma", "overlap"}
        assert 0 < told["staging_bytes"] <= 16 * MIB and told["context_bytes"] > 0
        assert told["staging_bytes"] + told["context_bytes"] == held
        for what in ("stores", "retrieves"):
            line = re.compile(rf"INFO {uuid}: {what} use (dma|overlap) .*GB/s")
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
