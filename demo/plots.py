"""Plots of the demo's figures: `python demo/plots.py demo.json docs/plots`, from the output of `demo.py --json`.

The Llama's time to first token over prompt length: computed, from the depot, and from the engine's own cache, which is
the lower bound. And the time to first token of each turn of the chats, with the depot and without. Each has one plot
for light pages and one for dark ones.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import multi_turn  # which makes the modules of bench importable

mpl.use("Agg")

from comparison import pictures
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator


@dataclass(frozen=True)
class Look:
    """Colours of one plot; the lines' colours are safe for colour-blind readers."""

    name: str
    ground: str
    ink: str
    grid: str
    lines: tuple[str, str, str]


LOOKS = (
    Look("ttft.png", "#ffffff", "#1f2328", "#d9dee3", ("#b23a00", "#005fb8", "#6b6f76")),
    Look("ttft-dark.png", "#14171c", "#e6e9ed", "#343a42", ("#ff9e64", "#6cb6ff", "#a0a6ad")),
)
LINES = (("cold_s", "computed", "o", 0), ("depot_s", "depot", "s", 7), ("own_s", "own cache", "^", -7))
"""Key of the values, name, marker, and how far the name is moved up so that the names of near lines do not overlap."""

_NEAR = 1.05


def medians(prompts: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Tokens and times in ms, by ascending length. Lengths that are nearly equal are merged to their median."""
    groups: list[list[dict[str, Any]]] = []
    for prompt in sorted(prompts, key=lambda prompt: prompt["tokens"]):
        if not groups or prompt["tokens"] > groups[-1][0]["tokens"] * _NEAR:
            groups.append([])
        groups[-1].append(prompt)
    values = {key: [statistics.median(p[key] * 1e3 for p in group) for group in groups] for key, *_ in LINES}
    return {"tokens": [statistics.median(p["tokens"] for p in group) for group in groups], **values}


def draw(measured: dict[str, Any], look: Look) -> Figure:
    """Draw one plot. Both axes are logarithmic, because times range from milliseconds to many seconds."""
    values = medians(measured["prompts"])
    figure = Figure(figsize=(8, 4.4), layout="constrained", facecolor=look.ground)
    axes = figure.subplots()
    axes.set_facecolor(look.ground)
    for (key, label, marker, up), color in zip(LINES, look.lines, strict=True):
        axes.plot(values["tokens"], values[key], color=color, marker=marker, linewidth=2, markersize=6)
        axes.annotate(
            f"{label}: {values[key][-1]:,.0f} ms", (values["tokens"][-1], values[key][-1]), (12, up),
            textcoords="offset points", va="center", color=color, fontsize=10,
        )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlim(values["tokens"][0] * 0.9, values["tokens"][-1] * 2.2)  # room for the lines' names
    axes.set_xticks(values["tokens"])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.0f} ms"))
    axes.set_xlabel("tokens of the prompt", color=look.ink)
    axes.set_title("Time to first token", loc="left", color=look.ink, fontsize=13)
    axes.tick_params(which="both", colors=look.ink)
    axes.grid(which="major", color=look.grid, linewidth=0.8)
    for side in axes.spines.values():
        side.set_visible(False)
    where = (
        f"vLLM on {measured['cores']} cores of {measured['processor']}; a Llama of {measured['layers']} layers, bf16"
    )
    if "load" in measured:
        where += f"; load {measured['load']:g} at the start"
    figure.text(0.01, -0.04, where, color=look.ink, fontsize=8)
    return figure


def draw_chats(measured: dict[str, Any], folder: Path) -> None:
    """Draw the chats' turns into `folder`."""
    rounds = {key: [{"chats": run}] for key, run in measured["chats"].items() if key in multi_turn.NAMES}
    about = (
        f"vLLM on {measured['cores']} cores of {measured['processor']}; more chats than the engine's own cache holds; "
        "medians, shaded up to the 90th percentile"
    )
    for look in pictures.LOOKS:
        path = folder / f"turns{look.suffix}.png"
        pictures.save(pictures.draw_turns(rounds, multi_turn.NAMES, about, look), path)
        print(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("numbers", type=Path, help="what demo.py --json wrote")
    parser.add_argument("folder", type=Path, help="where the pictures go")
    args = parser.parse_args()
    measured = json.loads(args.numbers.read_text())
    if "prompts" not in measured:
        sys.exit(f"{args.numbers} has no figures of the Llama: they come from demo.py without `--model windows`")
    args.folder.mkdir(parents=True, exist_ok=True)
    if "chats" in measured:
        draw_chats(measured, args.folder)
    for look in LOOKS:
        draw(measured, look).savefig(args.folder / look.name, dpi=150, bbox_inches="tight", facecolor=look.ground)
        print(args.folder / look.name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
