"""The library's types: programs as the documentation shows them pass a type checker."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.programs import module
from tests.test_docs import DOCS, blocks

CONFIG = "[mypy]\ncheck_untyped_defs = true\n[mypy-torch.*]\nfollow_imports = skip\nignore_missing_imports = true\n"
USES = """
import kvdepot, kvdepot.aio, numpy as np
from kvdepot import Shape, State


def use(depot: kvdepot.Depot, shape: Shape, kv: np.ndarray, ids: np.ndarray) -> list[kvdepot.Namespace]:
    one = depot.namespace(model="m", revision="1", dtype=np.float16, shape=shape)
    several = depot.namespace(model="m", revision="1", dtype=np.dtype("f2"), shape=[shape, State(8)])
    assert one.put(ids, [(kv, kv)]) + several.put([1], [kv, kv]) + one.get_into(ids, [kv, kv]) == 0
    found, _ = several.get(ids)
    assert found is not None and several.last.saved_s + several.last.found == 0
    found[0].astype(np.float32), found.index
    return [one, several]


async def wait(depot: kvdepot.aio.Depot, shape: Shape) -> None:
    found, _ = await depot.namespace(model="m", revision="1", dtype="float16", shape=(shape, State(8))).get([1])
    assert found is not None
    found[0].view(np.uint16), found.index
"""


def test_the_documentations_programs_pass_a_type_checker(tmp_path: Path) -> None:
    module("mypy")
    codes = [block.text for block in blocks(DOCS / "library.md") if block.kind == "python"]
    assert len(codes) > 1
    for number, code in enumerate([*codes, USES]):
        (tmp_path / f"program_{number}.py").write_text(code)
    config = tmp_path / "mypy.ini"
    config.write_text(CONFIG)
    command = [sys.executable, "-m", "mypy", "--config-file", config, "--cache-dir", tmp_path / "cache", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
