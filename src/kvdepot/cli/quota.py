"""`kvdepot quota`: shows how much memory each tenant has and may have, and changes it until the server ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
import msgspec

from kvdepot.cli import options
from kvdepot.cli.connect import connect
from kvdepot.cli.output import agreed, clean, console, duration, print_json, size
from kvdepot.errors import ConfigError
from kvdepot.values import parse_size

if TYPE_CHECKING:
    from kvdepot.protocol.quotas import Quota
    from kvdepot.protocol.status import TenantStatus

__all__ = ["quota"]


@click.command()
@click.argument("tenant", metavar="[TENANT]", required=False, default="")
@click.option("--floor", metavar="SIZE", help="what other tenants cannot take from it, e.g. 4GiB")
@click.option("--cap", metavar="SIZE", help="the most that it can have; 0: no cap")
@click.option("--disk-floor", metavar="SIZE", help="the same as --floor, in each tier disk://")
@click.option("--disk-cap", metavar="SIZE", help="the same as --cap, in each tier disk://")
@click.option("--weight", type=float, metavar="N", help="its part of what is left above all floors (default: 1)")
@click.option("--ttl-s", type=options.Whole(0), metavar="N", help="seconds after which its chunks expire; 0: no limit")
@click.option("--remove", is_flag=True, help="end its quota: it shares memory with all tenants that have none")
@options.destructive
@options.server
@options.as_json
def quota(
    tenant: str,
    floor: str | None,
    cap: str | None,
    disk_floor: str | None,
    disk_cap: str | None,
    weight: float | None,
    ttl_s: int | None,
    remove: bool,
    yes: bool,
    dry_run: bool,
    url: str | None,
    key: str | None,
    as_json: bool,
) -> int:
    """Show tenants' quotas; with a TENANT and options, change its quota until the server ends.

    What is not given stays as it is. A cap below what the tenant has evicts the rest, so the command then asks.
    Quotas that last are tables [tenants.NAME] of the settings file. Only clients without a tenant may change quotas.
    """
    from kvdepot.client import admin
    from kvdepot.protocol.quotas import Quota

    given = {
        "floor_bytes": None if floor is None else _bytes("--floor", floor),
        "cap_bytes": None if cap is None else _bytes("--cap", cap),
        "disk_floor_bytes": None if disk_floor is None else _bytes("--disk-floor", disk_floor),
        "disk_cap_bytes": None if disk_cap is None else _bytes("--disk-cap", disk_cap),
        "weight": weight,
        "ttl_s": ttl_s,
    }
    changes = {name: value for name, value in given.items() if value is not None}
    if (changes or remove) and not tenant:
        raise click.UsageError("give the TENANT whose quota to change")
    if changes and remove:
        raise click.UsageError("--remove ends the quota: give no other option with it")
    with connect(url, key) as client:
        now = next((each for each in admin.tenants(client) if each.tenant == tenant), None)
        new = msgspec.structs.replace(now.quota if now is not None else Quota(), **changes)
        losses = _losses(now, new) if changes and now is not None else []
        if dry_run:
            if as_json:
                print_json({"losses": losses})
            else:
                print("\n".join([*(losses or ["nothing would be evicted"]), "nothing was changed: this was a dry run"]))
            return 0
        if losses and not agreed("; ".join(losses), f"Change the quota of {clean(tenant)}?", yes, lambda: losses):
            return 1
        if remove:
            admin.set_quota(client, tenant, None)
        elif changes:
            admin.set_quota(client, tenant, new)
        shown = [each for each in admin.tenants(client) if tenant in ("", each.tenant)]
    if as_json:
        print_json([msgspec.to_builtins(each) for each in shown])
        return 0
    if not shown:
        print(f"{clean(tenant) or 'no tenant'} has {'no' if tenant else 'a'} quota", flush=True)
        return 0
    from kvdepot.cli.view import tenants

    out = console()
    out.print(tenants(shown).table(out.width))
    return 0


def _losses(now: TenantStatus, new: Quota) -> list[str]:
    """What a tenant loses at once with a new quota."""
    lost = []
    for where, used, cap in (
        ("memory", now.used_bytes, new.cap_bytes),
        ("each tier disk://", now.disk_bytes or 0, new.disk_cap_bytes),
    ):
        if cap and used > cap:
            lost.append(f"{where}: {clean(now.tenant)} has {size(used)}, and {size(used - cap)} would be evicted")
    if new.ttl_s and (not now.ttl_s or new.ttl_s < now.ttl_s):
        lost.append(f"chunks of {clean(now.tenant)} that are older than {duration(new.ttl_s)} would be removed")
    return lost


def _bytes(option: str, text: str) -> int:
    try:
        return int(parse_size(text))
    except ValueError as exc:
        raise ConfigError(f"{option}: {exc}: write 64GiB or 512MiB, say") from exc
