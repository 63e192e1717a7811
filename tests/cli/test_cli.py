"""The `kvdepot` command as people meet it: what it prints on a terminal and into a pipe, and what it exits with."""

from __future__ import annotations

import fcntl
import http.client
import importlib.util
import json
import os
import pty
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
import termios
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import click
import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

import kvdepot
from kvdepot import cli
from kvdepot.cli import output, view
from kvdepot.cli.screen import Screen
from kvdepot.client.socket import MessageQueueClient
from kvdepot.config import Config
from kvdepot.errors import Unavailable
from kvdepot.metrics import Event, Latency
from kvdepot.protocol.curve import read_client_key
from kvdepot.protocol.endpoints import Claim
from kvdepot.status import Engine as EngineStatus
from kvdepot.status import HitRate, NamespaceStatus, Reuse, Status, TierStatus
from tests.client.engine import CHUNK, Engine
from tests.conftest import Depot, StartDepot, eventually
from tests.ports import free_port
from tests.tiers.servers import need

CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]")


def run(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """A command that ends by itself, its output in pipes."""
    return subprocess.run(
        [sys.executable, "-m", "kvdepot.cli", *words],
        capture_output=True, text=True, timeout=60, check=False, env={**os.environ, **environ},
    )  # fmt: skip


class Terminal:
    """A command on a terminal of its own: what it has written, and a keyboard."""

    def __init__(self, *words: str, columns: int = 80, lines: int = 24, **environ: str) -> None:
        self.outer, inner = pty.openpty()
        fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.before = termios.tcgetattr(inner)
        self.raw = ""
        known = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvdepot.cli", *words], stdin=inner, stdout=inner, stderr=inner,
            env={**known, "TERM": "xterm-256color", **environ}, start_new_session=True,
            # What a shell starts in the background ignores interrupts, and hands that on.
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        )  # fmt: skip
        self.inner = inner
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self.outer, 65536)
            except OSError:  # its other end is closed
                return
            if not data:
                return
            self.raw += data.decode(errors="replace")

    @property
    def text(self) -> str:
        return CONTROL.sub("", self.raw)

    def press(self, keys: str) -> None:
        os.write(self.outer, keys.encode())

    def end(self) -> int:
        """Wait until it ends by itself; its exit code."""
        code = self.process.wait(30)
        os.close(self.inner)
        self._reader.join(10)
        os.close(self.outer)
        return code

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(20)


@contextmanager
def terminal(*words: str, **options: Any) -> Iterator[Terminal]:
    made = Terminal(*words, **options)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def used(depot: Depot) -> Iterator[Engine]:
    """An engine that has stored two chunks, found one and got it back."""
    engine = Engine(depot)
    for number in (1, 2):
        engine.store([number] * CHUNK, [0, 1, 2, 3])
    assert engine.lookup([1] * CHUNK) == CHUNK
    assert engine.retrieve([1] * CHUNK, [4, 5, 6, 7]) == set()
    yield engine
    engine.close()


# -- usage


def test_a_mistyped_command_or_option_is_answered_with_the_one_that_was_meant(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["stauts"]) == 2
    assert "'status'" in capsys.readouterr().err
    assert cli.main(["serve", "--chunk-sise", "9"]) == 2
    assert "'--chunk-size'" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["serve", "--chunk-size"], ["warm"], ["top", "--interval", "0"], ["keygen"]])
def test_wrong_usage_is_answered_with_the_usage_of_the_command_that_was_meant(
    capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    assert cli.main(words) == 2
    assert f"Usage: kvdepot {words[0]} " in capsys.readouterr().err


def test_every_command_has_help_and_the_exit_codes_stand_in_that_of_all(capsys: pytest.CaptureFixture[str]) -> None:
    from kvdepot.cli.root import root

    assert cli.main(["--help"]) == 0
    said = capsys.readouterr().out
    assert re.findall(r"^    (\d+)  ", said, re.MULTILINE) == ["0", "1", "2", "130"]
    for name in root.list_commands(click.Context(root)):
        assert re.search(rf"^  {name} +\w", said, re.MULTILINE), name
        assert cli.main([name, "--help"]) == 0
        told = capsys.readouterr().out
        assert f"Usage: kvdepot {name} " in told
        assert [line for line in told.splitlines() if len(line) > 80] == []


def test_an_option_means_the_same_in_every_command_that_has_it() -> None:
    from kvdepot.cli.root import root

    context = click.Context(root)
    owners: dict[str, set[str]] = {}
    for name in root.list_commands(context):
        command = root.get_command(context, name)
        assert command is not None
        for option in (each for each in command.params if isinstance(each, click.Option)):
            for word in option.opts:
                owners.setdefault(word, set()).add(name)
    assert owners["--keys"] == {"serve", "config"}  # the server's folder of keys, and nothing else
    assert owners["--hashes"] == {"warm", "pin"}


@pytest.mark.parametrize("words", [["warm"], ["pin", "name"]], ids=" ".join)
def test_a_prompt_that_is_named_twice_or_not_at_all_is_refused(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for given in ([], ["--tokens", "a", "--hashes", "b"]):
        assert cli.main([*words, *given]) == 2
        assert "give exactly one of --tokens and --hashes" in capsys.readouterr().err


def test_to_serve_neither_tables_nor_commands_of_people_are_imported() -> None:
    script = (
        "import sys; from kvdepot.cli import main; code = main(['serve', '--chunk-size', '0']); "
        "print(code, sorted({name.split('.')[0] for name in sys.modules} & {'rich', 'argparse', 'asyncio', 'torch'}))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "2 []\n"


def test_to_print_a_status_as_json_nothing_is_imported_that_computes_or_draws(depot: Depot) -> None:
    script = (
        "import sys; from kvdepot.cli import main; code = main(['status', '--json', '--url', sys.argv[1]]); "
        "print(code, sorted({name.split('.')[0] for name in sys.modules} "
        "& {'argparse', 'asyncio', 'numpy', 'rich', 'torch', 'xxhash'}), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, depot.url], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stderr == "0 []\n"


def test_tiers_can_follow_one_flag_or_each_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    urls = ["disk:///a?capacity_gib=1", "disk:///b?capacity_gib=1"]
    one, two = urls
    for words in (["--tiers", one, two], ["--tiers", one, "--tiers", two], ["--tiers", one, f"--tiers={two}"]):
        assert cli.main(["config", "--json", "--chunk-size", "64", *words, "--policy", "lru"]) == 0
        said = json.loads(capsys.readouterr().out)["settings"]
        assert said["tiers"] == {"value": urls, "source": "--tiers"}
        assert said["chunk_size"] == {"value": 64, "source": "--chunk-size"}


@pytest.mark.faults
def test_who_reads_no_further_ends_the_command_without_a_traceback(depot: Depot) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "kvdepot.cli", "top", "--json", "--interval", "0.1", "--url", depot.url],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout and process.stderr
        json.loads(process.stdout.readline())
        process.stdout.close()
        assert process.wait(20) == 1
        assert process.stderr.read() == ""


@pytest.mark.faults
@pytest.mark.parametrize("words", [["config"], ["config", "--json"], ["--help"]], ids=" ".join)
def test_output_that_there_is_no_room_for_is_told_without_a_traceback(words: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "kvdepot.cli", *words], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60,
            check=False,
        )  # fmt: skip
    assert done.returncode == 1
    assert re.fullmatch(r"kvdepot: .*No space left on device.*\n", done.stderr)


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        (["token"], "--http-token-file"),
        (["check"], "--on-stop keep"),
        (["status", "--key", "/nothing/there.key"], "kvdepot keygen"),
    ],
    ids=lambda words: words[0] if isinstance(words, list) else "",
)
def test_what_is_not_there_is_told_with_what_to_do(
    words: list[str], advice: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*words, "--url", f"ipc://{tmp_path}/x"]) in (1, 2)
    said = capsys.readouterr().err
    assert said.startswith("kvdepot: ") and said.count("\n") == 1
    assert "No such file" in said and advice in said


