"""Commands whose server does not exist, or does not answer."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from kvdepot.client import MessageQueueClient
from kvdepot.errors import Unavailable
from kvdepot.protocol.endpoints import Claim
from tests.cli.command import doctor, keygen, run, terminal
from tests.conftest import StartDepot, eventually

# -- a server that is not there


@pytest.mark.faults
def test_a_command_on_a_terminal_says_that_it_waits_and_can_be_interrupted(tmp_path: Path) -> None:
    with terminal("status", "--url", f"ipc://{tmp_path}/x", columns=200) as waits:
        eventually(lambda: f"waiting for a server at ipc://{tmp_path}/x" in waits.text)
        waits.process.send_signal(signal.SIGINT)
        assert waits.end() == 130
        assert "Traceback" not in waits.text


@pytest.mark.faults
def test_a_stopped_server_is_named_and_not_taken_for_a_missing_one(start_depot: StartDepot) -> None:
    depot = start_depot(arena_mib=4)
    pid = depot.process.pid
    os.kill(pid, signal.SIGSTOP)
    try:
        told = [run(command, "--url", depot.url).stderr for command in ("status", "lease")]
        found = doctor("--url", depot.url)[1]
        (finding,) = found["server"]
        assert finding["state"] == "fail" and finding["advice"] == "its log says more"
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
            assert f"pid {pid}" in text and "stopped (SIGSTOP)" in text and "start one" not in text
    finally:
        os.kill(pid, signal.SIGCONT)
    client.close()
    assert depot.status()["clients"]


@pytest.mark.faults
def test_a_wrong_key_is_named_and_never_a_reason_to_kill_the_server(
    start_depot: StartDepot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = keygen(tmp_path / "keys", "alice")
    stranger = keygen(tmp_path / "others", "bob") / "bob.key"
    monkeypatch.setenv("KVDEPOT_KEY", str(keys / "alice.key"))  # for the client that waits for the server
    keyed = start_depot("--keys", str(keys), arena_mib=4)
    monkeypatch.delenv("KVDEPOT_KEY")
    open_ = start_depot(arena_mib=4)
    without = run("status", "--url", keyed.url).stderr
    assert "requires a key" in without and "KVDEPOT_KEY" in without and "kill" not in without
    for depot in (keyed, open_):
        unwanted = run("status", "--url", depot.url, "--key", str(stranger)).stderr
        assert "does not accept this client's key" in unwanted and "kill" not in unwanted
    assert run("status", "--url", keyed.url, "--key", str(keys / "alice.key")).returncode == 0
    assert run("status", "--url", open_.url).returncode == 0
