"""Sharing KV between two hosts, end to end: `make demo-cluster`.

The hosts are network namespaces joined by a veth pair, or, without the rights to create them, two servers on this host.
Mooncake Store pools their memory. A vLLM engine on host A runs a few prompts and stops; a fresh engine on host B runs
the same prompts, which its own server has never seen. Prints how many tokens came through the pool, the times, and
whether tokens and logprobs are bit for bit those of the engine's own prefix-cache hit. Exit code 1 if they differ or
nothing came through the pool.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from demo import LLAMA, arguments, use_all_cpus, write_model

from kvdepot import install
from kvdepot.cli.certificate import Certificate
from kvdepot.cli.certify import TestedEngine, make_cases
from kvdepot.cli.view import console
from kvdepot.client import admin
from kvdepot.errors import KVDepotError
from kvdepot.processes import code_command, module_command
from kvdepot.protocol.status import Status

LENGTHS = (2048, 4096)
CHUNK = 256
"""Tokens of a chunk with a remote tier."""
_WAIT_S = 60.0


@dataclass(frozen=True)
class Host:
    """One of the two hosts: how commands are run there, and its address for the other one."""

    name: str
    address: str
    inside: tuple[str, ...] = ()


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Two network namespaces joined by a veth pair, or this host twice."""
    tag = f"{os.getpid()}"
    one = Host("A", "10.201.88.1", ("ip", "netns", "exec", f"kvd{tag}a"))
    two = Host("B", "10.201.88.2", ("ip", "netns", "exec", f"kvd{tag}b"))
    commands = [f"ip link add kva{tag} type veth peer name kvb{tag}"]
    for host in (one, two):
        space, link = host.inside[-1], f"kv{host.name.lower()}{tag}"
        commands += [
            f"ip netns add {space}",
            f"ip link set {link} netns {space}",
            f"ip -n {space} addr add {host.address}/24 dev {link}",
            f"ip -n {space} link set {link} up",
            f"ip -n {space} link set lo up",
        ]
    try:
        for command in commands:
            subprocess.run(command.split(), check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as exc:
        remove(one, two)
        print(f"no network namespaces here ({exc}): two depots on one host", flush=True)
        yield Host("A", "127.0.0.1"), Host("B", "127.0.0.1")
        return
    try:
        yield one, two
    finally:
        remove(one, two)


def remove(*hosts: Host) -> None:
    for host in hosts:
        subprocess.run(["ip", "netns", "del", host.inside[-1]], capture_output=True, check=False)
    subprocess.run(["ip", "link", "del", f"kva{os.getpid()}"], capture_output=True, check=False)


@contextmanager
def master(host: Host, folder: Path) -> Iterator[str]:
    """Run a `mooncake_master` on that host; yields its address."""
    spec = importlib.util.find_spec("mooncake")
    if spec is None or spec.origin is None:
        sys.exit(f"Mooncake is missing: {install.advice('mooncake')}")
    ports = [free_port(), free_port()]
    with (folder / "master.log").open("wb") as log:
        process = subprocess.Popen(
            [
                *host.inside, str(Path(spec.origin).parent / "mooncake_master"), f"--rpc_port={ports[0]}",
                f"--rpc_address={host.address}", f"--metrics_port={ports[1]}", f"--metrics_host={host.address}",
            ],
            stdout=log, stderr=log,
        )  # fmt: skip
    ask = f"import socket; socket.create_connection(({host.address!r}, {ports[0]}), 1)"
    deadline = time.monotonic() + _WAIT_S
    try:
        while subprocess.run([*host.inside, *code_command(ask)], capture_output=True, check=False).returncode:
            if process.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"mooncake_master does not listen:\n{(folder / 'master.log').read_text()[-4000:]}")
            time.sleep(0.1)
        yield f"{host.address}:{ports[0]}"
    finally:
        process.kill()
        process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def depot(host: Host, folder: Path, pool: str) -> Iterator[str]:
    """Run a server on that host, with an arena of its own and 1 GiB for the pool; yields its URL."""
    url = f"ipc://{folder}/{host.name}.sock"
    server = subprocess.Popen(
        [
            *host.inside, *module_command("kvdepot.cli", "serve", "--url", url), "--lookup-s", "8", "--http", "off",
            "--arena-name", f"kvdepot-demo-{os.getpid()}-{host.name}", "--arena-gib", "2", "--log-level", "warning",
            "--tiers", f"mooncake://{pool}/?local_host={host.address}&segment_gib=1",
        ]
    )  # fmt: skip
    try:
        with admin.connect(url, timeout_s=_WAIT_S):
            yield url
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)


def status(url: str) -> Status:
    with admin.connect(url) as client:
        return admin.status(client)


def wait_passed_on(url: str) -> int:
    """Wait until the server has written all its chunks to the pool; returns how many."""
    deadline = time.monotonic() + _WAIT_S
    while True:
        (tier,) = status(url).tiers
        if not tier.saves and not tier.queued_bytes:
            return tier.counters.get("saved_chunks", 0)
        if time.monotonic() > deadline:
            sys.exit(f"the depot did not pass its chunks on: {tier}")
        time.sleep(0.1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, metavar="N", nargs="+", default=LENGTHS, help="prompt lengths in tokens")
    args = parser.parse_args()
    use_all_cpus()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvdepot-cluster-")))
        words = arguments(write_model(folder / "model", LLAMA))
        one, two = stack.enter_context(two_hosts())
        print(f"host A is {one.address}, host B is {two.address}: mooncake_master on A, a depot on each", flush=True)
        pool = stack.enter_context(master(one, folder))
        first = stack.enter_context(depot(one, folder, pool))
        second = stack.enter_context(depot(two, folder, pool))
        print("engine on A: computes prompts, stores their KV", flush=True)
        with closing(TestedEngine(folder / "A.log", first, words, one.inside)) as engine:
            engine.start().run(*engine.probes, source="computing")
            cases = list(make_cases(engine, CHUNK, args.lengths))
            for case in cases:
                case.computed += engine.run(case, source="computing")
                case.own += [*engine.run(case, source="own cache"), *engine.run(case, source="own cache")]
            found = Certificate(engine.about, CHUNK)
        saved = wait_passed_on(first)
        print(f"engine on A stopped; {saved} chunks went to the pool", flush=True)
        print("engine on B: the same prompts, its depot empty", flush=True)
        if status(second).chunks:
            sys.exit("the depot on B holds chunks already")
        found.note_computed(cases)
        with closing(TestedEngine(folder / "B.log", second, words, two.inside)) as engine:
            engine.start().run(*engine.probes)  # an engine may compute its first hit, to compare
            for case in cases:
                case.expected = len(case.tokens) // CHUNK * CHUNK
                (answer,) = engine.run(case)
                found.add("pool", case, answer)
        (tier,) = status(second).tiers
    came = tier.counters.get("loaded_chunks", 0) * CHUNK
    if came < sum(result.loaded for result in found.results):
        found.fail("not all that was loaded on B came through the pool")
    found.print(console())
    print(f"{came} tokens came to B through the pool ({tier.name})")
    return 0 if found.passed else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KVDepotError as exc:
        sys.exit(f"kvdepot: {exc}")
    except KeyboardInterrupt:
        sys.exit(130)
