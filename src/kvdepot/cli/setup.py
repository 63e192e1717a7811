"""The command for setting up: `keygen`."""

from __future__ import annotations

import click

from kvdepot.cli import options
from kvdepot.cli.output import show
from kvdepot.protocol.curve import generate


@click.command()
@click.argument("folder", metavar="DIR", type=click.Path())
@click.argument("clients", metavar="[CLIENT]...", nargs=-1)
@click.option("--tenant", default="", metavar="NAME", help="the clients' tenant; they can access only its chunks")
@options.as_json
def keygen(folder: str, clients: tuple[str, ...], tenant: str, as_json: bool) -> int:
    """Write DIR/server.key unless it exists, and DIR/CLIENT.key for each client; add the clients to DIR/clients.toml.

    Only this user can read DIR. A client's name consists of letters, digits, - and _. Start the server with --keys
    DIR, and give each client its file as KVDEPOT_KEY. Restart a running server to make it read clients.toml again.
    """
    paths = [str(path) for path in generate(folder, list(clients), tenant)]
    show(as_json, {"files": paths}, *paths)
    return 0
