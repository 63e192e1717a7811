"""Descriptors of device memory between processes: real sockets and processes, memfds in the place of the memory."""

from __future__ import annotations

import contextlib
import os
import resource
import secrets
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdepot.devices.cuda import descriptors
from kvdepot.errors import DeviceError, LayoutError
from tests.conftest import HANG_S, SHM

pytestmark = pytest.mark.faults

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")

WORKER = """
import os, sys, time
from kvdepot.devices.cuda import descriptors

def export(first, end):
    for number in range(first, end):
        if number == {broken}:
            from kvdepot.errors import DeviceError
            raise DeviceError("the memory is asleep")
        fd = os.memfd_create("piece")
        os.write(fd, b"%d of {tag}" % number)
        yield fd

print(descriptors.offer("one", [100 + n for n in range({pieces})], export).hex(), flush=True)
{more}
sys.stdin.read()
deadline = time.monotonic() + 5
while len(os.listdir("/proc/self/fd")) >= 20 and time.monotonic() < deadline:
    time.sleep(0.001)  # the thread may be closing what it has just sent
print(len(os.listdir("/proc/self/fd")), flush=True)
"""


class Worker:
    """A process that offers pieces until it is told to end."""

    def __init__(self, pieces: int = 3, tag: str = "worker", broken: int = -1, more: str = "", files: int = 0) -> None:
        def limit() -> None:
            if files:
                resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))

        script = WORKER.format(pieces=pieces, tag=tag, broken=broken, more=more)
        self.process = subprocess.Popen(
            [sys.executable, "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=limit,
        )
        self.handle = bytes.fromhex(self.line())
        self.name: str = msgspec.msgpack.decode(self.handle)[0]
        self.path = SHM / self.name

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def changed(self, place: int, value: object) -> bytes:
        """The handle with one of its parts another."""
        parts = msgspec.msgpack.decode(self.handle)
        parts[place] = value
        return msgspec.msgpack.encode(parts)

    def end(self) -> tuple[int, str]:
        """Ends the process; how many files it had open, and what it said to its log."""
        out, err = self.process.communicate("", timeout=120)
        return int(out), err

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=120)


@pytest.fixture
def start_worker() -> Iterator[Callable[..., Worker]]:
    started: list[Worker] = []

    def start(**options: object) -> Worker:
        started.append(Worker(**options))  # type: ignore[arg-type]
        return started[-1]

    yield start
    for worker in started:
        assert worker.process.stdout is not None
        if not worker.process.stdout.closed:
            worker.kill()
    descriptors.sweep()


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    worker = Worker()
    yield worker
    _, log = worker.end()
    assert not log


@pytest.fixture
def socket_file() -> Iterator[Path]:
    """The name of a worker's socket that nobody has."""
    path = SHM / f"kvdepot-fds-{secrets.token_hex(8)}"
    yield path
    path.unlink(missing_ok=True)


def handle_of(path: Path, pieces: int = 3) -> bytes:
    return msgspec.msgpack.encode([path.name, bytes(16), 0, pieces])


def fetch_all(handle: bytes, patience_s: float = 10.0) -> list[tuple[bytes, int]]:
    return [(os.pread(fd, 100, 0), size) for fd, size in descriptors.fetch(handle, patience_s)]


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@contextlib.contextmanager
def listening(path: Path, serve: Callable[[socket.socket], object]) -> Iterator[None]:
    """Something else than a worker at this path: it serves one connection."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen(1)
        connections: list[socket.socket] = []

        def run() -> None:
            connections.append(listener.accept()[0])
            while not connections[-1].recv(1, socket.MSG_PEEK):  # some server that looks for sockets of the dead
                connections.append(listener.accept()[0])
            serve(connections[-1])

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield
        finally:
            thread.join(HANG_S)
            for connection in connections:
                connection.close()


# -- what arrives


def test_a_thousand_pieces_arrive_through_few_open_files(start_worker: Callable[..., Worker]) -> None:
    worker = start_worker(pieces=1000, files=110)
    before, most = open_files(), 0
    got = []
    for fd, size in descriptors.fetch(worker.handle):
        most = max(most, open_files())
        assert not os.get_inheritable(fd)
        got.append((os.pread(fd, 100, 0), size))
    assert got == [(b"%d of worker" % n, 100 + n) for n in range(1000)]
    assert most < before + 100
    assert open_files() == before
    files, log = worker.end()
    assert files < 20 and not log


def test_an_offer_can_be_fetched_again_and_by_several_at_once(start_worker: Callable[..., Worker]) -> None:
    worker = start_worker(pieces=200)
    got: list[list[tuple[bytes, int]]] = []
    threads = [threading.Thread(target=lambda: got.append(fetch_all(worker.handle))) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)
    assert got == [[(b"%d of worker" % n, 100 + n) for n in range(200)]] * 20


def test_the_same_memory_is_offered_once_and_other_memory_apart(start_worker: Callable[..., Worker]) -> None:
    worker = start_worker(
        more="""
