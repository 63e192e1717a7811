"""Pictures of a comparison: the time to first token over a chat's turns, and its distribution in both workloads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from comparison.results import turns

__all__ = ["LOOKS", "Look", "draw_distribution", "draw_turns", "save"]


@dataclass(frozen=True)
class Look:
    """Colours of one picture. suffix: of its file's name. lines: of the systems; safe for colour-blind readers."""

    suffix: str
    ground: str
    ink: str
    grid: str
    none: str
    kvdepot: str
    others: tuple[str, ...]

    def color(self, key: str, number: int) -> str:
        """Of a system; number: among the others."""
        return {"none": self.none, "kvdepot": self.kvdepot}.get(key, self.others[number % len(self.others)])


LOOKS = (
    Look("", "#ffffff", "#1f2328", "#d9dee3", "#b23a00", "#005fb8", ("#6b6f76", "#3a7d44", "#8a5aa8")),
    Look("-dark", "#14171c", "#e6e9ed", "#343a42", "#ff9e64", "#6cb6ff", ("#a0a6ad", "#7bc98a", "#c9a0e6")),
)
_MARKERS = {"none": "o", "kvdepot": "s"}


def draw_turns(rounds: dict[str, list[dict[str, Any]]], names: dict[str, str], about: str, look: Look) -> Figure:
    """Median time to first token of each turn of the chats, up to the ninetieth percentile in a lighter shade."""
    figure, axes = _axes(look)
    number = 0
    for key in (key for key in names if key in rounds):
        color, marker = look.color(key, number), _MARKERS.get(key, "^")
        number += key not in _MARKERS
        found = turns([each["chats"] for each in rounds[key]])
        x = [turn + 1 for turn, *_ in found]
        axes.plot(x, [middle * 1e3 for _, middle, _ in found], marker=marker, color=color, label=names[key], lw=2)
        if key in _MARKERS:
            axes.fill_between(
                x, [middle * 1e3 for _, middle, _ in found], [high * 1e3 for *_, high in found], color=color, alpha=0.15
            )
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.0f} ms"))
    axes.set_xlabel("turn of the chat", color=look.ink)
    axes.set_title("Time to first token, by turn", loc="left", color=look.ink, fontsize=13)
    axes.legend(frameon=False, labelcolor=look.ink, loc="upper left")
    figure.text(0.01, -0.05, about, color=look.ink, fontsize=8)
    return figure


def draw_distribution(
    rounds: dict[str, list[dict[str, Any]]], workload: str, title: str, names: dict[str, str], about: str, look: Look
) -> Figure:
    """The share of a workload's requests whose first token came within a time."""
    figure, axes = _axes(look)
    number = 0
    for key in (key for key in names if key in rounds):
        color = look.color(key, number)
        number += key not in _MARKERS
        times = sorted(request["first_s"] * 1e3 for each in rounds[key] for request in each[workload]["requests"])
        shares = [(rank + 1) / len(times) * 100 for rank in range(len(times))]
        axes.step(times, shares, where="post", color=color, label=names[key], lw=2)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f} ms"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:.0f} %"))
    axes.set_xlabel("time to first token", color=look.ink)
    axes.set_title(title, loc="left", color=look.ink, fontsize=13)
    axes.legend(frameon=False, labelcolor=look.ink, loc="upper left")
    figure.text(0.01, -0.05, about, color=look.ink, fontsize=8)
    return figure


def save(figure: Figure, path: Path) -> None:
    """Write a PNG."""
    figure.savefig(path, dpi=150, bbox_inches="tight", facecolor=figure.get_facecolor())


def _axes(look: Look) -> tuple[Figure, Any]:
    figure = Figure(figsize=(8, 4.2), layout="constrained", facecolor=look.ground)
    axes = figure.subplots()
    axes.set_facecolor(look.ground)
    axes.tick_params(which="both", colors=look.ink)
    axes.grid(which="major", color=look.grid, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in axes.spines.values():
        side.set_visible(False)
    return figure, axes
