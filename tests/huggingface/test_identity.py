"""The identity of a model: KV of other weights is not served, and that of equal ones is."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import kvdepot
from kvdepot.errors import BadRequest, ConfigError
from kvdepot.hf import PrefixCache
from kvdepot.integrations.huggingface.identity import identity
from tests.huggingface.models import CHUNK, compute, make, prompt

IDS = prompt(50)
WHOLE = 48


def stored(library: kvdepot.Depot, model: Any) -> PrefixCache:
    """A cache in which the prompt is stored."""
    cache = PrefixCache(library, model, CHUNK)
    past, n = cache.load(IDS)
    assert n == 0
    compute(model, IDS, past)
    assert cache.store(IDS, past) == WHOLE
    return cache


def test_equal_weights_share_their_prefixes(library: kvdepot.Depot, tmp_path: Path) -> None:
    model = make(seed=1)
    stored(library, model)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    for same in (make(seed=1), again):
        assert PrefixCache(library, same, CHUNK).load(IDS)[1] == WHOLE
    assert PrefixCache(library, make(seed=2), CHUNK).load(IDS)[1] == 0


def step(model: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(input_ids=IDS, labels=IDS).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def load_others(model: Any) -> None:
    model.load_state_dict(make().state_dict())


def scale_in_place(model: Any) -> None:
    model.model.layers[2].mlp.down_proj.weight.data += 0.01  # counted by no version of the tensor


def edit_one_value(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight[5, 7] += 1


def replace_a_tensor(model: Any) -> None:
    model.model.norm.weight = torch.nn.Parameter(model.model.norm.weight.detach() * 2)


def rotate_otherwise(model: Any) -> None:
    model.model.rotary_emb.inv_freq.mul_(0.5)


def attend_otherwise(model: Any) -> None:
    model.set_attn_implementation("eager")


def configure_otherwise(model: Any) -> None:
    model.config.rms_norm_eps = 0.1


def use_less_precision(model: Any) -> None:
    model.to(torch.bfloat16)


CHANGES = [
    step, load_others, scale_in_place, edit_one_value, replace_a_tensor, rotate_otherwise, attend_otherwise,
    configure_otherwise, use_less_precision,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_in_memory_begins_without_prefixes(library: kvdepot.Depot, change: Callable[[Any], None]) -> None:
    model = make(seed=1000 + CHANGES.index(change))
    cache = stored(library, model)
    assert cache.load(IDS)[1] == WHOLE
    before = identity(model)
    change(model)
    assert identity(model) != before
    assert cache.load(IDS)[1] == 0
    assert PrefixCache(library, model, CHUNK).load(IDS)[1] == 0


def test_what_is_changed_back_has_its_prefixes_again(library: kvdepot.Depot) -> None:
    model = make()
    cache, weights = stored(library, model), {name: each.clone() for name, each in model.state_dict().items()}
    load_others(model)
    assert cache.load(IDS)[1] == 0
    model.load_state_dict(weights)
    assert cache.load(IDS)[1] == WHOLE


def test_a_cache_of_weights_that_were_changed_is_not_stored(library: kvdepot.Depot) -> None:
    model = make()
    cache = PrefixCache(library, model, CHUNK)
    past, _ = cache.load(IDS)
    compute(model, IDS, past)
    scale_in_place(model)
    with pytest.raises(BadRequest, match="weights were changed since"):
        cache.store(IDS, past)
    assert cache.load(IDS)[1] == 0


def test_weights_that_change_during_generation_store_no_answer(library: kvdepot.Depot) -> None:
    model = make()
    weights = {name: each.clone() for name, each in model.state_dict().items()}
    cache, seen = PrefixCache(library, model, CHUNK), []

    def change_once(_: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if not seen:
            scale_in_place(model)
        seen.append(1)
        return scores

    answer = cache.generate(IDS, max_new_tokens=20, do_sample=False, logits_processor=[change_once])
    assert isinstance(answer, torch.Tensor) and len(seen) == 20
    assert cache.load(answer)[1] == 0
    model.load_state_dict(weights)
    assert cache.load(answer)[1] == WHOLE


class Int8Linear(torch.nn.Module):
    """A linear layer of quantized weights."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("scale", scale)
        self.register_buffer("weight", (linear.weight.detach() / scale).round().to(torch.int8))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(values, self.weight * self.scale)


def quantized(seed: int) -> Any:
    model = make(seed=seed)
    for layer in model.model.layers:
        layer.mlp.up_proj = Int8Linear(layer.mlp.up_proj)
    return model


def test_quantized_weights_and_their_scales_are_told_apart(library: kvdepot.Depot) -> None:
    model = quantized(71)
    cache = stored(library, model)
    assert PrefixCache(library, quantized(71), CHUNK).load(IDS)[1] == WHOLE
    assert PrefixCache(library, make(seed=71), CHUNK).load(IDS)[1] == 0
    model.model.layers[1].mlp.up_proj.scale[5] *= 2
    assert cache.load(IDS)[1] == 0


@pytest.mark.parametrize(
    "changed", ["model.norm.weight", "model.layers.3.mlp.up_proj.weight", "model.embed_tokens.weight"]
)
def test_large_models_are_told_apart_by_a_part_of_each_tensor(changed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvdepot.integrations.huggingface.identity._WHOLE_BYTES", 0)
    model = make(seed=5, hidden_size=1024, intermediate_size=2048, vocab_size=4096, num_hidden_layers=4)
    before = identity(model)
    weight = model.get_parameter(changed).data
    weight[(700, 3)[: weight.ndim]] += 1
    is_between_samples = weight.ndim == 2 and changed != "model.embed_tokens.weight"
    assert (identity(model) == before) is is_between_samples
    weight *= 1.01
    assert identity(model) != before


def test_weights_of_an_unknown_kind_are_refused() -> None:
    class Strange(torch.nn.Linear):
        def get_extra_state(self) -> object:
            return object()

    model = make()
    model.lm_head = Strange(64, 512, bias=False)
    with pytest.raises(ConfigError, match=r"cannot identify lm_head._extra_state"):
        identity(model)


@pytest.mark.skipif(not importlib.util.find_spec("peft") and "CI" not in os.environ, reason="PEFT is not installed")
def test_adapters_have_prefixes_of_their_own(library: kvdepot.Depot) -> None:
    import peft

    def adapted(seed: int) -> Any:
        base = make(seed=seed)
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        model = peft.get_peft_model(base, config, "one")
        model.add_adapter("two", config)
        return model.eval()

    model = adapted(81)
    cache = PrefixCache(library, model, CHUNK)
    for name in ("one", "two"):
        model.set_adapter(name)
        assert cache.load(IDS)[1] == 0
        answer = cache.generate(IDS, max_new_tokens=5, do_sample=False)
        assert torch.equal(answer, model.generate(input_ids=IDS, max_new_tokens=5, do_sample=False))
    with model.disable_adapter():
        assert cache.load(IDS)[1] == 0
    model.set_adapter("one")
    assert cache.load(IDS)[1] == PrefixCache(library, adapted(81), CHUNK).load(IDS)[1] == WHOLE
    model.merge_adapter()
    assert cache.load(IDS)[1] == 0
    model.unmerge_adapter()
    soft = peft.get_peft_model(make(), peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    with pytest.raises(ConfigError, match="virtual tokens"):
        PrefixCache(library, soft.eval(), CHUNK)
