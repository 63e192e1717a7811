"""`kvdepot certify`: a user's model on the user's own engine, with the depot and without, on one page.

It starts a server of its own and engines as child processes (integrations/vllm/certify.py), has them run the same
prompts with KV from every source, and compares (certificate.py). Invariant: whatever ends it, its processes end,
and its shared memory and files are removed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import random
import re
import select
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TypeAlias

import click
import msgspec

from kvdepot import install
from kvdepot.cli.certificate import Certificate
from kvdepot.cli.completions import Case, Completion, Description, Encode, Generate, Source
from kvdepot.cli.connect import interrupted_by_signals
from kvdepot.cli.output import Progress, clean, print_json, progress
from kvdepot.cli.pressure import judge, run_storms, shape_storm, small_cache
from kvdepot.client import admin
from kvdepot.client.launch import Embedded
from kvdepot.config import arena_folder
from kvdepot.errors import ConfigError, DeadlineExceeded, Unavailable
from kvdepot.memory import shm
from kvdepot.processes import module_command
from kvdepot.protocol import wire
from kvdepot.protocol.status import Status
from kvdepot.values import plural

Start: TypeAlias = Callable[..., "TestedEngine"]
"""Starts an engine with this name, and more arguments of vLLM's."""
Stage: TypeAlias = "Callable[[TieredServer, Start, Certificate, Progress], None]"
"""A stage after the comparisons: `_press`, if it was asked for."""
Prompts: TypeAlias = Sequence[int | str | list[int]]
"""Prompts by length, as text, or as token ids."""
_OVER = 9
"""Tokens of a generated prompt beyond whole chunks: fewer than a block, so that both caches hold the same tokens."""
_NEW_TOKENS = 16
_TRIES = 5
"""Most runs of a prompt until enough of it comes from the depot: an engine computes chunks that a tier would deliver
too late, and the next run finds these chunks in memory."""
_STORM = 1 << 16
"""Seed of the first prompt of a storm; other prompts have smaller ones."""
_START_S, _RUN_S, _SERVER_S, _END_S = 3600.0, 1800.0, 120.0, 30.0


