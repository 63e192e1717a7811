"""Shared by all families: sizes, a real `kvdepot serve` process, and the echo process for lower bounds."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq

from kvdepot.client import MessageQueueClient
from kvdepot.processes import module_command

__all__ = [
    "READY_S", "SHM", "TINY", "Echo", "EngineProcess", "Peer", "Scale", "Serve", "free_port", "listening",
    "listening_at", "mappings", "new_url", "say", "transfer_config", "wait_or_kill",
]  # fmt: skip

try:
    import click  # noqa: F401
except ImportError:  # an environment for the figures of GPUs may lack it
    _COMMAND = [sys.executable, str(Path(__file__).parents[1] / "scripts" / "serve.py")]
else:
    _COMMAND = module_command("kvdepot.cli")

SHM = Path("/dev/shm")
READY_S = 60.0


@dataclass(frozen=True)
class Scale:
    """The amount of work. With TINY the figures keep their names, but their numbers mean nothing."""

    layers: int = 32
    blocks: int = 1024
    """Blocks of the engine's KV: twice those of the longest prompt copied."""
    copy_tokens: tuple[int, ...] = (2048, 8192)
    copy_runs: int = 9
    copy_arena_gib: float = 3.0
    lookup_tokens: tuple[int, ...] = (1024, 8192, 32768, 131072)
    lookup_runs: int = 51
    rate_clients: int = 4
    rate_tokens: int = 8192
    rate_seconds: float = 1.0
    rate_runs: int = 5
    index_chunks: tuple[int, ...] = (1_000, 100_000, 1_000_000)
    index_lookups: int = 20_000
    watched_rounds: int = 24
    watched_seconds: float = 5.0
    watched_runs: int = 15
    watched_answers: float = 10.0
    """Minimum answers per second to ten pages and a scraper; with fewer, the measurement is void."""
    flood_rounds: int = 7
    flood_lookups: int = 500
    start_runs: int = 7
    recovered_chunks: int = 100_000
    recovery_runs: int = 5
    mla_layers: int = 61
    sharded_layers: int = 80
    peak_mib: int = 256
    gpu_device: str = "cuda"
    """The device of torch for the figures of a GPU; another one only to test the benchmark."""
    engine_layers: int = 4
    engine_tokens: int = 8192
    engine_starts: int = 3
    engine_idle_s: float = 1.1
    """Until the worker of an idle vLLM sleeps: it polls for a second after each step, at other engines' expense."""
    cold_runs: int = 5
    batch_runs: int = 15
    """Batches differ by several percent from one to the next, and the bar is 2 %."""
    warm_runs: int = 15
    codec_layers: int = 8
    codec_runs: int = 9
    tier_lookups: int = 1000
    hung_lookups: int = 6000
    tier_chunks: int = 100_000
    tier_prompts: int = 100
    chats: int = 10
    turns: int = 4
    storm_prompts: int = 30
    """Requests that come at once."""
    storm_rounds: int = 3
    flooding_prompts: int = 24
    queued_prompts: int = 500
    evicting_chunks: int = 20_000
    eviction_rounds: int = 101
    leases: int = 10_000
    lease_rounds: int = 101
    policy_requests: int = 8_000
    policy_capacities: tuple[int, ...] = (1_000, 5_000, 10_000, 20_000, 30_000)
    simulated_references: int = 1_000_000
    trace: str = ""
    """A file of requests to replay with the policies."""


