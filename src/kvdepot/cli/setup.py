"""What is done once: `keygen`, `calibrate`, and the shell's `completion`."""

from __future__ import annotations

import click
import msgspec

from kvdepot.cli import options
from kvdepot.cli.output import print_json, progress
from kvdepot.config import load

__all__ = ["calibrate", "completion", "keygen"]


@click.command()
@click.argument("folder", metavar="DIR", type=click.Path())
@click.argument("clients", metavar="[CLIENT]...", nargs=-1)
@click.option("--tenant", default="", metavar="NAME", help="the one tenant whose chunks these clients reach")
@options.as_json
def keygen(folder: str, clients: tuple[str, ...], tenant: str, as_json: bool) -> int:
    """Write DIR/server.key unless it is there, DIR/CLIENT.key for each client, and who they are into DIR/clients.toml.

    DIR is made for this user alone; a client's name is of letters, digits, - and _. Start the server with --keys DIR;
    give each client its file as KVDEPOT_KEY. A running server learns of new clients, and of those taken out of
    clients.toml, when it is started again.
    """
    from kvdepot.curve import generate

    paths = [str(path) for path in generate(folder, list(clients), tenant)]
    if as_json:
        print_json({"files": paths})
    else:
        print("\n".join(paths), flush=True)
    return 0


@click.command()
@click.option("--gpu", default="", metavar="UUID|N", help="one GPU (default: all)")
@options.as_json
def calibrate(gpu: str, as_json: bool) -> int:
    """Measure each way of copying between GPUs and pinned memory, as a server does when the first worker registers
    from one, and print how fast each is and which is taken. No server is needed or changed."""
    staging_bytes = load().gpu_staging_mib << 20
    from kvdepot.devices.cuda import calibrate as ways
    from kvdepot.devices.cuda.driver import load as load_driver
    from kvdepot.devices.cuda.gpus import Gpu

    found = []
    cuda = load_driver()
    uuids = ways.find(cuda, gpu)
    for number, uuid in enumerate(uuids):
        with progress() as told:
            told(f"measuring {uuid}", number, len(uuids))
            device = Gpu(cuda, uuid, staging_bytes)
            try:
                figures = ways.measure(device)
            finally:
                device.close()
        if as_json:
            found.append({"uuid": uuid, "name": device.name, "figures": figures, "without": device.ways.without})
            continue
        print(f"{device.name} {uuid}", *ways.table(figures), sep="\n", flush=True)
        if device.ways.without:
            print(f"copies by programs of the GPU cannot be had: {device.ways.without}", flush=True)
    if as_json:
        print_json(msgspec.to_builtins(found))
    return 0


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> int:
    """Print what makes a shell complete commands, options and their values.

    \b
    bash  kvdepot completion bash > ~/.local/share/bash-completion/completions/kvdepot
    zsh   kvdepot completion zsh > a folder of $fpath, as _kvdepot
    fish  kvdepot completion fish > ~/.config/fish/completions/kvdepot.fish
    """
    from click.shell_completion import get_completion_class

    from kvdepot.cli.root import COMPLETE, root

    kind = get_completion_class(shell)
    assert kind is not None, shell
    print(kind(root, {}, "kvdepot", COMPLETE).source(), flush=True)
    return 0
