"""Connecting a program to a depot: which server, with which key, in which process; and what importing costs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import kvdepot
from kvdepot.errors import ConfigError, KVDepotError, Unavailable
from tests.cli.command import keygen, run
from tests.conftest import HANG_S, Depot, StartDepot, eventually
from tests.library.conftest import Connect
from tests.library.kv import SMALL, TOKENS, open_namespace, random_kv, random_tokens
from tests.ports import free_port

pytestmark = pytest.mark.faults


def python(code: str, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=HANG_S,
        env=os.environ | environ, check=False,
    )  # fmt: skip


def test_importing_kvdepot_imports_no_large_package() -> None:
    done = python("import sys, kvdepot; print(sorted({'torch', 'numpy', 'zmq', 'msgspec'} & set(sys.modules)))")
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_a_first_use_does_not_import_torch() -> None:
    done = python("import sys, kvdepot; kvdepot.connect; print('numpy' in sys.modules, 'torch' in sys.modules)")
    assert (done.stdout, done.stderr) == ("True False\n", "")


def test_names_that_there_are_not_are_no_attributes() -> None:
    with pytest.raises(AttributeError, match="nothing"):
        kvdepot.nothing  # noqa: B018
    assert not hasattr(kvdepot, "__path2__")
    assert {kvdepot.connect, kvdepot.Depot, kvdepot.Namespace, kvdepot.Shape, kvdepot.State}


def test_completion_offers_every_name_of_the_library_before_its_first_use() -> None:
    done = python("import kvdepot; print(set(kvdepot.__all__) - set(dir(kvdepot)), '__doc__' in dir(kvdepot))")
    assert (done.stdout, done.stderr) == ("set() True\n", "")


def test_the_server_that_kvdepot_url_names_is_used(server: Depot, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVDEPOT_URL", server.url)
    with kvdepot.connect() as depot:
        assert depot.url == server.url
        assert depot.status().pid == server.process.pid
        assert server.url in repr(depot) and "closed" not in repr(depot)
    assert "closed" in repr(depot)


SHARED = """
import kvdepot
from tests.library.kv import check, open_namespace, put
with kvdepot.connect() as depot:
    print(check(open_namespace(depot, "1"), 1), put(open_namespace(depot, "1"), 1), depot.status().pid)
"""


def test_the_users_shared_server_is_started_once_and_outlives_programs(tmp_path: Path) -> None:
    home = {
        "HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path), "KVDEPOT_URL": "", "KVDEPOT_ARENA_GIB": "0.0625",
        "KVDEPOT_CHUNK_SIZE": str(TOKENS), "KVDEPOT_ARENA_NAME": f"kvdepot-test-{os.getpid()}-shared",
    }  # fmt: skip
    first = python(SHARED, **home)
    try:
        second = python(SHARED, **home)
        assert first.stdout.split()[:2] == ["0", "96"], first.stderr
        assert second.stdout.split() == ["96", "96", first.stdout.split()[2]], second.stderr
    finally:
        done = run("stop", **home)
    assert done.returncode == 0, done.stderr


def test_a_server_with_keys_keeps_tenants_apart(
    tmp_path: Path, start_depot: StartDepot, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = keygen(tmp_path / "keys", "alice", "bob", tenant="blue")
    keygen(keys, "carol", tenant="red")
    url = f"tcp://127.0.0.1:{free_port()}"
    with monkeypatch.context() as waiting:  # the fixture waits for the server
        waiting.setenv("KVDEPOT_KEY", str(keys / "alice.key"))
        server = start_depot("--keys", str(keys), "--verify", "always", url=url, chunk_size=TOKENS)
    tokens, kv = random_tokens(3 * TOKENS), random_kv(SMALL, 3 * TOKENS)
    found = {}
    for name in ("alice", "bob", "carol"):
        with kvdepot.connect(server.url, key=str(keys / f"{name}.key")) as depot:
            ns = open_namespace(depot, "1")
            if name == "alice":
                assert ns.put(tokens, kv) == 3 * TOKENS
            got, found[name] = ns.get(tokens)
            assert got is None or np.array_equal(got.view("u2"), kv)
    assert found == {"alice": 3 * TOKENS, "bob": 3 * TOKENS, "carol": 0}
    with pytest.raises(Unavailable, match="key"):
        kvdepot.connect(server.url)
    with pytest.raises(KVDepotError, match="key"):
        kvdepot.connect(server.url, key=str(tmp_path / "none.key"))


FORKED = """
import os, signal, sys
import kvdepot
from kvdepot.errors import BadRequest
from tests.library.kv import check, open_namespace, put

