"""README and docs are true: every code block runs, and what operators may meet stands there with what to do.

A block of code in these pages has a mark before it, a comment that readers of the page do not see:

    <!-- run -->              it is run, in the page's order, in an empty folder with an empty home
    <!-- run: PART -->        the same, where `kvdepot.PART` is a package of this tree
    <!-- run with an engine --> the same, once an engine has stored the prompt of `prompt.json` as the model MODEL
    <!-- run with vLLM -->    the same, by the tests of vLLM
    <!-- file: NAME -->       it is the content of that file, for the blocks behind it
    <!-- prints -->           what the block before it prints; numbers may differ, and `...` is any lines
    <!-- not run: REASON -->  it can't be run here

In a run `kvdepot serve` goes on in the background, and what only a reader has (a disk, a Redis, ports) is replaced by
`STAND_INS` or by the fixtures below.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import typing
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvdepot.protocol import wire
from kvdepot.protocol.counters import SERVER, TIER
from tests.ports import free_port
from tests.test_structure import LAYERS
from tests.tiers.servers import RedisServer, need

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "kvdepot"
DOCS = ROOT / "docs"
ARCHITECTURE = ROOT / "ARCHITECTURE.md"
INTERNALS = DOCS / "internals"
DECISIONS = DOCS / "decisions.md"
GLOSSARY = DOCS / "glossary.md"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("deploy/**/*.md")), *sorted(DOCS.rglob("*.md"))]
TIMEOUT_S = 300.0
VLLM_TIMEOUT_S = 1800.0
WITH_VLLM = "run with vLLM"
WITH_ENGINE = "run with an engine"

# What stands in the pages -> what the tests put in its place; {}: see `_Page`.
STAND_INS = {
    "/var/cache/kvdepot": "{folder}/cache",
    "redis://:PASSWORD@cache:6379/0": "redis://127.0.0.1:{redis}/0",
    "tcp://0.0.0.0:5555": "tcp://127.0.0.1:{port}",
    "tcp://HOST:5555": "tcp://127.0.0.1:{port}",
    "127.0.0.1:7077": "127.0.0.1:{http}",
    "tcp://127.0.0.1:5557": "tcp://127.0.0.1:{port}",
    ".venv/bin/": "",
    "--lengths 2048": "--lengths 512",  # two chunks are shown as well as eight
    "demo/demo.py": f"{ROOT}/demo/demo.py",
    "bench/replay.py": f"{ROOT}/bench/replay.py",
}


_FENCE = re.compile(r"(?:<!-- (?P<mark>[^>]*?) -->\n+)?^```(?P<kind>\w*)[^\n]*\n(?P<text>.*?)^```$", re.M | re.S)
_NO_CODE = ("text", "mermaid")

_ENGINE = """
import json
import torch
import zmq
from kvdepot.adapters import LMCacheMPWorkerAdapter, LoadStoreOp
from kvdepot.config import default_url

tokens = list(range(1024))
worker = LMCacheMPWorkerAdapter(default_url(), zmq.Context(), "MODEL", 1, 0, 16)
worker.register_kv_caches({"layer": torch.zeros(64, 2, 16, 1, 8)})
worker.submit_store_request("a", LoadStoreOp(list(range(64)), tokens, start=0, end=1024), None)
while "a" not in (worker.get_finished({"a"})[0] or ()):
    pass
worker.shutdown()
with open("prompt.json", "w") as file:
    json.dump(tokens, file)
