"""Which KV computed with a LoRA adapter may be shared, and under what name.

scheduler.py asks. Workers load an adapter's files when the first step needs them, or
when somebody asks for it (`add_lora`, `/v1/load_lora_adapter`), and again after it was evicted; the scheduler sees none
of this. The one law: KV is shared under what is on disk only where the engine can have read nothing else.

- Files that changed last before this engine could load any are what every load of this engine reads, for as long as
  they stay as they are. They are looked at when a request arrives, and again when a step has ended, before its KV is
  stored: a load lies between the two, or before the first.
- Files that are newer may have been loaded as something else before they were first seen here. A hub name is resolved
  by whoever loads it, from the network. KV of both is shared with nobody but this engine, under a random name.
- Files that changed after they were first seen: the engine may go on with the old ones, or load the new ones after an
  eviction. KV of that adapter is not cached any more; nor where one id stands for two adapters.

A request that is under way while the files are replaced may mix both, as it may in vLLM's own prefix cache.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from kvdepot.integrations.vllm.weight_files import Look, find_weights, look

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

__all__ = ["Adapters"]

log = logging.getLogger(__name__)

_MARGIN_S = 2.0
"""Times of files come from a clock that may be behind by some milliseconds."""
_MOST = 65536
"""Adapters that are known; which is forgotten and seen again is new."""
_NO_MATTER = frozenset({"lora_int_id", "lora_path", "load_inplace"})
"""Of a LoRARequest: how this engine finds and loads the adapter, not what it is."""


@dataclass
class _Seen:
    request: tuple[tuple[str, str], ...]
    looked: Look | None  # None: there is nothing to look at
    parts: tuple[tuple[str, str], ...] | None  # None: no longer cached


class Adapters:
    """The adapters that one engine's requests have named. `since`: when the engine could load none yet."""

    def __init__(self, since: float | None = None) -> None:
        self._since = time.time() if since is None else since
        self._seen: OrderedDict[int, _Seen] = OrderedDict()

    def __repr__(self) -> str:
        return f"<Adapters {len(self._seen)} seen>"

    def parts(self, lora: LoRARequest) -> tuple[tuple[str, str], ...] | None:
        """What stands for the adapter in the root of a request's chunks; None where its KV must not be cached.

        Raises OSError where its folder cannot be read.
        """
        seen = self._seen.get(lora.lora_int_id)
        if seen is None:
            seen = self._seen[lora.lora_int_id] = self._first_seen(lora)
            if len(self._seen) > _MOST:
                self._seen.popitem(last=False)
        else:
            self._compare(lora, seen)
        return seen.parts

    def is_unchanged(self, lora: LoRARequest) -> bool:
        """Whether all that was computed with it so far is what `parts` said."""
        try:
            return self.parts(lora) is not None
        except (OSError, ValueError, RuntimeError):  # a folder that is gone may look like a hub name that is none
            return False

    def _first_seen(self, lora: LoRARequest) -> _Seen:
        folder, is_sure = _resolve(lora.lora_path)
        looked = _look(folder)
        name = tuple((f"lora {field}", value) for field, value in _fields(lora))
        if folder is not None and looked is not None and is_sure and looked.changed_at < self._since - _MARGIN_S:
            found = find_weights(str(folder))
            if found is not None:
                return _Seen(_fields(lora), looked, (*name, ("lora files", found.digest)))
        log.info(
            "LoRA adapter %r is shared with no other engine: its files are newer than this one, or it is a hub name",
            lora.lora_name,
        )
        return _Seen(_fields(lora), looked, (*name, ("lora private", secrets.token_hex(16))))

    def _compare(self, lora: LoRARequest, seen: _Seen) -> None:
        if seen.parts is None:
            return
        now = _look(_resolve(lora.lora_path)[0])
        if seen.looked is None:
            seen.looked = now  # what was not there could not be loaded before
        is_same = now is seen.looked or (now is not None and seen.looked is not None and now.is_same(seen.looked))
        if not is_same or _fields(lora) != seen.request:
            seen.parts = None
            log.warning(
                "LoRA adapter %r is not cached until this engine is started again: its files changed since they were "
                "first seen, or its id stands for two adapters",
                lora.lora_name,
            )


def _look(folder: Path | None) -> Look | None:
    return look(folder) if folder is not None and folder.is_dir() else None


def _fields(lora: LoRARequest) -> tuple[tuple[str, str], ...]:
    return tuple((name, repr(value)) for name, value in msgspec.structs.asdict(lora).items() if name not in _NO_MATTER)


def _resolve(path: str) -> tuple[Path | None, bool]:
    """Where vLLM's `get_adapter_absolute_path` finds an adapter, and whether that is sure before it has been loaded.

    Asks nobody on the network. None where it is not known.
    """
    if path.startswith("~"):
        return Path(path).expanduser().absolute(), True
    if Path(path).is_absolute() or Path(path).exists():
        return Path(path).absolute(), True
    if os.environ.get("VLLM_USE_MODELSCOPE", "").lower() in {"1", "true"}:
        return None, False
    from huggingface_hub import constants, try_to_load_from_cache  # vLLM has it

    found = try_to_load_from_cache(path, "adapter_config.json")
    return (Path(found).parent, constants.HF_HUB_OFFLINE) if isinstance(found, str) else (None, False)
