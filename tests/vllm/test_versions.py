"""The releases of vLLM that are served: what the connector is of each, and that others are refused.

The interface is compared by reading source files, as names that only types need are imported nowhere.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvdepot.errors import ConfigError
from tests.vllm.engines import ROOT

OURS = ROOT / "src" / "kvdepot" / "integrations" / "vllm"
BASE = "distributed/kv_transfer/kv_connector/v1/base.py"
VERSION_FILE = "_version.py"
METHODS_SINCE = {"supports_sleep_mode": "0.33", "unregister_kv_caches": "0.33", "restore_kv_caches": "0.33"}
"""Methods of the connector that releases before this one never call."""


def sources() -> Path:
    """The `vllm` package to compare with."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.submodule_search_locations
    return Path(next(iter(spec.submodule_search_locations)))


def release() -> str:
    found = re.search(r"['\"]v?(\d+\.\d+)\.\d", (sources() / VERSION_FILE).read_text())
    assert found, "vLLM's own files do not say which version they are"
    return found[1]


def parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def classes(module: ast.Module) -> dict[str, ast.ClassDef]:
    return {node.name: node for node in ast.walk(module) if isinstance(node, ast.ClassDef)}


def methods(cls: ast.ClassDef) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in cls.body if isinstance(node, ast.FunctionDef)}


def signature(function: ast.FunctionDef) -> dict[str, Any]:
    """Kind (property, class method), and names, order and defaults of parameters."""
    given = function.args
    marks = {ast.unparse(mark) for mark in function.decorator_list} & {"property", "classmethod", "staticmethod"}
    return {
        "kind": sorted(marks), "names": [each.arg for each in (*given.posonlyargs, *given.args)],
        "only named": [each.arg for each in given.kwonlyargs],
        "rest": [each.arg for each in (given.vararg, given.kwarg) if each],
        "defaults": [ast.unparse(each) for each in (*given.defaults, *(d for d in given.kw_defaults if d))],
    }  # fmt: skip


