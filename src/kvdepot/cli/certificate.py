"""The verdict of `kvdepot certify`, its page as text and HTML, and the messages between command and engines.

Invariant: an answer passes if it equals that of the engine's own prefix cache bit for bit. Where that cannot be asked
for (other tokens were cached, or the engine does not repeat itself), it may differ by `_ROOM` times as much as two
answers of this run without the depot do.
"""

from __future__ import annotations

import io
import math
from itertools import combinations
from typing import TYPE_CHECKING, Literal, TypeAlias

import msgspec

from kvdepot import __version__
from kvdepot.cli.output import clean, duration
from kvdepot.values import plural

if TYPE_CHECKING:
    from rich.console import Console

Source: TypeAlias = Literal["nothing", "computing", "own cache", "depot"]
"""Where an answer's KV comes from. Computing stores it in the depot, too; the others store nothing there, or a second
try would find what the first one has stored."""
_ROOM = 2.0
"""The few answers without the depot do not show the largest difference that rounding can make."""
_MOST = 1e9
"""The largest difference: a token that is not among the likeliest of the other answer, or no number. It fails any
answer with the depot."""
_BAR_CELLS = 24
_NOT_TRIED = (
    "prefill and decode on different engines, several hosts",
    "load (requests ran one at a time)",
    "images and other inputs than text, sampling other than greedy",
)
_HTML = """<!doctype html><html lang="en"><meta charset="utf-8"><title>kvdepot certify</title>
<style>{stylesheet} body {{ color: {foreground}; background: {background}; margin: 2em }}</style>
<pre style="font: 15px/1.4 ui-monospace, monospace">{code}</pre></html>
"""


class Generate(msgspec.Struct, tag=True):
    """A command to an engine: answer prompts together, with one adapter. source: of their KV."""

    prompts: list[list[int]]
    adapter: int
    source: Source
    new_tokens: int


class Encode(msgspec.Struct, tag=True):
    """A command to an engine: turn a text into tokens."""

    text: str


class Description(msgspec.Struct):
    """An engine. tried: what is special about it, empty for what it has not. longest: tokens of prompt and answer."""

    model: str
    tried: dict[str, str]
    adapters: list[str]
    block_tokens: int
    longest: int
    vocabulary: int
    has_tokenizer: bool


class Completion(msgspec.Struct, frozen=True):
    """An engine's answer to one prompt. logprobs: of the likeliest tokens at each place, by token.

    ttft_s: seconds to the first token. cached: prompt tokens that were not computed; loaded: those that the depot had.
    failed: shards that could not be loaded, whose tokens were computed.
    """

    ttft_s: float
    tokens: list[int]
    logprobs: list[dict[str, float]]
    cached: int
    loaded: int
    failed: int


class Case(msgspec.Struct):
    """A prompt, for the model (adapter 0) or an adapter. computed: its answers alone and together with the others; own:
    twice from the engine's own prefix cache. expected: tokens that should be loaded, at least."""

    name: str
    tokens: list[int]
    adapter: int
    computed: list[Completion] = []
    own: list[Completion] = []
    expected: int = 1


def difference(one: Completion, other: Completion) -> tuple[float, str]:
    """The largest difference of logprobs up to the first other token, and where `other` begins to differ."""
    most, where = 0.0, ""
    for place, (mine, others, left, right) in enumerate(
        zip(one.tokens, other.tokens, one.logprobs, other.logprobs, strict=True), 1
    ):
        for token in left:
            if token in right or token in (str(mine), str(others)):  # not those that just one has among the likeliest
                gap = abs(left[token] - right.get(token, math.inf)) if left[token] != right.get(token) else 0.0
                most = max(most, gap if gap < _MOST else _MOST)
                if gap != 0.0 and not where:
                    where = f"token {place}: the logprob of {token} is {right.get(token)} instead of {left[token]}"
        if mine != others:
            return most, f"token {place} is {others} instead of {mine}; {where}"
    return most, where or ("" if one.logprobs == other.logprobs else "other tokens are among the likeliest")


class Judgement(msgspec.Struct, frozen=True):
    """One answer with KV from one source, as `road` names it. difference: to that of the engine's own cache, at most
    `_MOST`. fault: what is wrong, or empty."""

    road: str
    prompt: str
    ttft_s: float
    loaded: int = 0
    identical: bool = True
    difference: float = 0.0
    fault: str = ""


class Certificate(msgspec.Struct):
    """All that `kvdepot certify` has found out. rounding: the largest difference of logprobs between two answers
    without the depot."""

    engine: Description
    chunk_tokens: int
    passed: bool = True
    rounding: float = 0.0
    results: list[Judgement] = []
    faults: list[str] = []
    version: str = __version__

    def note_computed(self, cases: list[Case]) -> None:
        """Take over the answers without the depot."""
        for case in cases:
            pairs = combinations([*case.computed, *case.own], 2)
            self.rounding = max(self.rounding, *(difference(*pair)[0] for pair in pairs))
            self.results.append(Judgement("computed", case.name, case.computed[0].ttft_s))
            self.results.append(Judgement("own cache", case.name, case.own[-1].ttft_s))

    def add(self, road: str, case: Case, answer: Completion) -> None:
        """Judge an answer with the depot."""
        own = case.own[-1]
        most, where = difference(own if answer.cached else case.computed[0], answer)
        is_exact = answer.cached == own.cached and not difference(*case.own)[1]
        fault = where if is_exact or most > _ROOM * self.rounding or most == _MOST else ""
        if answer.failed and not fault:
            fault = f"{plural(answer.failed, 'shard')} could not be loaded"
        if answer.loaded < case.expected and not fault:
            few = f"{answer.loaded} of {case.expected} tokens" if answer.loaded else "nothing"
            fault = f"{few} came from the depot"
        self.results.append(Judgement(road, case.name, answer.ttft_s, answer.loaded, not where, most, fault))
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
        untried = [*(name for name, value in self.engine.tried.items() if not value), *_NOT_TRIED]
        for title, lines in (("What is wrong", self.faults), ("Not tried", untried)):
            if lines:
                out.print("\n".join([f"\n{title}:", *(f"- {clean(line)}" for line in lines)]), soft_wrap=True)