# -- serve


@pytest.mark.faults
@pytest.mark.parametrize(
    "tier",
    ["disk:///{folder}/kv?capacty_gib=1", "disk:///{folder}/kv?capacity_gib=many", "redis://localhost/x", "disk://kv"],
)
def test_a_tier_that_is_written_wrong_is_told_once_and_ends_the_server_at_its_start(tier: str, tmp_path: Path) -> None:
    done = run("serve", "--url", f"ipc://{tmp_path}/s", "--http", "off", "--tiers", tier.format(folder=tmp_path))
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("kvdepot: tier ") and line.count(tier.format(folder=tmp_path).partition("?")[0]) == 1


@pytest.mark.faults
def test_what_is_set_in_vain_or_fits_no_engine_is_told_when_the_server_starts(
    start_depot: StartDepot, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVDEPOT_ARENA_GB", "1")
    depot = start_depot(chunk_size=100)
    assert "environment variable KVDEPOT_ARENA_GB is not a setting; did you mean KVDEPOT_ARENA_GIB?" in depot.logged()
    assert "chunk size 100 is not a multiple of 16" in depot.logged()
    assert cli.main(["config", "--chunk-size", "100", "--json"]) == 0
    said = capfd.readouterr()
    assert json.loads(said.out)["settings"]["chunk_size"]["value"] == 100
    assert [line.startswith("kvdepot: ") for line in said.err.splitlines()] == [True, True]


def test_a_server_whose_settings_are_usual_warns_of_nothing(depot: Depot) -> None:
    assert "WARNING" not in depot.logged()


# -- config


@pytest.mark.parametrize(
    ("words", "said"),
    [(["--chunk-size", "many"], "'many' is not a whole number"), (["--lookup-s", "1s"], "'1s' is not a number")],
    ids=lambda words: words[0] if isinstance(words, list) else "",
)
def test_a_value_that_is_no_number_is_told_as_it_was_typed(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["config", *words]) == 2
    assert re.fullmatch(rf"kvdepot: {words[0]}: .*{said}\n", capsys.readouterr().err)


def test_the_names_of_settings_are_whole_on_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert cli.main(["config"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 40
    assert set(Config.__struct_fields__) <= {line.split()[0] for line in lines if not line.startswith(" ")}


def test_config_says_of_each_value_where_it_comes_from(tmp_path: Path) -> None:
    file = tmp_path / "depot.toml"
    file.write_text("chunk_size = 64\ncopy_threads = 3\npolicy = 's3fifo'\n")
    done = run("config", "--config", str(file), "--policy", "adaptive", "--json", KVDEPOT_COPY_THREADS="5")
    assert (done.returncode, done.stderr) == (0, "")
    said = json.loads(done.stdout)["settings"]
    assert said["chunk_size"] == {"value": 64, "source": str(file)}
    assert said["copy_threads"] == {"value": 5, "source": "KVDEPOT_COPY_THREADS"}
    assert said["policy"] == {"value": "adaptive", "source": "--policy"}
    assert said["verify"] == {"value": "sampled", "source": "default"}
    table = run("config", "--config", str(file), "--policy", "adaptive", KVDEPOT_COPY_THREADS="5").stdout
    lines = {line.split()[0]: line.split()[1:] for line in table.splitlines()}
    assert lines["copy_threads"] == ["5", "KVDEPOT_COPY_THREADS"]
    assert set(said) <= set(lines)


def test_config_shows_no_password() -> None:
    tiers = "redis://user:hun@ter2@host:1/0 s3://bucket?region=eu&secret_access_key=hunter2 redis+cluster://:hunter2@a:1,b:2"
    for flags in ([], ["--json"]):
        done = run("config", *flags, KVDEPOT_TIERS=tiers)
        assert done.returncode == 0
        assert "hunter2" not in done.stdout and "ter2" not in done.stdout
        for shown in ("redis://***@host:1/0", "region=eu", "redis+cluster://***@a:1,b:2"):
            assert shown in done.stdout


# -- status


def test_status_shows_on_a_terminal_what_it_prints_as_json(depot: Depot, used: Engine) -> None:
    said = json.loads(run("status", "--url", depot.url, "--json").stdout)
    with terminal("status", "--url", depot.url, columns=100) as shown:
        assert shown.end() == 0
        lines = shown.text.splitlines()
    assert max(map(len, lines)) <= 100
    assert any("working" in line for line in lines)
    assert any(f"{said['chunks']} chunks of {CHUNK} tokens" in line for line in lines)
    row = next(line for line in lines if line.startswith(used.model) and " 2 " in line).split()
    space = next(space for space in said["namespaces"] if space["model"] == used.model)
    assert row[1:3] == [str(space["world_size"]), str(space["chunks"])]
    assert any(re.match(r"Lookup +\d", line) for line in lines)
    assert any(line.startswith(used.model) and "scheduler" in line for line in lines)


@pytest.mark.faults
def test_colours_are_for_terminals_that_want_them(depot: Depot) -> None:
    assert "\x1b" not in run("status", "--url", depot.url).stdout
    colour = re.compile(r"\x1b\[(?:\d+;)*3\d")
    with terminal("status", "--url", depot.url) as shown:
        assert shown.end() == 0
        assert colour.search(shown.raw)
    with terminal("status", "--url", depot.url, NO_COLOR="1") as shown:
        assert shown.end() == 0
        assert not colour.search(shown.raw)


def a_status(**parts: Any) -> Status:
    whole: dict[str, Any] = {
        "chunk_size_tokens": 256, "capacity_bytes": 4 << 30, "used_bytes": 1 << 30, "chunks": 12_345,
        "reserved_shards": 0, "holds": 0, "evicted_chunks": 7, "record_slots": 10, "record_slots_used": 3,
        "unrecorded_shards": 0, "operations": 0, "clients": 2, "sessions": 0, "instances": 1, "uptime_s": 90.0,
        **parts,
    }  # fmt: skip
    return Status(**whole)


def shown(status: Status, width: int = 100) -> str:
    from rich.console import Console

    console = Console(width=width, highlight=False, markup=False, color_system=None, force_terminal=False)
    with console.capture() as captured:
        console.print(view.summary(status, "ipc:///x"))
        for listing in view.listings(status):
            console.print(listing.table(width))
    return captured.get()


def test_what_clients_named_can_neither_move_the_cursor_nor_be_taken_for_markup() -> None:
    name = "[red]x[/red]\x1b[2Jy\x9b1mz\r\n"
    text = shown(
        a_status(
            namespaces=[NamespaceStatus("", name, 1, 4, 1, 1, 1)],
            events=[Event(0.0, "x", f"client registers {name}")],
            tiers=[TierStatus(name, "through", name, None, None, None, 0, 0, {})],
        )
    )
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", text)
    assert text.count("[red]x[/red]") >= 4


@pytest.mark.parametrize("width", [20, 40, 60, 80])
def test_on_a_narrow_terminal_columns_are_left_out_and_no_number_is_cut(width: int) -> None:
    name = "meta-llama/Llama-3.1-8B-Instruct"
    latencies = [Latency("Lookup", 1_234_567, 0, 1.0), Latency("Retrieve", 999_999, 0, 1.0)]
    text = shown(
        a_status(latencies=latencies, namespaces=[NamespaceStatus("", name, 1, 4, 654_321, 1 << 30, 1)]), width
    )
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    assert all(any(line.startswith(start) for line in lines) for start in ("Lookup", "Retrieve", name[:10]))
    numbers = ("1.2 M", "999,999") if width < 40 else ("1.2 M", "999,999", "654,321")
    for number in numbers:
        assert re.search(rf"(?<!\S){re.escape(number)}(?!\S)", text), text


def test_engines_stay_in_their_lines_whoever_was_heard_of_last() -> None:
    rest: dict[str, Any] = {"device": "", "tenant": "", "sessions": 0, "pinned_chunks": 0, "queued": 0}
    engines = [
        EngineStatus(id=f"{number}", since_s=9.0, idle_s=0.0, models=[model], ranks=ranks, **rest)
        for number, (model, ranks) in enumerate([("b", []), ("a", [0]), ("b", [1]), ("b", [0]), ("a", [])])
    ]
    lines = [
        [line.split()[:3] for line in shown(a_status(engines=order)).splitlines() if line[:2] in ("a ", "b ")]
        for order in (engines, engines[::-1])
    ]
    assert lines[0] == lines[1] and len(lines[0]) == 5
    assert [line[0] for line in lines[0]] == ["a", "a", "b", "b", "b"]
    assert "2 schedulers, 3 workers" in shown(a_status(engines=engines))


def test_windows_longer_than_the_servers_life_are_left_out() -> None:
    rates = [HitRate(window, 1000, 0.5, 0.75) for window in (60.0, 600.0, 3600.0)]
    reuse = [Reuse(window, 256_000, 64_000, 0.25) for window in (60.0, 600.0, 3600.0)]
    text = shown(a_status(hit_rates=rates, reuse=reuse, uptime_s=90.0))
    assert "in 1 min" in text and "in 10 min" in text and "in 1 h" not in text
    assert "25.0 % in 1 min" in text and "50.0 %" in text and "an endless cache 75.0 %" in text
    assert "in 1 h" in shown(a_status(hit_rates=rates, uptime_s=700.0))


def test_what_somebody_should_look_at_is_said() -> None:
    tier = TierStatus("redis://h", "through", "left alone", None, None, None, 0, 0, {})
    text = shown(a_status(tiers=[tier], unrecorded_shards=3, counters={"corrupt_chunks": 2}))
    for words in ("look below", "redis://h is left alone", "3 shards would not survive", "2 chunks in memory were not"):
        assert words in text
    assert "working, up" in shown(a_status())


def test_what_left_failed_or_was_refused_is_listed_by_cause() -> None:
    disk = TierStatus("disk:///kv", "through", "up", 1, 1, None, 0, 0, {"late": 3, "saved_chunks": 17, "failures": 0})
    counters = {"lookups": 50, "errors": 1_234, "dropped_chunks": 12, "lookups_refused": 8, "corrupt_chunks": 0}
    lines = [re.split(r"  +", line.strip()) for line in shown(a_status(counters=counters, tiers=[disk])).splitlines()]
    first = lines.index(["left, failed or refused", "count", "where", "counter"])
    assert lines[first + 1 : first + 6] == [
        ["evicted to make room", "7", "Memory", "evicted_chunks"],
        ["requests that failed", "1,234", "Requests", "errors"],
        ["found no room", "12", "Memory", "dropped_chunks"],
        ["lookups refused", "8", "Requests", "lookups_refused"],
        ["came after its deadline", "3", "disk:///kv", "late"],
    ]
    assert len(lines) == first + 6
    assert "refused" not in shown(a_status(evicted_chunks=0, counters={"lookups": 50}))


def test_how_long_most_requests_took_is_told_as_far_as_it_is_known() -> None:
    latency = Latency("Lookup", 100, 0, 1.0)
    latency.buckets[2], latency.buckets[-1] = 60, 40
    row = next(line for line in shown(a_status(latencies=[latency])).splitlines() if line.startswith("Lookup"))
    p50, p99 = re.split(r"  +", row.strip())[-2:]
    assert p50 == "458 µs" and p99 == "≥ 10 s"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.00025, "250 µs"),
        (0.012, "12 ms"),
        (1.5, "1.5 s"),
        (61, "1 min 1 s"),
        (3661, "1 h 1 min"),
        (90_000, "1 d 1 h"),
    ],
)
def test_times_are_shown_in_two_units_at_most(value: float, text: str) -> None:
    assert output.duration(value) == text


