"""Plant small faults into the source, one at a time, and count how many of them the test suite notices.

    python tools/mutants.py [--tree DIR] [--python FILE] [--seed N] [--count N] [--like FILE] [--out FILE]
    python tools/mutants.py --planted [NAME...] [--seconds N] [--jobs N]

A seed draws the faults: one after the other from an area of the source, the larger the area the more often, and as
evenly as possible from each kind (see `KINDS`). Faults of equivalents.jsonl are not drawn: no test can notice these,
for the reason in their line. Each fault runs in a copy of the tree. pytest stops at the first failure, or when it has
used the processor for `--seconds`, over the test files in a fixed order: the one of the faulty module's name, the
simulation, those that import the module, those of its folder. A fault of vLLM's connector runs tests of tests/vllm
alone. Tests that start an engine or need a GPU do not run.

A fault is noticed if a test fails, or if a test hangs: it is under way for half of the time, and passes in as much
time without the fault. The result is a JSON file with one entry per fault, and a table. It is resumable: faults that
FILE has are not run again.

`--tree` measures another checkout with its own tests. `--like` compares two versions of the suite: it takes the faults
from the result of the other version, as far as this tree has their line once, in a function of the same name.

`--planted` plants the faults of planted.jsonl instead, all or those named: one fault a line, its name, its edits (file,
old text, new text) and the seed soon after which the simulation was last seen to notice it, or with `by` the test files
that must notice it. Exit code 1 if one is not noticed, or its old text is not there any more.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import pytest

AREAS = (
    "core", "client", "devices", "eviction", "integrations/lmcache", "integrations/vllm", "library", "memory",
    "protocol", "tiers",
)  # fmt: skip
KINDS = ("comparison", "dropped line", "off by one", "wrong key", "missing release", "negation")
RELEASES = ("release", "free", "close", "unpin", "discard", "pop", "clear", "cancel", "unlink", "erase", "remove")
TURNED = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
}
GENERIC = ("list", "dict", "tuple", "set", "type", "deque", "Counter", "Callable", "Iterable")
LOGGING = ("debug", "info", "warning", "error", "exception")
PYTEST = ["-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "mutants", "--no-header", "--tb=no"]
# It compares the source with planted.jsonl, so it would notice a fault for its text, not for its behaviour.
PYTEST += ["--deselect", "tests/test_structure.py::test_every_planted_fault_names_text_that_stands_once_in_its_file"]
PYTEST += ["-k", "not test_a_planted_bug"]
WITH_ENGINES = ("Engine", "START_S", "ROOT")
"""Names of tests/vllm/engines.py. The tests of a module that imports one of them start engines by themselves."""
WAITS = 4
"""How many times `--seconds` the tests may take by the clock: they wait, and others may have the processor."""
UNDER_WAY = "under_way.json"
"""Where the plugin notes the test that runs, and the seconds of the processor and of the clock before it."""
_BEGAN = time.monotonic()
COPIED = ("src", "tests", "docs", "deploy", "scripts", "bench", "demo", "tools", ".github")


class Fault(NamedTuple):
    """One small fault: what stands in a file between two byte offsets, and what replaces it."""

    file: str
    line: int
    kind: str
    start: int
    end: int
    text: str

    @property
    def name(self) -> str:
        return f"{self.file}:{self.line}:{self.start} {self.kind} -> {self.text[:40]!r}"


class Place(NamedTuple):
    """A fault as it can be found in another tree: the function and the line, without indentation, and where in it."""

    kind: str
    function: str
    line: str
    at: int
    text: str


def main() -> int:
    parser = argparse.ArgumentParser(prog="mutants.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tree", type=Path, default=Path(__file__).resolve().parent.parent)
    parser.add_argument("--like", type=Path, metavar="FILE", help="the faults of this result of another tree")
    parser.add_argument("--python", default=sys.executable, help="interpreter of the tree's environment")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=160)
    parser.add_argument("--seconds", type=float, default=60, help="of the processor, for each fault")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("mutants.json"))
    parser.add_argument("--draw", action="store_true", help="show the faults and run nothing")
    parser.add_argument("--planted", nargs="*", metavar="NAME", help="plant the faults of planted.jsonl")
    asked = parser.parse_args()
    if asked.planted is not None:
        return planted(asked.tree, asked.planted, asked.python, asked.seconds, asked.jobs)
    other: dict[str, dict[str, Any]] = json.loads(asked.like.read_text()) if asked.like else {}
    known = by_place(asked.tree)
    wanted = {Place(*entry["place"]): entry for entry in other.values()}
    faults = [known[place] for place in wanted if place in known] or draw(known, asked.tree, asked.seed, asked.count)
    if asked.draw:
        print(*(fault.name for fault in faults), sep="\n")
        return 0
    done: dict[str, dict[str, Any]] = json.loads(asked.out.read_text()) if asked.out.exists() else {}
    places = {fault: place for place, fault in known.items()}
    with copies(asked.tree, asked.jobs) as trees:

        def work(fault: Fault) -> None:
            tree = trees.pop()
            try:
                done[fault.name] = run(asked.tree, tree, fault, asked.python, asked.seconds)
            finally:
                trees.append(tree)
            done[fault.name]["place"] = places[fault]
            asked.out.write_text(json.dumps(done, indent=1))
            print(f"{len(done):4} {done[fault.name]['by'] or 'NOT NOTICED'}: {fault.name}", flush=True)

        with ThreadPoolExecutor(asked.jobs) as pool:
            list(pool.map(work, [fault for fault in faults if fault.name not in done]))
    show(faults, done)
    if other:
        before = [bool(wanted[places[fault]]["by"]) for fault in faults]
        print(
            f"{len(other)} faults in {asked.like}; {len(faults)} can be planted here, {sum(before)} were noticed there"
        )
    return 0


# -- drawing


def draw(known: dict[Place, Fault], tree: Path, seed: int, count: int) -> list[Fault]:
    """The faults of a seed: from one area after the other, and of one kind after the other, until there are `count`."""
    dice = random.Random(seed)
    listed = Path(__file__).with_name("equivalents.jsonl").read_text().splitlines()
    equivalents = {Place(*json.loads(line)["place"]) for line in listed}
    pools: dict[tuple[str, str], list[Fault]] = {}
    for place, fault in known.items():
        if place not in equivalents:
            pools.setdefault((area_of(fault.file), fault.kind), []).append(fault)
    for pool in pools.values():
        dice.shuffle(pool)
    sizes = [sum(len(path.read_bytes().splitlines()) for path in files_of(tree, area)) for area in AREAS]
    drawn: list[Fault] = []
    while len(drawn) < min(count, len(known) - len(equivalents)):
        pool = pools.get((*dice.choices(AREAS, sizes), KINDS[len(drawn) % len(KINDS)]), [])  # type: ignore[arg-type]
        drawn += [pool.pop()] if pool else []
    return drawn


def files_of(tree: Path, area: str) -> list[Path]:
    return sorted((tree / "src/kvdepot" / area).rglob("*.py"))


def area_of(file: str) -> str:
    return next(area for area in AREAS if file.startswith(f"src/kvdepot/{area}/"))


def by_place(tree: Path) -> dict[Place, Fault]:
    """Every fault that can be planted, by its place, unless that stands twice in the tree."""
    found: dict[Place, list[Fault]] = {}
    for path in [path for area in AREAS for path in files_of(tree, area)]:
        source = path.read_bytes()
        lines, functions = source.splitlines(), functions_of(source)
        for fault in possible(path, str(path.relative_to(tree))):
            within = [name for first, last, name in functions if first <= fault.line <= last]
            line = lines[fault.line - 1].decode()
            at = fault.start - source.rfind(b"\n", 0, fault.start) - 1 - (len(line) - len(line.lstrip()))
            place = Place(fault.kind, within[-1] if within else "", line.strip(), at, fault.text)
            found.setdefault(place, []).append(fault)
    return {place: faults[0] for place, faults in found.items() if len(faults) == 1}


def functions_of(source: bytes) -> list[tuple[int, int, str]]:
    """The first and last line and the name of each function, outer ones first."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, kinds)]
    return sorted((node.lineno, node.end_lineno or 0, node.name) for node in nodes)


