"""The copy kernel: what it copies, in Triton's interpreter; what Triton makes of it, as machine code. Not its speed."""

from __future__ import annotations

import base64
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdepot.devices.cuda.kernel import TILE_BYTES, Compiled, compiled
from kvdepot.errors import DeviceError
from kvdepot.processes import code_command
from tests.conftest import HANG_S

pytestmark = pytest.mark.faults

Row: TypeAlias = tuple[int, int, int]
"""Destination, source, bytes."""

Built: TypeAlias = dict[str, tuple[str, list[str]]]
"""By compute capability: the PTX, and the machine code's memory accesses, barriers and branches in order."""

SOURCES = 4 * TILE_BYTES
GUARD = 2 * TILE_BYTES
MOST_ROWS = 40
ARENA = SOURCES + MOST_ROWS * (TILE_BYTES + 256) + GUARD

ARCHS = ("80", "90", "100")
BUILD = f"""
import base64, json, os, sys
os.environ["TRITON_CACHE_DIR"] = sys.argv[1]
from kvdepot.devices.cuda.copy_rows import build
kernels = {{arch: build(int(arch)).asm for arch in {ARCHS}}}
print(json.dumps({{a: [k["ptx"], base64.b64encode(k["cubin"]).decode()] for a, k in kernels.items()}}))
"""


@pytest.fixture(scope="module", autouse=True)
def triton() -> Path:
    """Where Triton is; it is never imported here."""
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:
        if os.environ.get("CI"):
            pytest.fail("Triton is not installed")
        pytest.skip("Triton is not installed")
    return Path(spec.origin).parent


@pytest.fixture(autouse=True)
def _nothing_compiled_yet() -> None:
    compiled.cache_clear()


class Interpreter:
    """A process with the kernel in Triton's interpreter, and memory that it and the test both see."""

    def __init__(self, folder: Path) -> None:
        file = folder / "memory"
        file.write_bytes(bytes(ARENA))
        self.memory = np.memmap(file, np.uint8, "r+")
        self._log = (folder / "log").open("w+")
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).parent / "interpreted.py"), str(file)],
            env={**os.environ, "TRITON_INTERPRET": "1"},  # read when Triton is imported
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True,
        )  # fmt: skip

    def copy(self, rows: list[Row], programs: int) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([programs, rows, ARENA - GUARD]) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if answer != "done\n":
            self._process.wait(HANG_S)
            self._log.seek(0)
            said = self._log.read()
            if "only 0-dimensional arrays" in said and not os.environ.get("CI"):
                pytest.skip("this Triton's interpreter (3.4 and 3.6 are such) cannot work with numpy 2.4")
            pytest.fail(f"the interpreter said {answer!r}:\n{said}")

    def close(self) -> None:
        with self._log:
            self._process.communicate(timeout=120)  # closes its stdin, upon which it ends


@pytest.fixture(scope="module")
def interpreter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Interpreter]:
    process = Interpreter(tmp_path_factory.mktemp("interpreter"))
    yield process
    process.close()


