"""Which version of weights is at a path, or in the local cache of a model hub, and since when.

Called by identity.py for models and by lora.py for adapters. `find_weights` names a version by its contents, equally on
every host; it reads samples, which takes tens of milliseconds for a model of 160 files in the page cache. `look`
detects changes within one process by file metadata that no copy, rename or `touch` can restore; it reads no file.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from blake3 import blake3

__all__ = ["Look", "Weights", "find_weights", "look"]

_HARMLESS_SUFFIXES = {".md", ".log", ".lock", ".png", ".jpg", ".jpeg", ".gif", ".svg", ".pdf"}
_MAX_FILES = 20_000
_WHOLE_BYTES = 1 << 20
"""Files up to this size are hashed whole: configurations, code, indexes."""
_SAMPLE_BYTES = 4096
_SAMPLES = 4096
"""Samples of all larger files together: times do not distinguish weights if an image build sets all of them alike."""
_MAX_LINKS = 40
"""Linux's limit: beyond it, a path counts as a loop."""
_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


@dataclass(frozen=True)
class Weights:
    """One version of a model's or an adapter's files."""

    digest: str
    """Equal digests mean equal files, on any host."""
    changed_at: float
    """Unix time of the last change to any of them, or to links on the way to them; 0.0 if they never change."""


class Look(NamedTuple):
    """A folder of weights at one moment."""

    place: str
    """The folder, without links."""
    files: tuple[tuple[str | int, ...], ...]
    links: tuple[tuple[str | int, ...], ...]
    """Links on the way to the folder."""
    changed_at: float
    """Unix time of the last change to files, links or folder."""

    def is_same(self, other: Look) -> bool:
        """Whether no weights were written, replaced or relinked in between. Other files may change."""
        return self[:3] == other[:3]


def find_weights(name: str, revision: str | None = None, cache: str | None = None) -> Weights | None:
    """The version of the files at `name`: a path (`~` is expanded), or a repository of the Hugging Face hub in its
    local cache (`cache`: its folder if not the default).

    None if there is no such path or snapshot, more than 20,000 files, or an unreadable one. Does not use the network.
    """
    path = Path(name).expanduser()
    try:
        if name and path.exists():
            return _at(path)
        return _in_hub_cache(name, revision or "main", cache)
    except (OSError, ValueError):  # ValueError: a path with a null byte
        return None


def look(folder: Path) -> Look:
    """The current state of a folder of weights. Raises OSError if it cannot be read."""
    links = _links(folder)
    files: list[tuple[str | int, ...]] = []
    newest_ns = max([folder.stat().st_ctime_ns, *(int(link[-1]) for link in links)])
    for name, file, state in sorted(_walk(folder), key=lambda entry: entry[0]):
        entry = file.lstat()
        files.append((name, *_stat(entry), *_stat(state)))
        newest_ns = max(newest_ns, entry.st_ctime_ns, state.st_ctime_ns)
    return Look(os.path.realpath(folder), tuple(files), tuple(links), newest_ns / 1e9)


def _in_hub_cache(name: str, revision: str, cache: str | None) -> Weights | None:
    try:
        from huggingface_hub import constants
        from huggingface_hub.file_download import repo_folder_name
    except ImportError:
        return None
    repository = Path(cache or constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name, repo_type="model")
    if _COMMIT.fullmatch(revision):
        commit, changed_at = revision, 0.0
    else:
        ref = repository / "refs" / revision
        commit, changed_at = ref.read_text().strip(), ref.stat().st_ctime_ns / 1e9
    snapshot = repository / "snapshots" / commit
    if not snapshot.is_dir():
        return None
    found = _at(snapshot)
    return Weights(found.digest, max(found.changed_at, changed_at))