# -- top


@pytest.mark.faults
def test_top_draws_what_the_server_holds_within_80_by_24_and_ends_with_q(depot: Depot, used: Engine) -> None:
    with terminal("top", "--url", depot.url, "--interval", "0.1") as top:
        eventually(lambda: top.text.count("q ends") >= 3)
        assert f"kvdepot {kvdepot.__version__} at {depot.url}"[:80] in top.text
        assert re.search(r"memory +[#-]{20} ", top.text)
        assert "lookups/s" in top.text and "Lookup" in top.text
        assert top.process.poll() is None
        top.press("q")
        after = termios.tcgetattr(top.inner) if top.process.wait(20) == 0 else None
        assert after == top.before, "the terminal is left as it was"
        assert top.end() == 0
    assert "\x1b[?1049h" in top.raw and "\x1b[?1049l" in top.raw


@pytest.mark.parametrize("height", [16, 24, 40, 60])
def test_a_screen_that_is_too_small_for_all_says_of_each_table_how_much_is_left_out(height: int) -> None:
    from rich.console import Console

    spaces = [NamespaceStatus("", f"model-{number:02}", 1, 4, 1, 1, 1) for number in range(30)]
    tiers = [TierStatus(f"tier-{number:02}", "through", "up", 1, 1, None, 0, 0, {}) for number in range(3)]
    screen = Screen("ipc:///x")
    screen.show(a_status(namespaces=spaces, tiers=tiers, evicted_chunks=0), 1.0)
    console = Console(width=80, height=height, color_system=None, force_terminal=True)
    with console.capture() as captured:
        console.print(screen.draw(console), end="")
    lines = captured.get().splitlines()
    assert len(lines) == height and "q ends" in lines[-1]
    assert max(map(len, lines)) <= 80
    for name, total in (("model", 30), ("tier", 3)):
        here = sum(line.startswith(f"{name}-") for line in lines)
        more = re.search(rf"^{name}s .*?(?:\n{name}-.*)*\n\.\.\. (\d+) more", "\n".join(lines), re.MULTILINE)
        assert here + (int(more[1]) if more else 0) == total, "\n".join(lines)
    empty = sum(not line.strip() for line in lines)
    whole = 6 + 31 + 4 + 1  # the summary, both tables, the keys
    assert empty == max(0, height - whole), "room is left empty only where there is nothing more to show"


