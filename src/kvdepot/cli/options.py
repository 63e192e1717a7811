"""Options that several commands share. A decorator passes options that belong together to its command as one value."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import click
import msgspec
from click.shell_completion import CompletionItem

from kvdepot.config import ONLY_IN_FILE, TOPICS, Config, about, words_of
from kvdepot.values import parse_size

Decorated = TypeVar("Decorated", bound=Callable[..., Any])

as_json = click.option("-j", "--json", "as_json", is_flag=True, help="print JSON")
url = click.option("-u", "--url", metavar="URL", help="the server's endpoint")

_FILE = click.Path()


class Seconds(click.FloatRange):
    """A time in seconds within bounds; `nan`, which no bound refuses, is none."""

    def convert(self, value: float, param: click.Parameter | None, ctx: click.Context | None) -> float:
        found = float(super().convert(value, param, ctx))
        if found != found:
            self.fail(f"{value} is not a number of seconds", param, ctx)
        return found


def size(text: str) -> int:
    """The type of an option for a number of bytes, with a unit."""
    try:
        return round(parse_size(text))
    except (ValueError, OverflowError) as exc:
        raise click.BadParameter(str(exc)) from exc


@dataclass(frozen=True)
class Address:
    """The server that a command asks, and the key file of the client that asks; None: from the environment."""

    url: str | None
    key: str | None


@dataclass(frozen=True)
class PromptSource:
    """The prompt that a command is about: a file with its token ids or its chunk hashes, its model and its salt."""

    tokens: str | None = None
    hashes: str | None = None
    model: str = ""
    salt: str = ""


@dataclass(frozen=True)
class Consent:
    """The options of a command that makes a permanent change; see output.confirm."""

    yes: bool
    dry_run: bool
    as_json: bool


def _as_one(name: str, kind: type[Any], *options: Callable[[Any], Any]) -> Callable[[Decorated], Decorated]:
    """A decorator that adds options to a command and passes their values to it as one `kind` under `name`."""

    def decorate(command: Decorated) -> Decorated:
        @functools.wraps(command)
        def call(**given: Any) -> Any:
            values = {field: given.pop(field) for field in kind.__dataclass_fields__}
            return command(**given, **{name: kind(**values)})

        decorated: Any = call
        for option in reversed(options):
            decorated = option(decorated)
        return decorated  # type: ignore[no-any-return]

    return decorate


server = _as_one(
    "server", Address, url,
    click.option("-k", "--key", metavar="FILE", type=_FILE, help="this client's key file (default: KVDEPOT_KEY)"),
)  # fmt: skip
destructive = _as_one(
    "consent", Consent,
    click.option("-y", "--yes", is_flag=True, help="do not ask; required without a terminal"),
    click.option("--dry-run", is_flag=True, help="show what would happen, and change nothing"),
    as_json,
)  # fmt: skip
prompt = _as_one(
    "source", PromptSource,
    click.option("--tokens", metavar="FILE", type=_FILE, help="token ids of the prompt, JSON or plain; - for stdin"),
    click.option("--hashes", metavar="FILE", type=_FILE, help="chunk hashes of the prompt in hex, from its first "
                 "chunk; - for stdin"),
    click.option("-m", "--model", default="", metavar="NAME", help="a name that `kvdepot status` lists, or a unique "
                 "prefix"),
    click.option("--salt", default="", metavar="TEXT", help="the cache_salt of the requests"),
)  # fmt: skip

PROMPT = """\b
The token ids of a prompt, as vLLM's server has them:
  curl -s http://127.0.0.1:8000/tokenize -H 'Content-Type: application/json' \\
    -d '{"model": "MODEL", "prompt": "You are ..."}' | jq .tokens > tokens
"""
"""The end of the help of commands that take a prompt: where to get one."""


def settings(command: Decorated) -> Decorated:
    """Every setting of the server as a flag, and --config. The command must be of the class `Settings`."""
    for field in reversed(msgspec.structs.fields(Config)):
        if field.name in ONLY_IN_FILE:
            continue
        meta, words, many = about(field.name), words_of(field.name), field.name == "tiers"
        value = f"{field.default:g}" if isinstance(field.default, float) else str(field.default) or "empty"
        default = "a unix socket of this user" if field.name == "url" else "none" if many else value
        command = click.option(
            *(["-u"] if field.name == "url" else []), "--" + field.name.replace("_", "-"), field.name,
            metavar=f"[{'|'.join(words)}]" if words else (meta.extra or {})["metavar"], multiple=many,
            help=f"{meta.description} (default: {default})", shell_complete=_complete,
        )(command)  # fmt: skip
    return click.option("--config", "file", metavar="FILE", type=_FILE, help="settings file (TOML)")(command)


def _complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(word) for word in words_of(param.name or "") if word.startswith(incomplete)]


class Settings(click.Command):
    """A command with the server's settings, of which `--tiers` takes several values: `--tiers URL URL`."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        topics: dict[str, list[tuple[str, str]]] = {topic: [] for topic in TOPICS}
        for param in self.get_params(ctx):
            topic = (about(param.name or "").extra or {}).get("topic", "Other options")
            if record := param.get_help_record(ctx):
                topics.setdefault(topic, []).append(record)
        for topic, records in topics.items():
            with formatter.section(topic):
                formatter.write_dl(records)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, list(_one_by_one(args)))


def _one_by_one(words: list[str]) -> Iterator[str]:
    """Turn `--tiers A B` into `--tiers A --tiers B`. This is unambiguous, because the command takes no arguments."""
    flag, has_value = "", False
    for word in words:
        if word.startswith("-"):
            flag, has_value = word if word == "--tiers" else "", False
        elif flag and has_value:
            yield flag
        else:
            has_value = True
        yield word
