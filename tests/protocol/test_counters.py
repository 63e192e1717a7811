"""The table of counters: a new entry appears wherever counters are shown."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from kvdepot.protocol.counters import SERVER, TIER, Counted, Counters, losses, refusal
from kvdepot.protocol.status import Status, TierStatus

ROOT = Path(__file__).parents[2]
NOTHING = dict.fromkeys((field.name for field in msgspec.structs.fields(Status) if field.required), 0)

PLANTED = """
import importlib.util, json, sys
from kvdepot.protocol import counters
counters.SERVER += (
    counters.Counted("planted", "frogs", "Frogs in the pond.", "frogs that leapt", "Requests", "Drain it.", "Frogs",
                     "warning"),
)
import msgspec
from rich.console import Console
from kvdepot.cli import view
from deploy.observability import alerts
from kvdepot.protocol.status import Status
from kvdepot.web.prometheus import families
from prometheus_client.openmetrics.exposition import generate_latest
from kvdepot.web.history import History
from kvdepot.web.live import LiveStatus

counted = counters.Counters()
counted["planted"] += 3
status = Status(**json.loads(sys.argv[1]), counters=counted)

class Once:
    def collect(self):
        return families(status)

class Answered:
    number = 1

class Asked:
    turn = Answered()
    on_turn = None
    history = History()
    class client:
        server_url = "ipc:///nowhere"
    def latest(self):
        return self
    def trouble(self):
        return ""

asked = Asked()
asked.status = status
console = Console(width=200, file=sys.stderr)
with console.capture() as shown:
    for listing in view.listings(status):
        console.print(listing.table(200))
spec = importlib.util.spec_from_file_location("hooks", "docs/hooks.py")
hooks = importlib.util.module_from_spec(spec)
spec.loader.exec_module(hooks)
print(json.dumps({
    "status": msgspec.to_builtins(status)["counters"]["planted"],
    "prometheus": generate_latest(Once()).decode(),
    "terminal": shown.get(),
    "page": json.loads(LiveStatus(asked).encoded())["losses"],
    "alerts": alerts.render(),
    "guide": hooks.fill("<!-- table: counters -->" + chr(10) + "<!-- end of table -->"),
}))
"""


def test_what_is_added_in_one_line_is_found_everywhere() -> None:
    command = [sys.executable, "-c", PLANTED, json.dumps(NOTHING)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["status"] == 3
    assert "# HELP kvdepot_planted Frogs in the pond.\n" in found["prometheus"]
    assert "kvdepot_planted_total 3.0\n" in found["prometheus"]
    assert "frogs that leapt" in found["terminal"]
    assert found["page"] == [{"where": "Requests", "what": "frogs that leapt", "count": 3, "counter": "planted"}]
    assert "alert: Frogs\n" in found["alerts"] and "increase(kvdepot_planted_total[1h]) > 0" in found["alerts"]
    assert "| `planted` | `kvdepot_planted_total` | Frogs in the pond. | Drain it. |" in found["guide"]


@pytest.mark.parametrize("table", [SERVER, TIER], ids=["server", "tier"])
def test_each_counter_stands_once_in_its_table_and_is_a_sentence(table: tuple[Counted, ...]) -> None:
    names = [counted.name for counted in table]
    assert len(set(names)) == len(names)
    for counted in table:
        assert counted.meaning.endswith(".") and not counted.meaning.endswith("..")
        assert not counted.advice or counted.advice.endswith(".")
        assert bool(counted.alert) == bool(counted.severity)
        assert not refusal(counted) or counted.loss


def test_a_counter_that_is_in_no_table_is_not_counted() -> None:
    with pytest.raises(KeyError):
        Counters()["lookup"] += 1


def test_losses_are_told_of_the_server_and_of_each_tier_and_not_those_of_0() -> None:
    tier = TierStatus("disk", "through", "up", 1, 2, 4, 0, 0, {"evicted": 2, "saved_chunks": 7, "late": 0})
    status = Status(**NOTHING, counters={**Counters(), "dropped_chunks": 1, "lookups": 9}, tiers=[tier])
    assert [(loss.where, loss.counter, loss.count) for loss in losses(status)] == [
        ("Memory", "dropped_chunks", 1), ("disk", "evicted", 2),
    ]  # fmt: skip
