"""The cache salt and LoRA adapter of requests: which KV may be shared, and under what name.

Used by scheduler.py. Workers load an adapter's files when a step needs them, on request (`add_lora`), and again after
an eviction; the scheduler sees none of this. Invariant: KV is shared under the contents of files only if the engine
cannot have read others.

- Files last changed before this engine could load any (before its scheduler's process loaded our plugin) are the files
  that each of its loads reads, as long as they do not change. They are checked when a request arrives, and again when a
  step has ended, before its KV is stored: every load is between the two checks, or before the first.
- Newer files may have been loaded with other contents before they were first seen here, and a hub name is resolved by
  the loader, over the network. KV of both is shared with no other engine, under a random name.
- Files that changed after they were first seen: the engine may go on with the old ones, or load the new ones after an
  eviction. KV of that adapter is not cached any more; nor is it where one id stands for two adapters.

A request that runs while the files are replaced may mix both, as it may in vLLM's own prefix cache.
"""

from __future__ import annotations

import logging
import secrets
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

from kvdepot.integrations.loaded import loaded_since
from kvdepot.integrations.vllm.weights import NamedWeights
from kvdepot.integrations.weight_files import FolderState, find_weights, read_state, uses_modelscope
from kvdepot.protocol.keys import derive_root

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.lora.request import LoRARequest
    from vllm.v1.request import Request

log = logging.getLogger(__name__)

_Parts: TypeAlias = "tuple[tuple[str, str], ...]"
_MOST_OWNERS = 65536
"""Keys of vLLM's own cache that are remembered, the latest used. Once this many other keys were used after a key, that
cache soon has no block of it any more."""
_MARGIN_S = 2.0
"""Times of files come from a clock that may lag by some milliseconds."""
_MOST = 65536
"""Adapters that are remembered; one that was forgotten is new when it is seen again."""
_NO_MATTER = frozenset({"lora_name", "base_model_name", "lora_int_id", "lora_path", "load_inplace"})
"""Fields of a LoRARequest that only say how people name the adapter and how this engine finds and loads it."""


@dataclass
class _Seen:
    request: tuple[tuple[str, str], ...]
    state: FolderState | None  # None: there is no such folder
    parts: tuple[tuple[str, str], ...] | None  # None: no longer cached