@click.command(context_settings={"ignore_unknown_options": True, "help_option_names": ["--help"]})
@click.argument("words", metavar="MODEL [VLLM'S ARGUMENTS]", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option("--prompts", metavar="FILE|N,...", default="2048,4096,8192", help="a file with one prompt per line, as "
              "text or as a JSON array of token ids; or the lengths of generated prompts in tokens (default: "
              "2048,4096,8192)")  # fmt: skip
@click.option("--tier", metavar="URL", help="use this tier instead of a temporary disk; its chunks are kept")
@click.option("--pressure", is_flag=True, help="also have many prompts arrive at once, at an engine with a small "
              "cache: about a minute, and one more start of the engine")  # fmt: skip
@click.option("--html", metavar="FILE", type=click.Path(), help="also write the page there")
@click.option("--json", "as_json", is_flag=True, help="print JSON")
def certify(
    words: tuple[str, ...], prompts: str, tier: str | None, pressure: bool, html: str | None, as_json: bool
) -> int:
    """Run your model on your own vLLM with the depot and without, and compare tokens, logprobs and times.

    All other arguments are vLLM's, as for `vllm serve`: --dtype, --tensor-parallel-size, --speculative-config,
    --enable-lora --lora-modules NAME=PATH and so on. Prompts are computed, then loaded from the engine's own cache, and
    from the depot: in the same engine, in a fresh one, after kill -9 of the server, and from a tier. The server is a
    private one with the settings of the environment, such as KVDEPOT_ARENA_GIB, but for KVDEPOT_TIERS,
    KVDEPOT_LOOKUP_S and KVDEPOT_LOG_LEVEL.

    Exit code 1 if an answer differs, too little came from the depot, or --pressure found the depot slower than
    computing; 2 if the engine cannot run.
    """
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(f"vLLM is not installed here: in its environment, {install.again()}")
    wanted = _read(prompts)
    if html and (Path(html).is_dir() or not os.access(Path(html).absolute().parent, os.W_OK)):
        raise ConfigError(f"--html: {html} cannot be written")
    with progress() as update, interrupted_by_signals(), tempfile.TemporaryDirectory(prefix="kvdepot-certify-") as name:
        os.environ |= {
            "KVDEPOT_TIERS": tier or f"disk://{name}/tier?capacity_gib=1024&write=through",
            "KVDEPOT_LOOKUP_S": "8", "KVDEPOT_LOG_LEVEL": "error", "TMPDIR": name,
        }  # fmt: skip
        found = _certify(Path(name), words, wanted, [_press] * pressure, update)
    if as_json:
        print_json(found)
    else:
        from kvdepot.cli.view import console

        found.print(console())
    if html:
        Path(html).write_text(found.page(), encoding="utf-8")
    return 0 if found.passed else 1


def _read(file: str) -> Prompts:
    """The prompts in a file, or lengths. Raises ConfigError."""
    if re.fullmatch("[0-9]{1,7}(,[0-9]{1,7})*", file):
        return list(map(int, file.split(",")))
    try:
        lines = [line for line in Path(file).read_text(encoding="utf-8").splitlines() if line.strip()]
        is_list = re.compile(r"\[\s*[-\d\]]").match
        found = [msgspec.json.decode(line, type=list[int]) if is_list(line) else line for line in lines]
    except (OSError, ValueError) as exc:
        raise ConfigError(f"--prompts: {file}: {exc}") from exc
    if not found:
        raise ConfigError(f"--prompts: {file} has no prompts")
    return found


class TestedEngine:
    """One engine, as a group of child processes. about: its description, once it has started. probes: prompts that are
    not measured, one for the model and one for each adapter. is_able: whether vLLM has accepted the arguments."""

    about: Description
    probes: Sequence[Case] = ()
    is_able = False

    def __init__(self, log: Path, url: str, words: Sequence[str], inside: Sequence[str] = ()) -> None:
        """log: gets what vLLM says. words: vLLM's arguments. inside: a prefix of the command."""
        self._log = log
        self._channel, theirs = socket.socketpair()  # what is imported there may write to standard output
        self._lines = self._channel.makefile("rw")
        command = [*inside, *module_command("kvdepot.integrations.vllm.certify", url, *words)]
        with theirs, log.open("wb") as out:
            self._process = subprocess.Popen(command, 0, None, theirs.fileno(), out, out, start_new_session=True)

    def start(self) -> TestedEngine:
        """Wait until its model is loaded. Raises ConfigError, as all below for what the engine refuses."""
        self.about = msgspec.convert(self._answer(_START_S), Description)
        tokens = _generate(self, 1024, 0)
        self.probes = [Case("", tokens, adapter) for adapter in range(len(self.about.adapters) + 1)]
        return self

    def run(self, *cases: Case, source: Source = "depot", new_tokens: int = _NEW_TOKENS) -> list[Completion]:
        """Run prompts with one adapter together. source: of their KV."""
        command = Generate([case.tokens for case in cases], cases[0].adapter, source, new_tokens)
        return msgspec.convert(self._ask(command), list[Completion])

    def encode(self, text: str) -> list[int]:
        return msgspec.convert(self._ask(Encode(text)), list[int])

    def _ask(self, command: Generate | Encode) -> object:
        with contextlib.suppress(ConnectionError):  # then there is no answer
            print(msgspec.json.encode(command).decode(), file=self._lines, flush=True)
        return self._answer(_RUN_S)

    def _answer(self, timeout_s: float) -> object:
        is_there, line = bool(select.select([self._channel], [], [], timeout_s)[0]), ""
        with contextlib.suppress(ConnectionError):
            line = self._lines.readline() if is_there else ""
        if line:
            found = json.loads(line)
            if not isinstance(found, dict) or "error" not in found:
                return found
        log = [clean(line) for line in self._log.read_text(encoding="utf-8", errors="replace").splitlines()]
        causes = "\n".join(([each for each in log if "Error" in each] or log)[-5:])
        said = clean(found["error"]) if line else "it has ended" if is_there else "it does not answer"
        kind = Unavailable if self.is_able else ConfigError
        raise kind(f"the engine failed: {said}\n{causes}")

    def close(self) -> None:
        """End its processes, by force those that do not end in time, and remove the shared memory that they leave."""
        deadline, left = time.monotonic() + _END_S, set[Path]()
        with self._channel, contextlib.suppress(OSError):
            self._lines.close()
        with contextlib.suppress(ProcessLookupError):
            while time.monotonic() < deadline:
                self._process.poll()
                os.killpg(self._process.pid, 0)
                left |= _shared_memory(self._process.pid)
                time.sleep(0.05)
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(_END_S)
        for file in left:  # vLLM also kills its processes itself
            file.unlink(missing_ok=True)


def _shared_memory(group: int) -> set[Path]:
    """The files that Python and torch have made in shared memory for the processes of a group."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.getpgid(int(folder.name)) == group:
                words = (folder / "maps").read_text().split()
                found |= {Path(each) for each in words if each.startswith(("/dev/shm/psm_", "/dev/shm/torch_"))}
    return found


class TieredServer(Embedded):
    """A server of our own with a tier, whose settings are in the environment."""

    arenas = "kvdepot-{user}-certify-"  # between two servers, no other process removes it

    def status(self) -> Status:
        """Wait until it has started; its status. Raises ConfigError if it does not start."""
        deadline = time.monotonic() + _SERVER_S
        while True:
            try:
                with admin.connect(self.url, timeout_s=1.0) as client:
                    return admin.status(client)
            except Unavailable as exc:
                if not self.is_running() or time.monotonic() > deadline:
                    raise ConfigError(self.failure()) from exc

    def expect(self, condition: Callable[[Status], object], fault: str) -> Status:
        """Wait for a status. Raises DeadlineExceeded with the fault."""
        deadline = time.monotonic() + _SERVER_S
        while not condition(now := self.status()):
            if time.monotonic() > deadline:
                raise DeadlineExceeded(f"{fault} within {_SERVER_S:g} s")
            time.sleep(0.05)
        return now

    def settle(self) -> Status:
        """Wait until all is stored, and the tier has it."""
        return self.expect(
            lambda now: not (now.reserved_shards or now.operations or now.tiers[0].queued_bytes or now.tiers[0].saves),
            "the tier has not saved all chunks",
        )

    def restart(self) -> int:
        """Kill it, and start another one on its arena; returns how many chunks that cost."""
        before = self.settle()
        os.kill(before.pid, signal.SIGKILL)
        while self.is_running():
            time.sleep(0.01)
        self.start()
        return before.chunks - self.status().chunks

    def clear(self) -> None:
        """Have memory forget all chunks, which the tier keeps."""

        def is_empty(now: Status) -> bool:
            with admin.connect(self.url) as client:
                client.ask(wire.Clear()).result(_SERVER_S)
            return not now.chunks

        self.settle()
        self.expect(is_empty, "memory has not forgotten its chunks")

    def counter(self, name: str) -> int:
        return self.status().tiers[0].counters.get(name, 0)


def _certify(
    folder: Path, words: Sequence[str], prompts: Prompts, stages: Sequence[Stage], update: Progress
) -> Certificate:
    """Compare, then run further stages. An interrupt ends it, and does not disturb the end."""
    with ExitStack() as stack:
        stack.callback(signal.signal, signal.SIGINT, signal.getsignal(signal.SIGINT))
        stack.callback(lambda: shm.sweep_liveness_files(arena_folder()))  # of engines that had to be killed
        server = stack.enter_context(closing(TieredServer(f"ipc://{folder}/depot.sock", f"{os.getpid()}")))

        def start(name: str, *more: str) -> TestedEngine:
            update(f"engine {name}: vLLM loads the model", 0, 0)
            log = folder / f"{name}.log"
            engine = stack.enter_context(closing(TestedEngine(log, server.url, [*words, *more])))
            for probe in engine.start().probes:
                engine.run(probe, source="nothing")  # an engine's first calls are slower, and load an adapter
            engine.is_able = True
            return engine

        try:
            server.status()
            found = _examine(server, start, prompts, update)
            for stage in stages:
                stage(server, start, found, update)
            return found
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            update("ending the engines and the server", 0, 0)


def _examine(server: TieredServer, start: Start, prompts: Prompts, update: Progress) -> Certificate:
    one = start("A")
    for probe in one.probes:
        one.run(probe, source="computing")
    now = server.expect(lambda now: now.namespaces, "the engine has stored nothing")
    chunk = now.namespaces[0].chunk_tokens or now.chunk_size_tokens
    found = Certificate(one.about, chunk)
    cases = list(make_cases(one, chunk, prompts))

    def measure(road: str, engine: TestedEngine, some: Sequence[Case]) -> None:
        for number, case in enumerate(some):
            update(f"depot, {road}", number, len(some))
            for _ in range(_TRIES):
                before = server.counter("computed_tokens")
                (answer,) = engine.run(case)
                if answer.loaded >= case.expected:
                    break
            if server.counter("computed_tokens") > before:  # faster than loading from the tier
                case = msgspec.structs.replace(case, expected=0)
            found.add(road, case, answer)
            case.expected = max(case.expected, answer.loaded)

    for number, case in enumerate(cases):
        update("computing, and the engine's own cache", number, len(cases))
        case.computed += one.run(case, source="computing")
        case.own += [*one.run(case, source="own cache"), *one.run(case, source="own cache")]
    for probe in one.probes:  # vLLM's CPU kernels of adapters compute a batch with and without one wrongly
        together = [case for case in cases if case.adapter == probe.adapter]
        for case, answer in zip(together, one.run(*together, source="nothing"), strict=True):
            case.computed.append(answer)
    found.note_computed(cases)
    measure("same engine", one, cases)
    one.close()
    two = start("B")
    firsts = cases[:: len(cases) // len(two.probes)]
    measure("first hit", two, [msgspec.structs.replace(case, expected=0) for case in firsts])
    measure("fresh engine", two, cases)
    if lost := server.restart():
        found.fail(f"after kill -9: {plural(lost, 'chunk')} did not survive in memory")
    deadline = time.monotonic() + _SERVER_S
    for probe in two.probes:  # until the engine has found the server again
        while not two.run(probe, new_tokens=1)[0].loaded and time.monotonic() < deadline:
            time.sleep(0.1)
    measure("after kill -9", two, cases)
    server.clear()
    measure("tier", two, cases)
    if not server.counter("loaded_chunks"):
        found.fail("tier: the server has loaded no chunk from it")
    two.close()
    return found


def _press(server: TieredServer, start: Start, found: Certificate, update: Progress) -> None:
    """Run storms on an engine with a small cache, and add their verdict."""
    now, about, chunk = server.settle(), found.engine, found.chunk_tokens
    held = max(now.namespaces, key=lambda each: each.bytes)
    speed = max(each.tokens / each.ttft_s for each in found.results if each.road == "computed")
    fits = now.capacity_bytes // 2 * held.chunks * chunk // max(1, held.bytes)
    requests, prompt = shape_storm(speed, fits, about.longest - _NEW_TOKENS, chunk)
    blocks = small_cache(about.longest, prompt, about.block_tokens, max(1, len(held.groups)))
    engine = start("C", "--num-gpu-blocks-override", str(min(blocks, about.blocks)))
    cases = [Case(f"{number}", _generate(engine, prompt, _STORM + number), 0) for number in range(requests)]
    without, depot = run_storms(lambda source: engine.run(*cases, source=source), server.settle, cases, update)
    cache = engine.about.blocks // max(1, len(held.groups)) * about.block_tokens
    found.pressure = judge(cache, cases, without, depot, found.rounding)
    for fault in found.pressure.faults:
        found.fail(fault)


def _generate(engine: TestedEngine, length: int, seed: int) -> list[int]:
    """Numbers as text, or random token ids for an engine without a tokenizer; at most as many tokens as fit."""
    about, generator = engine.about, random.Random(seed)
    tokens = [generator.randrange(3, min(about.vocabulary, 32000)) for _ in range(length)]
    if about.has_tokenizer:
        tokens = engine.encode(" ".join(map(str, tokens)))
    return tokens[: min(length, about.longest - _NEW_TOKENS)]


def make_cases(engine: TestedEngine, chunk: int, prompts: Prompts) -> Iterator[Case]:
    """The prompts, cut so that less than a block follows whole chunks, for the model and then for each adapter.

    Raises ConfigError for a prompt that is too short, or too long.
    """
    block, found = engine.about.block_tokens, []
    for number, each in enumerate(prompts, 1):
        if isinstance(each, int):
            each = _generate(engine, each // chunk * chunk + min(_OVER, block - 1), number)
        tokens = engine.encode(each) if isinstance(each, str) else each
        found.append(tokens[: len(tokens) - max(0, (len(tokens) - 1) % chunk - block + 1)])
        if not chunk < len(tokens) <= (most := engine.about.longest - _NEW_TOKENS):
            least = f"one more than a chunk, and at most {most}, which leaves room for an answer"
            raise ConfigError(f"prompt {number} has {len(tokens)} tokens; give at least {chunk + 1}, {least}")
    for adapter, name in enumerate(["", *engine.about.adapters]):
        for number, tokens in enumerate(found, 1):
            yield Case(f"{number}: {len(tokens):,} tokens{name and f', {name}'}", tokens, adapter)