"""

_PRELUDE = r"""
set -euo pipefail
python() { "$PYTHON" "$@"; }
kvdepot() {
  if [ "${1-}" != serve ]; then "$PYTHON" -m kvdepot.cli "$@"; return; fi
  stop_server
  : > "$FOLDER/serve.log"
  "$PYTHON" -m kvdepot.cli "$@" > "$FOLDER/serve.log" 2>&1 &
  server=$!
  until grep -q "serving at" "$FOLDER/serve.log"; do
    kill -0 "$server" || { cat "$FOLDER/serve.log" >&2; return 1; }
    sleep 0.02
  done
  sed -n 's|.*, arena \(/dev/shm/[^ ]*\) of .*|\1|p' "$FOLDER/serve.log" >> "$FOLDER/arenas"
}
server=
stop_server() {
  if [ -n "$server" ]; then kill "$server"; wait "$server"; fi
  server=
}
trap 'code=$?; if [ -n "$server" ]; then kill "$server"; wait "$server" || true; fi; exit $code' EXIT
"""


@dataclass(frozen=True)
class Block:
    """A code block of a page."""

    page: Path
    line: int
    kind: str
    mark: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def is_run(self) -> bool:
        """Whether it is run in this tree, without vLLM."""
        word, _, part = self.mark.partition(": ")
        return word in ("file", WITH_ENGINE) or (word == "run" and (not part or _is_package(part)))


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    return [
        Block(page, text.count("\n", 0, found.start("kind")) + 1, found["kind"], found["mark"] or "", found["text"])
        for found in _FENCE.finditer(text)
    ]


def _is_package(part: str) -> bool:
    spec = importlib.util.find_spec(f"kvdepot.{part}")
    return spec is not None and spec.origin is not None and spec.submodule_search_locations is not None


RUN_PAGES = [page for page in PAGES if any(block.is_run for block in blocks(page))]
VLLM_PAGES = list(
    {  # pages that show the same commands stand for each other: an engine's start takes long
        tuple(block.text for block in found): page
        for page in reversed(PAGES)
        if (found := [block for block in blocks(page) if block.mark == WITH_VLLM])
    }.values()
)


# -- tables


@pytest.mark.parametrize(
    "page", [page for page in PAGES if "<!-- table: " in page.read_text()], ids=lambda page: page.name
)
def test_tables_made_from_the_code_are_up_to_date(page: Path) -> None:
    spec = importlib.util.spec_from_file_location("hooks", ROOT / "docs" / "hooks.py")
    assert spec is not None and spec.loader is not None
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    text = page.read_text()
    assert text.count("<!-- table: ") == text.count("<!-- end of table -->")
    assert hooks.fill(text) == text, "run python docs/hooks.py"


# -- blocks


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_code_block_says_whether_it_is_run(page: Path) -> None:
    known = re.compile(r"run(: \w+| with vLLM| with an engine)?|file: [\w./-]+|prints|not run: .{10,}")
    for block in blocks(page):
        assert block.kind, f"{block} has no language; of what is no code it is `text`"
        if block.kind not in _NO_CODE or block.mark:
            assert known.fullmatch(block.mark), f"{block} has the mark {block.mark!r}"


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path: unix sockets have names of 107 bytes at most."""
    with tempfile.TemporaryDirectory(prefix="kvd-docs-") as name:
        yield Path(name)


