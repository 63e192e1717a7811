"""Sizes and numbers as text, and parsing of settings, with error messages for wrong values and mistyped names."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import Any

import msgspec

_UNITS = {
    "": 1, "B": 1, "BYTES": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip
_SHOWN_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_SIZE = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]*)\s*", re.ASCII)


def plural(number: int, noun: str) -> str:
    """A number of things: 1 chunk, 1,200 chunks."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def size(count_bytes: float) -> str:
    """A number of bytes with three digits and a unit: 1.5 GiB."""
    unit = 0
    while count_bytes >= 1000 and unit < len(_SHOWN_UNITS) - 1:
        count_bytes /= 1024
        unit += 1
    shown = f"{count_bytes:,.0f}" if not unit or count_bytes >= 100 else f"{count_bytes:.3g}"
    return f"{shown} {_SHOWN_UNITS[unit]}"


def parse_size(text: str) -> float:
    """The bytes of a size with a unit: `64GiB`, `1.5 MiB`, `500GB` (a power of 1000), `4096B`. Only 0 needs none.
    Raises ValueError."""
    found = _SIZE.fullmatch(text)
    if found is None or found[2].upper() not in _UNITS:
        raise ValueError(f"{text!r} is not a size: write 64GiB or 500GB, say")
    count = float(found[1])
    if count and not found[2]:
        raise ValueError(f"{text!r} has no unit: write {found[1]}GiB or {found[1]}MiB, say")
    return count * _UNITS[found[2].upper()]


def parse_toml(text: str) -> dict[str, Any]:
    """The table of a TOML document. Raises ValueError."""
    if sys.version_info >= (3, 11):  # imported here, because most processes read no TOML
        import tomllib
    else:  # pragma: no cover
        import tomli as tomllib
    return tomllib.loads(text)


def is_size(name: str) -> bool:
    """Whether a setting of this name is a size; its name ends with the unit of a plain number."""
    return name.endswith(("_gib", "_mib", "_kib", "_bytes"))


def in_units(given: Mapping[str, object]) -> dict[str, object]:
    """Convert sizes such as `arena_gib = "512MiB"` to numbers in the setting's own unit; keeps the other settings."""
    return {name: _in_unit(name, value) if is_size(name) else value for name, value in given.items()}


def _in_unit(name: str, value: object) -> object:
    if not isinstance(value, str) or not (found := _SIZE.fullmatch(value)) or not found[2]:
        return value
    try:
        count = parse_size(value) / _UNITS[_unit(name).upper()]
    except ValueError:
        return value  # not a number either, which `explain` reports
    return round(count) if name.endswith("_bytes") or count.is_integer() else count


def _unit(name: str) -> str:
    return "bytes" if name.endswith("_bytes") else {"_gib": "GiB", "_mib": "MiB"}.get(name[-4:], "KiB")


def suggestion(name: str, known: Collection[str]) -> str:
    """The known name that is closest to a mistyped one; empty if none is close."""
    close = get_close_matches(name.replace("-", "_"), known, 1)
    return close[0] if close else ""


def explain(exc: msgspec.ValidationError, given: Mapping[str, object]) -> tuple[str, str]:
    """The field that failed validation (empty if it is not a single field), and what is wrong with it. given: the
    values that were converted."""
    text = str(exc)
    found = re.search(r"`\$\.(\w+)`|field `(\w+)`|^(\w+): ", text)
    name = next(filter(None, found.groups())) if found else ""
    said = re.sub(r" - at `\$(\.\w+)?`$", "", text).removeprefix(f"{name}: ")
    value = given.get(name)
    if said.startswith("Object missing required field"):
        said = "must be given"
    elif kind := re.fullmatch(r"Expected `(int|float)`, got `\w+`", said):
        said = _not_a_number(name, value, kind[1] == "int")
    elif words := re.fullmatch(r"Expected `str` matching regex '\^\(([\w|]+)\)\\\\Z'", said):
        said = f"{value!r} is not one of {words[1].replace('|', ', ')}"
    elif bound := re.fullmatch(r"Expected `(?:int|float)` (<=|>=|<|>) (\S+)", said):
        said = f"{value} is out of range, it must be {bound[1]} {bound[2].removesuffix('.0')}"
    return name, said


def _not_a_number(name: str, value: object, is_whole: bool) -> str:
    if not is_size(name):
        return f"{value!r} is not a {'whole number' if is_whole else 'number'}"
    unit = _unit(name)
    if isinstance(value, float):
        return f"{value:g} {unit} is not a whole number of {unit}"
    return f"{value!r} is not a size: write 64GiB or 512MiB, say, or a plain number of {unit}"


def fault_of(exc: msgspec.DecodeError | UnicodeDecodeError) -> str:
    """The fault of an object that was sent as JSON, after the name of the wrong field."""
    text, _, path = str(exc).partition(" - at `$")
    text, field = text.removeprefix("JSON is malformed: "), path.rstrip("`").lstrip(".")
    said = text[:1].lower() + text[1:] if isinstance(exc, msgspec.ValidationError) else f"not JSON ({text})"
    return f"{field}: {said}" if field else said
