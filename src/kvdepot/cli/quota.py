"""`kvdepot quota`: shows how much memory each tenant or salt has and may have; changes it until the server ends."""

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
@click.option("--salt", default="", metavar="TEXT", help="not the tenant, but its requests with this cache_salt")
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
    salt: str,
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
    """Show quotas; with a TENANT, a salt or both, and options, change its quota until the server ends.

    What is not given stays as it is. A cap below what the tenant or salt has evicts the rest, so the command then asks.
    A salt without a TENANT is one of clients without a tenant. The memory of a salt with a quota does not count for its
    tenant. Quotas that last are tables [tenants.NAME] and [salts.SALT] of the settings file. Only clients without a
    tenant may change quotas. Salts are shown by the beginning of their hash.
    """
    from kvdepot.client import admin
    from kvdepot.protocol.keys import salt_tag
    from kvdepot.protocol.quotas import Quota, name_of, shown_tag

    given = {
        "floor_bytes": None if floor is None else _bytes("--floor", floor),
        "cap_bytes": None if cap is None else _bytes("--cap", cap),
        "disk_floor_bytes": None if disk_floor is None else _bytes("--disk-floor", disk_floor),
        "disk_cap_bytes": None if disk_cap is None else _bytes("--disk-cap", disk_cap),
        "weight": weight,
        "ttl_s": ttl_s,
    }
    changes = {name: value for name, value in given.items() if value is not None}
    if (changes or remove) and not (tenant or salt):
        raise click.UsageError("give the TENANT or the --salt whose quota to change")
    if changes and remove:
        raise click.UsageError("--remove ends the quota: give no other option with it")
    asked, whose = (tenant, shown_tag(salt_tag(salt))), name_of(tenant, salt_tag(salt))
    with connect(url, key) as client:
        now = next((each for each in admin.tenants(client) if (each.tenant, each.salt) == asked), None)
        new = msgspec.structs.replace(now.quota if now is not None else Quota(), **changes)
        losses = _losses(now, new, whose) if changes and now is not None else []
        if dry_run:
            if as_json:
                print_json({"losses": losses})
            else:
                print("\n".join([*(losses or ["nothing would be evicted"]), "nothing was changed: this was a dry run"]))
            return 0
        if losses and not agreed("; ".join(losses), f"Change the quota of {clean(whose)}?", yes, lambda: losses):
            return 1
        if remove:
            admin.set_quota(client, tenant, None, salt)
        elif changes:
            admin.set_quota(client, tenant, new, salt)
        shown = [each for each in admin.tenants(client) if _is_asked(each, *asked)]
    if as_json:
        print_json([msgspec.to_builtins(each) for each in shown])
        return 0
    if not shown:
        whose = clean(name_of(tenant, salt_tag(salt)))
        print(f"{whose or 'no tenant or salt'} has {'no' if whose else 'a'} quota", flush=True)
        return 0
    from kvdepot.cli.view import tenants

    out = console()
    out.print(tenants(shown).table(out.width))
    return 0


def _is_asked(each: TenantStatus, tenant: str, salt: str) -> bool:
    """Whether to show it: all, those of a tenant, or that of one salt."""
    return (each.tenant, each.salt) == (tenant, salt) if salt else tenant in ("", each.tenant)


def _losses(now: TenantStatus, new: Quota, whose: str) -> list[str]:
    """What a tenant or salt loses at once with a new quota."""
    lost, name = [], clean(whose)
    for where, used, cap in (
        ("memory", now.used_bytes, new.cap_bytes),
        ("each tier disk://", now.disk_bytes or 0, new.disk_cap_bytes),
    ):
        if cap and used > cap:
            lost.append(f"{where}: {name} has {size(used)}, and {size(used - cap)} would be evicted")
    if new.ttl_s and (not now.ttl_s or new.ttl_s < now.ttl_s):
        lost.append(f"chunks of {name} that are older than {duration(new.ttl_s)} would be removed")
    return lost


def _bytes(option: str, text: str) -> int:
    try:
        return int(parse_size(text))
    except ValueError as exc:
        raise ConfigError(f"{option}: {exc}: write 64GiB or 512MiB, say") from exc
