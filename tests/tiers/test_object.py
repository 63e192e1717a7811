"""The object tier against moto's S3 server and a directory; servers that are killed, stopped, full or unwilling."""

from __future__ import annotations

import http.server
import subprocess
import sys
import threading
import traceback
import uuid
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvdepot.errors import TierError
from kvdepot.testing.tiers import TierConformance, name_of
from kvdepot.tiers import Tier, parse
from tests.conftest import HANG_S, ends
from tests.tiers.servers import BUCKET, S3Server, Server, StoreFaults, get, need, put

need(modules=["obstore", "moto", "flask", "flask_cors"])

from kvdepot.tiers.object import ObjectTier  # noqa: E402

SECRET = "sehr-geheim"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    one = S3Server(tmp_path_factory.mktemp("s3"))
    yield one
    one.kill()


@pytest.fixture(autouse=True)
def _credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "someone")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)


def url(endpoint: str, options: str = "", bucket: str = BUCKET) -> str:
    return f"s3://{bucket}/test/{uuid.uuid4().hex}?endpoint={endpoint}&region=us-east-1{options}"


class TestS3Conformance(TierConformance):
    shared = True
    largest_bytes = 8 << 20
    examples = 2

    @pytest.fixture
    def place(self, server: S3Server) -> str:
        return url(server.endpoint)

    def open_tier(self, place: Any) -> Tier:
        return parse(place).open()


class TestFileConformance(TierConformance):
    shared = True
    examples = 5

    def open_tier(self, place: Any) -> Tier:
        return parse(f"file://{place}").open()


class TestS3Faults(StoreFaults):
    killed, hung = "Connection refused|another object of this batch failed", "TimedOut|another object of this batch"

    @pytest.fixture
    def own(self, tmp_path: Path) -> Iterator[S3Server]:
        one = S3Server(tmp_path)
        yield one
        one.kill()

    def open(self, own: Server) -> Tier:
        return parse(url(f"http://127.0.0.1:{own.port}", "&timeout_s=1&requests=4&retries=1")).open()


def test_a_bucket_that_is_not_there_is_an_error_and_not_only_misses(server: S3Server) -> None:
    tier = parse(url(server.endpoint, bucket="another-bucket")).open()
    removal = partial(tier.remove, [name_of(1)])
    for call in (tier.usage, lambda: put(tier, 1, b"one"), lambda: tier.forget("", ""), removal):
        with pytest.raises(TierError, match=r"NoSuchBucket|404"):
            call()


def test_no_secret_is_shown(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_SAS_KEY", f"sv=2022-11-02&sr=c&sig={SECRET}")  # which goes into every URL
    shown = ""
    with Unwilling(403, b"", {"content-length": "0"}) as closed:
        for text in (
            url(server.endpoint, bucket="another-bucket"),
            f"az://container/kv?account=me&endpoint={closed.endpoint}&retries=0",
        ):
            tier = parse(text).open()
            shown += repr(tier)
            for ask in (Tier.usage, lambda tier: put(tier, 1, b"one"), lambda tier: get(tier, 1)):
                try:
                    ask(tier)
                except TierError as exc:
                    shown += "".join(traceback.format_exception(exc))
    assert "another-bucket" in shown and "Forbidden" in shown
    assert SECRET not in shown


class Unwilling:
    """A server that answers every request the same way."""

    def __init__(self, status: int, body: bytes, headers: dict[str, str], hang: bool = False) -> None:
        outer = self
        self.requests = 0
        self.ended = threading.Event()

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                outer.requests += 1
                self.rfile.read(int(self.headers.get("content-length", 0)))
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)
                if hang:
                    outer.ended.wait(HANG_S)
                self.close_connection = True

            do_GET = do_PUT = do_HEAD = do_POST = answer

            def log_message(self, *_: Any) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})

    def __enter__(self) -> Unwilling:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


def test_a_store_without_room_refuses_writes_and_is_no_failure() -> None:
    with Unwilling(507, b"<Error><Code>XMinioStorageFull</Code></Error>", {"content-length": "45"}) as full:
        tier = parse(url(full.endpoint, "&retries=0")).open()
        assert not put(tier, 1, b"one")
        assert isinstance(tier, ObjectTier) and tier._tally.counts()["refused"] == 1


def test_a_store_that_refuses_us_is_an_error_and_not_asked_again_in_the_batch() -> None:
    with Unwilling(403, b"", {"content-length": "0"}) as closed:
        tier = parse(url(closed.endpoint, "&requests=2")).open()
        for call in (lambda: tier.find([name_of(n) for n in range(50)]), tier.usage, lambda: put(tier, 1, b"one")):
            with pytest.raises(TierError):
                call()
        assert closed.requests <= 4


def test_an_answer_that_ends_early_or_stalls_is_never_taken_for_the_object() -> None:
    whole = {"content-length": "3000000", "etag": '"x"', "last-modified": "Sat, 21 Nov 2026 10:00:00 GMT"}
    for hang in (False, True):
        with Unwilling(200, bytes(2_000_000), whole, hang) as broken:
            tier = parse(url(broken.endpoint, "&retries=0&timeout_s=0.5")).open()
            with ends(), pytest.raises(TierError):
                get(tier, 1, 3_000_000)


def test_a_directory_tells_how_large_its_file_system_is_and_when_it_is_gone(tmp_path: Path) -> None:
    tier = parse(f"file://{tmp_path}/shared").open()
    assert put(tier, 1, b"one")
    assert (tier.usage().capacity_bytes or 0) > 0
    (tmp_path / "shared").rename(tmp_path / "elsewhere")
    with pytest.raises(TierError, match="No such file"):
        tier.usage()
    assert tier.find([name_of(1)]) == [False]
    (tmp_path / "elsewhere").rename(tmp_path / "shared")
    assert get(tier, 1) == b"one"


FORKED = """
import os, signal, sys
from kvdepot.errors import ConfigError
from kvdepot.tiers import Blob, object

def use():
    tier = object.open(sys.argv[1], {}, 1)
    blobs = [Blob("0" * 16 + "/a/b.0", [memoryview(b"a")])]
    assert tier.write(blobs) == tier.find([blobs[0].name]) == [True]

use()
child = os.fork()
if child == 0:
    signal.alarm(int(sys.argv[2]))
    try:
        use()
    except ConfigError as exc:
        os._exit(0 if "fork" in str(exc) else 2)
    os._exit(3)
ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
assert ended == 0, ended
"""


@pytest.mark.faults
def test_a_forked_child_of_a_process_with_tiers_is_refused_before_it_can_hang(tmp_path: Path) -> None:
    code = [sys.executable, "-c", FORKED, f"file://{tmp_path}", str(int(HANG_S / 2))]
    done = subprocess.run(code, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == 0, done.stderr
