"""The facts about a model beside its weights: configurations, the plain values of its modules, and code of others.

identity.py calls it at each load and store. Law: the facts of equal models are equal in all processes (they have no
address and no order of a set), and running a model does not change them. So values that a library keeps in a model for
its own use are left out, and code that no library has is described with all that it refers to. Hooks of others are
refused: they change KV in ways that no fact describes, and after a load they see only a part of the prompt.
"""

from __future__ import annotations

import functools
import json
import sys
import types
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import torch
from blake3 import blake3
from torch.nn.modules import module as torch_modules
from transformers import PretrainedConfig, PreTrainedModel

from kvdepot.errors import ConfigError

LIBRARIES = ("torch", "transformers", "peft", "accelerate", "bitsandbytes")
"""Packages whose code is known by its name: the release of transformers is a fact of its own."""
_ELSEWHERE = {
    "_name_or_path", "architectures", "base_model_name_or_path", "dtype", "revision", "torch_dtype",
    "transformers_version", "use_cache",
}  # fmt: skip
"""Keys of configurations that say where a model came from, or what its tensors say themselves."""
_IDLE = frozenset(vars(torch.nn.Module())) | {
    "_gradient_checkpointing_func", "_is_hf_initialized", "generation_config", "gradient_checkpointing",
    "hf_device_map", "hf_quantizer", "name_or_path", "warnings_issued",
}  # fmt: skip
"""Attributes of modules that have no part in computing KV, or that are facts elsewhere."""
_IDLE_IN_LIBRARIES = _IDLE | {"active_adapter"}  # a text or a list, which each layer of PEFT has itself
_REGISTRIES = {
    "transformers.modeling_utils": "ALL_ATTENTION_FUNCTIONS",
    "transformers.masking_utils": "ALL_MASK_ATTENTION_FUNCTIONS",
    "transformers.integrations.moe": "ALL_EXPERTS_FUNCTIONS",
}
"""Where transformers finds the functions whose names a configuration has; anybody may register one."""


def is_library(module: str) -> bool:
    """Whether Python or one of LIBRARIES has this module."""
    package = module.partition(".")[0]
    return package in LIBRARIES or package in sys.stdlib_module_names