@pytest.mark.faults
def test_top_waits_for_a_server_that_goes_away_and_is_interrupted_with_130(start_depot: StartDepot) -> None:
    depot = start_depot(arena_mib=8)
    with terminal("top", "--url", depot.url, "--interval", "0.1", columns=120) as top:
        eventually(lambda: "q ends" in top.text)
        depot.stop()
        eventually(lambda: "no kvdepot server answers" in top.text or "gone" in top.text, 20.0)
        again = start_depot(url=depot.url, arena_mib=8)
        seen = len(top.raw)
        eventually(lambda: f"pid {again.process.pid}" in CONTROL.sub("", top.raw[seen:]), 20.0)
        top.process.send_signal(signal.SIGINT)
        assert top.end() == 130
        assert "Traceback" not in top.text and "\x1b[?1049l" in top.raw


@pytest.mark.faults
def test_top_without_a_terminal_says_what_there_is_instead(depot: Depot) -> None:
    done = run("top", "--url", depot.url)
    assert (done.returncode, done.stdout) == (2, "")
    assert "needs a terminal" in done.stderr and "kvdepot status" in done.stderr
    with terminal("top", "--url", depot.url, TERM="dumb") as dumb:
        assert dumb.end() == 2
        assert "needs a terminal" in dumb.text


