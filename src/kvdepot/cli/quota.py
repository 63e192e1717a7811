"""`kvdepot quota`: shows how much memory each tenant or salt has and may have; changes it until the server ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click
import msgspec

from kvdepot.cli import options
from kvdepot.cli.connect import connect
from kvdepot.cli.output import agreed, clean, duration, print_tables, show, size
from kvdepot.errors import ConfigError
from kvdepot.values import parse_size

if TYPE_CHECKING:
    from kvdepot.protocol.quotas import Quota
    from kvdepot.protocol.status import Status, TenantStatus

__all__ = ["quota"]

_Decorated = TypeVar("_Decorated", bound=Callable[..., Any])


def _bytes(context: click.Context, option: click.Parameter, text: str | None) -> int | None:
    if text is None:
        return None
    try:
        return int(parse_size(text))
    except ValueError as exc:
        raise ConfigError(f"{option.opts[0]}: {exc}: write 64GiB or 512MiB, say") from exc


def _size(flag: str, field: str, meaning: str) -> Callable[[_Decorated], _Decorated]:
    """An option for a number of bytes, with or without a unit; it goes by the name of its field in Quota."""
    return click.option(flag, field, metavar="SIZE", callback=_bytes, help=meaning)


@click.command()
@click.argument("tenant", metavar="[TENANT]", required=False, default="")
@click.option("--salt", default="", metavar="TEXT", help="not the tenant, but its requests with this cache_salt")
@_size("--floor", "floor_bytes", "memory guaranteed to it, e.g. 4GiB")
@_size("--cap", "cap_bytes", "most memory it can use; 0: no cap")
@_size("--disk-floor", "disk_floor_bytes", "the same as --floor, in each tier disk://")
@_size("--disk-cap", "disk_cap_bytes", "the same as --cap, in each tier disk://")
@click.option("--weight", type=float, metavar="N", help="its share of the memory above all floors (default: 1)")
@click.option("--ttl-s", type=click.IntRange(0), metavar="N", help="seconds after which its chunks expire; 0: no limit")
@click.option("--remove", is_flag=True, help="end its quota: it shares memory with all tenants that have none")
@options.destructive
@options.server
@options.as_json
def quota(
    tenant: str, salt: str, remove: bool, consent: options.Consent, server: options.Address, as_json: bool,
    **given: float | None,
) -> int:  # fmt: skip
    """Show quotas; with a TENANT, a salt or both, and options, change its quota until the server ends.

    Options that are not given keep their values. Chunks above a cap are evicted at once, so the command asks for
    confirmation first, also if it cannot know whether there are any.
    A salt without a TENANT is one of clients without a tenant. The memory of a salt with a quota does not count for its
    tenant. Quotas that last are tables [tenants.NAME] and [salts.SALT] of the settings file. Only clients without a
    tenant may change quotas. Salts are shown by the beginning of their hash.
    """
    from kvdepot.client import admin
    from kvdepot.protocol.keys import salt_tag
    from kvdepot.protocol.quotas import Quota, name_of, shown_tag

    changes = {name: value for name, value in given.items() if value is not None}
    if (changes or remove) and not (tenant or salt):
        raise click.UsageError("give the TENANT or the --salt whose quota to change")
    if changes and remove:
        raise click.UsageError("--remove ends the quota: give no other option with it")
    asked, name = (tenant, shown_tag(salt_tag(salt))), clean(name_of(tenant, salt_tag(salt)))
    with connect(server) as client:
        status = admin.status(client)
        now = next((each for each in status.tenants if (each.tenant, each.salt) == asked), None)
        new = None if remove else msgspec.structs.replace(now.quota if now is not None else Quota(), **changes)
        if changes or remove:
            losses = _losses(status, now, new, asked, name)
            if consent.dry_run:
                ends = now.quota if remove and now is not None else None
                lines = [f"the quota of {name} would be removed: {clean(ends.words)}"] if ends is not None else []
                lines += [*(losses or ["nothing would be evicted"]), "nothing was changed: this was a dry run"]
                show(as_json, {"losses": losses, **({"ends": ends} if remove else {})}, *lines)
                return 0
            question = f"Change the quota of {name}?"
            if losses and not agreed(consent, "; ".join(losses), question, lambda: losses):
                return 1
            admin.set_quota(client, tenant, new, salt)
        found = [each for each in admin.status(client).tenants if _is_asked(each, *asked)]
    if as_json or not found:
        show(as_json, found, f"{name} has no quota" if name else "no tenant or salt has a quota")
        return 0
    from kvdepot.cli.view import tenants

    print_tables(tenants(found))
    return 0


def _is_asked(each: TenantStatus, tenant: str, salt: str) -> bool:
    """Whether to show it: all, those of a tenant, or that of one salt."""
    return (each.tenant, each.salt) == (tenant, salt) if salt else tenant in ("", each.tenant)


def _losses(
    status: Status, now: TenantStatus | None, new: Quota | None, asked: tuple[str, str], name: str
) -> list[str]:
    """Each loss, or possible loss, of a tenant or salt with the quota `new` in place of its own; None: without one.

    A salt whose quota ends counts for its tenant again, whose cap then holds for both.
    """
    tenant, salt = asked
    rows = [each for each in status.tenants if each.tenant == tenant]
    whole = next((each for each in rows if not each.salt), None)
    is_merged = new is None
    if new is None:
        if not salt or now is None or whole is None:
            return []
        new = whole.quota
    disks = [each.bytes for each in status.tiers if each.name.startswith("disk://")]
    memory: float = sum(each.bytes for each in status.namespaces if each.tenant == tenant)
    memory += status.other_namespaces.bytes if status.other_namespaces is not None else 0
    disk: float = max((float("inf") if held is None else held for held in disks), default=0)
    if now is not None:
        memory, disk = now.used_bytes, disk if now.disk_bytes is None else now.disk_bytes
        if whole is not None and is_merged:
            memory, disk = memory + whole.used_bytes, disk + (whole.disk_bytes or 0)
    lost = []
    for where, most, cap in (
        ("memory", memory, new.cap_bytes),
        ("each tier disk://", disk, new.disk_cap_bytes),
    ):
        if cap and most > cap:
            has = f"{'at most ' * (now is None)}{size(most)}" if most < float("inf") else "an unknown amount"
            lost.append(f"{where}: {name} has {has}, and what is above {size(cap)} would be evicted")
    ttl_s = now.ttl_s if now is not None else whole.ttl_s if whole is not None else 0
    if new.ttl_s and (not ttl_s or new.ttl_s < ttl_s) and (memory or status.tiers):
        lost.append(f"chunks of {name} that are older than {duration(new.ttl_s)} would be removed")
    return lost
