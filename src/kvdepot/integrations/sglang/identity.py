"""Facts that SGLang's page keys leave out: all that is fixed for an engine and changes KV, and when weights change.

SGLang's keys chain the tokens of a page and of all before it, from a seed that covers the request's `extra_key` (LoRA
adapter) and cache salt. The engine's facts are in the name of its model on the wire; a pool's are in pages.py.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import secrets
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from blake3 import blake3

from kvdepot.errors import ConfigError
from kvdepot.integrations.weight_files import SETTLED_S, Kind, find_weights
from kvdepot.protocol.model_names import name_model

_VERSIONS = re.compile(r"0\.5\.(20|21|22|23)(\D|$)")
_HARMLESS = re.compile(
    r"_.*|(.*_)?model_path|tokenizer_path|download_dir|served_model_name|weight_version|(.*_)?(host|port|ports)|"
    r"dist_.*|node_rank|base_gpu_id|gpu_id_step|numa_node|random_seed|(admin_)?api_key|ssl_.*|log_.*|.*metrics.*|"
    r"hicache_.*|enable_hierarchical_cache|max_(running|queued)_requests|max_total_tokens|mem_fraction_static|"
    r"schedule_.*|.*watchdog_timeout|kv_events_config|crash_dump_folder|stream_.*|lora_paths|.*_parser|chat_template"
)
"""Arguments of SGLang that do not change KV, or that differ from start to start; paths of models are replaced by the
contents of their files. All other arguments are identity: an unknown one costs hits at most."""
_UNREAD = (
    "quantization_param_path", "kt_weight_path", "modelopt_checkpoint_restore_path", "decrypted_config_file",
    "decrypted_draft_config_file",
)  # fmt: skip
"""Arguments that name files which change KV, and of which only the path is known."""
_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater"
_UPDATES = ("begin_weight_update", "update_weights_from", "load_weights_from", "receive_weights_from")


class EngineIdentity(NamedTuple):
    """An engine's facts. label: for people. run: names this start of the engine, and no other; equal in all ranks."""

    label: str
    facts: str
    run: str

    def name(self, pool: str, facts: str, epoch: int) -> str:
        """The name of a pool's KV. facts: the pool's. epoch: number of updates of weights so far; from the first on,
        the weights in memory are those of no file, so the name is private to this run."""
        own = [self.run, epoch] if epoch else []
        digest = blake3(json.dumps([self.facts, pool, facts, own]).encode()).hexdigest()
        return name_model(self.label if pool == "kv" else f"{self.label} {pool}", digest)