@pytest.mark.faults
def test_the_pictures_of_the_documentation_can_be_drawn_and_ask_nobody_for_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need(modules=["torch"])
    path = Path(__file__).parents[2] / "scripts" / "terminal_pictures.py"
    spec = importlib.util.spec_from_file_location("terminal_pictures", path)
    assert spec is not None and spec.loader is not None
    pictures = importlib.util.module_from_spec(spec)
    monkeypatch.setattr(sys, "path", list(sys.path))
    spec.loader.exec_module(pictures)
    monkeypatch.setattr(pictures, "SECONDS", 2.0)
    assert pictures.main(tmp_path) == 0
    for name, words in (("status", ("tiers", "events")), ("top", ("lookups/s", "q&#160;ends"))):
        drawn = (tmp_path / f"{name}.svg").read_text()
        shown = (path.parents[1] / "docs" / "screenshots" / f"{name}.svg").read_text()
        assert not re.search(r"url\(https?:|href", drawn)
        for word in (f"kvdepot&#160;{kvdepot.__version__}", "toy-llama", *words):
            assert word in drawn and word in shown, f"{name}: {word}; draw it again"


# -- a server that is not there


@pytest.mark.faults
def test_the_wait_for_a_server_is_told_on_a_terminal_and_can_be_interrupted(tmp_path: Path) -> None:
    with terminal("status", "--url", f"ipc://{tmp_path}/x", columns=200) as waits:
        eventually(lambda: f"waiting for a server at ipc://{tmp_path}/x" in waits.text)
        waits.process.send_signal(signal.SIGINT)
        assert waits.end() == 130
        assert "Traceback" not in waits.text


# -- chunks


@pytest.mark.faults
def test_what_people_do_to_chunks_is_told_as_json(depot: Depot, used: Engine, tmp_path: Path) -> None:
    prompt = tmp_path / "prompt.json"
    prompt.write_text(json.dumps([1] * CHUNK))
    which = ("--tokens", str(prompt), "--model", used.model, "--url", depot.url, "--json")
    done = run("warm", *which)
    assert (done.returncode, json.loads(done.stdout)) == (0, {"chunks": 1, "in_memory": 1}), done.stderr
    name = f"pin-{uuid.uuid4().hex[:6]}"
    done = run("pin", name, *which)
    assert (done.returncode, json.loads(done.stdout)) == (0, {"chunks": 1, "pinned": 1}), done.stderr
    assert name in run("status", "--url", depot.url).stdout
    done = run("unpin", name, "--url", depot.url, "--json")
    assert (done.returncode, json.loads(done.stdout)) == (0, {"unpinned": name})
    done = run("unpin", name, "--url", depot.url, "--json")
    assert done.returncode == 1 and name in done.stderr
    done = run("forget", "--model", used.model, "--url", depot.url, "--json")
    assert (done.returncode, json.loads(done.stdout)) == (0, {"memory": 2})
    prompt.write_text(json.dumps([3] * CHUNK))
    done = run("warm", *which)
    assert (done.returncode, json.loads(done.stdout)) == (1, {"chunks": 1, "in_memory": 0})


@pytest.mark.faults
def test_what_may_be_left_in_a_tier_is_no_success(start_depot: StartDepot, tmp_path: Path) -> None:
    tier = f"disk://{tmp_path}/kv?capacity_gib=1"
    depot = start_depot("--tiers", tier)
    engine = Engine(depot)
    engine.store([1] * CHUNK, [0, 1, 2, 3])
    eventually(lambda: depot.status()["tiers"][0]["counters"].get("saved_chunks", 0) == 1)
    done = run("forget", "--model", engine.model[:-1], "--url", depot.url)
    assert done.returncode == 1
    assert done.stdout.splitlines()[:2] == ["memory: 1 chunks", f"disk://{tmp_path}/kv: 1 chunks"]
    assert "name those in full" in done.stdout
    done = run("forget", "--model", engine.model, "--url", depot.url)
    assert (done.returncode, len(done.stdout.splitlines())) == (0, 2)
    engine.close()


def test_what_is_to_be_forgotten_must_be_said(depot: Depot) -> None:
    done = run("forget", "--url", depot.url)
    assert (done.returncode, done.stdout) == (2, "")
    assert "--model, --salt or --all" in done.stderr


@pytest.mark.parametrize("words", [["--all", "--model", "m"], ["--all", "--salt", "s"]], ids=" ".join)
def test_to_forget_everything_and_one_thing_is_a_contradiction(words: list[str], depot: Depot) -> None:
    done = run("forget", *words, "--yes", "--url", depot.url)
    assert done.returncode == 2
    assert "--all forgets everything" in done.stderr


@pytest.mark.faults
def test_to_forget_everything_wants_yes_where_nobody_can_be_asked(depot: Depot, used: Engine) -> None:
    done = run("forget", "--all", "--url", depot.url)
    assert (done.returncode, done.stdout) == (2, "")
    assert "--yes" in done.stderr and "--dry-run" in done.stderr
    assert used.lookup([1] * CHUNK) == CHUNK
    done = run("forget", "--all", "--yes", "--json", "--url", depot.url)
    assert (done.returncode, json.loads(done.stdout)["memory"] >= 2) == (0, True), done.stderr
    assert used.lookup([1] * CHUNK) == 0


