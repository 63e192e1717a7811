"""A process that writes, reads, removes and forgets objects of a directory until it is killed.

    python -m tests.tiers.disk_child DIRECTORY CAPACITY_BYTES ROUND

Prints `ready`, then `kept NUMBER` for objects that nothing removes: it never comes back to one. Its writers go
abreast: what one of them was last to say is never more than a round of the others' writes old, so it is not
evicted, however long that writer is held up.
"""

from __future__ import annotations

import itertools
import sys
import threading
from pathlib import Path

from kvdepot.testing.tiers import name_of
from kvdepot.tiers import Blob
from kvdepot.tiers.disk import Disk

WRITERS = 3
SIZES = (8, 5000, 70_000, 400_000)
"""An object's bytes follow from its number (`stamped`)."""


def stamped(number: int) -> bytes:
    return number.to_bytes(8, "little") * (SIZES[number % 4] // 8)


def live(tier: Disk, start: int, abreast: threading.Barrier) -> None:
    for number in itertools.count(start):
        abreast.wait()
        data = memoryview(stamped(number))
        assert tier.write([Blob(name_of(number), [data[:8], data[8:]] if len(data) > 8 else [data])]) == [True]
        sys.stdout.write(f"kept {number}\n")
        sys.stdout.flush()
        again = name_of(start + number % 5, salt=1)  # written over and over, removed, forgotten
        tier.write([Blob(again, [data])])
        tier.read([Blob(name_of(number), [memoryview(bytearray(400_000))])])
        if number % 7 == 0:
            tier.remove([again])
        if number % 11 == 0:
            tier.forget(f"{1:032x}", "")


def main() -> None:
    tier = Disk(Path(sys.argv[1]), int(sys.argv[2]))
    while tier.usage().objects is None:
        pass
    print("ready", flush=True)
    start = int(sys.argv[3]) * 10_000_000
    abreast = threading.Barrier(WRITERS)
    for thread in range(WRITERS):
        threading.Thread(target=live, args=(tier, start + thread * 1_000_000, abreast)).start()


if __name__ == "__main__":
    main()
