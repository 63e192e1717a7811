"""The folders of the source are layers: what may import what, and that nothing imports in a circle. Planted faults
name text that the source has."""

from __future__ import annotations

import ast
import functools
import json
import shutil
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src/kvdepot"

LAYERS = """
    errors values install logs processes locks
    protocol
    eviction
    memory
    tiers
    config
    devices
    core client
    library
    kv_events
    adapters aio contract keys metrics status
    web
    server
    testing
    cli
    integrations
    hf
"""
"""From the lowest layer up: a line may import only from the lines before it."""

OLD_PLACES = {"adapters", "contract", "hf", "keys", "metrics", "status"}
"""Documented import paths: re-exports, each of a few lines."""


def layers() -> dict[str, int]:
    """The layer of each module and folder directly in the package."""
    return {name: layer for layer, line in enumerate(LAYERS.split("\n")) for name in line.split()}


def imports(package: Path) -> Iterator[tuple[str, str]]:
    """`(module, imported module)`, also for types alone, as dotted names without the package's own."""
    modules = {".".join(path.relative_to(package).with_suffix("").parts).removesuffix(".__init__"): path
               for path in package.rglob("*.py")}  # fmt: skip
    for module, path in modules.items():
        for name in names_imported(module, path.read_text()):
            target = name.removeprefix("kvdepot.")
            found = target if target in modules else target.rpartition(".")[0]
            if found:  # else of the package itself: its version
                yield module, found


@functools.cache  # each planted fault is looked for in the whole package
def names_imported(module: str, source: str) -> list[str]:
    """The names of this package that a module's source imports."""
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: a relative import"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return [name for name in found if name.startswith("kvdepot.")]


def faults(package: Path) -> list[str]:
    """Violations of the layers in the source."""
    layer, found = layers(), []
    graph: dict[str, set[str]] = {}
    for module, target in imports(package):
        one, other = module.partition(".")[0], target.partition(".")[0]
        if one != "__init__" and one != other and layer[other] >= layer[one]:
            found.append(f"{module} imports {target}, which stands beside it or higher")
        if module != target:
            graph.setdefault(module, set()).add(target)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as exc:
        found.append(f"a circle: {' <- '.join(exc.args[1])}")
    return found


def test_nothing_imports_upward_or_in_a_circle() -> None:
    assert faults(PACKAGE) == []


def test_every_module_and_folder_has_its_floor_and_few_stand_outside() -> None:
    there = {path.name.removesuffix(".py") for path in PACKAGE.iterdir() if path.suffix == ".py" or path.is_dir()}
    there -= {"__init__", "__pycache__"}
    assert there == set(layers())
    outside = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__"} - OLD_PLACES
    assert len(outside) <= 8
    for name in OLD_PLACES:
        tree = ast.parse((PACKAGE / f"{name}.py").read_text())
        kinds = {type(node) for node in tree.body}
        assert kinds <= {ast.Expr, ast.ImportFrom, ast.Assign}, f"{name}.py does more than to re-export"


@pytest.mark.parametrize(
    ("module", "line", "fault"),
    [
        ("memory/records.py", "from kvdepot.core import depot", "memory.records imports core.depot"),
        ("core/depot.py", "from kvdepot.client.socket import Client", "core.depot imports client.socket"),
        ("client/socket.py", "    from kvdepot.core.usage import Usages", "client.socket imports core.usage"),
        ("protocol/layout.py", "from kvdepot.protocol import wire", "a circle"),
        ("core/report.py", "if TYPE_CHECKING: from kvdepot.core.depot import Depot", "a circle"),
        ("errors.py", "import kvdepot.config", "errors imports config"),
    ],
)
def test_planted_violations_of_the_layers_are_found(tmp_path: Path, module: str, line: str, fault: str) -> None:
    shutil.copytree(PACKAGE, tmp_path / "kvdepot", ignore=shutil.ignore_patterns("page", "__pycache__"))
    planted = tmp_path / "kvdepot" / module
    planted.write_text(f"{planted.read_text()}\n\ndef planted() -> None:\n    {line.strip()}\n")
    assert any(fault in found for found in faults(tmp_path / "kvdepot"))


def test_every_planted_fault_names_text_that_stands_once_in_its_file() -> None:
    lines = (PACKAGE.parents[1] / "tools/planted.jsonl").read_text().splitlines()
    edits = [(fault["name"], file, old) for fault in map(json.loads, lines) for file, old, _ in fault["edits"]]
    stale = [(name, old) for name, file, old in edits if (PACKAGE / file).read_text().count(old) != 1]
    assert edits
    assert stale == [], "write these for today's source, and run tools/mutants.py --planted with their names"
