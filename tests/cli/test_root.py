"""All commands: their names, their errors for wrong usage, and what they do if nobody reads their output."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest

from kvdepot import cli
from kvdepot.cli.root import root
from kvdepot.processes import module_command
from tests.client.engine import Engine
from tests.conftest import HANG_S, Depot


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("stauts", "status"), ("list", "status"), ("flush", "forget"), ("version", "--version"), ("pin", "lease"),
        ("serve --chunk-sise 9", "--chunk-size"),
    ],
)  # fmt: skip
def test_an_unknown_command_or_option_is_answered_with_a_suggestion(
    capsys: pytest.CaptureFixture[str], typed: str, meant: str
) -> None:
    assert cli.main(typed.split()) == 2
    said = capsys.readouterr().err
    assert said.startswith("kvdepot: No such ") and f"{meant!r}" in said


@pytest.mark.parametrize("words", [["serve", "--chunk-size"], ["warm"], ["top", "--interval", "0"], ["keygen"]])
def test_wrong_usage_is_answered_in_one_line_that_names_the_help(
    capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    assert cli.main(words) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and said.startswith("kvdepot: ") and f" (see `kvdepot {words[0]} --help`)" in said


def test_every_command_has_help_and_the_first_help_has_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    said = capsys.readouterr().out
    assert re.findall(r"^    (\d+)  ", said, re.MULTILINE) == ["0", "1", "2", "130"]
    for name in root.list_commands(click.Context(root)):
        assert re.search(rf"^  {name} +\w", said, re.MULTILINE), name
        assert cli.main([name, "--help"]) == 0
        told = capsys.readouterr().out
        assert f"Usage: kvdepot {name} " in told
        assert [line for line in told.splitlines() if len(line) > 80] == []


@pytest.mark.parametrize(
    ("words", "code", "unwanted"),
    [
        (["serve", "--chunk-size", "0"], 2, ["rich", "argparse", "asyncio", "torch"]),
        (["status", "--json"], 0, ["rich", "argparse", "asyncio", "torch", "numpy", "xxhash", "http"]),
    ],
)
def test_commands_import_no_slow_module_that_they_do_not_use(
    depot: Depot, words: list[str], code: int, unwanted: list[str]
) -> None:
    script = (
        "import sys; from kvdepot.cli import main; code = main(sys.argv[1:]); "
        f"print(code, sorted({{name.split('.')[0] for name in sys.modules}} & {set(unwanted)}), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *words], capture_output=True, text=True, timeout=HANG_S, check=True,
        env={**os.environ, "KVDEPOT_URL": depot.url},
    )  # fmt: skip
    assert done.stderr.splitlines()[-1] == f"{code} []"


def test_tiers_can_follow_one_flag_or_each_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    urls = ["disk:///a?capacity_gib=1", "disk:///b?capacity_gib=1"]
    one, two = urls
    for words in (["--tiers", one, two], ["--tiers", one, "--tiers", two], ["--tiers", one, f"--tiers={two}"]):
        assert cli.main(["config", "--json", "--chunk-size", "64", *words, "--policy", "lru"]) == 0
        said = json.loads(capsys.readouterr().out)["settings"]
        assert said["tiers"] == {"value": urls, "source": "--tiers"}
        assert said["chunk_size"] == {"value": 64, "source": "--chunk-size"}


@pytest.mark.faults
def test_a_closed_pipe_ends_the_command_without_a_traceback(depot: Depot) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "kvdepot.cli", "status", "--watch", "0.1", "--json", "--url", depot.url],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout and process.stderr
        json.loads(process.stdout.readline())
        process.stdout.close()
        assert process.wait(HANG_S) == 1
        assert process.stderr.read() == ""


@pytest.mark.faults
@pytest.mark.parametrize("words", [["config"], ["--help"]], ids=" ".join)
def test_a_full_disk_is_reported_without_a_traceback(words: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "kvdepot.cli", *words], stdout=full, stderr=subprocess.PIPE, text=True,
            timeout=HANG_S, check=False,
        )  # fmt: skip
    assert done.returncode == 1
    assert re.fullmatch(r"kvdepot: .*No space left on device.*\n", done.stderr)


NO_UTF8 = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}


@pytest.mark.parametrize(
    "locale", [{"PYTHONIOENCODING": "ascii"}, {"PYTHONIOENCODING": "latin-1"}, NO_UTF8], ids=["ascii", "latin-1", "C"]
)
def test_commands_print_in_every_encoding_of_the_terminal(
    locale: dict[str, str], used: Engine, depot: Depot, tmp_path: Path
) -> None:
    """Rounded lines, microseconds and names of others are letters that many encodings lack."""
    settings = tmp_path / "settings.toml"
    settings.write_text('[tenants."m\u00fcller \u6771"]\ncap_bytes = 1\n', encoding="utf-8-sig")
    server = ("--url", depot.url)
    for words in (["status", *server], ["lease", *server], ["doctor", *server], ["config", "--config", str(settings)]):
        done = subprocess.run(
            module_command("kvdepot.cli", *words), capture_output=True, timeout=HANG_S, env=os.environ | locale,
            check=False,
        )  # fmt: skip
        assert b"Traceback" not in done.stderr and done.stdout, done.stderr
    assert b"m\xc3\xbcller" in done.stdout or b"m\xfcller" in done.stdout or b"m?ller ?" in done.stdout
