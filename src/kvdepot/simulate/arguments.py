"""The arguments of `kvdepot simulate`, and how their values are read.

Called by simulate/replay.py and simulate/capacity.py. Whatever cannot be is a ConfigError that names the option.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, fields

from kvdepot.errors import ConfigError
from kvdepot.values import parse_size

__all__ = ["Asked", "Capacities", "count", "fitting", "names", "seconds", "size", "split", "spread"]


@dataclass(frozen=True)
class Asked:
    """The arguments of `kvdepot simulate`, as typed; None = not given."""

    traces: tuple[str, ...]
    policy: str | None = None
    capacity_blocks: str | None = None
    capacity: str | None = None
    kv_bytes_per_token: str | None = None
    block_tokens: str | None = None
    as_json: bool = False
    plot: str | None = None
    jobs: str | None = None
    hosts: str | None = None
    routing: str | None = None
    scale: str | None = None
    tier_size: str | None = None
    tier_latency: str | None = None
    tier_bandwidth: str | None = None
    prefill_tokens_per_s: str | None = None

    def __post_init__(self) -> None:
        given = {field.name for field in fields(self) if getattr(self, field.name) is not None}
        for option, (needed, what) in _NEEDED.items():
            if option in given and needed not in given:
                raise ConfigError(f"{_flag(option)} needs {_flag(needed)}: {what}")

    @property
    def token_bytes(self) -> int:
        """KV bytes per token; 0 = not given."""
        return 0 if self.kv_bytes_per_token is None else size(self.kv_bytes_per_token, "--kv-bytes-per-token")

    @property
    def tokens(self) -> int:
        """Tokens per block; 0 = not given."""
        return 0 if self.block_tokens is None else count(self.block_tokens, "--block-tokens")

    def capacities(self) -> Capacities:
        """Those asked for."""
        return Capacities(
            [count(text, "--capacity-blocks") for text in split(self.capacity_blocks)],
            [size(text, "--capacity") for text in split(self.capacity)],
        )

    @property
    def processes(self) -> int:
        """0 = not given."""
        return 0 if self.jobs is None else count(self.jobs, "--jobs")


@dataclass(frozen=True)
class Capacities:
    """Capacities in blocks, and in bytes."""

    blocks: list[int]
    sizes: list[int]

    def of(self, block_bytes: int, path: str) -> list[int]:
        """All of them in blocks of the trace at `path`, ascending."""
        return sorted({*self.blocks, *(fitting(each, block_bytes, path, "--capacity") for each in self.sizes)})


_FLEET = "hosts", "the number of hosts"
_NEEDED = {
    "capacity": ("kv_bytes_per_token", "the KV size of a token"),
    "routing": _FLEET,
    "scale": _FLEET,
    "prefill_tokens_per_s": _FLEET,
    "tier_size": _FLEET,
    "tier_latency": ("tier_size", "the size of the shared tier"),
    "tier_bandwidth": ("tier_size", "the size of the shared tier"),
}
"""Option -> the option without which it means nothing, and what that is."""


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def split(text: str | None) -> list[str]:
    """The parts of a list with commas, each once."""
    return list(dict.fromkeys(part.strip() for part in text.split(","))) if text is not None else []


def names(text: str, known: Collection[str], what: str) -> list[str]:
    """A list of names, each of which is known."""
    found = split(text)
    for name in found:
        if name not in known:
            raise ConfigError(f"unknown {what} {name!r}; available: {', '.join(known)}")
    return found


def count(text: str, option: str) -> int:
    """A positive whole number."""
    if not (text.isascii() and text.isdigit() and int(text)):
        raise ConfigError(f"{option} takes positive whole numbers, not {text!r}")
    return int(text)


def size(text: str, option: str) -> int:
    """Bytes of a size with or without a unit; at least 1."""
    try:
        found = round(parse_size(text))
    except (ValueError, OverflowError):
        found = 0
    if found < 1:
        raise ConfigError(f"{option} takes sizes like 64GiB, 500GB or 131072, not {text!r}")
    return found


_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_TIME = re.compile(r"\s*(\d+\.?\d*|\.\d+)\s*(us|ms|s)\s*", re.ASCII)


def seconds(text: str, option: str) -> float:
    """Seconds of a time with its unit; at least 0."""
    found = _TIME.fullmatch(text)
    if found is None:
        raise ConfigError(f"{option} takes times like 500us, 2ms or 0.1s, not {text!r}")
    return float(found[1]) * _UNITS[found[2]]


def fitting(size_bytes: int, block_bytes: int, path: str, option: str) -> int:
    """Blocks that fit into `size_bytes`."""
    if not block_bytes:
        raise ConfigError(f"{path}: does not give the tokens per block; use --block-tokens")
    if size_bytes < block_bytes:
        raise ConfigError(f"{option}: a block of {path} takes {block_bytes} bytes, more than {size_bytes}")
    return size_bytes // block_bytes


def spread(most: int) -> list[int]:
    """Capacities from a 64th of `most` to `most`, each about twice the one before, rounded."""
    sizes = {most or 1}
    for part in (2, 4, 8, 16, 32, 64):
        each = most // part
        step = 10 ** max(len(str(each)) - 2, 0)
        sizes.add(max(each // step * step, 1))
    return sorted(sizes)