@pytest.mark.faults
def test_a_dry_run_tells_what_would_be_forgotten_and_forgets_nothing(start_depot: StartDepot, tmp_path: Path) -> None:
    tier = f"disk://{tmp_path}/kv"
    depot = start_depot("--tiers", f"{tier}?capacity_gib=1")
    engine = Engine(depot)
    for number in (1, 2):
        engine.store([number] * CHUNK, [0, 1, 2, 3])
    eventually(lambda: depot.status()["tiers"][0]["objects"] == 2)
    told = depot.status()
    done = run("forget", "--all", "--dry-run", "--json", "--url", depot.url)
    assert done.returncode == 0, done.stderr
    there = told["tiers"][0]
    assert json.loads(done.stdout) == {
        "memory": {"chunks": 2, "bytes": told["used_bytes"]},
        "tiers": {tier: {"objects_at_most": 2, "bytes_at_most": there["bytes"]}},
    }
    done = run("forget", "--model", engine.model, "--dry-run", "--url", depot.url)
    lines = done.stdout.splitlines()
    assert done.returncode == 0
    assert re.fullmatch(r"memory: 2 chunks, [\d.]+ KiB", lines[0])
    assert re.fullmatch(rf"{tier}: at most 2 objects, [\d.]+ KiB", lines[1])
    assert "nothing was removed" in lines[2]
    done = run("forget", "--salt", "nobody's", "--dry-run", "--json", "--url", depot.url)
    assert json.loads(done.stdout)["memory"] == {"chunks": 0, "bytes": 0}
    assert engine.lookup([1] * CHUNK) == CHUNK
    engine.close()


@pytest.mark.faults
@pytest.mark.parametrize("answer", ["\n", "no\n", "\x04"], ids=["enter", "no", "end of input"])
def test_to_forget_everything_asks_on_a_terminal_with_what_would_go(depot: Depot, used: Engine, answer: str) -> None:
    with terminal("forget", "--all", "--url", depot.url) as shown:
        eventually(lambda: "[y/N]" in shown.text)
        assert re.search(r"memory: \d+ chunks, [\d.]+ [KM]iB", shown.text)
        shown.press(answer)
        assert shown.end() == 1
        assert "nothing was removed" in shown.text
    assert used.lookup([1] * CHUNK) == CHUNK
    with terminal("forget", "--all", "--url", depot.url) as shown:
        eventually(lambda: "[y/N]" in shown.text)
        shown.press("y\n")
        assert shown.end() == 0
        assert re.search(r"[\r\n]memory: \d+ chunks\r\n", shown.text)
    assert used.lookup([1] * CHUNK) == 0


@pytest.mark.faults
def test_the_question_before_everything_is_forgotten_can_be_interrupted(depot: Depot, used: Engine) -> None:
    with terminal("forget", "--all", "--url", depot.url) as shown:
        eventually(lambda: "[y/N]" in shown.text)
        os.killpg(shown.process.pid, signal.SIGINT)
        assert shown.end() == 130
        assert "Traceback" not in shown.text
    assert used.lookup([1] * CHUNK) == CHUNK


def test_check_tells_what_it_found_as_json(depot: Depot, used: Engine) -> None:
    done = run("check", "--arena-name", depot.name, "--json")
    said = json.loads(done.stdout)
    assert done.returncode == 0
    assert (said["problems"], said["in_use"], said["chunks"] >= 2) == ([], True, True)


def test_keygen_names_the_files_it_made_as_json(tmp_path: Path) -> None:
    done = run("keygen", str(tmp_path / "keys"), "alice", "--json")
    assert done.returncode == 0
    files = json.loads(done.stdout)["files"]
    assert all(Path(file).is_file() for file in files) and str(tmp_path / "keys" / "alice.key") in files


@pytest.mark.faults
def test_keys_that_there_was_no_room_for_are_taken_back_and_can_be_made_again(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    for most_bytes in range(
        20, 400, 60
    ):  # the server's key, a client's, and who the clients are, each cut off somewhere
        done = subprocess.run(
            [sys.executable, "-B", "-m", "kvdepot.cli", "keygen", str(folder), "alice", "bob"],
            capture_output=True, text=True, timeout=60, check=False,
            preexec_fn=partial(resource.setrlimit, resource.RLIMIT_FSIZE, (most_bytes, most_bytes)),
        )  # fmt: skip
        if done.returncode == 0:
            break
        assert re.fullmatch(r"kvdepot: .*: File too large\n", done.stderr)
        known = tomllib.loads((folder / "clients.toml").read_text()) if (folder / "clients.toml").exists() else {}
        assert {path.stem for path in folder.glob("*.key")} - {"server"} == set(known)
        assert all(path.stat().st_size for path in folder.iterdir())
        for client in known:  # those that could be made stay; another run takes the others
            (folder / f"{client}.key").unlink()
        (folder / "clients.toml").unlink(missing_ok=True)
    else:
        pytest.fail(done.stderr)
    assert most_bytes > 80, "it was cut off more than once"
    assert read_client_key(folder / "bob.key").server == read_client_key(folder / "alice.key").server


@pytest.mark.faults
def test_progress_is_shown_on_a_terminal_alone(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps({"timestamp": n, "hash_ids": [n, 1]}) + "\n" for n in range(50)))
    words = ("simulate", str(trace), "--policy", "lru", "--capacity-blocks", "10")
    with terminal(*words) as seen:
        assert seen.end() == 0
        assert "replay" in seen.text and "Hits in %" in seen.text
    done = run(*words)
    assert (done.returncode, done.stderr) == (0, "")


# -- doctor


