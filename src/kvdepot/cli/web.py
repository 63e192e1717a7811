"""`kvdepot open` and `kvdepot token`: access to a server's web page, for the server's own user."""

from __future__ import annotations

import http.client
from urllib.parse import quote

import click

from kvdepot.cli import options
from kvdepot.cli.connect import connect
from kvdepot.cli.output import print_json
from kvdepot.config import Config, load
from kvdepot.errors import ConfigError, Unavailable

__all__ = ["ask_health", "open", "token"]

_ANSWER_S = 2.0
_STATUS_S = 5.0
_EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}


@click.command()
@click.option("--key", metavar="FILE", type=click.Path(), help="this client's key file (default: KVDEPOT_KEY)")
@options.web
@options.as_json
def open(as_json: bool, key: str | None, **which: str | None) -> int:
    """Print the URL of the running server's web page, as the server reports it. The token follows the #, and
    browsers do not send it; anyone with this URL can forget, pin and load chunks."""
    from kvdepot.protocol import wire
    from kvdepot.protocol.status import read

    config = _config(which)
    with connect(config.url, key) as client:
        # Ask the server, because another user's server may have the address in the settings, and would get our token.
        address = read(client.ask(wire.Status()).result(_STATUS_S)).http
    if not address:
        raise Unavailable(
            f"the server at {config.url} has no web page (yet): HTTP is off, its packages are not installed, or its "
            "address is in use; see the log of `kvdepot serve`, or run `kvdepot doctor`"
        )
    if ask_health(address) is None:
        raise Unavailable(f"the web page at {_address(address)} does not answer; see the server's log")
    page = f"{_address(address)}/#token={quote(_token(config), safe='')}"
    if as_json:
        print_json({"url": page})
    else:
        print(page, flush=True)
    return 0


@click.command()
@options.web
@options.as_json
def token(as_json: bool, **which: str | None) -> int:
    """Print the bearer token for HTTP requests that change something; beyond this host, or where clients need keys, all
    requests need it. Anyone with it can forget, pin and load chunks."""
    said = _token(_config(which))
    if as_json:
        print_json({"token": said})
    else:
        print(said, flush=True)
    return 0


def _token(config: Config) -> str:
    """The token of that server. Raises ConfigError."""
    from kvdepot.web.token import read_token

    try:
        return read_token(config)
    except ConfigError as exc:
        advice = (
            "a server creates its token when it starts, for its own user; --url or --http-token-file selects the server"
        )
        raise ConfigError(f"{exc}; {advice}") from exc


def _config(which: dict[str, str | None]) -> Config:
    return load(which.pop("file"), which)


def _address(address: str) -> str:
    """The URL for a browser on this host."""
    host, _, port = address.rpartition(":")
    return f"http://{_EVERYWHERE.get(host.strip('[]'), host)}:{port}"


def ask_health(address: str) -> int | None:
    """The status code of `/healthz` there: 200 if the server is healthy; None if nothing answers."""
    connection = http.client.HTTPConnection(_address(address).removeprefix("http://"), timeout=_ANSWER_S)
    try:
        connection.request("GET", "/healthz")
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