@pytest.fixture
def redis(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[int]:
    """The port of a Redis, where the page wants one."""
    if "PASSWORD@cache" not in request.getfixturevalue("page").read_text():
        yield 0
        return
    need(commands=["redis-server"], modules=["redis"])
    server = RedisServer(tmp_path)
    yield server.port
    server.kill()


@pytest.mark.faults
@pytest.mark.parametrize("page", RUN_PAGES, ids=lambda page: page.name)
def test_the_code_of_a_page_runs_from_its_first_block_to_its_last(page: Path, folder: Path, redis: int) -> None:
    printed = _run(page, [block for block in blocks(page) if block.is_run], folder, redis)
    said = ""
    for block in blocks(page):
        said = printed.get(block, said)
        if block.mark == "prints" and said:
            assert re.fullmatch(_pattern(block.text), said.strip()), f"{block} is not\n{said}"


@pytest.mark.vllm
@pytest.mark.parametrize("page", VLLM_PAGES, ids=lambda page: page.name)
def test_the_code_of_a_page_that_wants_vllm_runs(page: Path, folder: Path) -> None:
    need(modules=["vllm", "torch"])
    wanted = [block for block in blocks(page) if block.mark == WITH_VLLM]
    printed = _run(page, wanted, folder, timeout_s=VLLM_TIMEOUT_S, arena_gib=0.5)
    assert "PASSED" in printed[wanted[0]]


def _run(
    page: Path,
    chosen: list[Block],
    folder: Path,
    redis: int = 0,
    timeout_s: float = TIMEOUT_S,
    arena_gib: float = 1 / 16,
) -> dict[Block, str]:
    """Run blocks of a page in order, by one shell; what each of them printed."""
    places = {"folder": folder, "redis": redis, "port": free_port(), "http": free_port()}
    here = folder / "here"
    script = [_PRELUDE, f"cd {here}"]
    here.mkdir()
    (folder / "home").mkdir()
    (folder / "engine.py").write_text(_ENGINE)
    for number, block in enumerate(chosen):
        text = block.text
        for shown, there in STAND_INS.items():
            text = text.replace(shown, there.format(**places))
        text = re.sub(r"^(kvdepot serve\b[^#\n]*?) &(?=\s)", r"\1", text, flags=re.M)
        name = block.mark.removeprefix("file: ") if block.mark.startswith("file: ") else ""
        if not name and block.kind == "python":
            name = f"block{number}.py"
        script.append(f"printf '\\n=== %d\\n' {number}; echo '{block}' > {folder}/at")
        if name:
            (here / name).write_text(text)
        if block.mark == WITH_ENGINE:
            script.append('python "$FOLDER/engine.py"')
        if block.mark.startswith("run"):
            script.append(text if block.kind == "sh" else f"python {name}")
    script.append("stop_server")
    environ = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])),
        "PYTHON": sys.executable,
        "FOLDER": str(folder),
        "HOME": str(folder / "home"),
        "XDG_RUNTIME_DIR": str(folder),
        "KVDEPOT_ARENA_GIB": str(arena_gib),
        "KVDEPOT_HTTP": f"127.0.0.1:{places['http']}" if any(b.mark == "run: web" for b in chosen) else "off",
    }
    try:
        done = subprocess.run(
            ["bash"], input="\n".join(script), cwd=folder, env=environ, capture_output=True, text=True,
            timeout=timeout_s, check=False,
        )  # fmt: skip
    finally:
        arenas = (folder / "arenas").read_text().split() if (folder / "arenas").exists() else []
        for arena in arenas:  # a page may tell its servers to keep them
            Path(arena).unlink(missing_ok=True)
    log = (folder / "serve.log").read_text() if (folder / "serve.log").exists() else ""
    at = (folder / "at").read_text().strip()
    assert done.returncode == 0, f"{at}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}\n{log[-3000:]}"
    printed = re.findall(r"^=== \d+\n(.*?)(?=^=== |\Z)", done.stdout, re.M | re.S)
    return dict(zip(chosen, printed, strict=True))


def _pattern(shown: str) -> str:
    """What a block with the mark `prints` stands for."""
    lines = []
    for line in map(str.strip, shown.strip().splitlines()):
        parts = re.split(r"(\d[\d.,]*|\s+)", line)
        found = (r"[\d.,]+" if part[:1].isdigit() else r"\s+" if part.isspace() else re.escape(part) for part in parts)
        lines.append(r"(?s:.*?)" if line == "..." else "".join(found))
    return r"\s*\n\s*".join(lines)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_links_of_a_page_lead_somewhere_in_the_repository(page: Path) -> None:
    links = re.findall(r"\]\((?!http)([^)#]+)|(?:src|srcset)=\"(?!http)([^\"]+)", page.read_text())
    for link in (one or other for one, other in links):
        assert (page.parent / link).exists(), link


def test_the_table_of_vllms_settings_is_what_the_connector_reads() -> None:
    source = (SOURCE / "integrations" / "vllm" / "settings.py").read_text()
    (settings,) = re.findall(r"^class ConnectorSettings\b.*?(?=^\S)", f"{source}\nend", re.M | re.S)
    read = {f"kvdepot.{name}" for name in re.findall(r"^    (\w+): ", settings, re.M)}
    assert set(re.findall(r"^\| `(kvdepot\.\w+)` \|", (DOCS / "vllm.md").read_text(), re.M)) == read