print(descriptors.offer("one", [100 + n for n in range(3)], export).hex(), flush=True)
print(descriptors.offer("two", [7], export).hex(), flush=True)
"""
    )
    assert bytes.fromhex(worker.line()) == worker.handle
    other = bytes.fromhex(worker.line())
    assert fetch_all(other) == [(b"0 of worker", 7)]
    assert len(fetch_all(worker.handle)) == 3


# -- who may


def test_the_socket_is_this_users_alone(worker: Worker) -> None:
    info = worker.path.lstat()
    assert stat.S_ISSOCK(info.st_mode) and stat.S_IMODE(info.st_mode) == 0o600 and info.st_uid == os.geteuid()


@pytest.mark.parametrize(
    ("parts", "error"),
    [
        *(({1: guess}, "refuses") for guess in (b"", bytes(16), bytes(15), b"guessed guessed ", b"guessed" * 30)),
        *(({2: number, 3: pieces}, ".") for number, pieces in ((1, 3), (1 << 62, 3), (0, 4), (0, 1 << 16))),
    ],
    ids=str,
)
def test_without_the_secret_and_of_what_was_not_offered_nothing_is_handed_out(
    worker: Worker, parts: dict[int, object], error: str
) -> None:
    handle = msgspec.msgpack.decode(worker.handle)
    for place, value in parts.items():
        handle[place] = value
    before = open_files()
    with pytest.raises(DeviceError, match=error):
        fetch_all(msgspec.msgpack.encode(handle))
    assert open_files() == before
    assert len(fetch_all(worker.handle)) == 3


@as_root
def test_another_user_gets_nothing_even_with_the_secret(worker: Worker) -> None:
    worker.path.chmod(0o666)  # so that it is the worker that looks, not the kernel
    script = f"""
import os, socket
os.setuid({NOBODY})
mine = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
mine.connect({str(worker.path)!r})
try:
    mine.send(bytes.fromhex({msgspec.msgpack.encode([msgspec.msgpack.decode(worker.handle)[1], 0, 0]).hex()!r}))
    print(len(mine.recv(1000)))
except OSError:
    print(0)
"""
    try:
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    finally:
        worker.path.chmod(0o600)
    assert done.stdout == "0\n", done.stderr


@as_root
def test_a_socket_of_another_user_is_not_asked(socket_file: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(socket_file))
        listener.listen()
        os.chown(socket_file, NOBODY, NOBODY)
        with pytest.raises(LayoutError, match="not a socket of user"):
            fetch_all(handle_of(socket_file))


# -- handles that are none


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "kvdepot-fds-", "kvdepot-fds-0123456789abcde", "kvdepot-fds-0123456789abcdef0", "x" * 3000,
     "../../tmp/kvdepot-fds-0123456789abcdef", "kvdepot-fds-0123456789abcdef/../x", "kvdepot-fds-0123456789ABCDEF",
     "kvdepot-card-0123456789abcdef", "kvdepot-fds-0123456789abcdef\n", "\0kvdepot-fds-0123456789abcdef", 7, None],
)  # fmt: skip
def test_a_hostile_name_is_refused(worker: Worker, name: object) -> None:
    with pytest.raises(LayoutError):
        fetch_all(worker.changed(0, name))


@settings(max_examples=60)
@given(st.data())
def test_a_handle_cut_short_or_garbled_is_refused_or_leads_nowhere(worker: Worker, data: st.DataObject) -> None:
    handle = bytearray(worker.handle)
    if data.draw(st.booleans()):
        handle = handle[: data.draw(st.integers(0, len(handle) - 1))]
    else:
        for _ in range(data.draw(st.integers(1, 3))):
            handle[data.draw(st.integers(0, len(handle) - 1))] ^= data.draw(st.integers(1, 255))
    before = open_files()
    got = []
    with contextlib.suppress(LayoutError, DeviceError):
        got = fetch_all(bytes(handle))
    assert len(got) <= 3
    assert open_files() == before
    assert len(fetch_all(worker.handle)) == 3


def test_a_link_to_a_socket_is_not_followed(worker: Worker, socket_file: Path) -> None:
    socket_file.symlink_to(worker.path)
    with pytest.raises(LayoutError, match="not a socket"):
        fetch_all(handle_of(socket_file))


# -- workers that do not do what they should


def test_a_worker_that_cannot_export_says_why_and_goes_on(start_worker: Callable[..., Worker]) -> None:
    worker = start_worker(pieces=70, broken=60)
    before = open_files()
    with pytest.raises(DeviceError, match="the memory is asleep"):
        fetch_all(worker.handle)
    assert open_files() == before
    with pytest.raises(DeviceError, match="the memory is asleep"):
        fetch_all(worker.handle)
    files, log = worker.end()
    assert files < 20 and not log


def test_a_bug_in_an_export_ends_one_connection_and_is_logged(start_worker: Callable[..., Worker]) -> None:
    worker = start_worker(
        more="""
