"""`kvdepot bench` and `kvdepot demo`: they run scripts of the repository, which an installed package lacks."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import click

import kvdepot
from kvdepot.cli import options
from kvdepot.cli.output import print_json
from kvdepot.errors import ConfigError

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
            print_json(json.loads(file.read_text()))
    return code


@click.command()
@click.option("--engine", type=click.Choice(["vllm"]), help="only the figures of a real engine")
@click.option("--only", metavar="NAME,...", help="only these families of figures")
@click.option("--tiny", is_flag=True, help="run for seconds instead of minutes; the numbers mean nothing")
@click.option("--no-vllm", is_flag=True, help="leave out the figures that need a vLLM engine")
@click.option("--trace", metavar="FILE", type=click.Path(), help="requests to replay with each policy, in addition "
    "to synthetic ones")  # fmt: skip
@click.option("--out", metavar="FILE", type=click.Path(), help="where to write the figures (default: bench.json)")
@options.as_json
def bench(
    engine: str | None, only: str | None, tiny: bool, no_vllm: bool, trace: str | None, out: str | None, as_json: bool
) -> int:
    """Run the benchmark: each figure beside the lower bound measured in the same run. Takes some minutes.

    With --json the table goes to standard error, and the figures, as written to --out, to standard output.
    """
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
    """Run a vLLM engine that stores its KV in a depot, and a fresh one that gets it back; then one engine that computes
    prompts beside one that decodes them. Takes some minutes.

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
