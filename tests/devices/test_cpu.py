"""CPU memory, with the conformance suite of devices."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvdepot.devices import share
from kvdepot.devices.cpu import HostTensors, enter_pages, view_memory_file, zeros_in_shared_memory
from kvdepot.errors import LayoutError
from kvdepot.protocol.layout import TensorView, build_layout
from tests.conftest import HANG_S
from tests.devices.conformance import DeviceConformance
from tests.devices.tensors import DTYPES, Bytes, Model
from tests.programs import missing


class TorchWorker:
    """Tensors of torch, in this process."""

    def __init__(self) -> None:
        self.storages: list[torch.Tensor] = []
        self.tensors: list[torch.Tensor] = []

    def make(self, model: Model) -> list[TensorView]:
        self.storages = [torch.zeros(size, dtype=torch.uint8) for size in model.sizes]
        self.tensors = []
        for layer in model.layers:
            item, dtype = DTYPES[layer.dtype], getattr(torch, layer.dtype)
            flat = self.storages[layer.storage].view(dtype)
            strides = [stride // item for stride in layer.strides]
            self.tensors.append(flat.as_strided(layer.shape, strides, layer.offset // item))
        return [share(tensor, layer.name) for tensor, layer in zip(self.tensors, model.layers, strict=True)]

    def write(self, storages: Sequence[Bytes]) -> None:
        for storage, new in zip(self.storages, storages, strict=True):
            storage.copy_(torch.from_numpy(np.array(new)))

    def read(self) -> list[Bytes]:
        return [storage.numpy().copy() for storage in self.storages]


class TestProcessor(DeviceConformance):
    @pytest.fixture(scope="class")
    @classmethod
    def worker(cls) -> Iterator[Any]:
        yield TorchWorker()


_HELD_UP = """
import os, signal, threading
from pathlib import Path
import torch
from kvdepot.devices import share
from kvdepot.devices.cpu import zeros_in_shared_memory
from kvdepot.errors import LayoutError
share(torch.zeros(4096, dtype=torch.uint8), "one")  # which starts torch's helper
(helper,) = Path("/proc/self/task", str(os.getpid()), "children").read_text().split()
os.kill(int(helper), signal.SIGSTOP)
threading.Timer(2.5, os.kill, (int(helper), signal.SIGCONT)).start()
tensor = torch.full((4096,), 7, dtype=torch.uint8)
view = share(tensor, "two")
tensor[0] = 8
assert Path("/dev/shm", view.mapping).read_bytes()[view.offset :] == bytes([8, *[7] * 4095])
"""


_TOO_SMALL = """
import os
import torch
from kvdepot.devices import share
from kvdepot.devices.cpu import zeros_in_shared_memory
from kvdepot.errors import ArenaError
with zeros_in_shared_memory():
    large, small = torch.zeros(2 << 20, dtype=torch.uint8), torch.zeros(1 << 19, dtype=torch.uint8)
large[:] = 1
assert not large.untyped_storage().is_shared() and small.untyped_storage().is_shared()
try:
    share(large, "large")
except ArenaError as exc:
    assert "large does not fit into /dev/shm: " in str(exc), exc
else:
    raise AssertionError("it was shared")
