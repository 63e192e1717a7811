"""A real vLLM engine on a real server: what comes from the depot equals the engine's own prefix-cache hit, bit for bit.

Prompts end just past a chunk: the engine's own cache (blocks of 128) and the depot (chunks of 256) then hold the same
tokens of it, so both runs compute the same rest in the same batch.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import HANG_S, Depot, StartDepot, eventually
from tests.vllm.conftest import StartEngine
from tests.vllm.engines import nothing_is_held, output, prompt, run_preempted, write_lora


@pytest.mark.parametrize("kind", ["gqa", "mla"])
def test_a_fresh_engine_gets_what_an_earlier_one_stored(
    kind: str, vllm_depot: Depot, models: dict[str, Path], start_engine: StartEngine
) -> None:
    tokens = prompt(1, 4 * 256 + 17)
    first = start_engine(models[kind], vllm_depot.url).wait_started()
    assert first.run(tokens)["cached"] == 0
    assert first.run(tokens, max_tokens=1)["cached"] == 1024  # by itself
    first.stop()

    second = start_engine(models[kind], vllm_depot.url).wait_started()
    from_depot = second.run(tokens)
    own = second.run(tokens)
    assert from_depot["cached"] == own["cached"] == 1024
    assert output(from_depot) == output(own)

    longer = tokens[:700] + prompt(2, 900)  # two chunks of it are stored
    assert second.run_fresh(longer)["cached"] == 512
    from_depot = second.run_fresh([*longer[:1536], 5, 6, 7])
    own = second.run([*longer[:1536], 5, 6, 7])
    assert from_depot["cached"] == own["cached"] == 1536
    assert output(from_depot) == output(own)
    exact = tokens[:1024]  # all of it is stored; the last token is computed all the same
    assert output(second.run_fresh(exact)) == output(second.run_fresh(exact))
    second.stop()
    eventually(lambda: vllm_depot.status()["holds"] == 0)


def test_salts_and_lora_adapters_never_share_and_two_engines_do(
    vllm_depot: Depot, models: dict[str, Path], start_engine: StartEngine, tmp_path: Path
) -> None:
    adapters = [(name, i + 1, str(write_lora(tmp_path / name, i))) for i, name in enumerate(("red", "blue"))]
    options = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    one = start_engine(models["gqa"], vllm_depot.url, **options)
    two = start_engine(models["gqa"], vllm_depot.url, **options)
    one.wait_started(), two.wait_started()
    tokens = prompt(3, 2 * 256 + 9)
    variants = [{}, {"salt": "tenant-1"}, {"salt": "tenant-2"}, *({"lora": adapter} for adapter in adapters)]
    for variant in variants:
        assert one.run_fresh(tokens, **variant)["cached"] == 0, variant
    for variant in variants:
        from_depot = two.run_fresh(tokens, **variant)
        assert from_depot["cached"] == 512, variant
        assert output(from_depot) == output(two.run(tokens, **variant)), variant
    outputs = [output(two.run_fresh(tokens, **variant)) for variant in variants]
    assert outputs[0] == outputs[1] == outputs[2]  # a salt changes nothing but who shares
    assert outputs[3] != outputs[0] and outputs[4] != outputs[0] and outputs[3] != outputs[4]
    mixed = two.tell("run", requests=[two.request(tokens, salt=f"tenant-{i}") for i in (1, 2)])
    assert len(mixed) == 2
    one.stop(), two.stop()


def test_a_retrieve_that_fails_is_recomputed_with_the_same_tokens(
    start_depot: StartDepot, models: dict[str, Path], start_engine: StartEngine
) -> None:
    depot = start_depot(arena_mib=64)
    engine = start_engine(models["gqa"], depot.url).wait_started()
    tokens = prompt(7, 3 * 256 + 11)
    cold = engine.run(tokens)
    engine.tell("reset")
    engine.tell("add", request=engine.request(tokens))  # the lookup says 768 tokens ...
    depot.process.kill()
    depot.process.wait(HANG_S)
    (recomputed,) = engine.tell("finish").values()  # ... and then they are gone
    assert engine.tell("failed_chunks") == 3
    assert output(recomputed) == output(cold)
    again = start_depot(url=depot.url, arena_mib=64)  # another arena
    eventually(lambda: again.status()["instances"] == 1)
    engine.tell("meet")
    assert output(engine.run_fresh(tokens)) == output(cold)
    engine.tell("reset")
    from_depot = engine.run(tokens)  # what was computed anew was stored
    assert from_depot["cached"] == 768
    assert output(from_depot) == output(engine.run(tokens))
    again.process.kill()
    again.process.wait(HANG_S)
    engine.tell("reset")
    assert engine.run(tokens)["tokens"] == cold["tokens"]  # without a server at all
    engine.stop()


def test_a_reset_of_the_connector_forgets_the_model_or_says_that_it_may_not(
    start_depot: StartDepot, models: dict[str, Path], start_engine: StartEngine
) -> None:
    depot = start_depot(arena_mib=64)
    engine = start_engine(models["gqa"], depot.url).wait_started()
    tokens = prompt(8, 2 * 256 + 11)
    cold = engine.run(tokens, max_tokens=300)
    assert depot.status()["chunks"] == 2, "what was decoded is not stored unless that is asked for"
    assert engine.tell("reset all") is True
    assert depot.status()["chunks"] == 0
    again = engine.run(tokens, max_tokens=300)
    assert (again["cached"], output(again)) == (0, output(cold))
    depot.process.kill()
    depot.process.wait(HANG_S)
    assert engine.tell("reset all") is False
    assert "may remain stored" in engine.logged()
    assert engine.run(tokens)["tokens"] == cold["tokens"][:8]
    engine.stop()


def test_preemption_under_a_tiny_kv_space_leaves_no_wrong_byte(
    start_depot: StartDepot, models: dict[str, Path], start_engine: StartEngine
) -> None:
    depot = start_depot(arena_mib=64)
    engine = start_engine(
        models["gqa"], depot.url, extra={"kvdepot.save_decode": True}, num_gpu_blocks_override=20, max_model_len=2048
    ).wait_started()
    prompts = [prompt(20 + i, 2 * 256 + 17 + i) for i in range(4)]
    run_preempted(engine, prompts, max_tokens=400)
    for tokens in prompts:
        from_depot = engine.run_fresh(tokens)
        own = engine.run(tokens)
        assert from_depot["cached"] == own["cached"] == 512
        assert output(from_depot) == output(own)
    decoded = engine.run(prompts[0], max_tokens=300)["tokens"]
    follow_up = prompts[0] + decoded[:260]
    from_depot = engine.run_fresh(follow_up)
    assert from_depot["cached"] == 3 * 256, "a decoded chunk, too"
    assert output(from_depot) == output(engine.run(follow_up))
    engine.stop()
    eventually(lambda: nothing_is_held(depot.status()))


def test_a_request_id_that_is_used_again_ends_each_time(
    start_depot: StartDepot, models: dict[str, Path], start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", "1")
    engine = start_engine(models["gqa"], start_depot(arena_mib=64).url).wait_started()
    for turn in range(4):
        for tokens in (2 * 256 + 11, 40):  # one that stores, and one that is shorter than a chunk
            results = engine.tell("run", requests=[{"id": "same", "tokens": prompt(100 + turn, tokens)}])
            assert list(results) == ["same"]
    engine.stop()


def test_an_unknown_setting_is_named_at_start(models: dict[str, Path], start_engine: StartEngine) -> None:
    said = start_engine(models["gqa"], "ipc:///nowhere", extra={"kvdepot.save_decodes": True}).start_error()
    assert "kvdepot.save_decodes is not a kvdepot setting" in said