depot = kvdepot.connect(sys.argv[1])
ns = open_namespace(depot, "forked")
assert put(ns, 1) == 96
child = os.fork()
if child == 0:
    signal.alarm(int(sys.argv[2]))
    try:
        for call in (lambda: put(ns, 2), lambda: check(ns, 1), depot.status, lambda: open_namespace(depot, "forked")):
            try:
                call()
            except BadRequest as exc:
                assert "fork" in str(exc) and "kvdepot.connect()" in str(exc)
            else:
                os._exit(2)
        depot.close()
        with kvdepot.connect(sys.argv[1]) as own:
            assert check(open_namespace(own, "forked"), 1) == 96
        os._exit(0)
    finally:
        os._exit(3)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
child = os.fork()
if child == 0:
    signal.alarm(int(sys.argv[2]))
    sys.exit()  # as Python ends, with what the parent has open
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert check(ns, 1) == 96  # the children have closed nothing of ours
"""


def test_a_forked_child_connects_itself_and_leaves_the_parents_alone(server: Depot) -> None:
    done = python(FORKED, server.url, str(int(HANG_S / 2)))
    assert (done.returncode, done.stderr) == (0, "")


EMBEDDED = """
import os, sys
import kvdepot
from tests.library.kv import check, open_namespace, put

depot = kvdepot.connect("embedded")
ns = open_namespace(depot, "1")
assert put(ns, 1) == check(ns, 1) > 0
kvdepot.kept, sys.kept = (depot, ns), dict(sys.modules)  # so they go after other modules have been cleared
print(depot._link._client.arena[0], depot.status().pid, flush=True)
if sys.argv[1] == "close":
    depot.close()
    depot.close()
if sys.argv[1] == "kill":
    os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("end", ["close", "exit", "kill"])
def test_an_embedded_server_ends_with_its_program(end: str) -> None:
    done = python(EMBEDDED, end, KVDEPOT_CHUNK_SIZE=str(TOKENS), KVDEPOT_ARENA_GIB="0.0625")
    assert done.returncode == (-9 if end == "kill" else 0), done.stderr
    assert done.stderr == "", "a program's own server says only what is wrong"
    arena, pid = done.stdout.split()
    eventually(lambda: not Path(f"/proc/{pid}").exists() and not Path(f"/dev/shm/{arena}").exists())


def test_an_embedded_server_that_cannot_start_says_why() -> None:
    done = python("import kvdepot; kvdepot.connect('embedded')", KVDEPOT_ARENA_GIB="90000")
    assert "Unavailable" in done.stderr and "embedded server exited" in done.stderr
    assert "--arena-gib" in done.stderr


@pytest.mark.parametrize("url", ["nonsense", "ipc://" + "x" * 200, "tcp://127.0.0.1", ""])
def test_an_address_that_cannot_be_is_refused(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVDEPOT_URL", "nonsense")
    with pytest.raises(Unavailable if url else ConfigError, match=r"nonsense|ipc:|tcp:"):
        kvdepot.connect(url)


def test_two_namespaces_of_one_depot_and_two_depots_work_side_by_side(server: Depot, connect: Connect) -> None:
    one, two = connect(server), connect(server)
    spaces = [open_namespace(depot, f"side by side {number}") for depot in (one, two) for number in range(2)]
    for seed, ns in enumerate(spaces[:2]):
        assert ns.put(random_tokens(TOKENS), random_kv(SMALL, TOKENS, seed)) == TOKENS
    one.close()
    for seed, ns in enumerate(spaces[2:]):
        found, _ = ns.get(random_tokens(TOKENS))
        assert np.array_equal(found.view("u2"), random_kv(SMALL, TOKENS, seed))