TINY = Scale(
    layers=2,
    blocks=64,
    copy_tokens=(256, 512),
    copy_runs=2,
    copy_arena_gib=1 / 32,
    lookup_tokens=(1024, 2048, 3072, 4096),
    lookup_runs=3,
    rate_clients=2,
    rate_tokens=2048,
    rate_seconds=0.05,
    rate_runs=1,
    index_chunks=(64, 128, 256),
    index_lookups=50,
    watched_rounds=1,
    watched_seconds=0.2,
    watched_runs=1,
    watched_answers=0.0,
    flood_rounds=1,
    flood_lookups=20,
    start_runs=1,
    recovered_chunks=256,
    recovery_runs=1,
    mla_layers=2,
    sharded_layers=2,
    peak_mib=4,
    gpu_device="cpu",
    engine_layers=2,
    engine_tokens=1024,
    engine_starts=1,
    engine_idle_s=0.0,
    cold_runs=1,
    batch_runs=1,
    warm_runs=2,
    codec_layers=1,
    codec_runs=2,
    tier_lookups=20,
    hung_lookups=60,
    tier_chunks=256,
    tier_prompts=4,
    chats=3,
    turns=2,
    storm_prompts=3,
    storm_rounds=1,
    flooding_prompts=2,
    queued_prompts=20,
    evicting_chunks=64,
    eviction_rounds=1,
    leases=40,
    lease_rounds=1,
    policy_requests=150,
    policy_capacities=(100, 400),
    simulated_references=5_000,
)


def say(text: str) -> None:
    """Print progress on stderr."""
    print(f"{time.strftime('%H:%M:%S')}  {text}", file=sys.stderr, flush=True)


