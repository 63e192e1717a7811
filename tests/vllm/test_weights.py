"""Weights that change while engines run: when a trainer's version names KV, and that engines then share again."""

from __future__ import annotations

import itertools
from pathlib import Path

from kvdepot.integrations.vllm.weights import NamedWeights, find_version
from tests.conftest import Depot
from tests.vllm.conftest import StartEngine
from tests.vllm.engines import LLAMA, Engine, output, prompt, write_model

CHUNKS = 3
TOKENS = CHUNKS * 256 + 17

UPDATES = ["change", "set", "reset"], ["reset", "change", "set"], ["change", "reset", "set"]
WINDOWS = (
    *UPDATES, [], ["reset"], ["change", "reset"], ["reset", "change"], ["set"],
    ["reset", "change", "set", "reset"], ["reset", "change", "set", "reset", "change"],
    ["change", "set", "reset", "reset", "change"], ["reset", "change", "set", "reset", "change", "set"],
)  # fmt: skip
"""Events between two steps, of up to two updates: weights change only where caches are reset, but their version may be
forgotten, or set again although nothing has changed."""


class Trainer:
    """A trainer and its engine: the weights that it has, and those that each version stands for."""

    def __init__(self, has_arrivals: bool) -> None:
        self.now, self.version = 0, "default"
        self.meaning = {"default": 0}
        self.weights = NamedWeights("run", lambda: self.version)
        self._has_arrivals = has_arrivals

    def live(self, window: list[str]) -> dict[str, str]:
        """What names the KV that a step after these events computes."""
        for event in window:
            match event:
                case "change":
                    self.now += 1
                case "set":
                    self.version = f"v{len(self.meaning)}"
                    self.meaning[self.version] = self.now
                case "reset":
                    self.weights.reset()
            if self._has_arrivals:  # a request that waits until the next step
                self.weights.follow()
        self.weights.follow()
        parts = dict(self.weights.parts)
        self.weights.step()
        return parts


def test_a_version_names_the_weights_that_it_was_set_for_and_no_others() -> None:
    for has_arrivals in (False, True):
        for windows in itertools.product(WINDOWS, repeat=3):
            trainer = Trainer(has_arrivals)
            seen: dict[str, int] = {}  # the weights under each private name
            for window in windows:
                parts = trainer.live(window)
                said = parts.get("weights version")
                assert said is None or trainer.meaning[said] == trainer.now, windows
                assert window not in UPDATES or (said == trainer.version and parts["weights run"] == "run"), windows
                private = str(parts)
                assert seen.setdefault(private, trainer.now) == trainer.now, "two weights under one name"


def test_a_version_without_a_reset_is_private_and_mixes_requests_under_way() -> None:
    versions = ["default"]
    weights = NamedWeights("run", lambda: versions[-1])
    weights.step()
    assert not weights.follow() and weights.parts == ()
    versions.append("1")
    assert weights.follow() and dict(weights.parts).keys() == {"epoch"}
    assert not weights.follow(), "said once"
    weights.step()
    weights.reset()
    assert dict(weights.parts).keys() == {"epoch"}, "a step has computed under this version, perhaps before the reset"
    weights.step()
    versions.append("2")
    assert weights.follow() and dict(weights.parts).keys() == {"epoch"}, "that reset was before the step"


def test_without_a_run_or_an_engine_core_versions_name_nothing() -> None:
    assert find_version()() == ""
    versions = ["default"]
    weights = NamedWeights("", lambda: versions[-1])
    versions.append("1")
    assert not weights.follow() and weights.parts == ()
    weights.reset()
    assert dict(weights.parts).keys() == {"epoch"}


def update(engine: Engine, folder: Path, version: str, order: str) -> None:
    """Change an engine's weights as a trainer does. order: when the caches are reset."""
    if order == "reset first":
        assert engine.tell("reset all") is True
    engine.tell("reload", folder=str(folder))
    engine.tell("version", version=version)
    if order == "reset last":
        assert engine.tell("reset all") is True


def test_engines_with_the_same_update_share_without_a_restart(
    vllm_depot: Depot, start_engine: StartEngine, tmp_path: Path
) -> None:
    model, folder = write_model(tmp_path / "old", LLAMA), write_model(tmp_path / "new", LLAMA, seed=1)
    options = {"dtype": "float32", "max_model_len": 2048, "extra": {"kvdepot.weights_run": "run-1"}}
    one, two = (start_engine(model, vllm_depot.url, **options) for _ in range(2))
    one.wait_started(), two.wait_started()
    tokens, other = prompt(900, TOKENS), prompt(901, TOKENS)
    computed, old = one.run(tokens), two.run(tokens)
    assert old["cached"] == CHUNKS * 256, "both have the weights on disk"

    update(one, folder, "step-1", "reset first")
    new = one.run(tokens)
    assert new["cached"] == 0 and output(new) != output(computed)
    still = two.run_fresh(tokens)
    assert still["cached"] == CHUNKS * 256 and output(still) == output(old), "the other engine keeps what it had"

    update(two, folder, "step-1", "reset last")
    shared = two.run(tokens)
    assert shared["cached"] == CHUNKS * 256 and output(shared) == output(one.run_fresh(tokens))
    two.run(other)
    assert one.run(other)["cached"] == CHUNKS * 256, "in both directions"

    assert two.tell("reset all") is True  # new weights of which nobody says a version, say
    assert two.run(tokens)["cached"] == 0, "it is alone until there is a version"
    two.run(prompt(902, TOKENS))
    assert one.run(prompt(902, TOKENS))["cached"] == 0
    assert one.run_fresh(tokens)["cached"] == CHUNKS * 256
    assert "weight version 'step-1' of run 'run-1'" in one.logged()
    one.stop(), two.stop()