def _at(path: Path) -> Weights:
    """The version of a file, or of all files in a folder. Raises OSError for unreadable files, and for too many."""
    changed_ns = max((int(link[-1]) for link in _links(path)), default=0)
    resolved = path.resolve()
    if resolved.is_file():
        entries = [("", resolved, resolved.stat())]
    else:
        folder = resolved.stat()
        if folder.st_ctime_ns != folder.st_mtime_ns:  # renamed into place; what is added to it changes both times
            changed_ns = max(changed_ns, folder.st_ctime_ns)
        entries = sorted(_walk(resolved), key=lambda entry: entry[0])
    hasher = blake3()
    snapshot = _snapshot(resolved)
    if snapshot is not None:
        hasher.update(f"snapshot {snapshot}\n".encode())
    large = sum(state.st_size > _WHOLE_BYTES for _, _, state in entries)
    for name, file, state in entries:
        if snapshot is not None and _is_blob(file):
            continue  # the commit says it, and files that nobody asked for may not have been downloaded yet
        changed_ns = max(changed_ns, state.st_ctime_ns, file.lstat().st_ctime_ns)
        hasher.update(f"{name}\0{state.st_size}\n".encode())
        if state.st_size <= _WHOLE_BYTES:
            hasher.update(file.read_bytes())
        else:
            hasher.update(f"{state.st_mtime_ns}\n".encode())
            _sample(hasher, file, state.st_size, max(16, _SAMPLES // large))
    return Weights(hasher.hexdigest(), changed_ns / 1e9)


def _walk(folder: Path) -> Iterator[tuple[str, Path, os.stat_result]]:
    """Name, path and state of each file below `folder` that may matter."""
    count = 0
    for at, folders, files in os.walk(folder, followlinks=True, onerror=_raise):
        folders[:] = [name for name in folders if not name.startswith(".") and name != "__pycache__"]
        for name in files:
            file = Path(at, name)
            if name.startswith(".") or file.suffix.lower() in _HARMLESS_SUFFIXES:
                continue
            count += 1
            if count > _MAX_FILES:
                raise OSError(f"more than {_MAX_FILES} files in {folder}")
            try:
                state = file.stat()
            except FileNotFoundError:
                continue  # a dangling link: it cannot have been loaded
            if stat.S_ISREG(state.st_mode):
                yield str(file.relative_to(folder)), file, state


def _raise(error: OSError) -> None:
    raise error


def _sample(hasher: blake3, file: Path, size: int, samples: int) -> None:
    """Hash windows of the file at even distances, from its start."""
    descriptor = os.open(file, os.O_RDONLY)
    try:
        step = max(_SAMPLE_BYTES, size // samples)
        for offset in range(0, size, step):
            hasher.update(os.pread(descriptor, _SAMPLE_BYTES, offset))
    finally:
        os.close(descriptor)


def _stat(state: os.stat_result) -> tuple[int, ...]:
    return state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns


def _links(path: Path) -> list[tuple[str | int, ...]]:
    """Each link on a path, with its target and, last, the time of its last change in ns."""
    found: list[tuple[str | int, ...]] = []
    todo, done = list(reversed(path.absolute().parts)), Path("/")
    while todo:
        part = todo.pop()
        if part in {"/", "."}:
            continue
        done = done.parent if part == ".." else done / part
        if part != ".." and done.is_symlink():
            target = str(done.readlink())
            found.append((str(done), target, *_stat(done.lstat())))
            if len(found) > _MAX_LINKS:
                raise OSError(f"{path} leads through too many links")
            todo += reversed(Path(target).parts)
            done = Path("/") if target.startswith("/") else done.parent
    return found


def _snapshot(folder: Path) -> str | None:
    """`repository@commit` of a folder in a hub's cache."""
    if folder.parent.name != "snapshots" or not _COMMIT.fullmatch(folder.name):
        return None
    return f"{folder.parent.parent.name}@{folder.name}"


def _is_blob(file: Path) -> bool:
    """Whether a snapshot's file is a link to content that the hub names by its hash."""
    return file.is_symlink() and file.resolve().parent.name == "blobs"
