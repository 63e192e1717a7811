"""`kvdepot quota`: shows how much memory each tenant or salt has and may have; changes it until the server ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import click
import msgspec

from kvdepot.cli import options
from kvdepot.cli.connect import connect
from kvdepot.cli.output import agreed, clean, console, duration, print_json, size
from kvdepot.errors import ConfigError
from kvdepot.values import parse_size

if TYPE_CHECKING:
    from kvdepot.client.socket import Client
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
@click.option("--ttl-s", type=options.Whole(0), metavar="N", help="seconds after which its chunks expire; 0: no limit")
@click.option("--remove", is_flag=True, help="end its quota: it shares memory with all tenants that have none")
@options.destructive
@options.server
@options.as_json
def quota(
    tenant: str, salt: str, remove: bool, yes: bool, dry_run: bool, url: str | None, key: str | None, as_json: bool,
    **given: float | None,
) -> int:  # fmt: skip
    """Show quotas; with a TENANT, a salt or both, and options, change its quota until the server ends.

    Options that are not given keep their values. A cap below what the tenant or salt has evicts the rest, so the
    command then asks for confirmation, also if it cannot know how much that is.
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
    tag = salt_tag(salt)
    asked, whose = (tenant, shown_tag(tag)), name_of(tenant, tag)
    with connect(url, key) as client:
        server = admin.status(client)
        now = next((each for each in server.tenants if (each.tenant, each.salt) == asked), None)
        new = None if remove else msgspec.structs.replace(now.quota if now is not None else Quota(), **changes)
        losses = _losses_of_change(client, server, now, new, tenant, salt) if changes or remove else []
        if dry_run:
            _print_dry_run(now, losses, whose, remove, as_json)
            return 0
        if losses and not agreed("; ".join(losses), f"Change the quota of {clean(whose)}?", yes, lambda: losses):
            return 1
        if changes or remove:
            admin.set_quota(client, tenant, new, salt)
        shown = [each for each in admin.tenants(client) if _is_asked(each, *asked)]
    _print(shown, whose, as_json)
    return 0


def _print(shown: list[TenantStatus], whose: str, as_json: bool) -> None:
    if as_json:
        print_json([msgspec.to_builtins(each) for each in shown])
        return
    if not shown:
        print(f"{clean(whose)} has no quota" if whose else "no tenant or salt has a quota", flush=True)
        return
    from kvdepot.cli.view import tenants

    out = console()
    out.print(tenants(shown).table(out.width))


def _is_asked(each: TenantStatus, tenant: str, salt: str) -> bool:
    """Whether to show it: all, those of a tenant, or that of one salt."""
    return (each.tenant, each.salt) == (tenant, salt) if salt else tenant in ("", each.tenant)


def _print_dry_run(now: TenantStatus | None, losses: list[str], whose: str, remove: bool, as_json: bool) -> None:
    ends = now.quota if now is not None and remove else None
    if as_json:
        print_json({"losses": losses, **({"ends": msgspec.to_builtins(ends)} if remove else {})})
        return
    lines = [*(losses or ["nothing would be evicted"]), "nothing was changed: this was a dry run"]
    if now is not None and ends is not None:
        has = f"it has {size(now.used_bytes)} in memory"
        lines.insert(0, f"the quota of {clean(whose)} would be removed: {clean(ends.words)}; {has}")
    elif remove:
        lines.insert(0, f"{clean(whose)} has no quota")
    print("\n".join(lines), flush=True)


@dataclass(frozen=True)
class _Part:
    """What a tenant or salt has, in bytes; None: unknown, and then at most `most_...`. tier: of each tier disk://."""

    memory: int | None
    most_memory: int
    tier: int | None
    most_tier: float
    ttl_s: int


def _part_of(server: Status, tenant: str, salt: str, counted: int | None) -> _Part:
    """What a tenant or salt has, which a status says of those with a quota only.

    counted: bytes in memory of a salt without a quota, if they were counted.
    """
    disks = [each.bytes for each in server.tiers if each.name.startswith("disk://")]
    most_tier = max((float("inf") if held is None else held for held in disks), default=0)
    rows = [each for each in server.tenants if each.tenant == tenant]
    for each in rows:
        if each.salt == salt:
            return _Part(each.used_bytes, each.used_bytes, each.disk_bytes, most_tier, each.ttl_s)
    ttl_s = next((each.ttl_s for each in rows if not each.salt), 0)
    if counted is not None:
        return _Part(counted, counted, None, most_tier, ttl_s)
    listed = sum(each.bytes for each in server.namespaces if each.tenant == tenant)
    listed = max(0, listed - sum(each.used_bytes for each in rows if each.salt))  # these count for themselves
    most = listed + (server.other_namespaces.bytes if server.other_namespaces is not None else 0)
    is_known = most == 0 or (most == listed and not salt)
    return _Part(most if is_known else None, most, None, most_tier, ttl_s)


def _losses_of_change(
    client: Client, server: Status, now: TenantStatus | None, new: Quota | None, tenant: str, salt: str
) -> list[str]:
    """What a tenant or salt loses at once, or may lose, with a new quota in place of the one that it has now, or
    without one."""
    from kvdepot.client import admin
    from kvdepot.protocol.keys import salt_tag
    from kvdepot.protocol.quotas import name_of, shown_tag

    if new is None:
        return _losses_of_tenant(server, now) if now is not None and salt else []
    tag = salt_tag(salt)
    is_countable = now is None and salt and not tenant  # a client counts chunks of its own tenant only
    counted = admin.preview(client, "", salt).memory.bytes if is_countable else None
    return _losses(server, _part_of(server, tenant, shown_tag(tag), counted), new, name_of(tenant, tag))


def _losses(server: Status, part: _Part, new: Quota, whose: str) -> list[str]:
    """What a tenant or salt loses at once with a new quota, or may lose."""
    lost, name = [], clean(whose)
    for where, used, most, cap in (
        ("memory", part.memory, part.most_memory, new.cap_bytes),
        ("each tier disk://", part.tier, part.most_tier, new.disk_cap_bytes),
    ):
        if not cap or (most if used is None else used) <= cap:
            continue
        if used is not None:
            lost.append(f"{where}: {name} has {size(used)}, and {size(used - cap)} would be evicted")
        else:
            limit = f", at most {size(most)}" if most < float("inf") else ""
            lost.append(f"{where}: what {name} has above {size(cap)} would be evicted; what it has is unknown{limit}")
    if new.ttl_s and (not part.ttl_s or new.ttl_s < part.ttl_s) and (part.most_memory or server.tiers):
        lost.append(f"chunks of {name} that are older than {duration(new.ttl_s)} would be removed")
    return lost


def _losses_of_tenant(server: Status, ends: TenantStatus) -> list[str]:
    """What a tenant loses when the quota of one of its salts ends, so that the salt's chunks count for the tenant."""
    whole = next((each for each in server.tenants if each.tenant == ends.tenant and not each.salt), None)
    if whole is None:
        return []
    disk = None if whole.disk_bytes is None or ends.disk_bytes is None else whole.disk_bytes + ends.disk_bytes
    memory = whole.used_bytes + ends.used_bytes
    most_tier = _part_of(server, ends.tenant, ends.salt, None).most_tier
    return _losses(server, _Part(memory, memory, disk, most_tier, ends.ttl_s), whole.quota, ends.tenant)
