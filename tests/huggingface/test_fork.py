"""Forked children, as of `gunicorn --preload`, that connect anew and use the model that their parent has loaded."""

from __future__ import annotations

import subprocess
import sys

from tests.conftest import HANG_S, Depot

FORKED = """
import os, signal, sys
import kvdepot, torch
from kvdepot.hf import PrefixCache
from tests.huggingface.models import CHUNK, make, prompt

model, ids = make(), prompt(6 * CHUNK)
depot = kvdepot.connect(sys.argv[1])
cache = PrefixCache(depot, model, CHUNK)
expected = cache.generate(ids, max_new_tokens=4)
child = os.fork()
if child == 0:
    signal.alarm(int(sys.argv[2]))
    torch.set_num_threads(1)  # torch's threads do not survive a fork either
    with kvdepot.connect(sys.argv[1]) as own:
        cache = PrefixCache(own, model, CHUNK)
        loaded = cache.load(ids)[1]
        is_equal = torch.equal(cache.generate(ids, max_new_tokens=4), expected)
    os._exit(0 if (loaded, is_equal) == (5 * CHUNK, True) else 2)
ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
assert ended == 0, ended
assert cache.load(ids)[1] == 5 * CHUNK
depot.close()
"""


def test_a_forked_child_loads_and_stores_by_a_connection_of_its_own(depot: Depot) -> None:
    code = [sys.executable, "-c", FORKED, depot.url, str(int(HANG_S / 2))]
    done = subprocess.run(code, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == 0, done.stderr
