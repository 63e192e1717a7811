"""Engines share KV only if all of vLLM's configuration is equal, except fields that are known to be harmless."""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib
import json
import os
import shutil
import time
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import envs
from vllm.config import KVTransferConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models.registry import ModelRegistry
from vllm.v1.attention.backends.utils import record_kv_cache_layout
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

from kvdepot.errors import ConfigError
from kvdepot.integrations.vllm import environment, versions
from kvdepot.integrations.vllm import identity as vllm_identity
from kvdepot.integrations.vllm.environment import HARMLESS_VARIABLES, describe_environment
from kvdepot.integrations.vllm.fields import describe_config, harmless_fields
from kvdepot.integrations.vllm.identity import identify, note_facts
from kvdepot.integrations.weight_files import SETTLED_S, find_weights
from kvdepot.protocol.model_names import key_of_model
from tests.conftest import eventually
from tests.vllm import engines


@pytest.fixture(scope="module")
def config(models: dict[str, Path]) -> VllmConfig:
    return EngineArgs(model=str(models["gqa"]), skip_tokenizer_init=True, max_model_len=1024).create_engine_config()


def _name(config: VllmConfig, weights_revision: str = "") -> str:
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=16, dtype=torch.float32)
    groups = [KVCacheGroupSpec(["layer"], spec)]
    return identify(config, KVCacheConfig(8, [], groups), weights_revision).namespace


def _classes(cls: type, seen: dict[str, type]) -> dict[str, type]:
    """The configuration classes that the fields of `cls` may hold, itself included, by name."""
    if cls.__name__ not in seen:
        seen[cls.__name__] = cls
        for hint in typing.get_type_hints(cls).values():
            for part in (hint, *typing.get_args(hint)):
                if isinstance(part, type) and dataclasses.is_dataclass(part):
                    _classes(part, seen)
    return seen