assert large.sum() == 2 << 20 and share(small, "small").mapping
"""


@pytest.mark.faults
def test_tensors_are_shared_where_torchs_helper_takes_longer_than_torch_waits() -> None:
    done = subprocess.run([sys.executable, "-c", _HELD_UP], capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == 0, done.stderr


class TestZerosInSharedMemory:
    @pytest.mark.parametrize("options", [{}, {"device": "cpu"}, {"device": torch.device("cpu", 0)}])
    def test_zeros_are_shared_where_they_are(self, options: dict[str, Any]) -> None:
        with zeros_in_shared_memory():
            tensor = torch.zeros(3, 5, dtype=torch.int16, **options)
        assert tensor.dtype == torch.int16 and tensor.shape == (3, 5) and not tensor.any()
        address = tensor.data_ptr()
        view = share(tensor[1:], "a layer")
        assert tensor.data_ptr() == address
        tensor[1:] = 258
        assert Path("/dev/shm", view.mapping).read_bytes()[view.offset :] == b"\2\1" * 10

    def test_other_tensors_are_what_they_would_be(self) -> None:
        with zeros_in_shared_memory():
            others = torch.ones(8), torch.empty(8), torch.zeros(8).clone(), torch.zeros(8, device="meta")
        after = torch.zeros(8)
        assert not any(tensor.untyped_storage().is_shared() for tensor in (*others[:3], after))
        assert others[3].device.type == "meta"

    def test_zeros_that_do_not_fit_are_in_other_memory_and_cannot_be_shared(self) -> None:
        mount = 'mount -t tmpfs -o size=1m tmpfs /dev/shm || exit 99; exec "$@"'
        inside = ["unshare", "--mount", "--propagation", "private", "sh", "-c", mount, "sh"]
        done = subprocess.run(
            [*inside, sys.executable, "-c", _TOO_SMALL],
            capture_output=True, text=True, timeout=HANG_S, check=False,
        )  # fmt: skip
        if done.returncode == 99 or "unshare:" in done.stderr:
            missing(f"the right to mount a small /dev/shm ({done.stderr})")
        assert done.returncode == 0, done.stderr


class TestMemoryThatOthersHold:
    """Sharing moves a storage and frees its old memory, so known references to that must prevent it."""

    def test_a_tensor_of_which_an_array_is_alive_is_refused_and_the_array_stays_good(self) -> None:
        tensor = torch.arange(16 * 64 * 4).view(16, 64, 4)
        array = memoryview(tensor[1:].numpy())
        with pytest.raises(LayoutError, match="a layer: a NumPy array or detached tensor of it"):
            share(tensor, "a layer")
        assert array[3, 5, 2] == tensor[4, 5, 2]
        del array
        share(tensor, "a layer")
        later = tensor.numpy()
        share(tensor[2:], "a layer")  # moves nothing any more
        tensor[3].fill_(-7)
        assert (later[3] == -7).all()

    @pytest.mark.parametrize("kind", ["from_numpy", "frombuffer", "from_dlpack", "from_file", "share_memory_"])
    def test_a_tensor_on_memory_of_others_is_refused(self, kind: str, tmp_path: Path) -> None:
        room = bytearray(16 * 64 * 4 + 128)
        first = 8 - np.frombuffer(room, np.uint8).ctypes.data % 64 % 8 + 8
        first += 8 * ((np.frombuffer(room, np.uint8).ctypes.data + first) % 64 == 0)
        theirs = np.frombuffer(room, np.uint8)[first : first + 16 * 64 * 4]
        (tmp_path / "kv").write_bytes(bytes(theirs))
        tensor = {
            "from_numpy": lambda: torch.from_numpy(theirs),
            "frombuffer": lambda: torch.frombuffer(room, dtype=torch.uint8, count=16 * 64 * 4, offset=first),
            "from_dlpack": lambda: torch.from_dlpack(theirs),
            "from_file": lambda: torch.from_file(str(tmp_path / "kv"), True, 16 * 64 * 4, dtype=torch.uint8),
            "share_memory_": lambda: torch.zeros(16 * 64 * 4, dtype=torch.uint8).share_memory_(),
        }[kind]()
        address = tensor.data_ptr()
        with pytest.raises(LayoutError, match="a layer: its memory is"):
            share(tensor.view(16, 64, 4), "a layer")
        assert tensor.data_ptr() == address


class TestMemoryFiles:
    """Memory that an engine has allocated with memfd_create stays where it is."""

    def make(self, size: int = 1 << 16) -> tuple[int, mmap.mmap, int]:
        """A memory file: its descriptor, a mapping of it from its second page on, and that mapping's address."""
        fd = os.memfd_create(f"pool_{uuid.uuid4().hex}")
        os.ftruncate(fd, mmap.PAGESIZE + size)
        mapped = mmap.mmap(fd, size, offset=mmap.PAGESIZE)
        os.close(fd)  # the mapping has a descriptor of its own
        return fd, mapped, np.frombuffer(mapped, np.uint8).ctypes.data

    def test_rows_are_mapped_where_they_are(self) -> None:
        _, mapped, address = self.make()
        view = view_memory_file("pool", address + 64, (10, 96, 4096))
        tensors = HostTensors.open(build_layout([view], [0]))
        try:
            mapped[64 + 3 * 4096] = 7
            (row,) = tensors.stacks[0].rows
            assert row.strided.shape == (10, 96) and row.strided[3, 0] == 7
            row.strided[9, 95] = 5
            assert mapped[64 + 9 * 4096 + 95] == 5
        finally:
            del row
            tensors.close()

    def test_other_memory_is_refused(self) -> None:
        with mmap.mmap(-1, 8192) as anonymous:
            address = np.frombuffer(anonymous, np.uint8).ctypes.data
            with pytest.raises(LayoutError, match="pool is not in a memory file"):
                view_memory_file("pool", address, (1, 8192, 8192))

    def test_another_file_under_the_same_descriptor_is_refused(self) -> None:
        _, _mapped, address = self.make()
        view = view_memory_file("pool", address, (1, 4096, 4096))
        _, pid, fd, name = view.mapping.split(":")
        for wrong in (f"{name}x", name[::-1], "x" * 20):
            layout = build_layout([view._replace(mapping=f"memfd:{pid}:{fd}:{wrong}")], [0])
            with pytest.raises(LayoutError, match="run the server as the engine's user and in its process namespace"):
                HostTensors.open(layout)

    @pytest.mark.parametrize("name", ["memfd:1:2", "memfd:0:1:0123456789abcdef", "memfd:1:2:../../0123456789abcdef"])
    def test_what_is_no_name_of_a_memory_file_is_refused(self, name: str) -> None:
        view = TensorView("pool", name, 4096, 0, (1, 4096), (4096, 1), 1, "uint8")
        with pytest.raises(LayoutError, match="is not the name of a memory file"):
            HostTensors.open(build_layout([view], [0]))


