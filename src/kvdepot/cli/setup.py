"""Commands for setting up: `keygen` and `calibrate`."""

from __future__ import annotations

from contextlib import closing, nullcontext
from typing import Any

import click

from kvdepot.cli import options
from kvdepot.cli.output import print_json, progress, show
from kvdepot.config import load
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


@click.command()
@click.option("--gpu", default="", metavar="UUID|N", help="one GPU (default: all)")
@click.option("--busy", is_flag=True, help="measure beside another process that keeps the GPU busy")
@options.as_json
def calibrate(gpu: str, busy: bool, as_json: bool) -> int:
    """Measure every copy path between GPUs and pinned memory, as a server does when a GPU's first worker registers.
    Prints the speed of each and which one is used. Neither needs nor affects a server.

    With --busy, measures how copies and an engine's kernels slow each other down, and prints the setting
    gpu_dma_from_kib that follows. Takes some 10 s more; needs Triton and 1 GiB of GPU memory."""
    config = load()
    from kvdepot.devices.cuda import calibrate as measuring
    from kvdepot.devices.cuda.driver import load as load_driver
    from kvdepot.devices.cuda.gpus import Gpu
    from kvdepot.devices.cuda.occupant import Occupant

    found: list[dict[str, Any]] = []
    cuda = load_driver()
    uuids = measuring.find(cuda, gpu)
    for number, uuid in enumerate(uuids):
        with progress() as update:
            update(f"measuring {uuid}", number, len(uuids))
            device = Gpu(cuda, uuid, config.gpu_staging_mib << 20)
            with closing(device), closing(Occupant(uuid)) if busy else nullcontext() as occupant:
                figures = measuring.measure(device, occupant)
        choice = measuring.choose(figures, config.gpu_dma_from_kib << 10)
        if as_json:
            found.append({"uuid": uuid, "name": device.name, "figures": figures, "without": device.copy_paths.without})
            if busy:
                found[-1]["gpu_dma_from_kib"] = measuring.dma_from(choice) >> 10
            continue
        print(f"{device.name} {uuid}", *measuring.table(figures, choice), sep="\n", flush=True)
        if device.copy_paths.without:
            print(f"the copy kernel is not available: {device.copy_paths.without}", flush=True)
        if busy:
            print(f"beside a busy GPU: kvdepot serve --gpu-dma-from-kib {measuring.dma_from(choice) >> 10}", flush=True)
    if as_json:
        print_json(found)
    return 0
