"""Tables of the documentation that are made from the code, and links of the site. Called by mkdocs for each page.

    python docs/hooks.py       writes the tables of all pages anew; a test fails if one of them is not up to date

<!-- table: settings --> begins one, and <!-- end of table --> ends it:

settings                             every setting of the server; `tier`, `disk`, `redis`, `object`, `mooncake`: options
counters                             what the server counts; `refusals`: what it refused; `tiers`: what a tier counts
metrics                              figures of the status and distributions, as Prometheus gets them
versions                             of the protocol and of what is stored

<!-- commands -->                    the help of every command, on the site alone
--8<-- "SECURITY.md"                 a page that lies in the repository's root; a line of its own, too

Links are written so that they work in the repository: `docs/gpus.md` in a page of the root, `../SECURITY.md` in one of
docs/. The site has the root's pages beside the others, in lower case, so links between the two are changed here.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec

_ROOT = Path(__file__).parents[1]
_BOOSTS = {"api": 0.1, "comparison": 0.4, "figures": 0.4, "library": 0.5, "migrate-from-lmcache": 0.4, "glossary": 0.5}
_BOOSTS |= dict.fromkeys(("vllm", "tiers", "security", "memory", "troubleshooting", "kubernetes"), 1.5)
_BOOSTS |= dict.fromkeys(("start", "log", "gpus"), 1.3)
"""How the site's search ranks pages, where it is not 1: the names of the API have most of a user's words in them."""
_TABLE = re.compile(r"^(<!-- table: (\w+) -->)$.*?^(<!-- end of table -->)$", re.M | re.S)
_TABLES = {
    "settings": "config:Config", "tier": "tiers:Options", "disk": "tiers.disk:DiskOptions",
    "redis": "tiers.redis:RedisOptions", "object": "tiers.object:ObjectOptions",
    "mooncake": "tiers.mooncake:MooncakeOptions",
}  # fmt: skip
"""The structs whose fields a table lists, by its name: module and class."""
_OF_ROOT = r"ARCHITECTURE\.md|SECURITY\.md|CONTRIBUTING\.md"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The page with what it includes, links that lead within the site, and its tables filled in."""
    if page.file.src_uri.startswith(("decisions", "internals/", "architecture", "contributing")):
        page.meta.setdefault("search", {"exclude": True})  # whoever searches for a word wants to use it
    elif boost := _BOOSTS.get(page.file.src_uri.removesuffix(".md")):
        page.meta.setdefault("search", {"boost": boost})
    markdown = re.sub(r"^<!-- commands -->$", lambda _: _commands(), markdown, flags=re.M)
    markdown = re.sub(r'^--8<-- "(\w+\.md)"$', lambda found: _of_root(found[1]), markdown, flags=re.M)
    return re.sub(rf"\]\(\.\./((?:\.\./)*)({_OF_ROOT})(?=[#)])", _lower, markdown)


def fill(markdown: str) -> str:
    """A page with its tables as the code has them."""
    return _TABLE.sub(lambda found: f"{found[1]}\n\n{_table(found[2])}\n\n{found[3]}", markdown)


def on_page_content(html: str, **_: Any) -> str:
    """The page with names (settings, paths, flags) marked, which style.css keeps in one line; the theme breaks code."""
    return re.sub(r"<code>([^\s<]{1,40})</code>", r'<code class="name">\1</code>', html)


def _of_root(name: str) -> str:
    """A page of the root, with links that lead from docs/."""
    text = re.sub(r"(?<=[\"(])docs/", "", (_ROOT / name).read_text())
    return re.sub(rf"\]\(()({_OF_ROOT})(?=[#)])", _lower, text)


def _lower(link: re.Match[str]) -> str:
    return f"]({link[1]}{link[2].lower()}"


def _table(name: str) -> str:
    if name in ("counters", "refusals", "tiers"):
        return _counters(name)
    if name == "metrics":
        return _metrics()
    if name == "versions":
        return _versions()
    module, _, owner = _TABLES[name].partition(":")
    head = [f"| {'setting' if name == 'settings' else 'option'} | default | meaning |", "|---|---|---|"]
    kind = getattr(importlib.import_module(f"kvdepot.{module}"), owner)
    fields = msgspec.structs.fields(kind)
    return "\n".join([*head, *(f"| `{f.name}` | {_default(f)} | {_description(kind, f.name)} |" for f in fields)])