def doctor(*words: str, **environ: str) -> tuple[int, dict[str, list[dict[str, str]]]]:
    done = run("doctor", "--json", *words, **environ)
    assert "Traceback" not in done.stderr
    found: dict[str, list[dict[str, str]]] = {}
    for finding in json.loads(done.stdout):
        assert finding["state"] in ("ok", "warn", "fail")
        assert finding["state"] == "ok" or finding["advice"], "what to do is said"
        found.setdefault(finding["what"], []).append(finding)
    return done.returncode, found


@pytest.mark.faults
def test_doctor_finds_a_server_that_works(depot: Depot) -> None:
    code, found = doctor("--url", depot.url, KVDEPOT_ARENA_NAME=depot.name, KVDEPOT_ARENA_GIB="0.0625")
    (server,) = found["server"]
    assert server["state"] == "ok" and f"pid {depot.process.pid}" in server["text"]
    for what in ("system", "shared memory", "memory", "locked memory", "open files", "vLLM", "NVIDIA", "key"):
        assert what in found
    assert not any(depot.name in finding["text"] for finding in found["shared memory"] if finding["state"] == "warn")
    assert code == int(any(finding["state"] == "fail" for group in found.values() for finding in group))
    text = run("doctor", "--url", depot.url).stdout
    assert re.search(r"^ok +server +", text, re.MULTILINE)


def test_doctor_says_what_keeps_a_depot_from_working(tmp_path: Path) -> None:
    code, found = doctor("--url", f"ipc://{tmp_path}/x", KVDEPOT_ARENA_GIB="100000")
    assert code == 1
    assert found["shared memory"][0]["state"] == "fail"
    assert "--arena-gib" in found["shared memory"][0]["advice"]
    assert found["server"][0]["state"] == "warn" and "kvdepot serve" in found["server"][0]["advice"]


def test_doctor_goes_on_where_the_settings_are_wrong(tmp_path: Path) -> None:
    code, found = doctor("--url", f"ipc://{tmp_path}/x", KVDEPOT_CHUNK_SIZE="0", KVDEPOT_CHUNKSIZE="256")
    assert code == 1
    wrong, mistyped = found["settings"]
    assert wrong["state"] == "fail" and "KVDEPOT_CHUNK_SIZE" in wrong["text"]
    assert mistyped["state"] == "warn" and "did you mean KVDEPOT_CHUNK_SIZE?" in mistyped["advice"]
    assert "server" in found


def test_doctor_tells_a_key_that_cannot_be_used(tmp_path: Path) -> None:
    code, found = doctor("--url", f"ipc://{tmp_path}/x", "--key", str(tmp_path / "missing.key"))
    assert code == 1 and found["key"][0]["state"] == "fail" and "missing.key" in found["key"][0]["text"]


@pytest.mark.faults
def test_doctor_tells_an_arena_that_no_server_has(start_depot: StartDepot) -> None:
    def told() -> bool:
        texts = [finding["text"] for finding in doctor("--url", left.url)[1]["shared memory"]]
        return any("unused arenas take" in text and left.name in text for text in texts)

    # Of many it names a few: the first by name.
    left = start_depot("--on-stop", "keep", arena_mib=4, name=f"0-kvdepot-test-{uuid.uuid4().hex[:12]}")
    assert not told()
    assert left.stop() == 0
    assert told()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to somebody else")
def test_doctor_tells_a_socket_of_another_user(tmp_path: Path) -> None:
    path = tmp_path / "depot.sock"
    path.touch()
    os.chown(path, 12345, -1)
    code, found = doctor("--url", f"ipc://{path}")
    assert code == 1 and found["server"][0]["state"] == "fail" and "12345" in found["server"][0]["text"]


# -- completion


