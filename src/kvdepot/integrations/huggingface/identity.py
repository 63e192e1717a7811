"""The identity of a model in memory: equal for all processes whose KV of equal tokens is equal.

`fingerprint` is taken at each load and store: it is cheap, and differs once a weight, the configuration or an adapter
has been changed in this process. `identity` is the name that a depot knows: a digest of the configuration, the code and
the weights. It reads all of a model up to 256 MiB; of a larger one it reads tensors up to 64 KiB whole, 4 KiB of each
MiB and the end of the others, and the beginning of each row of embeddings. So a model that was trained, merged or
quantized again has another identity. What may go unnoticed is a smaller change within one large matrix.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
import transformers
from blake3 import blake3

from kvdepot.errors import BadRequest, ConfigError
from kvdepot.integrations.huggingface.facts import PlainFacts, is_library
from kvdepot.integrations.samples import BY_ROW, ROW_SAMPLE_BYTES, SAMPLE_BYTES, SMALL_BYTES, STEP_BYTES

_FORMAT = 1
"""Raise this number when the layout of a model's KV in a depot changes."""
_WHOLE_BYTES = 256 << 20
"""Models up to this size are hashed whole."""
_MEDIA = re.compile(r"(image|video|audio|vision|speech).*token_(id|index)$")
_LENGTH_DEPENDENT = {"dynamic", "longrope"}
"""Rotary embeddings that rotate a prefix's keys by an amount that depends on the length of the whole prompt."""


def refuse_unserved(model: torch.nn.Module) -> None:
    """Raise ConfigError or BadRequest, with the reason, for a model whose KV cannot be cached."""
    if not isinstance(model, torch.nn.Module) or not hasattr(model, "generate") or not hasattr(model, "config"):
        raise BadRequest(f"pass a model of transformers (AutoModelForCausalLM), not {type(model).__name__}")
    kind = type(model).__name__
    if model.config.is_encoder_decoder:
        raise ConfigError(f"kvdepot.hf does not serve encoder-decoder models ({kind}): their KV depends on two prompts")
    for found in _values(model.config.to_dict(), re.compile(r"^(rope_)?type$")):
        if found in _LENGTH_DEPENDENT:
            raise ConfigError(
                f"kvdepot.hf does not serve rotary embeddings of type {found!r} ({kind}): a prefix's KV depends on "
                "the length of the whole prompt"
            )
    has_media = any(getattr(model.config, f"{kind}_config", None) for kind in ("vision", "audio", "speech", "video"))
    if has_media and not media_tokens(model):
        raise ConfigError(f"kvdepot.hf does not serve {kind}: nothing in its tokens tells where a prompt has images")
    if any(getattr(module, "gate_up_proj_precision_config", None) is not None for module in model.modules()):
        raise ConfigError("kvdepot.hf cannot identify MXFP4 experts: load the model with Mxfp4Config(dequantize=True)")
    for name, config in getattr(model, "peft_config", {}).items():
        if getattr(config, "alora_invocation_tokens", None):
            raise ConfigError(f"kvdepot.hf does not serve activated LoRA ({name!r}): it depends on the whole prompt")
        if getattr(config, "is_prompt_learning", False):
            raise ConfigError(f"kvdepot.hf does not serve adapters of virtual tokens ({config.peft_type} {name!r})")
    for name, tensor in _tensors(model.named_modules()):
        if tensor.device.type == "meta":
            raise BadRequest(
                f"{name} is on the meta device, without its values: load the weights (from_pretrained), without "
                "offloading to disk or CPU by accelerate"
            )
        if type(tensor.data).__name__ == "DTensor" or hasattr(tensor, "ds_id"):
            raise ConfigError(f"kvdepot.hf does not serve models of which a process has a shard only ({name})")


def media_tokens(model: torch.nn.Module) -> frozenset[int]:
    """The ids of tokens that stand for images and sounds."""
    found = _values(model.config.to_dict(), _MEDIA)
    return frozenset(value for value in found if isinstance(value, int))