# -- the architecture, the internals, the decisions, the glossary


def test_the_layers_of_the_architecture_are_those_that_are_tested_on_one_page() -> None:
    assert len(ARCHITECTURE.read_bytes()) <= 8192
    (picture,) = [block.text for block in blocks(ARCHITECTURE)]
    drawn = [set(re.findall(r"[\w/]+", line)) for line in picture.splitlines()]
    layers = [line.split() for line in LAYERS.split("\n") if line.strip()]
    for names, line in zip(layers, reversed(drawn), strict=True):
        assert {f"{name}/" if (SOURCE / name).is_dir() else name for name in names} <= line


@pytest.mark.parametrize(
    "page", [ARCHITECTURE, *sorted(INTERNALS.glob("*.md")), DECISIONS, GLOSSARY],
    ids=lambda page: str(page.relative_to(ROOT)),
)  # fmt: skip
def test_every_file_that_a_page_of_the_architecture_names_exists(page: Path) -> None:
    files = [f"/{path.relative_to(ROOT)}" for top in ("src", "tests", "tools") for path in ROOT.glob(f"{top}/**/*.py")]
    named = re.findall(r"`([\w./-]+\.py)`", page.read_text())
    assert [name for name in named if not any(path.endswith(f"/{name}") for path in files)] == []


# -- what stands in the operators' pages


def counted() -> set[str]:
    """Names of all that the source counts."""
    places = r"counters\[([^\]]+)\]|\._(?:tally|count)\(([^,)]+)|_counters(?:: [^=]+)? = \{([^}]*)\}"
    sources = [path.read_text() for path in SOURCE.rglob("*.py") if "testing" not in path.relative_to(SOURCE).parts]
    found = (" ".join(each) for source in sources for each in re.findall(places, source))
    return {name for each in found for name in re.findall(r'"(\w+)"', each)}


@pytest.mark.faults
def test_the_table_of_counters_has_all_that_the_source_counts_and_no_more() -> None:
    adapters_own = {"stores_dropped", "stores_given_up", "chunks_failed"}
    kept_elsewhere = {  # as numbers of their own
        "capped_chunks", "evicted_chunks", "mismatched_chunks", "refused_chunks", "rejoined", "undemoted_chunks",
        "yielded_chunks",
    }  # fmt: skip
    assert counted() | kept_elsewhere == {each.name for each in (*SERVER, *TIER)} | adapters_own
    text = "".join((DOCS / name).read_text() for name in ("operating.md", "metrics.md", "log.md"))
    assert [name for name in adapters_own if f"`{name}`" not in text] == []


# -- pictures and site


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the documentation as a website, built without a warning."""
    need(modules=["mkdocs", "material", "mkdocstrings"])
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


@pytest.mark.faults
def test_the_site_is_built_without_a_warning(site: Path) -> None:
    start = (site / "start" / "index.html").read_text()
    assert "kvdepot serve" in start
    found = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    boosts = {each["location"].partition("/")[0]: each.get("boost", 1) for each in found}
    assert boosts["api"] < boosts["tiers"], "names of the API are the last that a user searches for"
    for page in site.rglob("*.html"):
        outside = re.findall(r'(?:src|href)="(https?://[^"]+\.(?:js|css|woff2?))"', page.read_text())
        assert not outside, f"{page.name} loads {outside}"


def test_security_says_what_each_message_lets_a_client_do() -> None:
    page = (ROOT / "SECURITY.md").read_text()
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| (.+) \|$", page, re.MULTILINE)
    listed = Counter(name for names, what in rows if what for name in re.findall(r"\w+", names))
    messages = {message.__name__ for message in typing.get_args(wire.Request)}
    assert {name for name in listed if name[0].isupper()} == messages
    assert all(listed[name] == 1 for name in messages), "each once"