_MANY_BYTES = 48 << 20
"""Pages enough that entering them takes several steps."""


def resident_bytes(view: TensorView) -> int:
    """Of this process's mappings of a tensor's file."""
    sizes, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0]:
            inside = line.endswith(view.mapping)
        elif inside and line.startswith("Rss:"):
            sizes += int(line.split()[1]) << 10
    return sizes


def wait_until_entered() -> None:
    for thread in threading.enumerate():
        if thread.name == "kvdepot-pages":
            thread.join(HANG_S)
            assert not thread.is_alive()


class TestEnterPages:
    def test_all_pages_are_entered_once_whatever_views_there_are(self) -> None:
        with zeros_in_shared_memory():
            tensor = torch.zeros(_MANY_BYTES, dtype=torch.uint8)
        view = share(tensor, "a layer")
        assert resident_bytes(view) < 1 << 20
        enter_pages([tensor[: 1 << 20], tensor[1 << 20 :]])
        wait_until_entered()
        assert resident_bytes(view) >= _MANY_BYTES

    def test_a_server_enters_the_pages_that_it_maps_and_can_unmap_them_at_any_time(self) -> None:
        tensor = torch.zeros(2, _MANY_BYTES // 2, dtype=torch.uint8)
        view = share(tensor, "a layer")
        before = resident_bytes(view)
        HostTensors.open(build_layout([view], [0])).close()
        wait_until_entered()
        assert resident_bytes(view) == before
        mapped = HostTensors.open(build_layout([view], [0]))
        wait_until_entered()
        assert resident_bytes(view) >= before + _MANY_BYTES
        mapped.close()


def test_layers_of_equal_tensors_are_one_stack_and_others_are_not() -> None:
    """A block of a stack is copied with one call, so small chunks of many layers depend on it."""
    keys_and_values = [torch.zeros(2, 9, 4096, dtype=torch.uint8) for _ in range(3)]
    others = [torch.zeros(9, 512, dtype=torch.uint8), torch.zeros(9, 4096, dtype=torch.uint8)]
    tensors = [*keys_and_values, *others]
    views = [share(tensor, f"layer {i}") for i, tensor in enumerate(tensors)]
    mapped = HostTensors.open(build_layout(views, [1, 1, 1, 0, 0]))
    try:
        assert [stack.planes.shape for stack in mapped.stacks] == [(3, 2, 9, 4096), (1, 1, 9, 512), (1, 1, 9, 4096)]
        for number, tensor in enumerate(keys_and_values):
            tensor[1, 5] = number + 1
        assert mapped.stacks[0].planes[:, 1, 5].tolist() == [[number + 1] * 4096 for number in range(3)]
        assert not mapped.stacks[0].planes[:, 0].any()
    finally:
        mapped.close()
