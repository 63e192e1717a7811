"""The identity of a model: KV of other weights is not served, and that of equal ones is."""

from __future__ import annotations

import functools
import importlib.util
import operator
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.modules import module as modules
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.models.llama import modeling_llama

import kvdepot
from kvdepot.errors import BadRequest, ConfigError
from kvdepot.hf import PrefixCache
from kvdepot.integrations.huggingface.identity import fingerprint, identity
from tests.conftest import HANG_S
from tests.huggingface.models import CHUNK, HAS_STATES, SERVED, compute, make, prompt

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


def activate_otherwise(model: Any) -> None:
    model.model.layers[1].mlp.act_fn = torch.nn.ReLU()


def activate_by_a_function(model: Any) -> None:
    mlp = model.model.layers[1].mlp
    del mlp.act_fn
    mlp.act_fn = lambda values: torch.relu(values)


def scale_attention(model: Any) -> None:
    model.model.layers[1].self_attn.scaling *= 4


def normalize_otherwise(model: Any) -> None:
    model.model.layers[1].input_layernorm.variance_epsilon = 5.0


def rotate_more(model: Any) -> None:
    model.model.rotary_emb.attention_scaling = 3.0


class PlainAdapter(torch.nn.Module):
    """A linear layer with a LoRA that is no parameter."""

    def __init__(self, linear: torch.nn.Linear, scale: float) -> None:
        super().__init__()
        self.base = linear
        self.parts = [torch.full((linear.in_features, 2), scale), torch.ones(2, linear.out_features)]

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.base(values) + values @ self.parts[0] @ self.parts[1]
        return result


def adapt_by_a_plain_attribute(model: Any) -> None:
    model.model.layers[0].self_attn.k_proj = PlainAdapter(model.model.layers[0].self_attn.k_proj, 0.5).eval()


def patch_an_instance(model: Any) -> None:
    mlp, factor = model.model.layers[1].mlp, torch.tensor(4.0)
    forward = mlp.forward
    mlp.forward = lambda values: forward(values) * factor


CHANGES = [
    step, load_others, scale_in_place, edit_one_value, replace_a_tensor, rotate_otherwise, attend_otherwise,
    configure_otherwise, use_less_precision, activate_otherwise, activate_by_a_function, scale_attention,
    normalize_otherwise, rotate_more, adapt_by_a_plain_attribute, patch_an_instance,
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


def test_the_values_of_plain_tensors_count() -> None:
    names = []
    for scale in (0.5, 0.25, 0.5):
        model = make(seed=1)
        model.model.layers[0].self_attn.k_proj = PlainAdapter(model.model.layers[0].self_attn.k_proj, scale).eval()
        names.append(identity(model))
    assert names[0] == names[2] != names[1]


def attention(factor: float) -> Callable[..., Any]:
    """An attention function of our own: `factor` times what transformers' function gives."""

    def attend(module: Any, query: Any, key: Any, value: torch.Tensor, mask: Any, **others: Any) -> Any:
        return sdpa_attention_forward(module, query, key, value * factor, mask, **others)

    return attend


@pytest.mark.parametrize("name", ["ours", "sdpa"])
def test_the_code_of_a_registered_attention_function_counts(library: kvdepot.Depot, name: str) -> None:
    found, before = [], AttentionInterface._global_mapping.copy()
    AttentionMaskInterface.register("ours", sdpa_mask)
    try:
        for factor in (1.0, 5.0, 1.0):
            AttentionInterface.register(name, attention(factor))
            model = make(seed=91, attn_implementation=name)
            cache = PrefixCache(library, model, CHUNK)
            found.append(cache.load(IDS)[1])
            assert torch.equal(cache.generate(IDS, max_new_tokens=2), model.generate(input_ids=IDS, max_new_tokens=2))
        AttentionInterface.register(name, attention(2.0))
        assert cache.load(IDS)[1] == 0
    finally:
        AttentionInterface._global_mapping.clear()
        AttentionInterface._global_mapping.update(before)
        AttentionMaskInterface._global_mapping.pop("ours")
    assert found == [0, 0, WHOLE]


@pytest.mark.parametrize("name", ["LlamaMLP.forward", "apply_rotary_pos_emb"])
def test_code_of_transformers_that_was_replaced_counts(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    model = make(seed=1)
    before = identity(model), fingerprint(model)
    old = operator.attrgetter(name)(modeling_llama)
    monkeypatch.setattr(f"{modeling_llama.__name__}.{name}", functools.wraps(old)(lambda *args: old(*args)))
    assert identity(model) != before[0] and fingerprint(model) != before[1]
    monkeypatch.undo()
    assert (identity(model), fingerprint(model)) == before


def record(*_: Any) -> None:
    """A hook."""


@pytest.mark.parametrize("kind", ["forward_hook", "forward_pre_hook"])
def test_models_with_hooks_are_refused(library: kvdepot.Depot, kind: str) -> None:
    model = make()
    cache = stored(library, model)
    for register in (getattr(model.model.layers[1], f"register_{kind}"), getattr(modules, f"register_module_{kind}")):
        handle = register(record)
        for call in (cache.load, cache.generate, lambda ids: PrefixCache(library, model, CHUNK)):
            with pytest.raises(ConfigError, match=r"with hooks \(.*: record\)"):
                call(IDS)
        handle.remove()
    assert cache.load(IDS)[1] == WHOLE


@pytest.mark.parametrize("kind", SERVED)
def test_running_a_model_changes_no_fact_of_it(kind: str) -> None:
    model, ids = make(kind, seed=1), prompt(20)
    before = identity(model), fingerprint(model)
    short: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 2, "do_sample": False}
    model.generate(ids, **short, output_hidden_states=True, return_dict_in_generate=True)
    if kind != "latent" or HAS_STATES:
        model.generate(ids, **short, cache_implementation="static", disable_compile=True)
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    model.train()
    model(input_ids=ids, labels=ids).loss.backward()
    model.zero_grad()
    model.eval()
    assert (identity(model), fingerprint(model)) == before


def test_equal_models_have_one_identity_in_all_processes() -> None:
    script = "from tests.huggingface import test_identity as this\nprint(*this.identities())"
    environ = {**os.environ, "PYTHONHASHSEED": "1"}
    ended = subprocess.run(
        [sys.executable, "-c", script], env=environ, stdout=subprocess.PIPE, text=True, timeout=HANG_S
    )
    assert ended.stdout.split() == identities()


def identities() -> list[str]:
    """Of models of all kinds, with an attention function and a patch of our own."""
    models = [make(kind, seed=1) for kind in SERVED]
    activate_by_a_function(models[0])
    adapt_by_a_plain_attribute(models[0])
    patch_an_instance(models[0])
    return [identity(model) for model in models]


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
