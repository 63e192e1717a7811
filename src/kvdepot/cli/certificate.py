"""The verdict of `kvdepot certify`, and its page as text and HTML.

Invariant: an answer passes if it equals that of the engine's own prefix cache bit for bit. Where that cannot be asked
for (other tokens were cached, or the engine does not repeat itself), it may differ by `ROOM` times as much as two
answers of this run without the depot do.
"""

from __future__ import annotations

import io
from itertools import combinations
from typing import TYPE_CHECKING

import msgspec

from kvdepot import __version__
from kvdepot.cli.completions import MOST, ROOM, Case, Completion, Description, difference
from kvdepot.cli.output import clean, duration
from kvdepot.cli.pressure import Pressure
from kvdepot.values import plural

if TYPE_CHECKING:
    from rich.console import Console

_BAR_CELLS = 24
_NOT_TRIED = (
    "prefill and decode on different engines, several hosts",
    "images and other inputs than text, sampling other than greedy",
)
_HTML = """<!doctype html><html lang="en"><meta charset="utf-8"><title>kvdepot certify</title>
<style>{stylesheet} body {{ color: {foreground}; background: {background}; margin: 2em }}</style>
<pre style="font: 15px/1.4 ui-monospace, monospace">{code}</pre></html>
"""


class Judgement(msgspec.Struct, frozen=True):
    """One answer with KV from one source, as `road` names it. difference: to that of the engine's own cache, at most
    `MOST`. fault: what is wrong, or empty. tokens: of the prompt."""

    road: str
    prompt: str
    ttft_s: float
    loaded: int = 0
    identical: bool = True
    difference: float = 0.0
    fault: str = ""
    tokens: int = 0


class Certificate(msgspec.Struct):
    """All that `kvdepot certify` has found out. rounding: the largest difference of logprobs between two answers
    without the depot. pressure: of the stage that is run if asked for."""

    engine: Description
    chunk_tokens: int
    passed: bool = True
    rounding: float = 0.0
    results: list[Judgement] = []
    faults: list[str] = []
    pressure: Pressure | None = None
    version: str = __version__

    def note_computed(self, cases: list[Case]) -> None:
        """Take over the answers without the depot."""
        for case in cases:
            pairs = combinations([*case.computed, *case.own], 2)
            self.rounding = max(self.rounding, *(difference(*pair)[0] for pair in pairs))
            self.results.append(Judgement("computed", case.name, case.computed[0].ttft_s, tokens=len(case.tokens)))
            self.results.append(Judgement("own cache", case.name, case.own[-1].ttft_s, tokens=len(case.tokens)))

    def add(self, road: str, case: Case, answer: Completion) -> None:
        """Judge an answer with the depot."""
        own = case.own[-1]
        most, where = difference(own if answer.cached else case.computed[0], answer)
        is_exact = answer.cached == own.cached and not difference(*case.own)[1]
        fault = where if is_exact or most > ROOM * self.rounding or most == MOST else ""
        if answer.failed and not fault:
            fault = f"{plural(answer.failed, 'shard')} could not be loaded"
        if answer.loaded < case.expected and not fault:
            few = f"{answer.loaded} of {case.expected} tokens" if answer.loaded else "nothing"
            fault = f"{few} came from the depot"
        self.results.append(
            Judgement(road, case.name, answer.ttft_s, answer.loaded, not where, most, fault, len(case.tokens))
        )
        if fault:
            self.fail(f"{road}, prompt {case.name}: {fault}")

    def fail(self, fault: str) -> None:
        self.passed = False
        self.faults.append(fault)

    def page(self) -> str:
        """The page as HTML that loads nothing."""
        from rich.console import Console

        out = Console(record=True, file=io.StringIO(), width=110, highlight=False, markup=False)
        self.print(out)
        return out.export_html(code_format=_HTML)

    def print(self, out: Console) -> None:
        from rich.text import Text

        from kvdepot.cli.view import Listing

        style = "bold green" if self.passed else "bold red"
        out.print(Text.assemble(("PASSED" if self.passed else "FAILED", style), f": {clean(self.engine.model)}"))
        facts = [*(f"{name} {value}" for name, value in self.engine.tried.items() if value), f"kvdepot {self.version}"]
        out.print(f"{clean(', '.join(facts))}, chunks of {self.chunk_tokens} tokens\n")
        most, rows = max(each.ttft_s for each in self.results), []
        prompts = list(dict.fromkeys(each.prompt for each in self.results))
        for each in sorted(self.results, key=lambda each: prompts.index(each.prompt)):
            is_first = each.road == "computed"
            said: str | Text = "identical" if each.identical else "differs"
            if each.fault:
                said = Text("NOT LOADED" if each.identical else "WRONG", "bold red")
            bar = Text("█" * max(1, round(each.ttft_s / most * _BAR_CELLS)), "cyan")
            shown = "" if is_first or each.road == "own cache" else said
            rows.append([each.prompt * is_first, each.road, duration(each.ttft_s), f"{each.loaded:,}", shown, bar])
        out.print(Listing(("prompt", "from", ">first token", ">loaded", "answer", ""), rows).table(out.width))
        out.print(
            "\nidentical: tokens and logprobs are bit for bit those of the engine's own prefix cache or, if nothing was"
            " cached, of the computed answer. The engine's answers to one prompt without the depot differ from each "
            f"other by at most {self.rounding:.3g} in a logprob."
        )
        if self.pressure is not None:
            self.pressure.print(out)
        load = [] if self.pressure is not None else ["load (requests ran one at a time; --pressure tries it)"]
        untried = [*(name for name, value in self.engine.tried.items() if not value), *load, *_NOT_TRIED]
        for title, lines in (("What is wrong", self.faults), ("Not tried", untried)):
            if lines:
                out.print("\n".join([f"\n{title}:", *(f"- {clean(line)}" for line in lines)]), soft_wrap=True)