def broken(first, end):
    yield os.memfd_create("piece")
    raise ZeroDivisionError("a bug")
print(descriptors.offer("broken", [1, 1], broken).hex(), flush=True)
"""
    )
    with pytest.raises(DeviceError, match="gone, or refuses"):
        fetch_all(bytes.fromhex(worker.line()))
    assert len(fetch_all(worker.handle)) == 3
    _, log = worker.end()
    assert "a bug" in log


def test_a_worker_that_takes_the_connection_and_never_answers_is_left(socket_file: Path) -> None:
    with listening(socket_file, lambda _: None), pytest.raises(DeviceError, match="in time"):
        fetch_all(handle_of(socket_file), patience_s=0.2)


def test_a_worker_that_hands_out_drop_by_drop_has_as_much_time_in_all(socket_file: Path) -> None:
    asked = []

    def serve(connection: socket.socket) -> None:
        # Who leaves with an answer unread ends the connection with a reset.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError), Path(os.devnull).open() as null:
            while connection.recv(1000):
                asked.append(connection)
                time.sleep(0.05)  # all of it would take a minute
                socket.send_fds(connection, [msgspec.msgpack.encode([1] * 64)], [null.fileno()] * 64)

    with listening(socket_file, serve), pytest.raises(DeviceError, match="in time"):
        fetch_all(handle_of(socket_file, 1 << 16), patience_s=1.0)
    assert asked


ANSWERS = st.binary(max_size=200) | (
    st.lists(st.integers(-1, 2) | st.text(max_size=1), max_size=4) | st.none() | st.text(max_size=3)
).map(msgspec.msgpack.encode)
"""Any bytes; and messages, of which some fit."""


@settings(max_examples=60)
@given(answer=ANSWERS, fds=st.integers(0, 4))
def test_whatever_is_answered_is_an_error_or_the_pieces(answer: bytes, fds: int) -> None:
    path = SHM / f"kvdepot-fds-{secrets.token_hex(8)}"

    def serve(connection: socket.socket) -> None:
        connection.recv(1000)
        with Path(os.devnull).open() as null:
            socket.send_fds(connection, [answer], [null.fileno()] * fds)

    try:
        before = open_files()
        got = None
        with listening(path, serve), contextlib.suppress(DeviceError):
            got = fetch_all(handle_of(path))
        assert got is None or len(got) == 3 == fds
        assert open_files() == before
    finally:
        path.unlink(missing_ok=True)  # a server that starts removes sockets of which nobody listens


def test_descriptors_that_find_no_room_here_are_an_error(start_worker: Callable[..., Worker]) -> None:
    worker = start_worker(pieces=64)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = {int(path.name) for path in Path("/proc/self/fd").iterdir()}
    free = [number for number in range(len(taken) + 30) if number not in taken]
    before = open_files()
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[20], hard))
    try:
        with pytest.raises(DeviceError, match="limit of open files"):
            fetch_all(worker.handle)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert open_files() == before
    assert len(fetch_all(worker.handle)) == 64


# -- clients that do not do what they should


@settings(max_examples=60)
@given(question=st.binary(min_size=1, max_size=200))
def test_whatever_is_asked_a_worker_answers_the_next(worker: Worker, question: bytes) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as mine:
        mine.connect(str(worker.path))
        mine.send(question)
        assert mine.recv(1000) == b""
    assert len(fetch_all(worker.handle)) == 3


def test_connections_that_say_nothing_do_not_keep_others_out_for_long(start_worker: Callable[..., Worker]) -> None:
    worker = start_worker(more="descriptors._IDLE_S = 1.5; print(flush=True)")
    worker.line()
    with contextlib.ExitStack() as stack:
        silent = []
        for _ in range(12):  # more than are let in
            silent.append(stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)))
            silent[-1].connect(str(worker.path))  # waits while as many are waiting already
            silent[-1].settimeout(10)
        assert len(fetch_all(worker.handle)) == 3
        assert [each.recv(100) for each in silent] == [b""] * 12


def test_who_asks_without_reading_is_shut_out(start_worker: Callable[..., Worker]) -> None:
    worker = start_worker(pieces=640)
    secret = msgspec.msgpack.decode(worker.handle)[1]
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as mine:
        mine.settimeout(10)
        mine.connect(str(worker.path))
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            for _ in range(100_000):
                mine.send(msgspec.msgpack.encode([secret, 0, 0]))
    assert len(fetch_all(worker.handle)) == 640
    files, log = worker.end()
    assert files < 20 and not log


# -- ends


def test_a_worker_that_ends_takes_its_socket_with_it(start_worker: Callable[..., Worker]) -> None:
    worker = start_worker()
    worker.end()
    assert not worker.path.exists()
    with pytest.raises(LayoutError, match="cannot be reached"):
        fetch_all(worker.handle)


def test_the_socket_of_a_killed_worker_is_swept_and_that_of_a_living_one_stays(
    worker: Worker, start_worker: Callable[..., Worker]
) -> None:
    killed = start_worker()
    killed.kill()
    with pytest.raises((DeviceError, LayoutError), match=r"gone|cannot be reached"):  # others may sweep as well
        fetch_all(killed.handle)
    descriptors.sweep()
    assert not killed.path.exists()
    assert worker.path.exists()
    assert len(fetch_all(worker.handle)) == 3


def test_a_socket_that_is_being_made_and_a_file_are_not_swept_but_an_old_socket_is(socket_file: Path) -> None:
    hidden = socket_file.with_name(f".{socket_file.name}")
    socket_file.write_bytes(b"mine")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as making:
        making.bind(str(hidden))
        try:
            descriptors.sweep()
            assert hidden.exists() and socket_file.exists()
            os.utime(hidden, (0, 0))
            descriptors.sweep()
            assert not hidden.exists() and socket_file.exists()
        finally:
            hidden.unlink(missing_ok=True)


def test_a_worker_killed_between_two_messages_is_an_error(start_worker: Callable[..., Worker]) -> None:
    worker = start_worker(pieces=200)
    before = open_files()
    pieces = descriptors.fetch(worker.handle)
    next(pieces)
    worker.process.kill()
    worker.process.wait(HANG_S)
    with pytest.raises(DeviceError, match="gone"):
        list(pieces)
    assert open_files() == before


def test_a_forked_child_does_not_keep_the_socket_alive_and_listens_by_itself(
    start_worker: Callable[..., Worker],
) -> None:
    worker = start_worker(
        more="""
if not (child := os.fork()):
    print(descriptors.offer("one", [5], export).hex(), flush=True)
    os.read(0, 1)
    os._exit(0)
"""
    )
    theirs = bytes.fromhex(worker.line())
    path = SHM / msgspec.msgpack.decode(theirs)[0]
    try:
        assert path != worker.path
        assert fetch_all(theirs) == [(b"0 of worker", 5)]
        assert len(fetch_all(worker.handle)) == 3
        worker.process.kill()
        worker.process.wait(HANG_S)
        descriptors.sweep()
        assert not worker.path.exists()
        assert fetch_all(theirs) == [(b"0 of worker", 5)]
    finally:
        worker.kill()
