"""Count what the house rules limit, and fail if a count is above its limit.

    python scripts/house.py [--list NAME]

`make lint` runs this beside ruff. Whoever lowers a count lowers its limit here, too. A limit is raised only with an
entry of docs/decisions.md that says which feature is worth it and what was looked at to let go instead.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
LINES = {
    "src/kvdepot/cli": 3_187,
    "src/kvdepot/client": 4_346,
    "src/kvdepot/core": 8_303,
    "src/kvdepot/devices": 1_707,
    "src/kvdepot/eviction": 1_566,
    "src/kvdepot/integrations": 9_839,
    "src/kvdepot/kv_events": 767,
    "src/kvdepot/library": 953,
    "src/kvdepot/memory": 1_335,
    "src/kvdepot/protocol": 3_387,
    "src/kvdepot/tiers": 4_306,
    "src/kvdepot/web": 1_543,
    "src": 43_401,
    "tests": 52_008,
}
"""The most lines of Python below each folder."""
LIMITS = {
    "words of documents": 45_000,
    "functions with more than 5 parameters": 12,
    "functions above 60 lines": 0,
    "boolean parameters": 61,
    "Any": 90,
    "docstrings that are fragments": 0,
    "classes that share a name": 8,
    "test names above 80 characters": 0,
    "sentences above 35 words": 0,
}
FRAGMENT = {"Of", "By", "For", "In", "What", "How", "Those", "That", "So"}
"""First words of docstrings that lack their noun."""
CONTRACT = {"client/contract.py", "integrations/lmcache"}
"""Modules whose signatures others have fixed."""


class Finding(NamedTuple):
    """One place that counts."""

    count: str
    file: str
    line: int
    text: str


def main() -> int:
    parser = argparse.ArgumentParser(prog="house.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--list", metavar="NAME", help="show each place that a count consists of, by part of its name")
    wanted = parser.parse_args().list
    found = list(findings())
    if wanted:
        for each in found:
            if wanted in each.count:
                print(f"{each.file}:{each.line}: {each.text}")
        return 0
    counts = Counter(each.count for each in found)
    counts.update({f"lines of {folder}": lines(folder) for folder in LINES})
    failed = False
    for name, limit in ({f"lines of {folder}": most for folder, most in LINES.items()} | LIMITS).items():
        is_above = counts[name] > limit
        failed |= is_above
        print(f"{counts[name]:7,} of {limit:7,}  {name}{': above its limit (--list shows where)' * is_above}")
    return int(failed)


def lines(folder: str) -> int:
    """The number of lines of Python below a folder."""
    return sum(len(path.read_bytes().splitlines()) for path in (ROOT / folder).rglob("*.py"))


def findings() -> Iterator[Finding]:
    """Every place that one of the counts consists of."""
    names: dict[str, list[Finding]] = {}
    for path in sorted((ROOT / "src").rglob("*.py")):
        file, tree = str(path.relative_to(ROOT)), ast.parse(path.read_text())
        for node in ast.walk(tree):
            yield from docstrings(node, file)
            match node:
                case ast.FunctionDef() | ast.AsyncFunctionDef():
                    yield from signature(node, file)
                case ast.ClassDef():
                    names.setdefault(node.name, []).append(
                        Finding("classes that share a name", file, node.lineno, node.name)
                    )
                case ast.Name(id="Any"):
                    yield Finding("Any", file, node.lineno, "Any")
    for same in names.values():
        yield from same[1:] and same
    for path in (*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))):
        text, file = path.read_text(), str(path.relative_to(ROOT))
        yield from long_sentences(text, file)
        yield from words(text, file)
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and len(node.name) > 80:
                yield Finding("test names above 80 characters", str(path.relative_to(ROOT)), node.lineno, node.name)


def words(text: str, file: str) -> Iterator[Finding]:
    """Each word of a page's prose and tables; code blocks, comments and the targets of links do not count."""
    plain = re.sub(r"<!--.*?-->|^```.*?^```$", lambda hidden: "\n" * hidden[0].count("\n"), text, flags=re.M | re.S)
    for line, text in enumerate(re.sub(r"\]\([^)]*\)", "]", plain).splitlines(), 1):
        for word in text.split():
            if any(map(str.isalnum, word)):
                yield Finding("words of documents", file, line, word)


def long_sentences(text: str, file: str) -> Iterator[Finding]:
    """Sentences of a page that are too long to be read at once; code in a line is one word, and tables do not count."""
    text = re.sub(
        r"<!--.*?-->|^```.*?^```$|^[|#<!].*?$", lambda hidden: "\n" * hidden[0].count("\n"), text, flags=re.M | re.S
    )
    at = 1
    for part in re.split(r"(\n\s*(?=\n|[-*] |\d+\. ))", text):
        plain = re.sub(r"`[^`]*`", "code", re.sub(r"\]\([^)]*\)", "]", part))
        for sentence in re.split(r"(?<=[.?!])[*)\]]*\s+", plain):
            if sum(any(map(str.isalnum, word)) for word in sentence.split()) > 35:
                yield Finding("sentences above 35 words", file, at, " ".join(sentence.split()))
        at += part.count("\n")


def docstrings(node: ast.AST, file: str) -> Iterator[Finding]:
    """Docstrings in a body, also below attributes, that begin as a fragment."""
    if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return
    for child in node.body:
        match child:
            case ast.Expr(value=ast.Constant(value=str() as text)) if text.split()[:1]:
                if text.split()[0].strip(":,") in FRAGMENT:
                    yield Finding("docstrings that are fragments", file, child.lineno, text.splitlines()[0])


def signature(node: ast.FunctionDef | ast.AsyncFunctionDef, file: str) -> Iterator[Finding]:
    """What counts of a function's length and parameters; parameters of the contract and of commands do not."""
    if (length := (node.end_lineno or node.lineno) - node.lineno + 1) > 60:
        yield Finding("functions above 60 lines", file, node.lineno, f"{node.name}: {length}")
    is_command = any("command" in ast.unparse(each) for each in node.decorator_list)
    if is_command or any(part in file for part in CONTRACT):
        return
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    arguments = [each for each in arguments if each.arg not in ("self", "cls")]
    if len(arguments) > 5:
        yield Finding("functions with more than 5 parameters", file, node.lineno, f"{node.name}: {len(arguments)}")
    for each in arguments:
        if each.annotation is not None and "bool" in ast.unparse(each.annotation).split(" | "):
            yield Finding("boolean parameters", file, node.lineno, f"{node.name}: {each.arg}")


if __name__ == "__main__":
    sys.exit(main())