def new_url() -> str:
    """A new unix socket, in a folder that only this user can change, like the default one: messages are not sealed."""
    folder = Path(tempfile.gettempdir(), f"kvdepot-bench-{os.geteuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    return f"ipc://{folder}/{uuid.uuid4().hex[:12]}.sock"


def free_port() -> int:
    """A TCP port that nobody listens on."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


@contextlib.contextmanager
def listening(command: Sequence[str], port: int) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process that listens on `port`, for the length of the `with` statement."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            listening_at(port, process)
            yield process
        finally:
            process.kill()
            process.wait()


def listening_at(port: int, process: subprocess.Popen[bytes] | None = None) -> None:
    """Wait until a process listens on `port`. Raises RuntimeError after a timeout, or if `process` has ended."""
    deadline = time.monotonic() + READY_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1.0).close()
            return
        except OSError as exc:
            if (process is not None and process.poll() is not None) or time.monotonic() > deadline:
                raise RuntimeError(f"nobody listens at {port}") from exc
            time.sleep(0.02)


def wait_or_kill(process: subprocess.Popen[Any], timeout_s: float) -> None:
    """Wait until a process has ended that was told to; kill it after a timeout."""
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def mappings(pid: int, field: str) -> Iterator[tuple[str, int]]:
    """Of each mapping of a process: the line of `smaps` that begins it, and a field of it, such as Rss, in bytes."""
    head = ""
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        first = line.split(maxsplit=1)[0]
        if not first.endswith(":"):  # "7f..-7f.. rw-s ... /dev/shm/name" begins a mapping
            head = line
        elif first == f"{field}:":
            yield head, int(line.split()[1]) * 1024


def transfer_config(url: str, role: str = "kv_both") -> dict[str, Any]:
    """vLLM's `kv_transfer_config` for the kvdepot server at `url`."""
    return {"kv_connector": "KVDepotConnector", "kv_role": role, "kv_connector_extra_config": {"kvdepot.url": url}}


class Serve:
    """A `kvdepot serve` process with an arena of its own."""

    def __init__(
        self,
        *flags: str,
        arena_gib: float | None = None,
        chunk_size: int | str = "auto",
        before: Serve | None = None,
        url: str = "",
    ) -> None:
        """before: a killed server, whose endpoint and arena this one takes over. url: empty for a new one."""
        self.url = before.url if before else url or new_url()
        self.arena = before.arena if before else f"kvdepot-bench-{uuid.uuid4().hex[:12]}"
        size = [] if arena_gib is None else ["--arena-gib", str(arena_gib)]
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as the process
        self.started = time.perf_counter()
        self.process = subprocess.Popen(
            [
                *_COMMAND, "serve", "--url", self.url, "--arena-name", self.arena,
                "--chunk-size", str(chunk_size), *([] if "--http" in flags else ["--http", "off"]), *size, *flags,
            ],
            stderr=self._log,
        )  # fmt: skip

    def wait_first_answer(self, context: zmq.Context[Any]) -> float:
        """Seconds from launch to the first answer to a client."""
        client = MessageQueueClient(self.url, context)
        try:
            client.learn_chunk_size(READY_S)
            return time.perf_counter() - self.started
        finally:
            client.close()

    def wait_populated(self, context: zmq.Context[Any]) -> None:
        """Wait until it answers and every page of its arena is allocated."""
        self.wait_first_answer(context)
        path = SHM / self.arena
        deadline = time.monotonic() + READY_S
        while (info := path.stat()).st_blocks * 512 < info.st_size:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{path} has {info.st_blocks * 512} of {info.st_size} bytes populated")
            time.sleep(0.02)
        time.sleep(0.1)

    def resident_bytes(self) -> int:
        """Resident memory of the process without its arena."""
        arena = str(SHM / self.arena)
        return sum(size for head, size in mappings(self.process.pid, "Rss") if arena not in head)

    def kill(self) -> None:
        """kill -9, without cleaning up."""
        self.process.kill()
        self.process.wait()
        self._log.close()

    def close(self) -> None:
        """Stop it, and remove its files if it left any."""
        self.process.terminate()
        wait_or_kill(self.process, 20)
        self._log.seek(0)
        if self.process.returncode:
            sys.stderr.write(self._log.read())
        self._log.close()
        (SHM / self.arena).unlink(missing_ok=True)
        path = self.url.removeprefix("ipc://")
        for left in (path, path + ".lock"):
            Path(left).unlink(missing_ok=True)


class Peer:
    """A helper process (peers.py) that takes commands on stdin, one per line, and answers with lines of JSON."""

    def __init__(self, *arguments: str) -> None:
        script = str(Path(__file__).with_name("peers.py"))
        self._process = subprocess.Popen(
            [sys.executable, script, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def tell(self, command: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()

    def hear(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a helper process ended with {self._process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        """End it by closing its stdin."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        wait_or_kill(self._process, 5)
        self._process.stdout.close()


class Echo:
    """A bare ROUTER in another process, and a DEALER to it: the lower bound of all requests over ZeroMQ."""

    def __init__(self, context: zmq.Context[Any], reply_bytes: int = 16) -> None:
        self.url = new_url()
        self._peer = Peer("echo", self.url, str(reply_bytes))
        self._peer.hear()
        self._socket = context.socket(zmq.DEALER)
        self._socket.connect(self.url)
        self.round_trip(b"warm")

    def round_trip(self, message: bytes) -> None:
        """Send one message and receive the reply."""
        self._socket.send(message)
        self._socket.recv()

    def close(self) -> None:
        self._socket.close(linger=0)
        self._peer.close()
        Path(self.url.removeprefix("ipc://")).unlink(missing_ok=True)


class EngineProcess:
    """A vLLM engine, driven by a process of its own: a script that answers each line of JSON on stdin with another."""

    def __init__(self, script: str, *arguments: str) -> None:
        """arguments: of the script. Returns at once; call `hear` for its first line before the first command."""
        cpus = ",".join(map(str, sorted(os.sched_getaffinity(0))))
        environ = {
            **os.environ,
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": cpus,
            "VLLM_LOGGING_LEVEL": "WARNING",
            "HF_HUB_OFFLINE": "1",
        }
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as the process
        self._process = subprocess.Popen(
            [sys.executable, script, *arguments],
            env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True,
        )  # fmt: skip

    def hear(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            raise RuntimeError(f"a vLLM engine ended:\n{self._log.read()[-6000:]}")
        return json.loads(line)

    def ask(self, command: list[Any]) -> Any:
        """Send one command and return the answer. Blocks; raises RuntimeError if the engine has ended."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return self.hear()

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        wait_or_kill(self._process, 30)
        self._process.stdout.close()
        self._log.close()