def possible(path: Path, file: str) -> Iterator[Fault]:
    """Every fault that can be planted into one file."""
    source = path.read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def span(node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset

    def text(node: ast.expr | ast.stmt) -> str:
        start, end = span(node)
        return source[start:end].decode()

    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) or function.name in ("__repr__", "__str__"):
            continue
        for node in walk(function):
            match node:
                case ast.Compare(left=ast.expr() as left, ops=[op], comparators=[right]) if type(
                    op
                ) in TURNED and not isinstance(left, ast.NamedExpr):
                    start, end = span(node)
                    yield Fault(
                        file, node.lineno, "comparison", start, end, f"{text(left)} {TURNED[type(op)]} {text(right)}"
                    )
                case ast.Constant(value=int() as value) if not isinstance(value, bool):
                    yield Fault(file, node.lineno, "off by one", *span(node), str(value + 1))
                case ast.Subscript(slice=ast.Constant(value=str() as key)):
                    yield Fault(file, node.lineno, "wrong key", *span(node.slice), repr(f"{key}_"))
                case ast.Subscript(slice=ast.Name() | ast.Attribute()) if text(node.value) not in GENERIC:
                    yield Fault(file, node.lineno, "wrong key", *span(node.slice), f"next(iter({text(node.value)}))")
                case ast.Expr(value=ast.Call(func=called)):
                    is_release = name_of(called).lstrip("_").startswith(RELEASES)
                    kind = "missing release" if is_release else "dropped line"
                    yield Fault(file, node.lineno, kind, *span(node), "pass")
                case ast.Assign() | ast.AugAssign() if not isinstance(getattr(node, "target", None), ast.Name):
                    if isinstance(node, ast.AugAssign) or isinstance(node.targets[0], ast.Attribute | ast.Subscript):
                        yield Fault(file, node.lineno, "dropped line", *span(node), "pass")
                case ast.If(test=test) if not isinstance(test, ast.Compare):
                    yield Fault(file, node.lineno, "negation", *span(test), f"not ({text(test)})")


