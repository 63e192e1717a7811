"""`kvdepot quota`: shows how much memory each tenant or salt has and may have; changes it until the server ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_type_hints

import click
import msgspec

from kvdepot.cli import options
from kvdepot.cli.connect import connect
from kvdepot.cli.output import clean, confirm, duration, show
from kvdepot.client import admin
from kvdepot.errors import ConfigError
from kvdepot.protocol.keys import salt_tag
from kvdepot.protocol.quotas import Quota, fault_of, name_of, shown_tag
from kvdepot.values import size


def _limits(command: Callable[..., int]) -> Callable[..., int]:
    """An option for each field of a quota, passed on under the field's name."""
    for name, hint in reversed(get_type_hints(Quota, include_extras=True).items()):
        about = hint.__metadata__[0].description
        types: dict[str, Any] = {"weight": float, "ttl_s": click.IntRange(0)}
        command = click.option(
            f"--{name.removesuffix('_bytes').replace('_', '-')}", name, type=types.get(name, options.size),
            metavar="N" if name in types else "SIZE", help=f"{about[0].lower()}{about[1:].rstrip('.')}",
        )(command)  # fmt: skip
    return command


@click.command()
@click.argument("tenant", metavar="[TENANT]", required=False, default="")
@click.option("--salt", default="", metavar="TEXT", help="not the tenant, but its requests with this cache_salt")
@_limits
@click.option("--remove", is_flag=True, help="end its quota: it shares memory with all tenants that have none")
@options.destructive
@options.server
def quota(
    tenant: str, salt: str, remove: bool, consent: options.Consent, server: options.Address,
    **given: float | None,
) -> int:  # fmt: skip
    """Show quotas; with a TENANT, a salt or both, and options, change its quota until the server ends.

    Options that are not given keep their values. Chunks above a cap are evicted at once, so the command asks before it
    sets a lower one. A salt whose quota ends counts for its tenant again.
    A salt without a TENANT is one of clients without a tenant. The memory of a salt with a quota does not count for its
    tenant. Quotas that last are tables [tenants.NAME] and [salts.SALT] of the settings file. Only clients without a
    tenant may change quotas. Salts are shown by the beginning of their hash.
    """
    changes = {name: value for name, value in given.items() if value is not None}
    if (changes or remove) and not (tenant or salt):
        raise click.UsageError("give the TENANT or the --salt whose quota to change")
    if changes and remove:
        raise click.UsageError("--remove ends the quota: give no other option with it")
    asked, name = (tenant, shown_tag(salt_tag(salt))), clean(name_of(tenant, salt_tag(salt)))
    with connect(server) as client:
        status = admin.status(client)
        rows = {(each.tenant, each.salt): each for each in status.tenants}
        now = rows[asked].quota if asked in rows else Quota()
        try:
            new = None if remove else msgspec.structs.replace(now, **changes)
        except ValueError as exc:
            raise ConfigError(f"quota of {name}: {exc}") from exc
        others = [each.quota for who, each in rows.items() if who not in (asked, ("", ""))]
        if new is not None and changes and (fault := fault_of([new, *others], status.capacity_bytes)):
            raise ConfigError(fault)
        if changes or remove:
            whole = rows[tenant, ""].quota if salt and (tenant, "") in rows else Quota()
            losses = _losses(name, now, new) if new is not None else _losses(name, Quota(), whole)
            if losses or consent.dry_run:
                expected = {"losses": losses}, losses or ["nothing would be evicted"]
                confirm(consent, "; ".join(losses), f"Change the quota of {name}?", lambda: expected)
            admin.set_quota(client, tenant, new, salt)
        quotas = admin.status(client).tenants
    found = [each for each in quotas if ((each.tenant, each.salt) == asked if salt else tenant in ("", each.tenant))]
    if consent.as_json or not found:
        show(consent.as_json, found, f"{name} has no quota" if name else "no tenant or salt has a quota")
        return 0
    from kvdepot.cli import view

    view.print_tables(view.tenants(found))
    return 0


def _losses(name: str, now: Quota, new: Quota) -> list[str]:
    """Sentences about chunks that the quota `new` may remove: those above a lower cap, or older than a shorter expiry.
    now: the quota before it."""
    caps = ("memory", now.cap_bytes, new.cap_bytes), ("each tier disk://", now.disk_cap_bytes, new.disk_cap_bytes)
    lost = [
        f"{where}: what {name} has above {size(cap)} would be evicted"
        for where, before, cap in caps
        if cap and (not before or cap < before)
    ]
    if new.ttl_s and (not now.ttl_s or new.ttl_s < now.ttl_s):
        lost.append(f"chunks of {name} that are older than {duration(new.ttl_s)} would be removed")
    return lost
