"""Counts what a disk tier's directory holds when it is opened, on a thread of its own.

Until that is done, nothing is written: what is not counted cannot be bounded.
"""

# ruff: noqa: PTH108, PTH208

from __future__ import annotations

import contextlib
import logging
import os
import stat
import threading
from collections.abc import Iterator

from kvdepot.errors import TierError
from kvdepot.tiers import NAME
from kvdepot.tiers.disk.capacity import Capacity
from kvdepot.tiers.disk.entry import Entry
from kvdepot.tiers.disk.layout import LEVELS, TMP, TRASH, is_foreign, remove
from kvdepot.tiers.disk.quarantine import Quarantine

__all__ = ["Scan"]

log = logging.getLogger(__name__)

_PATIENCE_S = 0.1
"""A directory that is counted within this time takes writes as soon as it is opened."""


class Scan:
    """Removes what an earlier server left half done, counts objects, and evicts down to the capacity and the caps."""

    def __init__(self, capacity: Capacity, quarantine: Quarantine) -> None:
        """Starts the thread; blocks briefly."""
        self.done = threading.Event()
        self._capacity = capacity
        self._claim = capacity.claim
        self._tally = capacity.claim.tally
        self._quarantine = quarantine
        self._thread = threading.Thread(target=self._run, name="kvdepot-disk-count", daemon=True)
        self._thread.start()
        self.done.wait(_PATIENCE_S)

    def wait(self) -> None:
        """Until all files are known. Raises TierError if the claim has ended."""
        self.done.wait()
        self._claim.check()

    def join(self) -> None:
        """After the claim's end."""
        self._thread.join()

    def _run(self) -> None:
        try:
            self._count()
        except BaseException as exc:  # noqa: BLE001 - the top of a thread: calls of the tier wait for it
            why = str(exc) if isinstance(exc, OSError | TierError) else repr(exc)
            log.warning("cannot count the objects in %s: %s", self._claim.root, why)
            self._claim.end(f"cannot count its objects: {why}")
        self.done.set()

    def _count(self) -> None:
        for left in (TMP, TRASH):
            with contextlib.suppress(FileNotFoundError):
                self._tally("swept", len(os.listdir(f"{self._claim.root}/{left}")))
                remove(f"{self._claim.root}/{left}")
        self._quarantine.scan()
        self._quarantine.trim()
        for found in _objects_in(self._claim.root):
            for name, info in found:
                charge = self._capacity.charge_of(info)
                self._capacity.ledger.note(Entry(name=name, charge=charge, dated=info.st_atime, born=info.st_mtime))
            if self._claim.ended is not None:
                break
        self._capacity.ledger.rank()
        self._capacity.trim(self._capacity.ledger.used_bytes, 0.0)  # as many as there are; none by age


def _objects_in(path: str, level: int = 0) -> Iterator[list[tuple[str, os.stat_result]]]:
    """Names and stats of all objects under a root, a directory at a time.

    Removes links, empty files, and what belongs to another user.
    """
    with contextlib.suppress(FileNotFoundError), os.scandir(path) as entries:
        if level == len(LEVELS):
            yield _objects(path, entries)
            return
        for entry in entries:
            if not LEVELS[level].fullmatch(entry.name):
                continue
            if entry.is_symlink():  # objects would be written wherever it leads
                log.warning("removed %s: it is a symbolic link", entry.path)
                os.unlink(entry.path)
            elif is_foreign(entry.path, entry.stat(follow_symlinks=False)):
                remove(entry.path)
            elif entry.is_dir(follow_symlinks=False):
                yield from _objects_in(entry.path, level + 1)


def _objects(path: str, files: Iterator[os.DirEntry[str]]) -> list[tuple[str, os.stat_result]]:
    top, salt, space, fan = path.split("/")[-4:]
    found = []
    for file in files:
        name = f"{salt}/{space}/{file.name}"
        if salt[:2] != top or file.name[:2] != fan or not NAME.fullmatch(name):
            continue
        info = file.stat(follow_symlinks=False)
        if is_foreign(file.path, info):  # its owner may have written any header
            remove(file.path)
        elif stat.S_ISREG(info.st_mode) and info.st_size:
            found.append((name, info))
        elif not stat.S_ISDIR(info.st_mode):
            os.unlink(file.path)  # a link, or what a power failure has left of a file
    return found
