"""What is being forgotten in tiers: which have been told, which have answered, and what they said.

The one law: a tier is told once the saves to it that were under way have ended, and until all have answered, nothing
of what is forgotten is loaded (`is_under_way`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from kvdepot.core.index.chunk import Namespace
from kvdepot.core.tiering.tier import TierState, Token
from kvdepot.errors import KVDepotError
from kvdepot.tiers.format import model_prefix, tenant_prefix
from kvdepot.tiers.worker import Forget, Forgotten

__all__ = ["FORGET_S", "MOST_FORGETTINGS", "ForgetToken", "Forgetting", "Forgettings", "NotForgotten"]

MOST_FORGETTINGS = 16
"""Forgettings under way."""
FORGET_S = 25.0
"""So long forgetting may take before the answer says what has not been done; less than clients wait."""
_SHOWN = 100
"""Characters of a name in an answer."""


@dataclass(frozen=True, slots=True)
class NotForgotten:
    """A tier failed: it may still have anything of what is forgotten."""

    reason: str


@dataclass(slots=True, eq=False)
class Forgetting:
    """What is to be forgotten, while memory or a tier has not done so: nothing of it is loaded meanwhile.

    Tiers file by whole names. Of models whose name begins so, they are told `model` itself and all that are known here;
    one that only a tier knows is not found by the beginning of its name, and `trouble` says where that may be.
    """

    tenant: str | None  # None: of all
    model: str  # what names begin with; empty: any
    known: Collection[str]  # the names here that begin so
    salt: bytes | None  # None: any
    chunks: int | None = None  # removed from memory; None: it has not been gone through
    objects: dict[str, int | NotForgotten] = field(default_factory=dict)  # removed, by the tier's name
    owing: set[int] = field(default_factory=set)  # tiers that have not answered
    ended: bool = False  # it is, or is to be, answered

    def covers(self, namespace: Namespace, salt: bytes) -> bool:
        is_named = self.tenant in (None, namespace.tenant) and namespace.model.startswith(self.model)
        return is_named and self.salt in (None, salt)

    def is_whole_name(self) -> bool:
        """Whether `model` is known to be no mere beginning: a model here is called so, or a tier had one that is."""
        there = any(isinstance(count, int) and count > 0 for count in (self.chunks, *self.objects.values()))
        return not self.model or self.model in self.known or (there and not self.known)

    def trouble(self) -> str:
        """Why something may be left that no tier has told of; empty: nothing is."""
        if self.chunks is None:
            return f"memory has not been gone through within {FORGET_S:g} s; nobody gets what is left there"
        if self.owing:
            return f"not every tier has answered within {FORGET_S:g} s"
        if not self.objects or self.is_whole_name():
            return ""
        return (
            f"tiers file models by whole names: they were told {len(self.known)} that this server knows to begin with "
            f"{self.model[:_SHOWN]!r}, and may have others; name those in full, or forget all"
        )

    def tier_task(self, tier: TierState) -> Forget:
        namespaces = {"" if self.tenant is None else tenant_prefix(self.tenant)}
        if self.model:
            namespaces = {model_prefix(self.tenant or "", name) for name in (self.model, *self.known)}
        salt = "" if self.salt is None else self.salt.hex()
        return Forget(ForgetToken(tier, self), tier.number, salt, sorted(namespaces))


@dataclass(slots=True, eq=False)
class ForgetToken(Token):
    """Of a Forget."""

    forgetting: Forgetting


class Forgettings:
    """Those under way."""

    def __init__(self, tiers: Sequence[TierState]) -> None:
        self._tiers = tiers
        self._under_way: dict[Forgetting, None] = {}  # in the order in which they began
        # By tier: what it has not been told, and the saves that must end before.
        self._untold: dict[int, list[tuple[set[int], Forgetting]]] = {tier.number: [] for tier in tiers}

    def __repr__(self) -> str:
        return f"<Forgettings {len(self)}>"

    def __len__(self) -> int:
        return len(self._under_way)

    def is_under_way(self, namespace: Namespace, salt: bytes) -> bool:
        """Whether chunks of this namespace and salt are being forgotten."""
        return any(forgetting.covers(namespace, salt) for forgetting in self._under_way)

    def begin(self, forgetting: Forgetting) -> list[Forget]:
        """Tell each tier, at once or after its saves."""
        forgetting.owing = {tier.number for tier in self._tiers}
        forgetting.objects = {tier.config.name: 0 for tier in self._tiers}
        self._under_way[forgetting] = None
        for tier in self._tiers:
            self._untold[tier.number].append((set(tier.saving), forgetting))
        return [tier_task for tier in self._tiers for tier_task in self._tell(tier)]

    def save_ended(self, tier: TierState, number: int) -> list[Forget]:
        """Tell the tier to forget what had to wait for this save."""
        for saves, _ in self._untold[tier.number]:
            saves.discard(number)
        return self._tell(tier)

    def _tell(self, tier: TierState) -> list[Forget]:
        untold = self._untold[tier.number]
        self._untold[tier.number] = [(saves, forgetting) for saves, forgetting in untold if saves]
        return [forgetting.tier_task(tier) for saves, forgetting in untold if not saves]

    def told(self, token: ForgetToken, outcome: Forgotten | KVDepotError) -> bool:
        """A tier has forgotten, or failed to; whether that is to be answered now."""
        told = outcome.objects if isinstance(outcome, Forgotten) else NotForgotten(str(outcome))
        token.forgetting.objects[token.tier.config.name] = told
        token.forgetting.owing.discard(token.tier.number)
        return self._is_through(token.forgetting)

    def memory_ended(self, forgetting: Forgetting, chunks: int) -> bool:
        """Memory has been gone through; whether it is to be answered now."""
        forgetting.chunks = chunks
        return self._is_through(forgetting)

    def _is_through(self, forgetting: Forgetting) -> bool:
        if forgetting.chunks is None or forgetting.owing:
            return False
        self._under_way.pop(forgetting, None)
        return self.end(forgetting)

    def end(self, forgetting: Forgetting) -> bool:
        """It is answered now, unless it was before; where somebody has not answered, it goes on being forgotten."""
        is_first = not forgetting.ended
        forgetting.ended = True
        return is_first

    def end_all(self) -> list[Forgetting]:
        """The server ends; those that are to be answered now."""
        return [forgetting for forgetting in self._under_way if self.end(forgetting)]
