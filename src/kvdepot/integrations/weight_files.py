"""What tells one version of weight files on disk from another at the same path, without reading their contents.

`describe` is for names that outlast a process: sizes and times that a copy keeps. `look` is for one process that must
notice a change: it has also what no copy, rename or `touch` can give back (inodes and the times of their change).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

__all__ = ["Look", "describe", "look"]

_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".json"}
_MOST_LINKS = 40
"""As Linux: beyond it a path is a loop."""


class Look(NamedTuple):
    """A folder of weights at one moment."""

    place: str
    """The folder, without links."""
    files: tuple[tuple[str | int, ...], ...]
    links: tuple[tuple[str | int, ...], ...]
    """Those on the way to it."""
    changed_s: float
    """When the latest of files, links and folder changed, in seconds since 1970."""

    def is_same(self, other: Look) -> bool:
        """Whether no weights were written, replaced or linked elsewhere between. Other files may come and go."""
        return self[:3] == other[:3]


def describe(path: Path) -> str:
    """What tells weights in a local folder from others at the same path: names, sizes and times of its files.

    Empty where it is no folder. A link that leads nowhere counts as no file.
    """
    if not path.is_dir():
        return ""  # a hub name: the revision says it
    said = []
    for name in _weights(path):
        if (path / name).exists():
            stat = (path / name).stat()
            said.append(f"{name}:{stat.st_size}:{stat.st_mtime_ns}")
    return " ".join(said)


def look(path: Path) -> Look:
    """A folder of weights now. Raises OSError where it cannot be read."""
    links = _links(path)
    files: list[tuple[str | int, ...]] = []
    for name in _weights(path):
        entry = path / name
        files.append((name, *_stat(os.lstat(entry))))
        if entry.is_symlink():
            files.append((name, *(_stat(entry.stat()) if entry.exists() else ())))
    times = [int(each[-1]) for each in (*files, *links) if len(each) > 1]
    newest_ns = max([*times, path.stat().st_ctime_ns])
    return Look(os.path.realpath(path), tuple(files), tuple(links), newest_ns / 1e9)


def _weights(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir() if entry.suffix in _SUFFIXES)


def _stat(stat: os.stat_result) -> tuple[int, ...]:
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def _links(path: Path) -> list[tuple[str | int, ...]]:
    """Each link that a path leads through, with its target."""
    found: list[tuple[str | int, ...]] = []
    todo, done = list(reversed(path.absolute().parts)), Path("/")
    while todo:
        part = todo.pop()
        if part in {"/", "."}:
            continue
        done = done.parent if part == ".." else done / part
        if part != ".." and done.is_symlink():
            target = str(done.readlink())
            found.append((str(done), target, *_stat(os.lstat(done))))
            if len(found) > _MOST_LINKS:
                raise OSError(f"{path} leads through too many links")
            todo += reversed(Path(target).parts)
            done = Path("/") if target.startswith("/") else done.parent
    return found