class PlainFacts:
    """The facts about one model as it is now. text: the facts as JSON. tensors: tensors that are neither parameters nor
    buffers, with their names. modules: all modules, with their names.

    Raises ConfigError for hooks.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.tensors: list[tuple[str, torch.Tensor]] = []
        self.modules = list(model.named_modules())
        self._paths = {id(module): path for path, module in self.modules}
        self._known: dict[int, object] = {}
        self._alive: list[object] = []  # keeps objects alive whose ids are keys of `_known`
        hooks = (torch_modules._global_forward_hooks, torch_modules._global_forward_pre_hooks)
        _refuse_hooks("all modules", *hooks)
        modules = [[path, self._module(path, module)] for path, module in self.modules]
        classes = dict.fromkeys(type(module) for _, module in self.modules)
        forwards = [[_name(kind), self._describe(_name(kind), kind.forward)] for kind in classes]
        kinds = sorted({model.device.type, "cpu"})
        casts = [[kind, str(torch.get_autocast_dtype(kind))] for kind in kinds if torch.is_autocast_enabled(kind)]
        self.text = json.dumps([modules, forwards, casts], sort_keys=True)

    def __repr__(self) -> str:
        return f"<PlainFacts {len(self._paths)} modules, {len(self.tensors)} tensors>"

    def _module(self, path: str, module: torch.nn.Module) -> object:
        _refuse_hooks(path, module._forward_hooks, module._forward_pre_hooks)
        is_private = isinstance(module, PreTrainedModel)  # transformers keeps notes of its own in these
        idle = _IDLE_IN_LIBRARIES if is_library(type(module).__module__) else _IDLE
        return [_name(type(module))] + [
            [name, self._describe(f"{path}.{name}", value)]
            for name, value in sorted(vars(module).items())
            if name not in idle
            and not (is_private and name.startswith("_"))
            and not (name == "forward" and getattr(value, "__func__", None) is type(module).forward)
        ]

    def _describe(self, where: str, value: object, depth: int = 0) -> object:
        """A value as JSON. where: its name. depth: number of objects around it."""
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, np.ndarray) and value.dtype != object:
            value = torch.from_numpy(np.array(value))
        if isinstance(value, torch.Tensor):
            self.tensors.append((where, value))
            return "tensor"
        if id(value) not in self._known:
            self._alive.append(value)
            self._known[id(value)] = "above"  # the value contains itself
            self._known[id(value)] = self._resolve(where, value, depth)
        return self._known[id(value)]

    def _resolve(self, where: str, value: object, depth: int) -> object:
        match value:
            case Mapping():
                return {str(key): self._describe(f"{where}[{key}]", each, depth) for key, each in value.items()}
            case list() | tuple():
                return [self._describe(f"{where}[{i}]", each, depth) for i, each in enumerate(value)]
            case set() | frozenset():
                return sorted(map(str, value))
            case torch.nn.Module():
                return self._other_module(where, value) if id(value) not in self._paths else self._paths[id(value)]
            case functools.partial():
                return [self._describe(where, each, depth) for each in (value.func, value.args, value.keywords)]
            case types.MethodType():
                return [self._describe(where, each, depth) for each in (value.__func__, value.__self__)]
            case types.FunctionType():
                return self._function(where, value, depth)
            case type() | types.ModuleType():
                return _name(value)
        if is_library(type(value).__module__) and hasattr(value, "to_dict"):
            return self._config(where, value)
        if depth or is_library(type(value).__module__) or not hasattr(value, "__dict__"):
            is_plain = isinstance(value, bytes | complex | torch.dtype | torch.device | np.generic)
            return repr(value) if is_plain else getattr(value, "__qualname__", _name(type(value)))
        return [_name(type(value)), self._describe(where, dict(vars(value)), depth + 1)]

    def _config(self, where: str, config: PretrainedConfig) -> object:
        """A digest of a configuration and of the functions that it names: all modules have it."""
        names = {getattr(config, f"_{kind}_implementation", None) for kind in ("attn", "experts")}
        registries = [getattr(sys.modules.get(module), name, {}) for module, name in _REGISTRIES.items()]
        functions = [[name, each.get(name)] for name in sorted(filter(None, names)) for each in registries]
        found = [self._describe(where, each) for each in (_without_places(config.to_dict()), functions)]
        return blake3(json.dumps(found, sort_keys=True).encode()).hexdigest()

    def _other_module(self, where: str, module: torch.nn.Module) -> object:
        """Describe a module that is none of the model's, but to which one of the model's modules refers."""
        self.tensors += [
            (f"{where}.{name}", each) for name, each in [*module.named_parameters(), *module.named_buffers()]
        ]
        return [[path, self._module(f"{where}.{path}", each)] for path, each in module.named_modules()]

    def _function(self, where: str, value: types.FunctionType, depth: int) -> object:
        """The name of a library's function and the functions of others in its module; of other functions, all code."""
        module, code = value.__globals__.get("__name__", ""), value.__code__
        inner = getattr(value, "__wrapped__", None) or getattr(value, "_torchdynamo_orig_callable", None)
        found: list[object] = [f"{module}.{code.co_name}", self._describe(where, inner, depth)]
        names = {name: value.__globals__[name] for name in sorted(_names(code)) if name in value.__globals__}
        if is_library(module):
            names = {name: each for name, each in names.items() if _is_function_of_others(each)}
        else:
            cells = [each.cell_contents for each in value.__closure__ or () if not _is_empty(each)]
            found += [_digest(code), self._describe(where, [value.__defaults__, value.__kwdefaults__, cells], depth)]
        return [*found, self._describe(where, names, 1)]


def _name(value: type | types.ModuleType) -> str:
    return f"{value.__module__}.{value.__qualname__}" if isinstance(value, type) else value.__name__


def _without_places(value: object) -> object:
    if isinstance(value, Mapping):
        return {str(key): _without_places(each) for key, each in value.items() if key not in _ELSEWHERE}
    return [_without_places(each) for each in value] if isinstance(value, list | tuple) else value


def _is_function_of_others(value: object) -> bool:
    return isinstance(value, types.FunctionType) and not is_library(value.__globals__.get("__name__", ""))


def _is_empty(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - it raises for a variable that has no value yet
    except ValueError:
        return True
    return False


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from _codes(each)


def _names(code: types.CodeType) -> set[str]:
    return {name for each in _codes(code) for name in each.co_names}


def _digest(code: types.CodeType) -> str:
    """A digest of code that does not depend on its file and line numbers."""
    hasher = blake3()
    for each in _codes(code):
        constants = [
            sorted(map(repr, c)) if isinstance(c, frozenset) else repr(c)
            for c in each.co_consts
            if not isinstance(c, types.CodeType)
        ]
        hasher.update(each.co_code + repr((constants, each.co_names)).encode())
    return hasher.hexdigest()


def _refuse_hooks(path: str, *hooks: Mapping[int, Callable[..., object]]) -> None:
    for hook in (hook for each in hooks for hook in each.values()):
        function = hook
        while isinstance(function, functools.partial | types.MethodType):
            function = function.func if isinstance(function, functools.partial) else function.__func__
        where = function.__globals__.get("__name__", "") if isinstance(function, types.FunctionType) else None
        if not is_library(type(function).__module__ if where is None else where):
            raise ConfigError(
                f"kvdepot.hf does not serve models with hooks ({path or 'model'}: "
                f"{getattr(function, '__qualname__', type(function).__qualname__)}): they may change KV, and see a "
                "part of each prompt only. Remove them, or replace the module by one of a class of your own"
            )