def _instances(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The configurations within a configuration, except those left out as a whole."""
    yield path, value
    for field in dataclasses.fields(value):
        inner = getattr(value, field.name)
        harmless = field.name in harmless_fields(type(value))
        is_config = dataclasses.is_dataclass(inner) and not isinstance(inner, type)
        if is_config and not harmless and not hasattr(inner, "to_dict"):  # transformers' are described by to_dict
            yield from _instances(inner, f"{path}.{field.name}")


CLASSES = _classes(VllmConfig, {})


def _logged(config: VllmConfig) -> str:
    """What an engine logs about its configuration."""
    with pytest.MonkeyPatch.context() as patch:
        lines: list[str] = []
        patch.setattr(vllm_identity.log, "debug", lambda text, *values: lines.append(text % values))
        vllm_identity.describe_engine(config, "")
    return "\n".join(lines)


def _text(value: Any) -> str:
    return json.dumps(describe_config(value), sort_keys=True)


@pytest.mark.parametrize("cls", CLASSES.values(), ids=CLASSES)
def test_every_field_separates_engines_unless_it_is_listed_with_a_reason(cls: type) -> None:
    instance = object.__new__(cls)
    names = {field.name for field in dataclasses.fields(cls)}
    for name in names:
        object.__setattr__(instance, name, None)
    before = _text(instance)
    for name in names:
        object.__setattr__(instance, name, "another value")
        assert (_text(instance) == before) == (name in harmless_fields(cls)), f"{cls.__name__}.{name}"
        object.__setattr__(instance, name, None)


def test_every_field_of_a_real_configuration_is_reached(config: VllmConfig) -> None:
    before = _text(config)
    changed = 0
    for path, instance in _instances(config):
        for field in dataclasses.fields(instance):
            value = getattr(instance, field.name)
            object.__setattr__(instance, field.name, "another value")
            is_harmless = field.name in harmless_fields(type(instance))
            assert (_text(config) == before) == is_harmless, f"{path}.{field.name}"
            object.__setattr__(instance, field.name, value)
            changed += 1
    assert changed > 300
    assert _text(config) == before


def test_attributes_that_are_no_fields_separate_engines_too(config: VllmConfig) -> None:
    before = _text(config)
    fields = {field.name for field in dataclasses.fields(config.model_config)}
    others = vars(config.model_config).keys() - fields
    assert {"attention_chunk_size", "convert_type", "original_max_model_len"} <= others
    config = copy.deepcopy(config)
    for name in sorted(others):
        value = getattr(config.model_config, name)
        setattr(config.model_config, name, "another value")
        is_derived = isinstance(getattr(type(config.model_config), name, None), functools.cached_property)
        assert (_text(config) == before) == (is_derived or name in harmless_fields(type(config.model_config))), name
        setattr(config.model_config, name, value)


def _configured(model: Path, transfer: Any, **options: Any) -> VllmConfig:
    """A configuration as vLLM hands it to workers."""

    class WithoutWorkers(UniProcExecutor):
        def _init_executor(self) -> None:
            pass

    given: dict[str, Any] = {"skip_tokenizer_init": True, "max_model_len": 1024, "kv_transfer_config": transfer}
    config = EngineArgs(model=str(model), **(given | options)).create_engine_config()
    WithoutWorkers(config)
    return copy.deepcopy(config)


def _build(config: VllmConfig) -> None:
    """Change a configuration as vLLM's code for a model and its fit to the free memory do."""
    config.model_config.hf_config.num_ln_in_parallel_attn = 2
    config.model_config.max_model_len = 800
    config.cache_config.mamba_page_size_padded = 131072
    config.cache_config.mamba_block_size = 256


@pytest.mark.parametrize("is_child", [False, True], ids=["alone", "below MultiConnector"])
def test_an_engine_has_one_name_whatever_building_the_model_changes(
    models: dict[str, Path], is_child: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_identity, "loaded_since", lambda: time.time() + 60)
    settings = {"kvdepot.start": "never"}
    transfer: dict[str, Any] = {"kv_connector": "KVDepotConnector", "kv_connector_extra_config": settings}
    if is_child:
        child = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
        children = {"connectors": [transfer | {"kv_role": "kv_both"}, child]}
        transfer = {
            "kv_connector": "MultiConnector", "kv_connector_extra_config": children,
            "kv_load_failure_policy": "recompute",
        }  # fmt: skip
    reused = KVTransferConfig(**transfer, kv_role="kv_both")
    scheduler = _configured(models["gqa"], reused)
    worker = copy.deepcopy(scheduler)
    _build(worker)
    assert _name(worker) == _name(scheduler)
    # vLLM's own copies of a configuration, for parts of a model, can still be made.
    assert worker.with_hf_config(worker.model_config.hf_config, ["LlamaForCausalLM"]).instance_id != worker.instance_id
    other = _configured(models["gqa"], reused, max_model_len=800)
    assert _name(other) != _name(scheduler), "two engines with one KVTransferConfig"
    again = _configured(models["gqa"], reused)
    assert again.instance_id != scheduler.instance_id
    assert _name(again) == _name(scheduler)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("VLLM_MARLIN_INPUT_DTYPE", "int8"), ("VLLM_CPU_INT4_W4A8", "0"), ("VLLM_FLOAT32_MATMUL_PRECISION", "high"),
        ("VLLM_USE_DEEP_GEMM_E8M0", "0"), ("VLLM_CPU_MOE_PREPACK", "0"), ("ONEDNN_DEFAULT_FPMATH_MODE", "BF16"),
    ],
)  # fmt: skip
def test_variables_that_change_numbers_separate_engines(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    before = _name(config)
    monkeypatch.setenv(variable, value)
    assert _name(config) != before


def test_all_processes_agree_though_files_appear_above_the_model_between_their_looks(
    config: VllmConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "org" / "model"
    engines.write_model(folder, engines.LLAMA)
    found = copy.deepcopy(config)
    found.model_config.model = str(folder)
    found.kv_transfer_config = KVTransferConfig(kv_connector="KVDepotConnector", kv_role="kv_both")
    changed = find_weights(str(folder)).changed_at
    monkeypatch.setattr(vllm_identity, "loaded_since", lambda: changed + SETTLED_S + 0.05)  # just settled
    note_facts(found)
    name = _name(found)

    def appear() -> bool:
        for number, place in enumerate((folder.parent, tmp_path)):
            (place / f"{number}.log").unlink(missing_ok=True), (place / f"{number}.log").write_bytes(b"")
        return find_weights(str(folder)).changed_at > changed + 0.1  # the file system's clock ticks

    eventually(appear)
    assert _name(found) == name


def test_layouts_separate_engines_however_they_were_asked_for(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def name(layout: str | None) -> str:
        found = copy.deepcopy(config)
        record_kv_cache_layout(found.cache_config, layout) if layout else None
        found.instance_id += f"-kvdepot-{'0' * 32}-1000-0-{'0' * 32}"  # as noted before vLLM settles it
        return _name(found)

    names = {layout: name(layout) for layout in (None, "LBHNC", "LBNHC", "BLHNC", "BLNHC")}
    assert len(set(names.values())) == len(names)
    assert names["BLNHC"] == name("BLNHC")
    before = _name(config)
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "BLNHC")
    assert _name(config) == before


def test_every_variable_separates_engines_unless_it_is_listed_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    known = envs.compile_factors().keys()
    listed = {name for names in HARMLESS_VARIABLES.values() for name in names}
    assert len(known - listed) > 100
    assert {"VLLM_HOST_IP", "VLLM_CACHE_ROOT", "VLLM_PORT", "VLLM_API_KEY", "CUDA_VISIBLE_DEVICES"}.isdisjoint(known)
    for name in known:
        monkeypatch.delenv(name, raising=False)
    assert describe_environment() == {}
    tried = 0
    for name in sorted(known):
        monkeypatch.setenv(name, "1")
        if name in envs.compile_factors():  # otherwise vLLM refuses this value
            tried += 1
            assert (name in describe_environment()) == (name not in listed), name
        monkeypatch.delenv(name)
    assert tried > 0.9 * len(known)
    assert all(len(reason) > 10 for reason in HARMLESS_VARIABLES)


def _plugin(folder: Path, code: str) -> None:
    """Install a package with a plugin of vLLM, always as version 1."""
    package, metadata = folder / "kvd_other_code", folder / "kvd_other_code-1.dist-info"
    package.mkdir(exist_ok=True)
    metadata.mkdir(exist_ok=True)
    (package / "__init__.py").write_text(code)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: kvd-other-code\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("[vllm.general_plugins]\nother_code = kvd_other_code:register\n")


def test_code_of_others_separates_engines_by_its_contents(
    config: VllmConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def name(given: VllmConfig = config) -> str:
        environment._digest.cache_clear()
        importlib.invalidate_caches()
        return _name(given)

    names = [name()]
    monkeypatch.syspath_prepend(str(tmp_path))
    _plugin(tmp_path, "def register(): pass")
    names.append(name())
    _plugin(tmp_path, "def register(): ...")
    names.append(name())
    monkeypatch.setenv("VLLM_PLUGINS", "kvdepot")
    assert name() == names[0], "a plugin that vLLM does not load"
    worker = copy.deepcopy(config)
    worker.parallel_config.worker_extension_cls = "kvd_other_code.Extension"
    names.append(name(worker))
    _plugin(tmp_path, "class Extension: pass")
    names.append(name(worker))
    architecture = config.model_config.architecture
    monkeypatch.setitem(ModelRegistry.models, architecture, copy.deepcopy(ModelRegistry.models[architecture]))
    ModelRegistry.register_model(architecture, "kvd_other_code:Model")
    names.append(name())
    _plugin(tmp_path, "class Model: pass")
    names.append(name())
    assert len({*names}) == len(names)


def test_a_tokenizer_that_is_not_the_models_own_separates_engines_by_its_contents(
    config: VllmConfig, tmp_path: Path
) -> None:
    before = _name(config)
    config = copy.deepcopy(config)
    names = {before}
    for number, content in enumerate(("one", "other", "one")):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "tokenizer.json").write_text(content)
        config.model_config.tokenizer = str(folder)
        names.add(_name(config))
    assert len(names) == 3
    config.model_config.tokenizer = config.model_config.model
    assert _name(config) == before
    config.model_config.tokenizer_mode = "slow"
    assert _name(config) != before


def test_a_release_that_corrects_a_model_shares_none_of_its_kv_with_releases_before(
    config: VllmConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = engines.write_model(tmp_path / "mla", engines.MLA)
    mla = EngineArgs(model=str(folder), skip_tokenizer_init=True, max_model_len=1024).create_engine_config()
    yarn = copy.deepcopy(mla)
    yarn.model_config.hf_text_config.rope_parameters["attention_factor"] = 1.0
    names = {}
    for release in versions.KV_FORMATS:
        monkeypatch.setattr(versions, "installed_release", lambda now=release: now)
        names[release] = [versions.corrections(each.model_config) for each in (config, mla, yarn)]
    assert names["0.30"] == [[], [], []]
    assert all(names[release] == [[], [], ["0.31"]] for release in ("0.31", "0.32", "0.33"))
    assert versions.corrections(yarn.model_config) == ["0.31"]
    assert '"corrections": [["0.31"]]' in _logged(yarn)


def test_a_models_path_and_folder_do_not_separate_engines(
    tmp_path: Path, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_identity, "loaded_since", lambda: time.time() + 60)
    (tmp_path / "current").symlink_to(models["gqa"])
    shutil.copytree(models["gqa"], tmp_path / "llama-8b")
    options: dict[str, Any] = {"skip_tokenizer_init": True, "max_model_len": 1024}
    options["speculative_config"] = {"method": "draft_model", "num_speculative_tokens": 2}
    names = []
    for path in (models["gqa"], tmp_path / "current", tmp_path / "llama-8b"):
        options["speculative_config"]["model"] = str(path)
        names.append(_name(EngineArgs(model=str(path), **copy.deepcopy(options)).create_engine_config()))
    assert [name.partition("@")[0] for name in names] == ["gqa", "current", "llama-8b"]
    assert len({key_of_model(name) for name in names}) == 1


def test_two_models_with_one_revision_never_share(
    tmp_path: Path, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_identity, "loaded_since", lambda: time.time() + 60)
    shutil.copytree(models["gqa"], tmp_path / "a" / "model")
    shutil.copytree(models["gqa"], tmp_path / "b" / "model")
    with (tmp_path / "b" / "model" / "model.safetensors").open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"\1\2\3\4")
    one, other = (
        EngineArgs(model=str(tmp_path / each / "model"), skip_tokenizer_init=True).create_engine_config()
        for each in "ab"
    )
    assert _name(one, "v1") != _name(other, "v1")
    assert _name(one, "v1") not in (_name(one, "v2"), _name(one))


def test_a_value_that_cannot_be_described_is_refused_until_somebody_names_it(config: VllmConfig) -> None:
    config = copy.deepcopy(config)
    config.model_config.hf_overrides = lambda given: given
    with pytest.raises(ConfigError, match=r"hf_overrides.*kvdepot\.weights_revision"):
        _name(config)
    assert _name(config, "mine 1") != _name(config, "mine 2")


def test_bound_arguments_separate_engines_unless_they_are_defaults(config: VllmConfig) -> None:
    """vLLM 0.33 binds the default of one to the function that draft models' configurations have."""

    def override(given: Any, extra: Any = None) -> Any:
        return given

    def named(overrides: Any) -> str:
        changed = copy.deepcopy(config)
        changed.model_config.hf_overrides = overrides
        return _name(changed)

    with pytest.raises(ConfigError, match="hf_overrides"):
        named(functools.partial(override, extra=None))
    override.__module__ = "vllm.config.speculative"
    plain = named(override)
    assert named(functools.partial(override, extra=None)) == plain
    others = [functools.partial(override, extra={"a": 1}), functools.partial(override, extra={"a": 2})]
    assert len({plain, *map(named, others), named(functools.partial(override, None))}) == 4
    assert named(functools.partial(dict, a=1)) != named(functools.partial(dict, a=2)), "without a signature"


@pytest.mark.parametrize(
    ("where", "field", "value", "message"),
    [
        ("model_config", "model", "organisation/nowhere", "which version of organisation/nowhere"),
        ("model_config", "model_weights", "s3://bucket/model", "which version of s3://bucket/model"),
        ("load_config", "load_format", "tensorizer", "what load format tensorizer loads"),
        ("load_config", "model_loader_extra_config", {"a": {"path": "/elsewhere"}}, "which files"),
    ],
)
def test_weights_that_cannot_be_read_are_refused_until_the_user_names_them(
    config: VllmConfig, where: str, field: str, value: Any, message: str
) -> None:
    config = copy.deepcopy(config)
    setattr(getattr(config, where), field, value)
    with pytest.raises(ConfigError, match=message):
        _name(config)
    assert _name(config, "mine").count("@") == 1


def test_instruction_sets_that_pack_keys_in_another_way_separate_engines(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = _name(config)
    has_amx = torch.cpu._is_amx_tile_supported()
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: not has_amx)
    assert _name(config) != before


def test_a_model_that_changed_while_it_was_loaded_is_shared_with_no_other_engine(
    config: VllmConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    engines.write_model(folder, engines.LLAMA)
    one, other = copy.deepcopy(config), copy.deepcopy(config)
    for number, engine in enumerate((one, other)):
        engine.model_config.model = str(folder)
        engine.instance_id = f"engine {number}"
    changed = max(file.stat().st_ctime for file in folder.iterdir())
    monkeypatch.setattr(vllm_identity, "loaded_since", lambda: changed + 60)
    assert _name(one) == _name(other)
    monkeypatch.setattr(vllm_identity, "loaded_since", lambda: changed - 1)
    assert _name(one) != _name(other)
    assert _name(one) == _name(copy.deepcopy(one)), "the scheduler and the workers of one engine must agree"
    one.instance_id = f"engine-kvdepot-{'0' * 32}-{int(1000 * (changed - 1))}-0-{'0' * 32}"
    before = _name(one)
    monkeypatch.setattr(vllm_identity, "loaded_since", lambda: changed + 60)
    assert _name(one) == before, "a worker that starts after the change must agree as well"