def _counters(name: str) -> str:
    from kvdepot.protocol.counters import SERVER, TIER, refusal

    shown = TIER if name == "tiers" else [each for each in SERVER if bool(refusal(each)) == (name == "refusals")]
    if name == "refusals":
        head = ["| counter | counts | when it grows |", "|---|---|---|"]
        return "\n".join([*head, *(f"| `{c.name}` | {c.meaning} | {c.advice} |" for c in shown)])
    prefix = "kvdepot_tier_" if name == "tiers" else "kvdepot_"
    head = ["| counter, in Prometheus | counts | when it grows |", "|---|---|---|"]
    rows = (f"| `{c.name}`, `{prefix}{c.series}_total` | {c.meaning} | {c.advice} |" for c in shown)
    return "\n".join([*head, *rows])


def _metrics() -> str:
    """A row for each meaning, with the metrics that have it, and their labels."""
    from kvdepot.protocol.figures import figures
    from kvdepot.protocol.status import DISTRIBUTIONS, FAMILIES, TIER_DISTRIBUTIONS

    names: dict[str, list[str]] = {}
    for family in FAMILIES:
        labels = f"{{{','.join(family.labels)}}}" if family.labels else ""
        for each in figures(family.rows):
            name = f"`kvdepot_{family.prefix}{each.metric}{'_total' * (each.kind == 'counter')}{labels}`"
            names.setdefault(each.meaning, []).append(name)
    rows = [(", ".join(each), meaning) for meaning, each in names.items()]
    rows += [(f"`kvdepot_{name}`", f"histogram: {meaning}") for name, meaning in DISTRIBUTIONS.items()]
    rows += [
        (f"`kvdepot_tier_{name}{{tier}}`", f"histogram: {meaning}") for name, meaning in TIER_DISTRIBUTIONS.items()
    ]
    return "\n".join(["| metric | meaning |", "|---|---|", *(f"| {name} | {meaning} |" for name, meaning in rows)])


def _versions() -> str:
    from kvdepot.memory import arena_header
    from kvdepot.protocol import wire
    from kvdepot.tiers import format as tier_format

    rows = [
        ("protocol between engines and server", wire.VERSION, "none", "refused on both sides, with the code `version`"),
        (
            "chunks in memory (the arena)",
            arena_header.VERSION,
            "none",
            "the file is refused, and the message says what to do",
        ),
        ("objects in tiers", tier_format.VERSION, "none", "a miss"),
    ]
    head = ["| what | version | older versions that are read | any other version |", "|---|---|---|---|"]
    return "\n".join([*head, *(f"| {what} | {now} | {read} | {other} |" for what, now, read, other in rows)])


def _description(kind: type[Any], name: str) -> str:
    meta = get_args(get_type_hints(kind, include_extras=True)[name])[1]
    return str(meta.description).replace("|", r"\|")


def _default(field: Any) -> str:
    default = field.default
    if default is msgspec.NODEFAULT:
        return "required" if field.default_factory is msgspec.NODEFAULT else ""
    return "" if default in ("", ()) else f"`{default:g}`" if isinstance(default, float) else f"`{default}`"


def _commands() -> str:
    """The help of every command, as a terminal of 100 columns shows it."""
    import click

    from kvdepot.cli.root import root

    whole = click.Context(root, info_name="kvdepot", terminal_width=100, help_option_names=["-h", "--help"])
    parts = [f"## kvdepot\n\n```text\n{root.get_help(whole)}\n```"]
    for name in root.list_commands(whole):
        command = root.get_command(whole, name)
        assert command is not None, name
        text = command.get_help(click.Context(command, whole, name, terminal_width=100))
        if name == "config":  # it has every option of `serve`
            head, _, rest = text.partition("\n\nMemory:")
            own = rest.partition("Other options:")[2]
            text = f"{head}\n\n  It takes the options of `kvdepot serve`, and:\n\nOther options:{own}"
        parts.append(f"## {name}\n\n```text\n{text}\n```")
    return "\n\n".join(parts)


if __name__ == "__main__":
    for path in (_ROOT / "docs").glob("*.md"):
        path.write_text(fill(path.read_text()))
