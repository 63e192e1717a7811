"""Code other than vLLM's that may compute an engine's KV: plugins, workers, and models that are registered elsewhere.

Used by facts.py. vLLM's own code is described by the release's KV format (versions.py), code in a model's folder by the
model's files. Invariant: code is described by the contents of its package's files, as a version may stay the same while
they change (an editable install).
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from blake3 import blake3

from kvdepot.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

__all__ = ["describe_code"]

_GROUPS = ("vllm.general_plugins", "vllm.platform_plugins")
"""Plugins that vLLM loads in its workers."""
_KNOWN = ("", "auto", "kvdepot", "transformers_modules", "vllm")
"""Packages whose code is known: we, and vLLM's resolvers of LoRA adapters, compute no KV; a model's folder is described
by its files; "auto" is a worker of vLLM's."""


def describe_code(vllm_config: VllmConfig, models: Sequence[ModelConfig]) -> list[list[str]]:
    """Each piece of foreign code that this engine loads, with a digest of its package."""
    parallel = vllm_config.parallel_config
    names = [*_plugins(), *map(_model, models)]
    for worker in (parallel.worker_cls, parallel.worker_extension_cls):
        names.append(worker if isinstance(worker, str) else f"{worker.__module__}.{worker.__qualname__}")
    return [[name, _digest(package)] for name in sorted({*names}) if (package := _package(name))]


def _plugins() -> Iterator[str]:
    from vllm import envs

    for group in _GROUPS:
        for point in importlib.metadata.entry_points(group=group):
            if envs.VLLM_PLUGINS is None or point.name in envs.VLLM_PLUGINS:
                yield point.value


def _model(model: ModelConfig) -> str:
    """The module of a model's class, which a program may also register without a plugin."""
    from vllm.model_executor.models.registry import ModelRegistry

    registered = ModelRegistry.models.get(model.architecture)
    cls = getattr(registered, "model_cls", None)
    module = str(getattr(registered, "module_name", "") or getattr(cls, "__module__", ""))
    if module.startswith("vllm.model_executor.models.transformers"):
        return f"transformers:{model.architecture}"  # a frame of vLLM's around that library's model
    return f"{module}:{model.architecture}"


def _package(name: str) -> str:
    """The top-level package of a qualified name; empty if its code is known."""
    top = name.partition(":")[0].partition(".")[0]
    return "" if top in _KNOWN else top


@cache
def _digest(package: str) -> str:
    """A digest of all files of a package, or of a module; "unknown" without files.

    Raises ConfigError for a file that cannot be read.
    """
    hasher = blake3()
    found = 0
    try:
        for place in _places(package):
            files = sorted(place.rglob("*")) if place.is_dir() else [place]
            for file in files:
                if file.is_file() and "__pycache__" not in file.parts:
                    hasher.update(f"{file.relative_to(place)}\0{file.stat().st_size}\0".encode())
                    hasher.update(file.read_bytes())
                    found += 1
    except OSError as exc:
        raise ConfigError(f"kvdepot cannot determine what {package} is, which vLLM loads: {exc}") from exc
    return hasher.hexdigest()[:32] if found else "unknown"


def _places(package: str) -> list[Path]:
    """A package's folders, or a module's file."""
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:  # the program itself
        return [Path(file)] if (file := getattr(sys.modules[package], "__file__", None)) else []
    if spec is None:
        return []
    return [Path(place) for place in spec.submodule_search_locations or [spec.origin or ""]]
