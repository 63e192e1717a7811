"""`kvdepot status`: the state of a running server, once or again and again; the URL of its web page; its log."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

import click

from kvdepot.cli import options
from kvdepot.cli.connect import connect, endpoint
from kvdepot.cli.output import clean, print_json, show
from kvdepot.client.launch import Shared
from kvdepot.config import load
from kvdepot.errors import ConfigError, KVDepotError, Unavailable
from kvdepot.protocol import wire
from kvdepot.protocol.addresses import socket_path
from kvdepot.protocol.status import read
from kvdepot.web.token import read_token

_ANSWER_S = 5.0
_HEALTH_S = 2.0
_EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}


@click.command()
@click.option("-w", "--watch", metavar="[SECONDS]", is_flag=False, flag_value=2.0, type=options.Seconds(0.1, 3600),
              help="print it again every SECONDS (without a value: 2) until interrupted; with --json, one line "
              "each")  # fmt: skip
@click.option("--http", "shows_page", is_flag=True, help="print the URL of the web page instead, with the token")
@options.server
@options.as_json
def status(watch: float | None, shows_page: bool, server: options.Address, as_json: bool) -> int:
    """Show the state of a running server: memory, tokens reused, saved prefill, latencies, engines, models, tiers,
    evictions and failures; and the path of the log if an engine started the server. Other servers log to
    where they were started: a terminal, the journal of a service, a container's log.

    With --http, print only the URL of the web page, as the server reports it, with the token of the file that
    KVDEPOT_HTTP_TOKEN_FILE names, or that the server made. The token follows the #, and browsers do not send it; anyone
    with this URL can forget, lease and load chunks. HTTP requests that change something need the token (Authorization:
    Bearer), and so do all requests from other hosts, or where clients need keys.
    """
    if shows_page and watch is not None:
        raise click.UsageError("--http prints the URL once: give no --watch with it")
    place = endpoint(server.url)
    try:
        with connect(server) as client:
            if shows_page:
                return _show_page(client.ask(wire.GetStatus()).result(_ANSWER_S), place, as_json)
            while True:
                try:
                    _show(client.ask(wire.GetStatus()).result(_ANSWER_S), place, as_json, watch is not None)
                except KVDepotError as exc:
                    if watch is None:
                        raise
                    print(f"kvdepot: {exc}", file=sys.stderr, flush=True)
                if watch is None:
                    return 0
                time.sleep(watch)
    except Unavailable:
        if (log := _log_at(place)) is not None:
            print(f"kvdepot: the log of the last server that an engine started here: {log}", file=sys.stderr)
        raise


def _show(answer: Any, place: str, as_json: bool, repeats: bool) -> None:
    if as_json:
        print(json.dumps(answer), flush=True) if repeats else print_json(answer)
        return
    from kvdepot.cli import view

    now = read(answer)
    out = view.console()
    if repeats and out.is_terminal:
        out.clear()
    out.print(view.summary(now, place))
    log = _log_at(place)
    with contextlib.suppress(OSError):  # another user's server, or one that has ended
        if log is not None and os.path.samestat(Path(f"/proc/{now.pid}/fd/2").stat(), log.stat()):
            out.print(f"log       {clean(str(log))}")
    out.print()
    view.print_tables(*view.listings(now))
    if repeats and not out.is_terminal:
        out.print()


def _log_at(place: str) -> Path | None:
    """The log of the last server that an engine started at an endpoint; None if there is none."""
    log = Shared(place).log if socket_path(place) is not None else None
    return log if log is not None and log.is_file() else None


def _show_page(answer: Any, place: str, as_json: bool) -> int:
    # Ask the server, because another user's server may have the address in the settings, and would get our token.
    address = read(answer).http
    if not address:
        raise Unavailable(
            f"the server at {place} has no web page (yet): HTTP is off, or its address is in use; "
            "see the log of `kvdepot serve`, or run `kvdepot doctor`"
        )
    if ask_health(address) is None:
        raise Unavailable(f"the web page at {_local(address)} does not answer; see the server's log")
    try:
        token = read_token(load(flags={"url": place}))
    except ConfigError as exc:
        advice = (
            "a server creates its token when it starts, for its own user; KVDEPOT_HTTP_TOKEN_FILE names another file"
        )
        raise ConfigError(f"{exc}; {advice}") from exc
    url = f"{_local(address)}/#token={quote(token, safe='')}"
    show(as_json, {"url": url, "token": token}, url)
    return 0


def _local(address: str) -> str:
    """The URL of an address for a browser on this host."""
    host, _, port = address.rpartition(":")
    return f"http://{_EVERYWHERE.get(host.strip('[]'), host)}:{port}"


def ask_health(address: str) -> int | None:
    """The status code of `/healthz` there: 200 if the server is healthy; None if nothing answers."""
    import http.client  # slow to import

    connection = http.client.HTTPConnection(_local(address).removeprefix("http://"), timeout=_HEALTH_S)
    try:
        connection.request("GET", "/healthz")
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
