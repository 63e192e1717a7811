"""What the stand-in offers, the real bindings offer too: names, parameters in their order, values."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from typing import Any

import pytest

from tests.standin.machine import Machine

_DESCRIBE = """
import enum, inspect, json
from cuda.bindings import driver
found = {"functions": {}, "enums": {}, "numbers": {}, "classes": {}, "file": driver.__file__}
for name in NAMES or dir(driver):
    value = getattr(driver, name, None)
    if value is None or not name.startswith(("cu", "CU")):
        continue
    if name.startswith("cu"):
        found["functions"][name] = list(inspect.signature(value).parameters)
    elif isinstance(value, type) and "__members__" in dir(value):
        found["enums"][name] = {key: int(member) for key, member in value.__members__.items()}
    elif isinstance(value, type):
        found["classes"][name] = [part for part in ("__int__", "__index__", "getPtr") if hasattr(value, part)]
    elif name.startswith("CU_"):
        found["numbers"][name] = value
print(json.dumps(found))
"""


def _describe(names: list[str], environment: dict[str, str] | None = None) -> dict[str, Any]:
    code = f"NAMES = {names!r}\n{_DESCRIBE}"
    said = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True, text=True)
    found: dict[str, Any] = json.loads(said.stdout)
    return found


@pytest.fixture(scope="module")
def described() -> dict[str, Any]:
    machine = Machine()
    try:
        return _describe([], machine.environment())
    finally:
        machine.close()


def test_the_stand_in_comes_before_the_real_bindings(described: dict[str, Any]) -> None:
    assert "tests/standin/cuda/bindings" in described["file"]
    assert len(described["functions"]) > 60


@pytest.mark.skipif(
    importlib.util.find_spec("cuda") is None, reason="NVIDIA's cuda-bindings are not installed: nothing to compare with"
)
def test_the_real_bindings_have_what_the_stand_in_has(described: dict[str, Any]) -> None:
    names = [name for kind in ("functions", "enums", "numbers", "classes") for name in described[kind]]
    real = _describe(names)
    assert "standin" not in real["file"]
    assert described["functions"] == real["functions"]
    assert described["numbers"] == real["numbers"]
    for name, members in described["enums"].items():
        assert members.items() <= real["enums"][name].items(), name
    for name, parts in described["classes"].items():
        assert set(parts) <= set(real["classes"][name]), name  # what the stand-in's handles can, real ones can
