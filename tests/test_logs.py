"""The contents of log lines; each stays one line, whatever others have sent."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import select
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from kvdepot import logs
from kvdepot.client import MessageQueueClient
from kvdepot.errors import KVDepotError
from kvdepot.protocol import wire
from tests.client.engine import CHUNK, Engine
from tests.conftest import HANG_S, StartDepot
from tests.core.desk import Desk, lookup, prompt, retrieve, store

Configure = Callable[[str], Callable[[], str]]


@pytest.fixture
def set_up() -> Iterator[Callable[[str, int], None]]:
    """Set up logging, and restore it after the test."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers = []
    yield lambda form, fd: logs.configure("debug", form, fd)
    for handler in root.handlers:
        handler.close()
    root.handlers = handlers
    root.setLevel(level)


@pytest.fixture
def configure(set_up: Callable[[str, int], None], tmp_path: Path) -> Iterator[Configure]:
    """Set up logging; returns a function that reads the log."""
    path = tmp_path / "log"

    def read() -> str:
        for handler in logging.getLogger().handlers:
            handler.flush()
        return path.read_bytes().decode()

    with path.open("wb") as file:

        def start(form: str) -> Callable[[], str]:
            set_up(form, file.fileno())
            return read

        yield start


def test_a_failure_that_repeats_is_logged_once_a_minute_with_its_count(
    configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = configure("human")
    log, now = logs.Sparing(logging.getLogger("kvdepot")), time.monotonic()
    for after_s, line in [(0, "full"), *[(1, "full")] * 300, (2, "gone"), (59, "full"), (61, "full"), (61, "gone")]:
        monkeypatch.setattr(time, "monotonic", partial(float, now + after_s))
        log.warning("%s", line)
    monkeypatch.undo()
    said = [line.partition("WARNING ")[2] for line in read().splitlines()]
    assert said == ["full", "gone", "full (301 more times since the last such line)"]


def test_a_json_line_has_time_level_logger_message_and_fields(configure: Configure) -> None:
    read = configure("json")
    before = time.time()
    logging.getLogger("kvdepot.part").warning("lost %d", 3, extra={"request": "r1", "tier": "disk", "client": ""})
    said = json.loads(read())
    assert before - 1 <= said.pop("ts") <= time.time()
    assert said == {"level": "warning", "logger": "kvdepot.part", "message": "lost 3", "request": "r1", "tier": "disk"}


def test_what_cannot_be_formatted_does_not_raise_into_the_caller(configure: Configure) -> None:
    class Broken:
        def __str__(self) -> str:
            raise RuntimeError("no text")

    read = configure("human")
    logging.getLogger("kvdepot").warning("%s", Broken())
    logging.getLogger("kvdepot").warning("next")
    assert "next" in read()


@pytest.mark.parametrize("form", ["human", "json"])
def test_a_traceback_is_bounded_and_looks_like_no_line_of_ours(configure: Configure, form: str) -> None:
    read = configure(form)
    try:
        raise KVDepotError("x" * 100_000 + "evil\x1b[31m\n2026-01-31 12:00:00,000 INFO all is well")
    except KVDepotError:
        logging.getLogger("kvdepot").exception("failed")
    text = read()
    assert len(text) < 20_000 and "\x1b" not in text and "all is well" in text
    first, *others = text.splitlines()
    if form == "json":
        assert others == [] and "evil" in json.loads(first)["exception"]
    else:
        assert first.endswith("ERROR failed") and others and all(line.startswith("  ") for line in others)


@pytest.mark.parametrize("form", ["human", "json"])
@pytest.mark.parametrize("evil", ["a\nERROR b", "\x1b[31m\r", "x" * 100_000, "\udcff", '"}\n{"'])
def test_text_from_clients_stays_within_one_bounded_log_line(configure: Configure, form: str, evil: str) -> None:
    read = configure(form)
    logging.getLogger("kvdepot").info("asked", extra={"request": evil})
    logging.getLogger("kvdepot").info("asked %s", evil)
    text = read()
    assert text.count("\n") == 2 and text.endswith("\n") and "\r" not in text and "\x1b" not in text
    assert len(text.partition("\n")[0]) < 2000 and len(text) < 20_000


def pour(pipe: int, least: int) -> str:
    """At least this number of lines from a pipe."""
    text = b""
    while text.count(b"\n") < least or not text.endswith(b"\n"):
        assert select.select([pipe], [], [], 10.0)[0], "nothing comes"
        text += os.read(pipe, 1 << 20)
    return text.decode()


@pytest.mark.parametrize("blocking", [True, False])
def test_logging_never_waits_for_a_slow_reader_and_counts_lost_lines(
    set_up: Callable[[str, int], None], monkeypatch: pytest.MonkeyPatch, blocking: bool
) -> None:
    monkeypatch.setattr(logs, "_MOST_LINES", 100)
    mouth, end = os.pipe()
    os.set_blocking(end, blocking)
    log = logging.getLogger("kvdepot")
    try:
        set_up("json", end)
        for number in range(1000):
            log.info("%d %s", number, "x" * 4000)
        said = [json.loads(line) for line in pour(mouth, 101).splitlines()]
        log.info("heard again")
        while said[-1]["message"] != "heard again":
            said += [json.loads(line) for line in pour(mouth, 1).splitlines()]
        lost = sum(int(line["message"].split()[0]) for line in said if "lines lost" in line["message"])
        numbers = [int(line["message"].split()[0]) for line in said if "xxx" in line["message"]]
        assert numbers == sorted(numbers) and len(numbers) >= 100
        assert lost and lost + len(numbers) == 1000
    finally:
        os.close(mouth)  # whatever still waits for a reader fails
        logging.getLogger().handlers[0].flush()
        os.close(end)


def about(caplog: pytest.LogCaptureFixture, request: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if getattr(record, "request", "") == request]


@pytest.fixture(autouse=True)
def _debug(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "kvdepot")


def test_a_request_can_be_followed_from_its_lookup_to_its_store(caplog: pytest.LogCaptureFixture) -> None:
    desk = Desk()
    client = desk.hello()
    desk.register(client)
    chain = prompt("a", 3)
    desk.ask(client, lookup(chain, "cmpl-1"))
    desk.ask(client, store(chain, request="cmpl-1"))
    desk.ask(client, store(chain, request="cmpl-2"))
    desk.ask(client, lookup(chain, "cmpl-2"))
    desk.ask(client, retrieve(chain, request="cmpl-2"))
    assert about(caplog, "cmpl-1") == ["found 0 of 3 chunks", "stored 3 of 3 new chunks"]
    assert about(caplog, "cmpl-2") == ["stored 0 of 0 new chunks", "found 3 of 3 chunks", "retrieved 3 of 3 chunks"]
    assert all(record.client == client.hex()[:8] for record in caplog.records if getattr(record, "request", ""))


@pytest.mark.faults
def test_a_server_whose_log_nobody_reads_serves_and_stops(start_depot: StartDepot) -> None:
    mouth, end = os.pipe()
    fcntl.fcntl(end, fcntl.F_SETPIPE_SZ, 4096)
    server = start_depot("--log-level", "debug", stderr=end)
    os.close(end)
    engine = Engine(server)
    for _ in range(200):
        with pytest.raises(KVDepotError):
            engine.scheduler.mq_client.ask(wire.Lookup(engine.model, 1, 4, "r", 1, b"odd")).result(HANG_S)
    engine.close()
    assert server.stop() == 0
    assert "serving at" in pour(mouth, 1)
    os.close(mouth)


@pytest.mark.faults
def test_a_server_logs_json_from_its_first_line_to_its_last(start_depot: StartDepot) -> None:
    server = start_depot("--log-format", "json", "--log-level", "debug")
    engine = Engine(server)
    engine.store(list(range(CHUNK)), [0, 1, 2, 3])
    client = MessageQueueClient(server.url, server.context)
    with pytest.raises(KVDepotError):
        client.ask(wire.Lookup(engine.model, 1, 4, "cmpl-3", 1, b"odd")).result(HANG_S)
    client.close()
    engine.close()
    assert server.stop() == 0
    said = [json.loads(line) for line in server.logged().splitlines()]
    assert said[-1]["message"] == "stopped" and {"ts", "level", "logger"} <= said[0].keys()
    (failed,) = [line for line in said if line.get("request") == "cmpl-3"]
    assert failed["level"] == "debug" and len(failed["client"]) == 8
