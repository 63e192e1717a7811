"""Clients in forked children: calls end at once and say what to do, and a client of the child's own works."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.conftest import HANG_S, StartDepot

FORKED = """
import os, signal, sys, threading, time
import torch, zmq
from kvdepot.adapters import LMCacheMPSchedulerAdapter, LMCacheMPWorkerAdapter, LoadStoreOp
from kvdepot.adapters import RequestType, send_lmcache_request
from kvdepot.errors import BadRequest

def connect():
    where = (sys.argv[1], zmq.Context(), "m", 1, 0, 16)
    return LMCacheMPSchedulerAdapter(*where), LMCacheMPWorkerAdapter(*where)

def find(scheduler, name):
    scheduler.maybe_submit_lookup_request(name, token_ids=TOKENS)
    return answer(scheduler, name)

def answer(scheduler, name):
    while (found := scheduler.check_lookup_result(name)) is None:
        time.sleep(0.001)
    scheduler.end_session(name)
    return found

def store(worker, name):
    worker.submit_store_request(name, LoadStoreOp([0, 1], TOKENS, start=0, end=32), None)
    while name not in (worker.get_finished({name})[0] or ()):
        time.sleep(0.001)

TOKENS = list(range(32))
scheduler, worker = connect()
worker.register_kv_caches({"layer": torch.zeros(4, 2, 16, 1, 8)})
store(worker, "a")
locked, rest = threading.Event(), threading.Event()
def hold():
    with scheduler.mq_client._lock:  # as a thread that is reading the socket when another forks
        locked.set()
        rest.wait()
thread = threading.Thread(target=hold)
scheduler.maybe_submit_lookup_request("under way", token_ids=TOKENS)
thread.start()
locked.wait()
child = os.fork()
if child == 0:
    signal.alarm(int(sys.argv[2]))
    try:
        assert answer(scheduler, "under way") == find(scheduler, "c") == 0
        store(worker, "d")
        try:
            send_lmcache_request(worker.mq_client, RequestType.NOOP, []).result()
        except BadRequest as exc:
            assert "fork" in str(exc)
        else:
            os._exit(2)
        scheduler.shutdown()
        worker.shutdown()
        del scheduler, worker
        own, _ = connect()
        assert find(own, "e") == 32
        os._exit(0)
    finally:
        os._exit(3)
rest.set()
ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
assert ended == 0, ended
assert answer(scheduler, "under way") == find(scheduler, "f") == 32  # the child has taken nothing of ours
store(worker, "g")
scheduler.shutdown()
worker.shutdown()
"""


@pytest.mark.faults
def test_a_forked_child_hears_that_its_parents_client_is_not_its_own(start_depot: StartDepot) -> None:
    server = start_depot(chunk_size=16, arena_mib=8)
    code = [sys.executable, "-c", FORKED, server.url, str(int(HANG_S / 2))]
    done = subprocess.run(code, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == 0, done.stderr