class Adapters:
    """The adapters that one engine's requests have named. since: a Unix time before the engine could load any."""

    def __init__(self, since: float | None = None) -> None:
        self._since = loaded_since() if since is None else since
        self._seen: OrderedDict[int, _Seen] = OrderedDict()

    def parts(self, lora: LoRARequest) -> tuple[tuple[str, str], ...] | None:
        """The parts that name the adapter in the root of a request's chunks; None if its KV must not be cached.

        Raises OSError if its folder cannot be read.
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
        """Whether everything computed with the adapter so far may be shared under its `parts`."""
        try:
            return self.parts(lora) is not None
        except (OSError, ValueError, RuntimeError):  # a removed folder may look like an invalid hub name
            return False

    def _first_seen(self, lora: LoRARequest) -> _Seen:
        folder, is_sure = _resolve(lora.lora_path)
        if getattr(lora, "tensorizer_config_dict", None):
            is_sure = False  # vLLM 0.30 loads the adapter from the place that this field names
        state = _state_of(folder)
        name = tuple((f"lora {field}", value) for field, value in _fields(lora))
        if folder is not None and state is not None and is_sure:
            found = find_weights(str(folder))
            if found is not None and max(found.changed_at, state.changed_at) < self._since - _MARGIN_S:
                return _Seen(_fields(lora), state, (*name, ("lora files", found.digest)))
        told = "LoRA adapter %r is shared with no other engine: its files are newer than this one, or it is a hub name"
        log.info(told, lora.lora_name)
        return _Seen(_fields(lora), state, (*name, ("lora private", secrets.token_hex(16))))

    def _compare(self, lora: LoRARequest, seen: _Seen) -> None:
        if seen.parts is None:
            return
        now, before = _state_of(_resolve(lora.lora_path)[0]), seen.state
        # Files that did not exist could not have been loaded.
        is_same = before is None or (now is not None and now.is_same(before))
        if is_same and _fields(lora) == seen.request:
            seen.state = now
            return
        seen.parts = None
        log.warning(
            "LoRA adapter %r is not cached until this engine is restarted: its files changed since they were first "
            "seen, or its id stands for two adapters", lora.lora_name,
        )  # fmt: skip


def _state_of(folder: Path | None) -> FolderState | None:
    return read_state(folder) if folder is not None and folder.is_dir() else None


def _fields(lora: LoRARequest) -> tuple[tuple[str, str], ...]:
    return tuple((name, repr(value)) for name, value in msgspec.structs.asdict(lora).items() if name not in _NO_MATTER)


def _resolve(path: str) -> tuple[Path | None, bool]:
    """Where vLLM's `get_adapter_absolute_path` finds an adapter, and whether that is certain before it is loaded.

    None if unknown. Does not use the network.
    """
    if path.startswith("~"):
        return Path(path).expanduser().absolute(), True
    if Path(path).is_absolute() or Path(path).exists():
        return Path(path).absolute(), True
    if uses_modelscope():
        return None, False
    from huggingface_hub import constants, try_to_load_from_cache  # a dependency of vLLM

    found = try_to_load_from_cache(path, "adapter_config.json")
    return (Path(found).parent, constants.HF_HUB_OFFLINE) if isinstance(found, str) else (None, False)


class Roots:
    """The parents of requests' first chunks, from their cache salt and LoRA adapter, and which requests have none.

    vLLM's own prefix cache may hand a request blocks that another one computed. Its key says less than our root: up to
    vLLM 0.30 the adapter's name, which may also be a salt, and since then the adapter's path, but never its files. So
    with adapters, each key of vLLM must stand for one root as long as this engine runs, with or without a server.
    Requests with a second root are not cached: they may read, and compute from, blocks of the first.
    """

    def __init__(self, vllm_config: VllmConfig, weights: NamedWeights) -> None:
        self.adapters = Adapters()
        self.weights = weights
        has_both = vllm_config.lora_config is not None and bool(vllm_config.cache_config.enable_prefix_caching)
        self._owners: OrderedDict[tuple[Any, ...], _Parts | None] | None = OrderedDict() if has_both else None

    def root(self, request: Request) -> bytes | None:
        """Parent of the request's first chunk; None if it must not be cached.

        Raises OSError for an adapter that cannot be read, ValueError for a name that is not valid text.
        """
        parts = None
        try:
            parts = self._parts(request)
        finally:
            is_owner = self._is_owner(request, parts)
        if parts is None or not is_owner:
            return None
        return derive_root(*self.weights.parts, *parts)

    def _parts(self, request: Request) -> _Parts | None:
        salt = (("salt", request.cache_salt),) if request.cache_salt else ()
        if request.lora_request is None:
            return salt
        adapter = self.adapters.parts(request.lora_request)
        return None if adapter is None else salt + adapter

    def _is_owner(self, request: Request, parts: _Parts | None) -> bool:
        """Whether all blocks that vLLM's own cache has under this request's key were computed with these parts."""
        if self._owners is None:
            return True
        key = generate_block_hash_extra_keys(request, 0, 1, 0)[0] or ()
        owner = self._owners.setdefault(key, parts)
        if owner is not None and owner != parts:
            log.warning(
                "requests with the LoRA adapter or cache salt %r are not cached until this engine is restarted: vLLM's "
                "own prefix cache takes them for those with another adapter. Give each version of an adapter a name "
                "and a folder of its own", getattr(request.lora_request, "lora_name", request.cache_salt),
            )  # fmt: skip
            owner = self._owners[key] = None
        self._owners.move_to_end(key)
        if len(self._owners) > _MOST_OWNERS:
            self._owners.popitem(last=False)
        return owner is not None