def walk(function: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function's body without those of functions in it, of assertions, annotations and messages."""
    for child in ast.iter_child_nodes(function):
        if isinstance(
            child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Assert | ast.Raise | ast.arguments
        ):
            continue
        if isinstance(child, ast.JoinedStr) or (isinstance(child, ast.AnnAssign) and not child.simple):
            continue
        if isinstance(child, ast.Call) and name_of(child.func) in LOGGING:
            continue
        yield child
        yield from walk(child)


def name_of(called: ast.expr) -> str:
    """The last name of what is called."""
    return called.attr if isinstance(called, ast.Attribute) else called.id if isinstance(called, ast.Name) else ""


# -- running


@contextlib.contextmanager
def copies(tree: Path, count: int) -> Iterator[list[Path]]:
    """So many copies of a tree, until the end of the context."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        yield [copy(tree, Path(folder, str(number))) for number in range(count)]


def copy(tree: Path, target: Path) -> Path:
    """A copy of what tests read of a tree."""
    target.mkdir()
    for each in tree.iterdir():
        if each.is_file():
            shutil.copy2(each, target)
        elif each.name in COPIED:
            shutil.copytree(each, target / each.name, ignore=shutil.ignore_patterns("__pycache__"), symlinks=True)
    return target


def order(tree: Path, fault: Fault) -> list[str]:
    """The test files for a fault, the likeliest to notice it first."""
    module = fault.file.removeprefix("src/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    folder = area_of(fault.file).rpartition("/")[2]

    def rank(path: Path) -> int:
        source = path.read_text()
        if path.stem == f"test_{module.rpartition('.')[2]}":
            return 0
        if path.stem == "test_sim":
            return 3 if folder == "vllm" else 1  # to import vLLM takes half of the time
        if f"{module} " in source or f"{module}\n" in source:
            return 2
        return 4 if path.parent.name == folder else 5

    files = [path for path in (tree / "tests").rglob("test_*.py") if path.parent.name != "huggingface"]
    files = [path for path in files if (path.parent.name == "vllm") == (folder == "vllm") and rank(path) < 5]
    return [str(path.relative_to(tree)) for path in sorted(files, key=lambda path: (rank(path), path))]


def run(origin: Path, tree: Path, fault: Fault, python: str, seconds: float) -> dict[str, Any]:
    """Plant a fault into a copy and run tests; returns the test that noticed it (`by`, empty: none) and the time."""
    path, began = tree / fault.file, time.monotonic()
    source = (origin / fault.file).read_bytes()
    path.write_bytes(source[: fault.start] + fault.text.encode() + source[fault.end :])
    status, lines = call(tree, [python, *PYTEST, *order(tree, fault)], seconds)
    path.write_bytes(source)
    failed = next((line for line in lines if line.startswith(("FAILED", "ERROR"))), "")
    by = failed.split(" - ")[0] or hung(tree, python, seconds, status)
    if not by and status not in (0, None, -signal.SIGXCPU):
        by = f"pytest ended with status {status}"
    return {"by": by, "seconds": round(time.monotonic() - began, 1), "kind": fault.kind, "file": fault.file}


def hung(tree: Path, python: str, seconds: float, status: int | None) -> str:
    """The test that hangs with the fault: it had half of the time or more, and passes in as much without the fault."""
    if status not in (None, -signal.SIGXCPU) or not (tree / UNDER_WAY).exists():
        return ""
    test, used, waited = json.loads((tree / UNDER_WAY).read_text())
    left = seconds - (used if status is not None else waited / WAITS)
    if left < seconds / 2 or call(tree, [python, *PYTEST, test], left)[0] != 0:
        return ""
    return f"hung: {test}"


def call(tree: Path, command: list[str], seconds: float) -> tuple[int | None, list[str]]:
    """Run a command on a copy's source; returns its exit code and its output.

    The code is None if it took too long by the clock, and that of SIGXCPU if it has used the processor for so long.
    """
    paths = f"{tree}/src{os.pathsep}{Path(__file__).parent}"
    environ = {**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    limit = int(seconds) + 1
    log = tree / "output.log"
    (tree / UNDER_WAY).unlink(missing_ok=True)
    with log.open("wb") as output:
        tests = subprocess.Popen(
            command, cwd=tree, env=environ, stdout=output, stderr=output, start_new_session=True,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 1)),
        )  # fmt: skip
        try:
            status: int | None = tests.wait(WAITS * seconds)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(tests.pid, signal.SIGKILL)
            tests.wait()
    return status, log.read_text(errors="replace").splitlines()


# -- the plugin of pytest in these runs


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests that start an engine or need a GPU."""
    left_out = [item for item in items if starts_an_engine(item) or item.get_closest_marker("gpu")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


def starts_an_engine(item: Any) -> bool:
    theirs = sys.modules.get("tests.vllm.engines")
    own = [name for name in WITH_ENGINES if getattr(item.module, name, None) is getattr(theirs, name, item)]
    return bool(own) or "start_engine" in item.fixturenames


def pytest_runtest_logstart(nodeid: str) -> None:
    Path(UNDER_WAY).write_text(json.dumps([nodeid, time.process_time(), time.monotonic() - _BEGAN]))


# -- faults of planted.jsonl


def planted(tree: Path, names: list[str], python: str, seconds: float, jobs: int) -> int:
    """Plant the faults of these names, or all; returns the exit code."""
    faults = [json.loads(line) for line in (tree / "tools/planted.jsonl").read_text().splitlines()]
    faults = [fault for fault in faults if not names or fault["name"] in names]
    missed = []
    with copies(tree, jobs) as trees:

        def work(fault: dict[str, Any]) -> None:
            copied = trees.pop()
            try:
                noticed = plant(tree, copied, fault, python, seconds)
            finally:
                trees.append(copied)
            print(f"{fault['name']}: {noticed}", flush=True)
            if noticed.startswith("NOT"):
                missed.append(fault["name"])

        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(work, faults))
    print(f"{len(faults) - len(missed)} of {len(faults)} noticed; not: {', '.join(missed) or 'none'}")
    return 1 if missed or not faults else 0


def plant(origin: Path, tree: Path, fault: dict[str, Any], python: str, seconds: float) -> str:
    """Make a fault's edits in a copy, run what must notice it, and undo them; returns what it said, or NOT ..."""
    files = {file for file, _, _ in fault["edits"]}
    sources = {file: (origin / "src/kvdepot" / file).read_text() for file in files}
    changed = dict(sources)
    for file, old, new in fault["edits"]:
        if changed[file].count(old) != 1:
            return f"NOT PLANTED: {file} has changed, mend the line"
        changed[file] = changed[file].replace(old, new)
    simulate = [python, "-m", "tests.sim", "--jobs", "1", "--first", str(fault["seed"])]
    command = [python, *PYTEST, *fault["by"]] if "by" in fault else simulate
    for file, source in changed.items():
        (tree / "src/kvdepot" / file).write_text(source)
    status, lines = call(tree, command, seconds)
    for file, source in sources.items():
        (tree / "src/kvdepot" / file).write_text(source)
    said = [line for line in lines if line.startswith(("FAILED", "seed "))]
    return said[0] if status == 1 and said else "NOT NOTICED"


def show(faults: list[Fault], done: dict[str, dict[str, object]]) -> None:
    """Print, by area and by kind, how many faults were noticed."""
    for title, group in (("area", lambda fault: area_of(fault.file)), ("kind", lambda fault: fault.kind)):
        planted = Counter(group(fault) for fault in faults)
        noticed = Counter(group(fault) for fault in faults if done[fault.name]["by"])
        print(f"\n{title:20} planted noticed")
        for name, count in sorted(planted.items()):
            print(f"{name:20} {count:7} {noticed[name]:7}")
    total = sum(bool(done[fault.name]["by"]) for fault in faults)
    print(f"\n{total} of {len(faults)} noticed: {100 * total / len(faults):.1f} %")


if __name__ == "__main__":
    sys.exit(main())
