"""Figures: fields of a status that are metrics, declared by the annotation of the field, with their meaning.

Prometheus, docs/metrics.md, the page, the history and the dashboard read `figures`. To add one, add its field to
protocol/status.py, and the line of core/ that fills it in.
"""

from __future__ import annotations

import functools
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple, get_type_hints

import msgspec
from msgspec import Meta


class Figure(NamedTuple):
    """One figure. path: the path of its field in the struct. metric: its name in Prometheus, without prefix and
    `_total`.

    kind: `counter`; `gauge`; or `line`, a gauge that the history keeps for a chart, as it does all counters.
    """

    path: str
    metric: str
    kind: str
    meaning: str

    def of(self, owner: object) -> Any:
        """The figure's value in a struct; None: not known."""
        return attrgetter(self.path)(owner)


def _declare(kind: str, meaning: str, metric: str = "") -> Meta:
    """The annotation of a field that is a figure. metric: its name in Prometheus; empty: the name of the field."""
    return Meta(description=meaning, extra={"kind": kind, "metric": metric})


gauge, line, counter = (partial(_declare, kind) for kind in ("gauge", "line", "counter"))


@functools.cache
def figures(owner: type[msgspec.Struct]) -> tuple[Figure, ...]:
    """The figures of a struct and of the structs in it, in the order of its fields."""
    found: list[Figure] = []
    for name, hint in get_type_hints(owner, include_extras=True).items():
        for meta in getattr(hint, "__metadata__", ()):
            if not meta.extra:
                continue
            metric = meta.extra["metric"] or (f"{name}econds" if name.endswith("_s") else name)
            found.append(Figure(name, metric, meta.extra["kind"], meta.description))
        if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
            found += [each._replace(path=f"{name}.{each.path}") for each in figures(hint)]
    return tuple(found)
