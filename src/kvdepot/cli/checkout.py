"""`kvdepot bench` and `kvdepot demo`: they run scripts of the repository, which an installed package lacks; and
`kvdepot bench --url`, which needs none."""

from __future__ import annotations

import importlib.util
import json
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

import kvdepot
from kvdepot.cli import options
from kvdepot.cli.connect import connect
from kvdepot.cli.output import clean, count, duration, print_json, progress, size
from kvdepot.config import default_key
from kvdepot.errors import ConfigError

if TYPE_CHECKING:
    from kvdepot.cli.load import Result

__all__ = ["bench", "demo"]


def _script(name: str) -> Path:
    """A script of the checkout that contains this package or is the current folder. Raises ConfigError."""
    for root in (Path(kvdepot.__file__).parents[2], Path.cwd()):
        path = root / name
        if path.is_file() and (root / "src" / "kvdepot").is_dir():
            return path
    raise ConfigError(
        f"{name} is part of the repository, not of the installed package: run this in a checkout, "
        "where `make bench` and `make demo` install what they need"
    )


def _need(*modules: str) -> None:
    """Raise ConfigError unless these modules are installed. Does not import them."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"{', '.join(missing)} cannot be imported by {sys.executable}; `make demo` installs it")


def _run(script: Path, arguments: Sequence[str], *, quiet: bool = False) -> int:
    """Run a script to its end; returns its exit code. quiet: redirect its output to standard error."""
    with subprocess.Popen(
        [sys.executable, str(script), *arguments], stdout=sys.stderr.fileno() if quiet else None
    ) as process:
        try:
            return process.wait()
        except KeyboardInterrupt:  # the script gets it too, and stops its processes
            process.wait()
            return 130


def _run_for_json(script: Path, arguments: Sequence[str], flag: str, out: str | None) -> int:
    """Run a script that writes its figures to the file given by a flag, and print them; returns its exit code."""
    with tempfile.TemporaryDirectory(prefix="kvdepot-figures-") as folder:
        file = Path(out or f"{folder}/figures.json")
        code = _run(script, [*arguments, flag, str(file)], quiet=True)
        if file.is_file() and (code == 0 or not out):  # after a failure, the user's file may be from an earlier run
            print_json(json.loads(file.read_text(encoding="utf-8")))
    return code


@click.command()
@click.option("--engine", type=click.Choice(["vllm"]), help="only the figures of a real engine")
@click.option("--only", metavar="NAME,...", help="only these families of figures")
@click.option("--tiny", is_flag=True, help="run for seconds instead of minutes; the numbers are meaningless")
@click.option("--no-vllm", is_flag=True, help="leave out the figures that need a vLLM engine")
@click.option("--trace", metavar="FILE", type=click.Path(), help="requests to replay with each policy, in addition "
    "to synthetic ones")  # fmt: skip
@click.option("--out", metavar="FILE", type=click.Path(), help="where to write the figures (default: bench.json)")
@click.option("-u", "--url", metavar="[URL]", is_flag=False, flag_value="", help="measure the running server at URL "
    "(without a value: the one of KVDEPOT_URL, or this user's)")  # fmt: skip
@click.option("-k", "--key", metavar="FILE", type=click.Path(), help="with --url: this client's key file")
@click.option("-c", "--clients", type=options.Whole(1, 256), default=4, metavar="N", help="with --url: clients, each "
    "a process with one request at a time (default: 4)")  # fmt: skip
@click.option("-n", "--requests", type=options.Whole(1, 10_000_000), default=2000, metavar="N", help="with --url: "
    "lookups, and retrieves, of all clients (default: 2000)")  # fmt: skip
@click.option("--prompts", type=options.Whole(1, 1_000_000), default=64, metavar="N", help="with --url: prompts to "
    "store, each with one request (default: 64)")  # fmt: skip
@click.option("--chunks", type=options.Whole(1, 4096), default=8, metavar="N", help="with --url: chunks of a prompt "
    "(default: 8)")  # fmt: skip
@click.option("--chunk-bytes", default="256KiB", metavar="SIZE", help="with --url: KV bytes of a chunk, at least "
    "4KiB (default: 256KiB)")  # fmt: skip
@click.option("-y", "--yes", is_flag=True, help="with --url: proceed even if the server must evict chunks for it")
@options.as_json
def bench(
    engine: str | None, only: str | None, tiny: bool, no_vllm: bool, trace: str | None, out: str | None,
    url: str | None, as_json: bool, **load: Any,
) -> int:  # fmt: skip
    """Run the benchmark of a checkout: each figure beside the lower bound measured in the same run. Takes some minutes.

    With --json the table goes to standard error, and the figures, as written to --out, to standard output.

    With --url, measure a running server instead: stores, lookups and retrieves per second of all clients together,
    under a model name of its own whose chunks it removes at the end, also when a signal ends it. It takes memory and
    time from engines, and stores no more than what is free in the arena.
    """
    if url is not None:
        if engine or only or tiny or no_vllm or trace or out:
            raise click.UsageError("--url measures a running server: it excludes --engine, --only, --tiny, --no-vllm, "
                                   "--trace and --out")  # fmt: skip
        return _bench_server(url or None, as_json, **load)
    script = _script("bench/bench.py")
    if engine:
        if only or no_vllm:
            raise click.UsageError("--engine excludes --only and --no-vllm")
        _need("vllm")
        only = "engine"
    arguments = ["--tiny"] * tiny + ["--no-vllm"] * no_vllm
    for flag, value in (("--only", only), ("--trace", trace)):
        arguments += [flag, value] if value else []
    if not as_json:
        return _run(script, [*arguments, *(["--out", out] if out else [])])
    return _run_for_json(script, arguments, "--out", out)


def _bench_server(
    url: str | None, as_json: bool, key: str | None, clients: int, requests: int, prompts: int, chunks: int,
    chunk_bytes: str, yes: bool,
) -> int:  # fmt: skip
    """Measure a running server; exit code 1 if a request failed."""
    from kvdepot.cli.load import BLOCKS, MODEL, Plan, measure
    from kvdepot.client import admin

    chunk = options.size_of("--chunk-bytes", chunk_bytes, 1) // BLOCKS * BLOCKS
    if not 4096 <= chunk <= 1 << 30:
        raise ConfigError("--chunk-bytes: give between 4KiB and 1GiB")
    clients = min(clients, prompts)
    each, per_client = -(-prompts // clients), -(-requests // clients)
    key = key or default_key()
    total = clients * each * chunks * (-(-chunk // 4096) * 4096)
    with connect(url, key) as client:
        now = admin.status(client)
        free = now.capacity_bytes - now.used_bytes
        what = f"{size(total)} would be stored, and {size(free)} of the arena are free"
        if total > free and not yes:
            raise ConfigError(
                f"{what}, so chunks of engines would be evicted: lower --prompts, --chunks or --chunk-bytes, or give "
                "--yes"
            )
        model = MODEL + secrets.token_hex(8)
        plan = Plan(client.server_url, key, model, each, per_client, chunks, chunk)
        found: list[Result] = []
        try:
            with progress() as update:
                for result in measure(plan, clients, update):
                    if not as_json:
                        print(*([] if found else [_HEAD]), _line(result), sep="\n", flush=True)
                    found.append(result)
        finally:
            left = admin.not_forgotten(admin.forget(client, model, ""))
    for line in left:
        print(f"kvdepot: chunks of {model} may remain: {clean(line)}", file=sys.stderr)
    if as_json:
        print_json({"clients": clients, "chunks": chunks, "chunk_bytes": chunk, "results": msgspec.to_builtins(found)})
    failed = sum(result.failed for result in found)
    if failed:
        print(f"kvdepot: {failed} requests failed or missed stored chunks", file=sys.stderr)
    return 1 if failed or left else 0


def _row(kind: str, requests: str, rate: str, moved: str, p50: str, p99: str) -> str:
    return f"{kind:<8}  {requests:>9}  {rate:>11}  {moved:>10}  {p50:>8}  {p99:>8}"


_HEAD = _row("", "requests", "requests/s", "GB/s", "p50", "p99")


def _line(result: Result) -> str:
    moved = f"{result.bytes_per_s / 1e9:.2f}" if result.bytes_per_s else "-"
    times = duration(result.p50_s), duration(result.p99_s)
    return _row(result.kind, count(result.requests), count(result.per_s), moved, *times)


@click.command()
@click.option("--cluster", is_flag=True, help="over two depots that share a pool of memory (Mooncake Store)")
@click.option("--model", type=click.Choice(["llama", "windows"]), help="only this model; default: both")
@click.option("--lengths", metavar="N,...", help="prompt lengths in tokens, for each model")
@click.option(
    "--url", metavar="[URL]", is_flag=False, flag_value="", help="use the server at URL (without a value: the one of "
    "KVDEPOT_URL, or this user's); default: start one for the demo",
)  # fmt: skip
@options.as_json
def demo(cluster: bool, model: str | None, lengths: str | None, url: str | None, as_json: bool) -> int:
    """Run a vLLM engine that stores its KV in a depot, and a fresh one that loads it; then one engine that computes
    prompts beside one that decodes them; then multi-turn chats with the depot and without. Takes some minutes.

    Exit code 1 if an output differs or nothing was retrieved. With --json the messages go to standard error and the
    figures to standard output.
    """
    script = _script("demo/cluster.py" if cluster else "demo/demo.py")
    if cluster and url is not None:
        raise click.UsageError("--cluster starts its own servers: it excludes --url")
    if cluster and model is not None:
        raise click.UsageError("--cluster has one model: it excludes --model")
    _need("torch", "safetensors", "vllm")
    given = lengths.split(",") if lengths else []
    arguments = ["--lengths", *given] if given else []
    if model is not None:
        arguments += ["--model", model]
    if url is not None:
        arguments += ["--url", url]
    if not as_json:
        return _run(script, arguments)
    return _run_for_json(script, arguments, "--json", None)