def imported() -> Iterator[tuple[str, str, str]]:
    """Our file, vLLM's module, and the name that we import from it, for types, too."""
    for file in sorted(OURS.glob("*.py")):
        for node in ast.walk(parse(file)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm":
                for name in node.names:
                    yield file.name, node.module or "", name.name


def module_file(module: str) -> Path:
    place = sources().parent / Path(*module.split("."))
    return place / "__init__.py" if place.is_dir() else place.with_suffix(".py")


def defines(file: Path, name: str) -> bool:
    """Whether a module defines or imports a name, or loads it when asked for."""
    text = file.read_text()
    top = ast.parse(text)
    names = {alias.asname or alias.name for node in ast.walk(top) if isinstance(node, ast.Import | ast.ImportFrom)
             for alias in node.names}  # fmt: skip
    names |= {node.name for node in ast.walk(top) if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    for node in ast.walk(top):
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return name in names or (file.parent / name).is_dir() or (file.parent / f"{name}.py").exists()


def test_every_overridden_method_has_the_parameters_that_vllm_calls_it_with() -> None:
    base = classes(parse(sources() / BASE))
    theirs = {name: node for cls in ("KVConnectorBase_V1", "SupportsHMA") for name, node in methods(base[cls]).items()}
    ours = methods(classes(parse(OURS / "connector.py"))["KVDepotConnector"])
    number = [int(part) for part in release().split(".")]
    compared = 0
    for name, function in ours.items():
        if name in theirs:
            assert signature(function) == signature(theirs[name]), f"{name} in vLLM {release()}"
            compared += 1
        elif not name.startswith("_"):
            since = METHODS_SINCE.get(name)
            assert since, f"vLLM {release()} has no method {name}"
            assert number < [int(part) for part in since.split(".")], f"{name} should be in vLLM {release()}"
    assert compared > 25
    abstract = {name for name, node in theirs.items() if "abstractmethod" in map(ast.unparse, node.decorator_list)}
    assert abstract <= ours.keys()


@pytest.mark.parametrize("name", ["KVConnectorMetadata", "KVConnectorWorkerMetadata", "KVConnectorTransferResults"])
def test_the_classes_that_messages_are_made_of_are_there(name: str) -> None:
    assert name in classes(parse(sources() / BASE))


def test_every_name_that_is_imported_from_vllm_is_there() -> None:
    names = list(imported())
    assert len(names) > 30
    missing = [
        each for each in names if not module_file(each[1]).exists() or not defines(module_file(each[1]), each[2])
    ]
    assert not missing, f"not in vLLM {release()}"


def test_fields_that_are_left_out_of_the_identity_are_not_of_classes_that_are_gone() -> None:
    from kvdepot.integrations.vllm.fields import HARMLESS, NEUTRAL

    known = {name for file in (sources() / "config").rglob("*.py") for name in classes(parse(file))}
    for name in {*HARMLESS, *NEUTRAL} - {"PreTrainedConfig"}:
        assert name in known | {"AuxOutputConfig"}, f"{name} is no class of vLLM {release()}"


def test_a_field_at_its_neutral_value_is_left_out_and_at_any_other_is_not() -> None:
    from kvdepot.integrations.vllm.fields import NEUTRAL, _without_neutral

    for cls, fields in NEUTRAL.items():
        made = type(cls, (), {})
        for field, (value, reason) in fields.items():
            assert re.match(r"(since|until|moved here in) 0\.\d\d", reason), f"{cls}.{field}"
            assert _without_neutral(made, {field: value, "other": 1}) == {"other": 1}
            for other in ("another", None, not value, [value]):
                if json.dumps(other) != json.dumps(value):
                    assert _without_neutral(made, {field: other})
    assert _without_neutral(type("AttentionConfig", (), {}), {"tokenspeed_mla_min_split_kv": True})


def test_attributes_of_transformers_count_only_if_they_are_set() -> None:
    from transformers import LlamaConfig

    from kvdepot.integrations.vllm.fields import describe_config

    def told(**attributes: Any) -> object:
        return describe_config(LlamaConfig(**attributes))

    assert told(new_of_a_release=None) == told()
    assert told(new_of_a_release=0) != told()


@pytest.mark.parametrize("version", ["0.29.2", "0.34.0", "0.3.1", "1.0", "0.1.dev1+gabc", "dev", ""])
def test_another_version_is_refused_with_the_range_and_what_to_install(version: str) -> None:
    from kvdepot.integrations.vllm.versions import refuse_other_versions

    with pytest.raises(ConfigError, match=r"supports vLLM 0\.30 to 0\.33, but vLLM .*pip install 'vllm==0\.33"):
        refuse_other_versions(version)


@pytest.mark.parametrize("version", ["0.30.0", "0.31.1rc2", "0.32.3.dev7+g0123.cpu", "v0.33.0"])
def test_a_release_and_what_is_built_from_it_is_served(version: str) -> None:
    from kvdepot.integrations.vllm.versions import refuse_other_versions

    refuse_other_versions(version)


def test_an_engine_of_another_version_is_refused_before_a_model_is_loaded(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    import vllm
    from vllm.engine.arg_utils import EngineArgs

    monkeypatch.setattr(vllm, "__version__", "0.29.0")
    arguments = EngineArgs(
        model=str(models["gqa"]), skip_tokenizer_init=True,
        kv_transfer_config={"kv_connector": "KVDepotConnector", "kv_role": "kv_both"},
    )  # fmt: skip
    with pytest.raises(Exception, match=r"kvdepot supports vLLM 0\.30 to 0\.33, but vLLM 0\.29\.0"):
        arguments.create_engine_config()


def test_all_texts_name_the_same_range_of_vllm_versions() -> None:
    from kvdepot.cli.doctor import VLLM_RELEASES
    from kvdepot.integrations.vllm.versions import KV_FORMATS

    assert list(VLLM_RELEASES) == list(KV_FORMATS)
    oldest, (major, minor) = VLLM_RELEASES[0], VLLM_RELEASES[-1].split(".")
    assert f'vllm = ["vllm>={oldest},<{major}.{int(minor) + 1}"]' in (ROOT / "pyproject.toml").read_text()
    table = (ROOT / "docs" / "upgrades.md").read_text()
    assert all(f"| {each} |" in table for each in VLLM_RELEASES)