@pytest.fixture
def shell_path(tmp_path: Path) -> str:
    """A PATH with a `kvdepot` in it."""
    script = tmp_path / "bin" / "kvdepot"
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -m kvdepot.cli "$@"\n')
    script.chmod(0o755)
    return f"{script.parent}:{os.environ['PATH']}"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("kvdepot st", ["status"]),
        ("kvdepot serve --chunk", ["--chunk-size"]),
        ("kvdepot serve --on-stop k", ["keep"]),
        ("kvdepot serve --policy s", ["s3fifo"]),
    ],
)
def test_bash_completes_commands_options_and_their_values(shell_path: str, words: str, expected: list[str]) -> None:
    script = (
        'eval "$(kvdepot completion bash)"; COMP_WORDS=($1); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); '
        '_kvdepot_completion kvdepot; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        ["bash", "-c", script, "bash", words], env={**os.environ, "PATH": shell_path},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.stdout.split(), done.stderr) == (expected, "")


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_take_what_completion_prints(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", shell]) == 0
    said = capsys.readouterr().out
    assert f"_KVDEPOT_COMPLETE={shell}_complete" in said
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=said, text=True, check=True, timeout=30)


# -- what belongs to a checkout


@pytest.mark.parametrize("command", ["bench", "demo"])
def test_outside_a_checkout_bench_and_demo_say_where_they_are(command: str, tmp_path: Path) -> None:
    package = tmp_path / "site" / "kvdepot"
    shutil.copytree(Path(kvdepot.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    done = subprocess.run(
        [sys.executable, "-m", "kvdepot.cli", command], cwd=tmp_path, capture_output=True, text=True, timeout=60,
        env={**os.environ, "PYTHONPATH": str(package.parent)}, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"kvdepot: .*in a checkout.*\n", done.stderr)


@pytest.mark.faults
def test_bench_runs_the_benchmark_of_the_checkout_and_prints_its_figures_as_json() -> None:
    done = run("bench", "--tiny", "--only", "policies", "--json")
    assert done.returncode == 0, done.stderr
    assert "numbers mean nothing" in done.stderr
    assert json.loads(done.stdout)


def test_bench_refuses_a_family_of_figures_that_there_is_not() -> None:
    done = run("bench", "--only", "nonsense")
    assert done.returncode == 2
    assert "'nonsense'" in done.stderr


@pytest.mark.faults
def test_the_demo_says_before_it_begins_that_the_server_it_is_to_use_is_not_there(tmp_path: Path) -> None:
    need(modules=["vllm", "torch", "safetensors"])
    done = run("demo", "--url", f"ipc://{tmp_path}/x", "--lengths", "2065", "--json")
    assert (done.returncode, done.stdout) == (1, "")
    assert re.search(r"^kvdepot: no kvdepot server answers at .*`kvdepot serve`", done.stderr, re.MULTILINE)
    assert "Traceback" not in done.stderr and "engine A" not in done.stderr


def test_a_demo_of_two_depots_takes_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", "--cluster", "--url"]) == 2
    assert "--url" in capsys.readouterr().err


# -- the web page


@pytest.mark.faults
def test_open_prints_an_address_that_answers_and_the_token_that_changes_need(start_depot: StartDepot) -> None:
    need(modules=["litestar", "uvicorn", "prometheus_client"])
    at = f"127.0.0.1:{free_port()}"
    depot = start_depot("--http", at, arena_mib=8)
    which = ("--url", depot.url)
    address = eventually(lambda: run("open", *which).stdout.strip(), 30.0)
    place, _, told = address.partition("/#token=")
    assert place == f"http://{at}"
    token = run("token", *which).stdout.strip()
    assert unquote(told) == token
    codes = []
    for header in ({}, {"authorization": f"Bearer {token}"}):
        connection = http.client.HTTPConnection(at, timeout=10)
        body = json.dumps({"name": "nothing"})
        connection.request("POST", "/v1/unpin", body, {"content-type": "application/json", **header})
        codes.append(connection.getresponse().status)
        connection.close()
    assert codes[0] == 401 and codes[1] != 401
    _, found = doctor("--url", depot.url, KVDEPOT_HTTP=at)
    assert found["web page"][0]["state"] == "ok"


@pytest.mark.faults
def test_open_gives_the_token_to_nobody_who_has_the_address_that_the_server_wanted(start_depot: StartDepot) -> None:
    need(modules=["litestar", "uvicorn", "prometheus_client"])
    at = f"127.0.0.1:{free_port()}"
    first = start_depot("--http", at, arena_mib=8)
    eventually(lambda: run("open", "--url", first.url, KVDEPOT_HTTP=at).returncode == 0, 30.0)
    second = start_depot("--http", at, arena_mib=8)
    eventually(lambda: "no HTTP at" in second.logged())
    done = run("open", "--url", second.url, KVDEPOT_HTTP=at)
    assert (done.returncode, done.stdout) == (1, "") and "address is in use" in done.stderr
    assert (first.status()["http"], second.status()["http"]) == (at, "")
    _, found = doctor("--url", second.url, KVDEPOT_HTTP=at)
    assert found["web page"][0]["state"] == "warn" and "another program listens at" in found["web page"][0]["text"]
    assert first.stop() == 0
    address = eventually(lambda: run("open", "--url", second.url).stdout.strip(), 30.0)
    assert address == f"http://{at}/#token={run('token', '--url', second.url).stdout.strip()}"


@pytest.mark.faults
def test_open_says_so_where_the_server_has_no_page(start_depot: StartDepot) -> None:
    depot = start_depot("--http", "off", arena_mib=8)
    done = run("open", "--url", depot.url)
    assert (done.returncode, done.stdout) == (1, "") and "HTTP is off" in done.stderr


@pytest.mark.faults
def test_open_says_what_to_do_where_there_is_no_server(tmp_path: Path) -> None:
    done = run("open", "--url", f"ipc://{tmp_path}/x")
    assert (done.returncode, done.stdout) == (1, "")
    assert "kvdepot serve" in done.stderr
    done = run("token", "--url", f"ipc://{tmp_path}/x")
    assert done.returncode == 2 and "Traceback" not in done.stderr and str(tmp_path) in done.stderr


# -- a server that is there and does not answer


@pytest.mark.faults
def test_a_stopped_server_is_named_and_not_taken_for_one_that_was_never_started(start_depot: StartDepot) -> None:
    depot = start_depot(arena_mib=4)
    pid = depot.process.pid
    os.kill(pid, signal.SIGSTOP)
    try:
        told = [run("status", "--url", depot.url).stderr]
        (finding,) = doctor("--url", depot.url)[1]["server"]
        assert finding["state"] == "fail"
        told.append(finding["text"])
        client = MessageQueueClient(depot.url, depot.context)
        with pytest.raises(Unavailable) as silent:
            client.learn_chunk_size(0.5)
        told.append(str(silent.value))
        with pytest.raises(Unavailable) as taken:
            Claim(depot.url, "--url")
        assert f"pid {pid}" in str(taken.value)
        for text in told:
            assert f"pid {pid}" in text and f"kill -CONT {pid}" in text and "start one" not in text
    finally:
        os.kill(pid, signal.SIGCONT)
    client.close()
    assert depot.status()["clients"]


@pytest.mark.faults
def test_a_stopped_server_at_a_tcp_port_is_not_taken_for_one_that_was_never_started(start_depot: StartDepot) -> None:
    depot = start_depot(url=f"tcp://127.0.0.1:{free_port()}", arena_mib=4)
    os.kill(depot.process.pid, signal.SIGSTOP)
    try:
        said = run("status", "--url", depot.url).stderr
        assert "who listens at" in said and "start one" not in said
    finally:
        os.kill(depot.process.pid, signal.SIGCONT)