@st.composite
def tables(draw: st.DrawFn) -> list[Row]:
    """Rows whose destinations lie apart, most often with a gap between them, in any order; sources may overlap."""
    rows: list[Row] = []
    end = SOURCES
    for _ in range(draw(st.integers(0, MOST_ROWS))):
        size = 16 * draw(st.sampled_from([0, 1, 2, 31, 33, 256, TILE_BYTES // 16 - 1, TILE_BYTES // 16]))
        source = 16 * draw(st.integers(0, (SOURCES - size) // 16))
        begin = end + 16 * draw(st.sampled_from([0, 1, 3, 16]))
        rows.append((begin, source, size))
        end = begin + size
    return draw(st.permutations(rows))


@settings(deadline=None, max_examples=100)
@given(rows=tables(), programs=st.integers(1, 9), seed=st.integers(0, 1 << 32))
def test_every_row_is_copied_byte_for_byte_and_nothing_around_it_is_touched(
    interpreter: Interpreter, rows: list[Row], programs: int, seed: int
) -> None:
    before = np.frombuffer(np.random.default_rng(seed).bytes(ARENA), np.uint8)
    interpreter.memory[:] = before
    wanted = bytearray(before.tobytes())
    for destination, source, size in rows:
        wanted[destination : destination + size] = before[source : source + size].tobytes()
    interpreter.copy(rows, programs)
    assert interpreter.memory.tobytes() == bytes(wanted)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, triton: Path) -> Built:
    folder = tmp_path_factory.mktemp("built")
    done = subprocess.run([sys.executable, "-c", BUILD, str(folder)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    tool = triton / "backends" / "nvidia" / "bin" / "cuobjdump"
    found = {}
    for arch, (ptx, cubin) in json.loads(done.stdout.splitlines()[-1]).items():
        file = folder / f"{arch}.cubin"
        file.write_bytes(base64.b64decode(cubin))
        sass = subprocess.run([tool, "-sass", file], capture_output=True, text=True, timeout=HANG_S, check=True).stdout
        found[arch] = ptx, re.findall(r"\b((?:LD|ST)[GLS]?\.\S*|LD[LS]|ST[LS]|BAR\.\S*|BRA)\s", sass)
    return found


@pytest.mark.parametrize("arch", ARCHS)
def test_machine_code_loads_128_bits_at_a_time_before_stores_and_spills_none(built: Built, arch: str) -> None:
    ptx, accesses = built[arch]
    moved = re.findall(r"\b(ld|st)\.global(\S*)", ptx)
    wide = [kind for kind, how in moved if how.endswith((".v2.b64", ".v4.b32"))]
    assert wide.count("ld") == wide.count("st") > 0
    assert [kind for kind, _ in moved].count("st") == wide.count("st"), "nothing else is stored"
    assert all("evict_first" in how for kind, how in moved if ".v" in how), "nothing is kept in caches"
    stores = [i for i, name in enumerate(accesses) if name.startswith("STG")]
    assert all(".128" in accesses[i] for i in stores)
    assert not [name for name in accesses[stores[0] : stores[-1] + 1] if not name.startswith("STG")]
    loads = [i for i, name in enumerate(accesses) if name.startswith("LDG") and ".128" in name]
    assert len(loads) == len(stores) and loads[-1] < stores[0]
    assert accesses[stores[-1] + 1] == "BRA", "the next rows' entries are there when a round begins"
    assert not [name for name in accesses if not name.startswith(("LDG", "STG", "BRA"))], "spilled, or waits"


def test_the_compiler_needs_no_home_and_imports_nothing_from_its_folder(tmp_path: Path) -> None:
    """The folder where the server was started may be one that others can write to."""
    home, temporary = tmp_path / "home", tmp_path / "tmp"
    temporary.mkdir()
    for name in ("triton", "msgspec", "kvdepot"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(7)")
    code = (
        "import sys; from kvdepot.devices.cuda.kernel import compiled; made = compiled(90); "
        "assert 'triton' not in sys.modules and made is compiled(90); print(made.cubin[:4], made.threads, made.name)"
    )
    environment = {**os.environ, "HOME": str(home), "TMPDIR": str(temporary)}
    done = subprocess.run(
        code_command(code), capture_output=True, text=True, timeout=120, env=environment, cwd=tmp_path
    )
    assert (done.stdout, done.stderr) == ("b'\\x7fELF' 256 copy_rows\n", "")
    assert not home.exists() and not list(temporary.iterdir())


def test_without_triton_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(DeviceError, match="pip install triton"):
        compiled(90)


def test_a_triton_that_cannot_is_an_error_and_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "triton").mkdir()
    with monkeypatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
        patch.setenv("PYTHONDONTWRITEBYTECODE", "1")  # each body is written over the one before
        for body, said in [
            ("raise ImportError('libtriton.so is not there')", "sm_90: ImportError: libtriton.so is not there"),
            ("import os; os._exit(3)", "sm_90: exit status 3"),
            ("import os; os._exit(0)", "sm_90: Input data was truncated"),
        ]:
            (tmp_path / "triton" / "__init__.py").write_text(body)
            with pytest.raises(DeviceError, match=re.escape(said)):
                compiled(90)
    assert compiled(90).cubin.startswith(b"\x7fELF")


@pytest.mark.parametrize(
    "wanted",
    [{"scratch_bytes": 128}, {"shared_bytes": 49153}, {"blocks_per_cluster": 2}, {"parameters": 1}],
    ids=lambda wanted: next(iter(wanted)),
)
def test_a_kernel_that_wants_more_than_a_launch_gives_is_refused(wanted: dict[str, int]) -> None:
    fits: dict[str, Any] = {
        "name": "copy_rows", "cubin": b"", "threads": 256, "parameters": 4, "shared_bytes": 49152, "scratch_bytes": 0,
        "blocks_per_cluster": 1,
    }  # fmt: skip
    Compiled(**fits).refuse()
    with pytest.raises(DeviceError, match=str(next(iter(wanted.values())))):
        Compiled(**{**fits, **wanted}).refuse()
