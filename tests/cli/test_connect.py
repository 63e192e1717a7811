"""Commands whose server does not exist, or does not answer."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import uuid
from pathlib import Path

import pytest

from kvdepot.client import MessageQueueClient
from kvdepot.errors import Unavailable
from kvdepot.protocol.endpoints import Claim
from kvdepot.protocol.silence import why_silent
from tests.cli.command import doctor, keygen, run, terminal
from tests.conftest import HANG_S, StartDepot, eventually
from tests.ports import free_port

# -- a server that is not there


@pytest.mark.faults
def test_the_wait_for_a_server_is_told_on_a_terminal_and_can_be_interrupted(tmp_path: Path) -> None:
    with terminal("status", "--url", f"ipc://{tmp_path}/x", columns=200) as waits:
        eventually(lambda: f"waiting for a server at ipc://{tmp_path}/x" in waits.text)
        waits.process.send_signal(signal.SIGINT)
        assert waits.end() == 130
        assert "Traceback" not in waits.text


# -- a server that is there and does not answer


@pytest.mark.faults
def test_a_stopped_server_is_named_and_not_taken_for_a_missing_one(start_depot: StartDepot) -> None:
    depot = start_depot(arena_mib=4)
    pid = depot.process.pid
    os.kill(pid, signal.SIGSTOP)
    try:
        told = [run(command, "--url", depot.url).stderr for command in ("status", "config")]
        found = doctor("--url", depot.url)[1]
        (finding,) = found["server"]
        assert finding["state"] == "fail" and finding["advice"] == f"continue it with `kill -CONT {pid}`"
        assert "kvdepot serve" not in found["web page"][0]["advice"]
        told.append(finding["text"] + finding["advice"])
        client = MessageQueueClient(depot.url, depot.context)
        with pytest.raises(Unavailable) as silent:
            client.learn_chunk_size(0.5)
        told.append(str(silent.value))
        with pytest.raises(Unavailable) as taken:
            Claim(depot.url, "--url")
        assert f"pid {pid}" in str(taken.value)
        for text in told:
            assert f"pid {pid}" in text and f"kill -CONT {pid}" in text and "start one" not in text
    finally:
        os.kill(pid, signal.SIGCONT)
    client.close()
    assert depot.status()["clients"]


@pytest.mark.faults
@pytest.mark.parametrize("kind", ["ipc", "tcp"])
def test_a_wrong_key_is_named_and_never_a_reason_to_kill_the_server(
    start_depot: StartDepot, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def address() -> str:
        return f"tcp://127.0.0.1:{free_port()}" if kind == "tcp" else f"ipc://{tmp_path}/{uuid.uuid4().hex}"

    keys = keygen(tmp_path / "keys", "alice")
    stranger = keygen(tmp_path / "others", "bob") / "bob.key"
    monkeypatch.setenv("KVDEPOT_KEY", str(keys / "alice.key"))  # for the client that waits for the server
    keyed = start_depot("--keys", str(keys), arena_mib=4, url=address())
    monkeypatch.delenv("KVDEPOT_KEY")
    open_ = start_depot(arena_mib=4, url=address())
    without = run("status", "--url", keyed.url).stderr
    assert "requires a key" in without and "KVDEPOT_KEY" in without and "kill" not in without
    unwanted = run("status", "--url", open_.url, "--key", str(stranger)).stderr
    assert "requires no key" in unwanted and "leave out --key" in unwanted and "kill" not in unwanted
    unknown = run("status", "--url", keyed.url, "--key", str(stranger)).stderr
    assert "does not know this client's key, or " in unknown
    assert run("status", "--url", keyed.url, "--key", str(keys / "alice.key")).returncode == 0
    assert run("status", "--url", open_.url).returncode == 0


@pytest.mark.faults
def test_a_process_that_sends_a_byte_now_and_then_is_not_waited_for(tmp_path: Path) -> None:
    port, sent, ended = free_port(), [0], threading.Event()

    def dribble() -> None:
        with (
            socket.create_server(("127.0.0.1", port)) as listener,
            listener.accept()[0] as asking,
            contextlib.suppress(OSError),
        ):
            while sent[0] < 64 and not ended.wait(0.2):
                asking.sendall(b"\0")
                sent[0] += 1

    thread = threading.Thread(target=dribble, daemon=True)
    thread.start()
    said = eventually(lambda: why_silent(f"tcp://127.0.0.1:{port}", False))
    assert "does not answer" in said and "kill" not in said
    ended.set()
    thread.join(HANG_S)
    assert sent[0] < 64, "it was left before it had sent a whole greeting"
