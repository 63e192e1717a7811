"""Bad input of `kvdepot certify`, which it refuses before it starts anything. tests/vllm has it with engines."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from tests.cli.command import run

HIDE_VLLM = """
import importlib.util

find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "vllm" else find_spec(name, package)
"""
needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is asked for first")


@needs_vllm
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "Missing argument 'MODEL [VLLM'S ARGUMENTS]'"),
        (["m", "--prompts", "{folder}/none"], "No such file or directory"),
        (["m", "--prompts", "{folder}/empty"], "empty has no prompts"),
        (["m", "--prompts", "{folder}/broken"], "broken: "),
        (["m", "--dtype", "float32", "--html", "{folder}/none/page.html"], "none/page.html cannot be written"),
    ],
)
def test_bad_input_is_refused_with_the_reason(tmp_path: Path, words: list[str], said: str) -> None:
    (tmp_path / "empty").write_text("\n\n")
    (tmp_path / "broken").write_text("[1, 2, 'x']\n")
    done = run("certify", *(word.format(folder=tmp_path) for word in words))
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@needs_vllm
def test_a_server_that_cannot_start_is_reported_before_an_engine_starts() -> None:
    done = run("certify", "m", "--tier", "disk:///none")
    assert done.returncode == 2
    assert "capacity_gib" in done.stderr
    assert "kvdepot: the embedded server exited with status 2; see its log lines above" in done.stderr


def test_without_vllm_it_says_where_to_run_it(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(HIDE_VLLM)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = run("certify", "m", PYTHONPATH=path)
    assert done.returncode == 2
    assert "vLLM is not installed here: in its environment, install kvdepot again" in done.stderr


def test_short_options_of_vllm_are_not_taken_for_others() -> None:
    done = run("certify", "-dph", "m", "--html", "/none/page.html")
    assert "Usage: " not in done.stdout
    if importlib.util.find_spec("vllm") is not None:
        assert done.returncode == 2
        assert "/none/page.html cannot be written" in done.stderr
    assert "Usage: " in run("certify", "--help").stdout