def fingerprint(model: torch.nn.Module) -> bytes:
    """A digest that changes with the model: its facts, and the places, version counters and a few values of its
    tensors. Waits for the device. Raises ConfigError for hooks."""
    facts = PlainFacts(model)
    hasher = blake3(facts.text.encode())
    samples: dict[torch.device, list[torch.Tensor]] = {}
    for _, tensor in [*_tensors(facts.modules), *facts.tensors]:
        for leaf in _leaves(tensor):
            version = 0 if leaf.is_inference() else leaf._version  # writes by .data and numpy() are not counted
            hasher.update(f"{leaf.data_ptr()} {version} {leaf.dtype} {list(leaf.shape)};".encode())
            few = _plain(leaf)[tuple(slice(None, None, max(1, size // 4)) for size in leaf.shape)]
            samples.setdefault(leaf.device, []).append(few.reshape(-1).contiguous().view(torch.uint8))
    for values in samples.values():
        hasher.update(torch.cat(values).cpu().numpy())
    return hasher.digest()


def identity(model: torch.nn.Module) -> str:
    """The digest that names the model's KV in a depot. Raises ConfigError for weights that cannot be read."""
    hasher = blake3()
    facts = PlainFacts(model)
    parts = [_FORMAT, transformers.__version__, str(model.device.type), facts.text, _code(model)]
    hasher.update(json.dumps(parts).encode())
    weights = {**dict(model.named_buffers()), **model.state_dict()}
    weights |= {f"{name} {number}": each for number, (name, each) in enumerate(facts.tensors)}
    size = sum(each.nbytes for each in weights.values() if isinstance(each, torch.Tensor))
    step = SAMPLE_BYTES if size <= _WHOLE_BYTES else STEP_BYTES
    for name in sorted(weights):
        _hash(hasher, name, weights[name], step)
    return hasher.hexdigest()[:32]


def _values(value: object, name: re.Pattern[str]) -> Iterator[object]:
    """The values under keys of this name in nested configurations."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            if isinstance(key, str) and name.search(key):
                yield each
            yield from _values(each, name)


def _code(model: torch.nn.Module) -> list[str]:
    """The classes of a model's modules; for classes that no library has, also a digest of their files."""
    found = set()
    for kind in {type(module) for module in model.modules()}:
        text = f"{kind.__module__}.{kind.__qualname__}"
        if not is_library(kind.__module__):
            try:
                text += f" {hashlib.sha256(Path(inspect.getfile(kind)).read_bytes()).hexdigest()}"
            except (OSError, TypeError) as exc:
                raise ConfigError(f"kvdepot.hf cannot identify the code of {text}: {exc}") from exc
        found.add(text)
    return sorted(found)


def _tensors(modules: Iterable[tuple[str, torch.nn.Module]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers with their names; shared ones once for each place. Faster than torch's own lists."""
    for path, module in modules:
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    yield f"{path}.{name}", tensor


def _leaves(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors with memory of their own of which a tensor consists: those within a quantized one."""
    if not hasattr(tensor.data, "__tensor_flatten__"):
        yield tensor
        return
    for name in tensor.data.__tensor_flatten__()[0]:
        yield from _leaves(getattr(tensor.data, name))


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.data.as_subclass(torch.Tensor)


def _hash(hasher: blake3, name: str, value: object, step: int) -> None:
    """Add an entry of a state dict to a digest: of large tensors, 4 KiB of each `step` bytes."""
    if isinstance(value, torch.Tensor):
        for leaf in _leaves(value):
            hasher.update(f"{name} {leaf.dtype} {list(leaf.shape)}\0".encode())
            for part in _parts(_plain(leaf), name, step):
                hasher.update(part.contiguous().cpu().numpy())
    elif isinstance(value, Mapping | list | tuple):
        for key, each in value.items() if isinstance(value, Mapping) else enumerate(value):
            _hash(hasher, f"{name}[{key}]", each, step)
    elif isinstance(value, str | bytes | int | float | torch.dtype | torch.Size | None):
        hasher.update(f"{name} {value!r}\0".encode())
    else:
        raise ConfigError(f"kvdepot.hf cannot identify {name} of this model's weights: a {type(value).__name__}")


def _parts(tensor: torch.Tensor, name: str, step: int) -> Iterator[torch.Tensor]:
    data = tensor.contiguous().reshape(-1).view(torch.uint8)
    if data.numel() <= SMALL_BYTES or step <= SAMPLE_BYTES:
        yield data
        return
    end = data.numel() // step * step
    yield data[:end].view(-1, step)[:, :SAMPLE_BYTES]
    yield data[end : end + SAMPLE_BYTES]
    yield data[-SAMPLE_BYTES:]
    if tensor.ndim == 2 and BY_ROW.search(name):
        yield data.view(len(tensor), -1)[:, :ROW_SAMPLE_BYTES]
