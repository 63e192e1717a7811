"""A soak test: minutes of mixed traffic with random kills. Nothing may be served wrong, be lost, or grow.

    python tools/soak.py [--minutes 10] [--seed S]

It runs a real `kvdepot serve` with an arena so small that it evicts all the time, and toy engines on the public
adapters that check every byte (soak_engine.py), one of which runs as long as the soak. Odd clients, fuzzed bytes, many
ranks and engines with hashes of their own are the simulation's.

Growth shows only in a process that keeps running, under constant conditions. So there are three parts:

    storm    0 to 35 %     engines and the server are killed (-9), the server is stopped for a second. Nothing may be
                           served wrong, hang, or be left in /dev/shm
    steady   35 to 100 %   a new server that is not killed; everything else continues. After a warm-up, the resident
                           memory of the server and the old engine is read each second; the medians of the first and
                           the last third may differ by 2 % at most
    end      traffic ends  everything held must be released, files be removed, the server exit with 0

At a **pause** the engines finish their requests: the same processes, but idle. There is
one pause after the warm-up and one at the end; the number of file descriptors, threads, pins and files must not have
grown in between.

Exit code 0: passed; 1: failed, with the reasons. The seed determines every choice, but not its time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

from kvdepot.client import MessageQueueClient
from kvdepot.errors import KVDepotError
from kvdepot.protocol import wire

HERE = Path(__file__).parent
SHM = Path("/dev/shm")
ARENA_MIB = 24
CHUNK_TOKENS = 64
STORM = 0.35
WARM = 0.6  # part of the run after which memory is compared
GROWTH = 0.02
PAUSE_S = 40.0
"""Longer than any deadline of a client."""
STUCK_S = 60.0
RELEASED_S = 5.0
"""Time within which a server releases everything that a dead client held."""
CLIENTS = 2
"""Connections of an engine: its scheduler's and its worker's."""


class Failed(Exception):
    """A check of the soak failed."""


class Child:
    """A process of ours that writes JSON lines; a thread reads them."""

    def __init__(self, script: str, *args: str) -> None:
        self.script = script
        self.model = ""  # of an engine
        self.liveness_files: set[str] = set()
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.notes: list[str] = []
        self.idle = False
        self.ended = False
        self.moved = time.monotonic()  # when it made a step last
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as the process
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / script), *args],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True,
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self.process.pid

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            try:
                said = json.loads(line)
            except ValueError:
                continue  # cut off by a kill
            if "liveness_file" in said:
                self.liveness_files.add(said["liveness_file"])
            if "note" in said:
                self.notes.append(said["note"])
            if "counts" in said:
                if said["counts"]["steps"] > self.counts["steps"]:
                    self.moved = time.monotonic()
                self.wrong += said["wrong"]
                self.counts = Counter(said["counts"])
                self.idle = said["idle"]
            self.ended |= "ended" in said

    def tell(self, order: str) -> None:
        assert self.process.stdin is not None
        self.idle = False
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(order + "\n")
            self.process.stdin.flush()

    def has_ended(self) -> bool:
        """Whether its last line said that it ended regularly."""
        self._reader.join()
        return self.ended

    def kill(self) -> None:
        """kill -9, and read its last lines."""
        self.process.kill()
        self.process.wait()
        self._reader.join()

    def logged(self) -> str:
        self.log.seek(0)
        return self.log.read()[-4000:]


class Soak:
    def __init__(self, minutes: float, seed: int) -> None:
        self.random = random.Random(seed)
        self.start = time.monotonic()
        self.length_s = minutes * 60
        self.name = f"kvdepot-soak-{uuid.uuid4().hex[:12]}"
        self.folder = tempfile.TemporaryDirectory(prefix="kvdepot-soak-")
        self.url = f"ipc://{self.folder.name}/depot.sock"
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - of all servers
        self.kills: Counter[str] = Counter()
        self.dead: Counter[str] = Counter()  # counts of engines that were killed
        self.liveness_files: set[str] = set()
        self.pids: set[int] = set()
        self.children: list[Child] = []
        self.server: subprocess.Popen[bytes] | None = None
        self.memory: dict[str, list[tuple[float, int]]] = {"server": [], "engine": []}
        self.faults_found: list[str] = []

    # -- processes

    def serve(self) -> None:
        self.server = subprocess.Popen(
            [
                sys.executable, "-m", "kvdepot.cli", "serve", "--url", self.url, "--arena-name", self.name,
                "--arena-gib", str(ARENA_MIB / 1024), "--chunk-size", str(CHUNK_TOKENS), "--log-level", "warning",
                "--http", "off",
            ],
            stderr=self.log,
        )  # fmt: skip

    def engine(self, model: str) -> Child:
        """Start an engine."""
        seed = str(self.random.getrandbits(32))
        child = Child("soak_engine.py", self.url, model, seed)
        child.model = model
        self.children.append(child)
        self.pids.add(child.pid)
        return child

    @property
    def elapsed(self) -> float:
        """Elapsed part of the run, 0 to 1."""
        return (time.monotonic() - self.start) / self.length_s

    # -- state

    def status(self) -> dict[str, Any]:
        """The server's status; empty if it does not answer now."""
        try:
            answer: dict[str, Any] = self.client.ask(wire.Status(), deadline_s=3.0).result(4.0)
        except KVDepotError:
            return {}
        return answer

    def files(self) -> dict[str, list[str]]:
        """Our shared-memory files, by kind."""
        for child in self.children:
            self.liveness_files |= child.liveness_files
        names = [*sorted(self.liveness_files), self.client.liveness.name]
        torches = [(path.name, re.match(r"torch_(\d+)_", path.name)) for path in SHM.glob("torch_*")]
        tensors = [name for name, found in torches if found and int(found[1]) in self.pids]
        return {
            "arenas": [path.name for path in SHM.glob(f"*{self.name}*")],
            "liveness_files": [name for name in names if (SHM / name).exists() or (SHM / f".{name}").exists()],
            "tensors": tensors,
        }

    def line(self, what: str) -> dict[str, Any]:
        """Print the current counts; returns them."""
        assert self.server is not None
        status = self.status()
        now = {
            "server_kib": resident(self.server.pid),
            "engine_kib": resident(self.children[0].pid),
            "server_fds": fds(self.server.pid),
            "engine_fds": fds(self.children[0].pid),
            "server_threads": threads(self.server.pid),
            "engine_threads": threads(self.children[0].pid),
            **{name: status.get(name) for name in ("clients", "instances", "sessions", "holds", "reserved_shards")},
            **{name: value for name, value in status.items() if "record" in name or "slot" in name},
            "chunks": status.get("chunks"),
            "evicted": status.get("evicted_chunks"),
            **{name: len(found) for name, found in self.files().items()},
        }
        total = self.totals()
        print(
            f"{time.monotonic() - self.start:6.0f} s {what:7}",
            *(f"{name}={value}" for name, value in now.items()),
            f"steps={total['steps']} requests={total['done']} checked_blocks={total['checked_blocks']}",
            f"failed_blocks={total['failed_blocks']} wrong={len(self.faults_found)}",
            f"kills={sum(self.kills.values())} ({', '.join(f'{n} {k}' for k, n in sorted(self.kills.items()))})",
            flush=True,
        )
        return now

    def totals(self) -> Counter[str]:
        return sum((child.counts for child in self.children), self.dead.copy())

    # -- watching

    def watch(self) -> None:
        """Fail if an engine saw an error, or an engine or the server hangs or has ended."""
        assert self.server is not None
        if self.server.poll() is not None:
            raise Failed(f"the server ended with {self.server.returncode}\n{self.server_log()}")
        for child in self.children:
            self.faults_found += child.wrong
            child.wrong = []
            while child.notes:
                print(f"{time.monotonic() - self.start:6.0f} s engine {child.pid}: {child.notes.pop(0)}", flush=True)
            if child.process.poll() is not None:
                raise Failed(f"{child.script} ended with {child.process.returncode}\n{child.logged()}")
            if child.script == "soak_engine.py" and time.monotonic() - child.moved > STUCK_S:
                os.kill(child.pid, signal.SIGUSR1)  # it writes its stacks
                time.sleep(1)
                raise Failed(f"an engine made no step for {STUCK_S} s\n{child.logged()}")
        if self.faults_found:
            raise Failed("\n".join(self.faults_found[:10]))

    def server_log(self) -> str:
        self.log.seek(0)
        return self.log.read()[-4000:]

    def until(self, what: str, condition: Callable[[], Any], timeout_s: float) -> None:
        """Poll until `condition` returns no complaint; fails with the last one."""
        deadline = time.monotonic() + timeout_s
        begun = next_word = time.monotonic()
        while complaint := condition():
            self.watch()
            if time.monotonic() > next_word + 5:
                next_word = time.monotonic()
                print(f"{next_word - begun:4.1f} s: {what}: {complaint}", flush=True)
            if time.monotonic() > deadline:
                raise Failed(f"{what}, {timeout_s:g} s on: {complaint}")
            time.sleep(0.1)

    # -- faults

    def fault(self) -> None:
        """Cause one random fault."""
        assert self.server is not None
        storm = self.elapsed < STORM
        kind = self.random.choices(["engine", "server", "stop"], [4, 3 if storm else 0, 1])[0]
        self.kills[kind] += 1
        if kind == "engine":
            child = self.random.choice(self.children[1:])
            self.bury(child)
            self.engine(child.model)
        elif kind == "server":
            self.server.kill()
            self.server.wait()
            self.serve()
        else:
            os.kill(self.server.pid, signal.SIGSTOP)
            time.sleep(1)  # the fault itself
            os.kill(self.server.pid, signal.SIGCONT)

    def bury(self, child: Child) -> None:
        child.kill()
        self.children.remove(child)
        self.liveness_files |= child.liveness_files
        self.dead += child.counts
        self.faults_found += child.wrong
        if self.status():  # there is a server to notice it
            files = sorted(child.liveness_files)
            self.until("an engine died", lambda: [name for name in files if (SHM / name).exists()], RELEASED_S)

    # -- the parts

    def run(self) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self.serve()
        self.client = MessageQueueClient(self.url, self.context)
        self.client.learn_chunk_size(20.0)
        for model in ("shared", "shared", "other"):
            self.engine(model)
        self.until(
            "engines have not begun",
            lambda: [child.model for child in self.children if child.counts["done"] < 20],
            60,
        )
        self.line("start")
        steady = False
        before: dict[str, Any] = {}
        next_fault = next_line = next_sample = 0.0
        while self.elapsed < 1:
            now = time.monotonic()
            self.watch()
            if not steady and self.elapsed >= STORM:
                steady = True
                self.begin_steady()
            if not before and self.elapsed >= WARM:
                before = self.pause("before")
                self.resume()
            if now >= next_fault:
                self.fault()
                next_fault = time.monotonic() + self.random.expovariate(1 / 4)
            if now >= next_line:
                self.line("storm" if not steady else "steady" if before else "warm-up")
                next_line = now + 30
            if before and now >= next_sample:
                assert self.server is not None
                self.memory["server"].append((now, resident(self.server.pid)))
                self.memory["engine"].append((now, resident(self.children[0].pid)))
                next_sample = now + 1
            time.sleep(0.05)
        after = self.pause("after")
        self.compare(before, after)
        self.finish()

    def begin_steady(self) -> None:
        """Start a new server, so that what it allocates at the start does not count as growth."""
        assert self.server is not None
        self.server.kill()
        self.server.wait()
        self.kills["server"] += 1
        self.serve()

    def pause(self, what: str) -> dict[str, Any]:
        """Pause the traffic while the same processes keep running; returns what they hold then."""
        begun = time.monotonic()
        for child in self.children:
            child.tell("pause")
        self.until(
            "engines did not come to rest",
            lambda: [child.counts for child in self.children if not child.idle],
            PAUSE_S,
        )
        rested = time.monotonic()
        self.until("the server still holds", self.held, PAUSE_S)
        print(f"at rest after {rested - begun:.1f} s, nothing held after {time.monotonic() - rested:.1f} s more")
        return self.line(what)

    def resume(self) -> None:
        for child in self.children:
            child.tell("resume")

    def held(self) -> str:
        """What the server still holds although the traffic has ended; empty: nothing."""
        status = self.status()
        expected = {
            "clients": 1 + CLIENTS * len(self.children),
            "instances": len(self.children),
            "sessions": 0,
            "holds": 0,
            "reserved_shards": 0,
            "operations": 0,
        }
        wrong = {name: value for name, value in expected.items() if status.get(name) != value}
        odd = [f"{name} is {status.get(name)}, not {value}" for name, value in wrong.items()]
        files = self.files()
        if len(files["liveness_files"]) != expected["clients"]:
            there = files["liveness_files"]
            odd.append(f"{len(there)} liveness files of {expected['clients']} clients: {there}")
        living = {child.pid for child in self.children}
        odd += [f"{name} of a dead engine" for name in files["tensors"] if int(name.split("_")[1]) not in living]
        if len(files["arenas"]) > 1:
            odd.append(f"arenas {files['arenas']}")
        return "; ".join(odd)

    def compare(self, before: dict[str, Any], after: dict[str, Any]) -> None:
        """Raise if something grew."""
        grown = []
        kinds = "server_fds", "engine_fds", "server_threads", "engine_threads", "arenas", "liveness_files", "tensors"
        for name in kinds:
            if after[name] > before[name]:
                grown.append(f"{name} grew from {before[name]} to {after[name]}")
        for name, samples in self.memory.items():
            kib = [value for _, value in samples]
            third = len(kib) // 3
            if third < 5:
                print(f"resident memory of the {name}: too few samples to compare; let it run longer")
                continue
            first, last = statistics.median(kib[:third]), statistics.median(kib[-third:])
            growth = last / first - 1
            print(f"resident memory of the {name}: median {first:.0f} KiB, then {last:.0f} KiB: {growth:+.2%}")
            if growth > GROWTH:
                grown.append(f"the memory of the {name} grew by {growth:.2%}")
        if grown:
            raise Failed("; ".join(grown))

    def finish(self) -> None:
        """End all processes; nothing may be left."""
        assert self.server is not None
        for child in self.children:
            child.tell("quit")
        for child in list(self.children):
            if child.process.wait(30) or not child.has_ended():
                raise Failed(f"an engine ended with {child.process.returncode}\n{child.logged()}")
            self.bury(child)
        self.until("the server still holds", self.held, PAUSE_S)
        self.client.close()
        self.server.terminate()
        if code := self.server.wait(20):
            raise Failed(f"the server ended with {code}\n{self.server_log()}")
        left = {kind: names for kind, names in self.files().items() if names}
        if left or list(Path(self.folder.name).iterdir()):
            raise Failed(f"left behind: {left} {list(Path(self.folder.name).iterdir())}")
        if re.search(r"Traceback|ERROR", log := self.server_log()):
            raise Failed(f"the server's log speaks of errors:\n{log}")
        total = self.totals()
        print("nothing left behind;", ", ".join(f"{name} {value}" for name, value in sorted(total.items())))

    def clean_up(self) -> None:
        """End all our processes and remove all our files, whatever happened."""
        for child in self.children:
            child.kill()
            self.liveness_files |= child.liveness_files
        if self.server is not None and self.server.poll() is None:
            self.server.kill()
            self.server.wait()
        if hasattr(self, "client"):
            left = self.files()
            self.client.close()
            for name in (*left["arenas"], *left["liveness_files"], *left["tensors"]):
                (SHM / name).unlink(missing_ok=True)
            self.context.term()
        self.folder.cleanup()


def resident(pid: int) -> int:
    """Private memory of a process in KiB: without the arena, KV and libraries, which are files."""
    found = re.search(r"RssAnon:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) if found else 0


def threads(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/task").iterdir()))


def fds(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def main() -> int:
    parser = argparse.ArgumentParser(description="Mixed traffic with random kills: nothing wrong, nothing that grows.")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=None, help="default: a new one, printed")
    args = parser.parse_args()
    seed = random.SystemRandom().getrandbits(32) if args.seed is None else args.seed
    print(f"soak of {args.minutes:g} minutes, seed {seed}", flush=True)
    soak = Soak(args.minutes, seed)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        soak.run()
    except Failed as exc:
        print(f"FAILED (seed {seed}): {exc}")
        return 1
    except KeyboardInterrupt:
        print("interrupted")
        return 1
    finally:
        soak.clean_up()
    print("the soak is clean")
    return 0


if __name__ == "__main__":
    sys.exit(main())
