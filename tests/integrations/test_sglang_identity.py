"""The settings of SGLang's extra config, and what names an engine's KV; without SGLang."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvdepot.errors import ConfigError
from kvdepot.integrations.sglang import identity
from kvdepot.integrations.sglang.identity import EngineIdentity, forget_updates, identify, watch_updates
from kvdepot.integrations.sglang.settings import HiCacheSettings, read_settings

OF_SGLANG = {
    "backend_name": "kvdepot", "module_path": "kvdepot.integrations.sglang", "class_name": "KVDepotHiCache",
    "interface_v1": 1, "allocator": "shm", "file_storage_path": "sglang_storage",
}  # fmt: skip


class TestSettings:
    def test_ours_are_read_and_sglangs_are_left_alone(self) -> None:
        given = {"kvdepot.url": "ipc:///tmp/a.sock", "kvdepot.required": True, "kvdepot.weights_revision": "7"}
        assert read_settings(OF_SGLANG | given) == HiCacheSettings("ipc:///tmp/a.sock", "auto", True, "", "7")
        assert read_settings(OF_SGLANG) == HiCacheSettings()

    @pytest.mark.parametrize(
        ("more", "message"),
        [
            ({"kvdepot.ulr": "x"}, r"kvdepot.ulr is not a kvdepot setting; did you mean kvdepot.url\? valid settings:"),
            ({"url": "ipc:///tmp/a"}, r"url is not a kvdepot setting; did you mean kvdepot.url\?"),
            ({"kvdepot.required": 1}, "kvdepot.required is 1, not of type bool"),
            ({"kvdepot.start": "always"}, "kvdepot.start is 'always', not one of auto, never"),
            ({"kvdepot.url": "http://x"}, "kvdepot.url: "),
            ({"interface_v1": None}, 'add "interface_v1": 1 to --hicache-storage-backend-extra-config, given in the'),
        ],
    )
    def test_wrong_ones_are_refused_with_what_to_do(self, more: dict[str, object], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            read_settings(OF_SGLANG | more)

    @pytest.mark.parametrize("extra", [None, [1], "text", 7])
    def test_what_is_no_json_object_is_refused(self, extra: object) -> None:
        with pytest.raises(ConfigError, match="must be a JSON object, not"):
            read_settings(extra)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model whose files are old: those that change while an engine starts make its KV its own."""
    (tmp_path / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


@pytest.fixture(autouse=True)
def _started_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the files of these tests had been there long before the engine."""
    monkeypatch.setattr(identity, "SETTLED_S", -1e9)


def named(model: Path, version: str = "0.5.23", revision: str = "", **more: object) -> str:
    arguments: dict[str, object] = {"model_path": str(model), "dtype": "auto", "nnodes": 1, **more}
    return identify("served", arguments, revision, version).name("kv", "MHA|1|page_first", 0)


class TestIdentity:
    def test_equal_engines_have_one_name_whatever_their_ports_and_paths(self, model: Path, tmp_path: Path) -> None:
        first = named(model, port=1, random_seed=5, log_level="info", served_model_name="a", hicache_ratio=2.0)
        assert first == named(model, port=2, random_seed=6, nccl_port=9, log_level="debug", hicache_ratio=4.0)
        assert first.startswith(f"{model.name}@kv-")

    @pytest.mark.parametrize(
        "more",
        [
            {"dtype": "float16"}, {"kv_cache_dtype": "fp8_e5m2"}, {"quantization": "fp8"}, {"tp_size": 2},
            {"json_model_override_args": '{"rope_theta": 1}'}, {"version": "0.5.22"}, {"revision": "mine"},
            {"an_argument_of_a_later_version": True},
        ],
    )  # fmt: skip
    def test_whatever_may_change_kv_changes_the_name(self, model: Path, more: dict[str, Any]) -> None:
        assert named(model, **more) != named(model)

    def test_other_weights_have_another_name(self, model: Path) -> None:
        before = named(model)
        (model / "model.safetensors").write_bytes(b"\x03\0\0\0\0\0\0\0{ }")
        assert named(model) != before

    @pytest.mark.parametrize("form", ["dict", "text", "name=path", "list of dict", "object"])
    def test_other_weights_of_an_adapter_have_another_name(self, model: Path, tmp_path: Path, form: str) -> None:
        path = tmp_path / "adapter"
        path.mkdir()
        paths: object = {
            "dict": {"a": str(path)}, "text": [str(path)], "name=path": [f"a={path}"],
            "list of dict": [{"lora_name": "a", "lora_path": str(path)}],
            "object": [types.SimpleNamespace(lora_path=str(path))],
        }[form]  # fmt: skip
        names = []
        for content in (b"\x02\0\0\0\0\0\0\0{}", b"\x03\0\0\0\0\0\0\0{ }"):
            (path / "adapter_model.safetensors").write_bytes(content)
            names.append(named(model / "config.json", lora_paths=paths))
        assert len(set(names)) == 2

    def test_weights_that_change_while_the_engine_loads_are_its_own(
        self, model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before = named(model, port=1)
        monkeypatch.setattr(identity, "SETTLED_S", 1e9)
        assert named(model, port=1) not in (before, named(model, port=2))

    def test_pools_and_updates_of_weights_have_names_of_their_own(self) -> None:
        one, other = EngineIdentity("m", "facts", "run 1"), EngineIdentity("m", "facts", "run 2")
        names = [
            one.name("kv", "f", 0), one.name("kv", "f", 1), other.name("kv", "f", 1), one.name("kv", "f", 2),
            one.name("mamba", "f", 0), one.name("kv", "g", 0),
        ]  # fmt: skip
        assert len(set(names)) == len(names) and other.name("kv", "f", 0) == names[0]

    def test_the_ranks_of_one_start_have_one_name_after_updates_and_other_starts_another(
        self, model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def updated() -> str:
            return identify("served", {"model_path": str(model)}, "", "0.5.23").name("kv", "f", 1)

        assert updated() != updated()  # no ranks are known
        names: list[str] = []
        for _ in range(2):
            store = torch.distributed.HashStore()  # which an engine's ranks share, and its next start does not have
            torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
            try:
                names.append(updated())
                assert updated() == names[-1]
                monkeypatch.setattr(identity, "_are_updated", True)
                assert updated() != names[-1]  # an earlier backend of this process may have used the ranks' name
                monkeypatch.setattr(identity, "_are_updated", False)
            finally:
                torch.distributed.destroy_process_group()
        assert names[0] != names[1]

    def test_weights_that_cannot_be_identified_need_a_name(self, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for more in ({"load_format": "remote"}, {"custom_weight_loader": ["x"]}):
            with pytest.raises(ConfigError, match=r'Set "kvdepot.weights_revision" in --hicache-storage-backend'):
                named(model, **more)
            assert named(model, revision="1", **more) != named(model, revision="2", **more)
        with pytest.raises(ConfigError, match=r"cannot determine which version of /no/such/model this is"):
            named(Path("/no/such/model"))
        monkeypatch.setitem(os.environ, "SGLANG_USE_MODELSCOPE", "true")
        with pytest.raises(ConfigError, match="cannot determine which version of hub/model this is"):
            named(Path("hub/model"))

    @pytest.mark.parametrize("version", ["0.5.19", "0.5.24", "0.5.2", "0.6.0", "1.0"])
    def test_other_versions_are_refused(self, model: Path, version: str) -> None:
        with pytest.raises(ConfigError, match=r"kvdepot supports SGLang 0.5.20 to 0.5.23, not "):
            named(model, version)
        assert named(model, "0.5.20.post1")

    def test_engines_on_several_hosts_are_refused(self, model: Path) -> None:
        with pytest.raises(ConfigError, match="does not support engines on several hosts"):
            named(model, nnodes=2)
        with pytest.raises(ConfigError, match="omit --enable-kv-cache-sharding"):
            named(model, enable_kv_cache_sharding=True)


class TestUpdatesOfWeights:
    @pytest.fixture
    def updater(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[type]:
        """A class like SGLang's, where SGLang has it."""

        class WeightUpdater:
            done = 0

            def update_weights_from_disk(self, path: str) -> str:
                self.done += 1
                return path

            def receive_weights_from_distributed(self) -> None: ...

            def check(self) -> None: ...

        module = types.ModuleType(identity._UPDATER)
        module.WeightUpdater = WeightUpdater  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, identity._UPDATER, module)
        yield WeightUpdater

    def test_each_update_is_noticed_once_before_it_begins(self, updater: Any) -> None:
        noticed: list[int] = []
        model = updater()

        def notice() -> None:
            noticed.append(model.done)

        watch_updates(notice)
        try:
            assert model.update_weights_from_disk("p") == "p" and noticed == [0]
            model.receive_weights_from_distributed()
            model.check()
            assert noticed == [0, 1]
            watch_updates(len_of := lambda: noticed.append(-1))  # a second backend of this process
            model.update_weights_from_disk("p")
            assert noticed == [0, 1, 1, -1]
            forget_updates(len_of)
        finally:
            forget_updates(notice)
        model.update_weights_from_disk("p")
        assert noticed == [0, 1, 1, -1]

    def test_a_version_whose_updates_cannot_be_noticed_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, identity._UPDATER, types.ModuleType("empty"))
        with pytest.raises(ConfigError, match="would not notice updates of weights"):
            watch_updates(lambda: None)
