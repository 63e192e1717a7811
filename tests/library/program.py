"""A program that uses the library, to be paused, stopped and killed in the middle of a call.

Run as `python -m tests.library.program PARENT URL REVISION`: one JSON line in (`{"do": ..., ...}`), one out. A command
with `at_copy` stops its call before that copy: it writes "paused", and goes on after another line.
"""

from __future__ import annotations

import itertools
import json
import sys
from typing import Any

import numpy as np

import kvdepot
from kvdepot.library import namespace as patched
from tests.library.kv import SMALL, cut, open_namespace, random_kv, random_tokens
from tests.programs import die_with_parent

_copyto = np.copyto


def say(value: object) -> None:
    print(json.dumps(value), flush=True)


def pause_at(at_copy: int) -> None:
    """Stop the next call before its copy of this number; 0: do not stop it."""
    numbers = itertools.count(1)

    def copyto(to: Any, source: Any) -> None:
        if next(numbers) == at_copy:
            say("paused")
            sys.stdin.readline()
        _copyto(to, source)

    patched.np.copyto = copyto if at_copy else _copyto  # type: ignore[assignment]


def handle(ns: kvdepot.Namespace, do: str, seed: int, count: int) -> object:
    """seed: of the tokens and of their KV. count: tokens."""
    tokens, kv = random_tokens(count, seed), random_kv(SMALL, count, seed)
    match do:
        case "put":
            return ns.put(tokens, kv)
        case "contains":
            return ns.contains(tokens)
        case "get":
            found, n = ns.get(tokens)
            assert (found is None) == (n == 0)
            return [n, n == 0 or np.array_equal(found.view("u2"), cut(kv, SMALL, 0, n))]
    raise ValueError(do)


def main() -> None:
    die_with_parent(int(sys.argv[1]))
    depot = kvdepot.connect(sys.argv[2])
    ns = open_namespace(depot, sys.argv[3])
    say("ready")
    for line in sys.stdin:
        command = json.loads(line)
        pause_at(command.pop("at_copy", 0))
        say(handle(ns, **command))


if __name__ == "__main__":
    main()