def identify(model_name: str, arguments: dict[str, object], revision: str, version: str) -> EngineIdentity:
    """An engine's facts. arguments: SGLang's server arguments. revision: a user's name for the weights, or empty.

    Reads samples of the weights' files. Raises ConfigError for versions and weights that it does not know.
    """
    if not _VERSIONS.match(version):
        raise ConfigError(f"kvdepot supports SGLang 0.5.20 to 0.5.23, not {version}")
    if arguments.get("nnodes", 1) != 1:
        raise ConfigError("kvdepot does not support engines on several hosts (--nnodes): a server keeps one host's KV")
    if arguments.get("enable_kv_cache_sharding"):
        raise ConfigError("kvdepot does not support KV that is divided among ranks: omit --enable-kv-cache-sharding")
    parent = os.getppid()  # the process that starts all ranks
    ticks = int(Path(f"/proc/{parent}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()[19])
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    started = json.dumps([boot, parent, ticks, str(arguments.get("random_seed")), str(arguments.get("port"))])
    began_at = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")
    origins = [(arguments.get("model_path"), arguments.get("revision"))]
    if draft := arguments.get("speculative_draft_model_path"):
        origins.append((draft, arguments.get("speculative_draft_model_revision")))
    origins += [(adapter, None) for adapter in _adapters(arguments)]
    weights = [_weights(arguments, origin, version_of, revision) for origin, version_of in origins]
    facts: dict[str, object] = {
        "arguments": {key: value for key, value in arguments.items() if not _HARMLESS.fullmatch(key)},
        "revision": revision,
        "version": version,
        "weights": [digest for digest, _ in weights],
    }
    if any(changed_at > began_at - SETTLED_S for _, changed_at in weights):
        facts["private"] = started
    if unread := [name for name in _UNREAD if arguments.get(name) and not revision]:
        raise ConfigError(
            f"kvdepot does not read the files of --{unread[0].replace('_', '-')}, which change KV. Set "
            '"kvdepot.weights_revision" in --hicache-storage-backend-extra-config to a name for the versions of all '
            "files, and change the name whenever one of them changes"
        )
    path = str(arguments.get("model_path") or model_name or "sglang")
    return EngineIdentity(Path(path).name, json.dumps(facts, sort_keys=True, default=str), _name_run())


def _name_run() -> str:
    """A name for this start of the engine, which its first rank has put into the store of the ranks' process group; the
    store is new with each start. (A trainer's engine starts again with the same parent, port and seed, and other
    weights.) A rank without such a store, or whose weights have changed under an earlier backend, has a name of its
    own."""
    import torch.distributed

    own = secrets.token_hex(16)
    with contextlib.suppress(AttributeError, RuntimeError, ValueError):  # no group, or a store that does not answer
        if not _are_updated:
            store = torch.distributed.distributed_c10d._get_default_store()
            return bytes(store.compare_set("kvdepot run", "", own)).decode()
    return own


def _adapters(arguments: dict[str, object]) -> list[object]:
    """The paths of the adapters that an engine starts with: SGLang identifies these by name and path, others by a
    random number."""
    given, found = arguments.get("lora_paths") or [], [path for path in (arguments.get("uno_lora_path"),) if path]
    if isinstance(given, dict):
        return [*found, *given.values()]
    for each in given if isinstance(given, list | tuple) else [given]:
        if isinstance(each, dict):
            found.append(each.get("lora_path"))
        else:
            found.append(each.rpartition("=")[2] if isinstance(each, str) else getattr(each, "lora_path", None))
    return found


def _weights(arguments: dict[str, object], origin: object, version: object, named: str) -> tuple[str, float]:
    """A digest of a model's files, and when they last changed. Raises ConfigError if neither the files nor the user
    name their version."""
    kinds = {Kind.WEIGHTS, Kind.CONFIG} | ({Kind.CODE, Kind.OTHER} if arguments.get("trust_remote_code") else set())
    cache = arguments.get("download_dir")
    is_elsewhere = (
        str(arguments.get("load_format", "")).startswith("remote")
        or arguments.get("custom_weight_loader")
        or arguments.get("model_loader_extra_config", "{}") not in ("{}", {}, None)
    )
    is_hub = os.environ.get("SGLANG_USE_MODELSCOPE", "").lower() not in ("1", "true") or Path(str(origin)).exists()
    found = None
    if isinstance(origin, str) and is_hub and not is_elsewhere:
        found = find_weights(origin, version or None, cache or None, kinds)  # type: ignore[arg-type]
    if found is None and not named:
        raise ConfigError(
            f"kvdepot cannot determine which version of {origin or 'the model'} this is. Set "
            '"kvdepot.weights_revision" in --hicache-storage-backend-extra-config to a name for this version of the '
            "model, and change the name whenever the weights change"
        )
    return ("named by the user", 0.0) if found is None else (found.digest, found.changed_at)


# -- weights that change while the engine runs

_notices: list[Callable[[], None]] = []
_watched: set[type] = set()
_are_updated = False


def are_updated() -> bool:
    """Whether the weights of a model in this process have changed since it was first watched."""
    return _are_updated


def watch_updates(notice: Callable[[], None]) -> None:
    """Call `notice` before the weights of a model in this process change. SGLang notifies no backend of that; flushing
    its caches, which follows, also has other reasons. Raises ConfigError if SGLang's code for it is not as expected."""
    _notices.append(notice)
    module = sys.modules.get(_UPDATER)
    updater = getattr(module, "WeightUpdater", None)
    names = [name for name in vars(updater or object) if name.startswith(_UPDATES)]
    if module is not None and not names:
        raise ConfigError("kvdepot would not notice updates of weights: it does not know this version of SGLang")
    if updater is None or updater in _watched:
        return  # no model is run in this process
    _watched.add(updater)
    for name in names:
        setattr(updater, name, _noticed(getattr(updater, name)))


def forget_updates(notice: Callable[[], None]) -> None:
    """End the calls that `watch_updates` began; an unknown `notice` is fine."""
    if notice in _notices:
        _notices.remove(notice)


def _noticed(update: Callable[..., object]) -> Callable[..., object]:
    @functools.wraps(update)
    def noticed(*args: object, **options: object) -> object:
        global _are_updated
        _are_updated = True
        for notice in _notices:
            notice()
        return update(*args, **options)

    return noticed
