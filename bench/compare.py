"""kvdepot beside the same engine without a cache, and beside LMCache's multi-process mode.

    python bench/compare.py [--only PART[,PART]] [--systems NAME[,NAME]] [--rounds N] [--tiny] [--out FOLDER]

Each round runs every system once, in turn, in fresh processes: its server, then a vLLM engine, which gets single
prompts, chats and documents. All systems have the same engine, model, memory and requests. Parts: prompts, chats,
documents. Writes compare.json, compare.md and pictures. The exit code is 0 if it ran to the end, whatever the figures.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import say
from comparison.engine import kv_bytes, write_model
from comparison.results import markdown, summary, tables
from comparison.run import FULL, PARTS, SMALL_BLOCKS, TINY, Workloads, run_round
from comparison.systems import BASELINE, SYSTEMS, installed
from report import describe_machine
from rich.console import Console
from rich.table import Table

_PICTURES = {"chats": "Multi-turn chats: time to first token", "documents": "Documents: time to first token"}


def main(argv: list[str] | None = None) -> int:
    """Run the chosen systems and parts, print the tables, write the files."""
    parser = argparse.ArgumentParser(prog="compare.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", metavar="PART", help=f"some of {', '.join(PARTS)}, separated by commas")
    parser.add_argument("--systems", metavar="NAME", help=f"some of {', '.join(SYSTEMS)}, separated by commas")
    parser.add_argument("--rounds", metavar="N", type=int, default=2, help="default: 2")
    parser.add_argument("--small-blocks", action="store_true", help="engine blocks of 32 tokens instead of 128")
    parser.add_argument("--tiny", action="store_true", help="sizes for trying it out; the numbers mean nothing")
    parser.add_argument("--out", metavar="FOLDER", type=Path, default=Path("compare"), help="default: compare")
    args = parser.parse_args(argv)
    parts = _chosen(parser, args.only, PARTS)
    chosen = {key: SYSTEMS[key] for key in _chosen(parser, args.systems, tuple(SYSTEMS))}
    if args.rounds < 1:
        parser.error("at least one round")
    systems = installed({BASELINE: SYSTEMS[BASELINE], **chosen})  # the others' answers are compared with its own
    scale = TINY if args.tiny else SMALL_BLOCKS if args.small_blocks else FULL
    workloads = Workloads(scale.chats.requests(), scale.documents.requests())
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # servers and engines end with it
    begun = time.monotonic()
    machine = [f"date       {datetime.date.today().isoformat()}", *describe_machine(), _versions(systems)]
    machine.append(f"engine     blocks of {scale.block_tokens} tokens")
    print("\n".join(machine), flush=True)
    rounds: dict[str, list[dict[str, Any]]] = {key: [] for key in systems}
    with tempfile.TemporaryDirectory(prefix="kvdepot-compare-") as name:
        model = write_model(Path(name, "model"))
        for number in range(args.rounds):
            for key, system in systems.items():
                rounds[key].append(run_round(system, model, scale, workloads, parts, number))
    names = {key: system.name for key, system in systems.items()}
    found = summary(rounds, BASELINE)
    shown = tables(found, names)
    _print(shown)
    args.out.mkdir(parents=True, exist_ok=True)
    written = {"machine": machine, "kv_bytes_per_token": kv_bytes(), "figures": found, "rounds": rounds}
    (args.out / "compare.json").write_text(json.dumps(written) + "\n")
    lines = [*machine, "", *(f"### {title}\n{markdown(table)}\n" for title, table in shown.items())]
    (args.out / "compare.md").write_text("\n".join(lines))
    _draw(rounds, names, parts, machine, args.out)
    say(f"{args.out}: written after {time.monotonic() - begun:.0f} s")
    return 0


def _chosen(parser: argparse.ArgumentParser, given: str | None, known: tuple[str, ...]) -> tuple[str, ...]:
    names = tuple(given.split(",")) if given else known
    for name in names:
        if name not in known:
            parser.error(f"{name!r} is not one of {', '.join(known)}")
    return names


def _versions(systems: dict[str, Any]) -> str:
    """Of what is compared, once each."""
    found = {system.package: system.version for system in systems.values() if system.package}
    return "compared   " + ", ".join(f"{package} {version}" for package, version in found.items())


def _print(shown: dict[str, list[tuple[str, ...]]]) -> None:
    console = Console(width=None if sys.stdout.isatty() else 120)
    for title, (head, *rows) in shown.items():
        table = Table(title=title, title_justify="left", title_style="bold")
        for number, column in enumerate(head):
            table.add_column(column, justify="right" if number else "left")
        for row in rows:
            table.add_row(*row)
        console.print(table)


def _draw(
    rounds: dict[str, list[dict[str, Any]]],
    names: dict[str, str],
    parts: tuple[str, ...],
    machine: list[str],
    out: Path,
) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        say("no pictures: matplotlib is not installed")
        return
    from comparison import pictures

    about = " ".join(machine[1].split()[1:])
    for look in pictures.LOOKS:
        for part in [part for part in parts if part in _PICTURES]:
            drawn = pictures.draw_distribution(rounds, part, _PICTURES[part], names, about, look)
            pictures.save(drawn, out / f"{part}{look.suffix}.png")
        if "chats" in parts:
            pictures.save(pictures.draw_turns(rounds, names, about, look), out / f"turns{look.suffix}.png")


if __name__ == "__main__":
    sys.exit(main())
