"""`kvdepot.layout`: what vLLM is asked for, what it makes of that, and engines whose layers lie side by side."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.utils import get_kv_connector_cache_layout
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backends.utils import resolve_kv_cache_layout

from kvdepot.integrations.vllm import paged_kv
from kvdepot.integrations.vllm.settings import ConnectorSettings
from tests.conftest import Depot, StartDepot
from tests.vllm.conftest import StartEngine
from tests.vllm.engines import output, prompt, same_as_own

BLOCKS: dict[str, Any] = {"kvdepot.layout": "blocks"}
EXTENDED: dict[str, Any] = {"worker_extension_cls": "tests.vllm.block_major.BlockMajor"}
FALLEN_BACK = "kvdepot.layout is blocks, but this engine's KV has the layout "


def configured(model: Path, **extra: Any) -> VllmConfig:
    settings = {"kvdepot.start": "never", **extra}
    transfer = KVTransferConfig(kv_connector="KVDepotConnector", kv_role="kv_both", kv_connector_extra_config=settings)
    arguments = EngineArgs(
        model=str(model), skip_tokenizer_init=True, max_model_len=1024, max_num_batched_tokens=1024,
        kv_transfer_config=transfer,
    )  # fmt: skip
    return arguments.create_engine_config()


def asked(config: VllmConfig) -> str | None:
    """What vLLM's engine core asks every connector's class."""
    found: str | None = get_kv_connector_cache_layout(config)
    return found


def test_the_engine_chooses_its_layout_unless_blocks_are_asked_for(models: dict[str, Path]) -> None:
    assert asked(configured(models["gqa"])) is None
    assert asked(configured(models["gqa"], **{"kvdepot.layout": "engine"})) is None
    assert asked(configured(models["gqa"], **BLOCKS)) == "BLHNC", "attention on CPUs reads heads before tokens"
    assert asked(configured(models["mla"], **BLOCKS)) is None, (
        "MLA on CPUs fails at its first step with any such layout"
    )


@pytest.mark.parametrize(("capability", "name"), [((9, 0), "BLNHC"), ((10, 0), "BLHNC"), ((12, 0), "BLHNC")], ids=str)
def test_on_gpus_tokens_come_before_heads_unless_kernels_want_heads_first(
    capability: tuple[int, int], name: str, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configured(models["mla"], **BLOCKS)
    gpu = SimpleNamespace(is_cpu=lambda: False, get_device_capability=lambda: DeviceCapability(*capability))
    monkeypatch.setattr(paged_kv, "current_platform", gpu)
    assert asked(config) == name


@pytest.mark.parametrize(
    ("supported", "variable", "layout"),
    [
        (("LBHNC", "BLHNC"), "", "BLHNC"),
        (("LBHNC",), "", "LBHNC"),
        (("LBHNC", "BLHNC"), "HND", "LBHNC"),
    ],
    ids=["a backend that can", "a backend that cannot", "the variable has precedence"],
)
def test_vllm_takes_what_is_asked_for_or_the_engine_says_that_it_did_not(
    supported: tuple[str, ...],
    variable: str,
    layout: str,
    models: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if variable:
        monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", variable)
    lines: list[str] = []
    monkeypatch.setattr(paged_kv.log, "warning", lambda text, *values: lines.append(text % values))
    config = configured(models["gqa"], **BLOCKS)
    assert resolve_kv_cache_layout(config, [list(supported)]).name == layout
    paged_kv.check_layout(ConnectorSettings(layout="blocks"), config)
    assert len(lines) == (layout == "LBHNC") and all(FALLEN_BACK + "LBHNC" in line for line in lines)
    paged_kv.check_layout(ConnectorSettings(), config)
    assert len(lines) == (layout == "LBHNC"), "what was not asked for is not missed"


def test_engines_with_layers_side_by_side_share_and_never_with_others(
    start_depot: StartDepot, models: dict[str, Path], start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    depot, tokens = start_depot(arena_mib=64), prompt(951, 4 * 256 + 17)
    first = start_engine(models["gqa"], depot.url, extra=BLOCKS, **EXTENDED).wait_started()
    other = start_engine(models["gqa"], depot.url, **EXTENDED)
    computed = first.run(tokens)
    assert computed["cached"] == 0
    same_as_own(first, tokens, 4 * 256)
    first.stop()
    assert "Using BLHNC KV cache layout" in first.logged() and FALLEN_BACK not in first.logged()
    same = other.wait_started().run(tokens)
    assert same["cached"] == 0 and output(same) == output(computed), "other places, the same values"
    same_as_own(other, tokens, 4 * 256)
    other.stop()
    assert "Using LBHNC KV cache layout" in other.logged()
    assert len(depot.status()["namespaces"]) == 2

    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "BLHNC")  # whoever asks for it, it is the same layout
    by_variable = start_engine(models["gqa"], depot.url, **EXTENDED).wait_started()
    assert by_variable.run(tokens)["cached"] == 4 * 256
    by_variable.stop()
    assert len(depot.status()["namespaces"]) == 2
    depot.close()


def test_an_engine_whose_backend_cannot_runs_as_without_the_setting_and_says_so(
    vllm_depot: Depot, models: dict[str, Path], start_engine: StartEngine
) -> None:
    tokens = prompt(952, 2 * 256 + 17)
    engine = start_engine(models["mla"], vllm_depot.url, extra=BLOCKS).wait_started()
    assert engine.run(tokens)["cached"] == 0
    same_as_own(engine, tokens, 2 * 256, exact=False)
    engine.stop()
    assert f"{FALLEN_BACK}LB" in engine.logged()
    plain = start_engine(models["mla"], vllm_depot.url).wait_started()
    assert plain.run(tokens)["cached"] == 2 * 256, "and shares with engines without it"
    plain.stop()
    assert FALLEN_BACK not in plain.logged()
