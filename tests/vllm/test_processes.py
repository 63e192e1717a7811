"""An engine's processes agree on what it is: what the scheduler looks up is what its workers have stored.

vLLM's code for a model changes the configuration in the process that builds the model, which the scheduler's process
does not see. Other tests of this folder run the other kinds of models and drafters in several processes, too.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import HANG_S, SHM, Depot, eventually
from tests.ports import free_port
from tests.vllm import drafters, engines
from tests.vllm.conftest import StartEngine
from tests.vllm.engines import END_S, ENVIRON, MLA, ROOT, START_S, nothing_is_held, prompt, same_as_own
from tests.vllm.processors import write_tokenizer

YARN: dict[str, Any] = MLA | {
    "rope_scaling": {
        "type": "yarn", "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "beta_fast": 32,
        "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
    },
}  # fmt: skip
"""vLLM gives its rope another type as it builds the model."""
STATES: dict[str, Any] = {"enable_prefix_caching": True, "num_gpu_blocks_override": 64}
"""vLLM fits the size of states and of blocks to each other as it builds the model."""


def shared_files(session: int) -> set[Path]:
    """Files in /dev/shm that processes of a session use."""
    used = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if os.getsid(int(process.name)) == session:
                used |= {Path("/", line.partition("/")[2]) for line in (process / "maps").read_text().splitlines()}
                used |= {path.readlink() for path in (process / "fd").iterdir()}
    return {path for path in used if path.parent == SHM and path.exists()}


def test_a_model_that_vllm_completes_as_it_builds_it_gets_what_it_stored(
    vllm_depot: Depot, start_engine: StartEngine, tmp_path: Path
) -> None:
    model = engines.write_model(tmp_path / "model", YARN)
    engine = start_engine(model, vllm_depot.url, max_num_batched_tokens=4096).wait_started()  # MLA: in one step
    tokens = prompt(801, 3 * 256 + 17)
    assert engine.run(tokens)["cached"] == 0
    same_as_own(engine, tokens, 3 * 256)
    engine.stop()
    eventually(lambda: nothing_is_held(vllm_depot.status()))


@pytest.mark.parametrize("kind", ["states", "eagle3"])
def test_the_ranks_of_an_engine_agree_with_its_scheduler(
    kind: str, vllm_depot: Depot, models: dict[str, Path], start_engine: StartEngine, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"tensor_parallel_size": 2, "max_model_len": 2048}
    if kind == "states":
        model, tokens, cached = models["states"], prompt(803, 640 + 17), 640
        options |= STATES
    else:
        model = engines.write_model(tmp_path / "target", drafters.TARGET)
        head = drafters.write_drafter(tmp_path / "eagle3", "eagle3", drafters.TARGET)
        tokens, cached = [token % drafters.VOCABULARY for token in prompt(804, 2 * 256 + 17)], 512
        options |= {
            "speculative_config": {"method": "eagle3", "model": str(head), "num_speculative_tokens": 3},
            "dtype": "float32", "block_size": 32,
        }  # fmt: skip
    engine = start_engine(model, vllm_depot.url, **options).wait_started()
    assert engine.run(tokens)["cached"] == 0
    same_as_own(engine, tokens, cached, exact=False)
    if kind == "states":  # and on the end of an answer, within a block
        answer = engine.run_fresh(tokens, max_tokens=9)["tokens"]
        assert engine.run_fresh([*tokens, *answer, 5])["cached"] == len(tokens) + 8
    engine.stop()
    eventually(lambda: nothing_is_held(vllm_depot.status()))


def test_vllm_serve_answers_over_http_from_the_depot_and_leaves_no_file_in_shm(
    vllm_depot: Depot, tmp_path: Path
) -> None:
    """API server, engine core and worker as users start them, and a model with states, which none of them may see
    otherwise than the others."""
    model = engines.write_model(tmp_path / "states", engines.STATES)
    write_tokenizer(model)
    port = free_port()
    transfer = {
        "kv_connector": "KVDepotConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"kvdepot.url": vllm_depot.url},
    }
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(port),
        "--host", "127.0.0.1", "--served-model-name", "served", "--max-model-len", "4096", "--enforce-eager",
        "--enable-prefix-caching", "--enable-prompt-tokens-details", "--kv-transfer-config", json.dumps(transfer),
        "--shutdown-timeout", str(int(END_S)),  # by default it kills its processes at once
    ]  # fmt: skip
    environ = os.environ | ENVIRON | {"VLLM_SERVER_DEV_MODE": "1"}  # which lets a request reset the prefix cache

    def post(path: str, **body: Any) -> Any:
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=HANG_S) as answer:
            return json.loads(answer.read() or "null")

    def complete() -> tuple[str, int]:
        answer = post("v1/completions", model="served", prompt=tokens, max_tokens=8, temperature=0, ignore_eos=True)
        details = answer["usage"]["prompt_tokens_details"] or {"cached_tokens": 0}
        return answer["choices"][0]["text"], details["cached_tokens"]

    def is_up() -> bool:
        assert server.poll() is None, "its last lines are below"
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
            return True
        return False

    block = 640 if torch.cpu._is_avx512_bf16_supported() else 384  # vLLM keeps states in 32 bits, or in 16
    tokens = prompt(805, block + 17)
    before = vllm_depot.status()
    with tempfile.TemporaryFile("a+") as log:
        server = subprocess.Popen(command, env=environ, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)
        try:
            eventually(is_up, START_S)
            computed, nothing = complete()
            eventually(lambda: vllm_depot.status()["chunks"] > before["chunks"])
            own = complete()
            post("reset_prefix_cache")
            assert complete() == own == (computed, block) and nothing == 0
            files = shared_files(server.pid) - {SHM / vllm_depot.name}
            server.send_signal(signal.SIGTERM)
            assert server.wait(END_S) == 0
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)
            server.wait()
            log.seek(0)
            said = log.read()
            print(said[-6000:])
    assert "disagree" not in said
    assert files
    eventually(lambda: not any(file.exists() for file in files))
    eventually(lambda: nothing_is_held(vllm_depot.status()))
    eventually(lambda: vllm_depot.status()["clients"] == before["clients"])
    died = vllm_depot.status()["counters"]["clients_died"] - before["counters"]["clients_died"]
    assert died == 0
