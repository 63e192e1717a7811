"""`kvdepot quota`: shows how much memory each tenant or salt has and may have; changes it until the server ends."""

from __future__ import annotations

import click
import msgspec

from kvdepot.cli import options
from kvdepot.cli.connect import connect
from kvdepot.cli.output import clean, console, print_json
from kvdepot.errors import ConfigError
from kvdepot.protocol.status import TenantStatus
from kvdepot.values import parse_size

__all__ = ["quota"]


@click.command()
@click.argument("tenant", metavar="[TENANT]", required=False, default="")
@click.option("--salt", default="", metavar="TEXT", help="not the tenant, but its requests with this cache_salt")
@click.option("--floor", metavar="SIZE", help="what other tenants cannot take from it, e.g. 4GiB")
@click.option("--cap", metavar="SIZE", help="the most that it can have; 0: no cap")
@click.option("--disk-floor", metavar="SIZE", help="the same as --floor, in each tier disk://")
@click.option("--disk-cap", metavar="SIZE", help="the same as --cap, in each tier disk://")
@click.option("--weight", type=float, metavar="N", help="its part of what is left above all floors (default: 1)")
@click.option("--ttl-s", type=click.IntRange(0), metavar="N", help="seconds after which its chunks expire; 0: no limit")
@click.option("--remove", is_flag=True, help="end its quota: it shares memory with all tenants that have none")
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
    url: str | None,
    key: str | None,
    as_json: bool,
) -> int:
    """Show quotas; with a TENANT, a salt or both, and options, change its quota until the server ends.

    A salt without a TENANT is one of clients without a tenant. The memory of a salt with a quota does not count for its
    tenant. What is not given stays as it is. Quotas that last are tables [tenants.NAME] and [salts.SALT] of the
    settings file. Only clients without a tenant may change quotas. Salts are shown by the beginning of their hash.
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
    asked = tenant, shown_tag(salt_tag(salt))
    with connect(url, key) as client:
        if remove:
            admin.set_quota(client, tenant, None, salt)
        elif changes:
            old = {(each.tenant, each.salt): each.quota for each in admin.tenants(client)}.get(asked, Quota())
            admin.set_quota(client, tenant, msgspec.structs.replace(old, **changes), salt)
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


def _bytes(option: str, text: str) -> int:
    try:
        return int(parse_size(text))
    except ValueError as exc:
        raise ConfigError(f"{option}: {exc}: write 64GiB or 512MiB, say") from exc
