"""Test kvdepot with releases of vLLM other than the main environment's.

    python scripts/test_versions.py [VERSION...]

For each release with a wheel for processors: the tests of `ENGINES` with its own engine, in its environment
(.venv-versions/VERSION, which the Makefile makes), and an upgrade from it to the main environment's release. For one
whose environment holds only sources: the connector's methods and vLLM's are compared, and vLLM's scheduler and what its
runners call are run with a model of ours. Default: all environments there are. Fails at the first release that fails.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
ENVIRONMENTS = ROOT / ".venv-versions"
ENGINES = [
    "tests/vllm/test_versions.py",
    "tests/vllm/test_identity.py::test_every_field_separates_engines_unless_it_is_listed_with_a_reason",
    "tests/vllm/test_identity.py::test_every_field_of_a_real_configuration_is_reached",
    "tests/vllm/test_layouts.py",
    "tests/vllm/test_engine.py::test_a_fresh_engine_gets_what_an_earlier_one_stored",
    "tests/vllm/test_engine.py::test_a_retrieve_that_fails_is_recomputed_with_the_same_tokens",
    "tests/vllm/test_engine.py::test_an_unknown_setting_is_named_at_start",
    "tests/vllm/test_windows.py::test_prompts_of_any_length_come_back_bit_for_bit_in_another_engine[windows]",
    "tests/vllm/test_windows.py::test_below_multiconnector_a_failed_load_is_recomputed_too",
    "tests/vllm/test_beside.py::test_a_failure_policy_that_ends_requests_is_refused_before_loading",
    "tests/vllm/test_states.py::test_prompts_come_back_bit_for_bit_in_another_engine",
    "tests/vllm/test_start.py::test_an_engine_runs_without_its_server_and_connects_when_it_comes",
    "tests/vllm/test_telemetry.py::test_metrics_and_log_of_an_engine_say_what_it_did",
]
"""What depends on vLLM's code: loads, stores, windows, states, failed loads, MultiConnector, a server that starts
after its engine, metrics, refusals. Not drafters: EAGLE fails in 0.30's own backend for processors."""
BY_HAND = ["-n", "2", "tests/vllm/test_runner_v2.py", "-k", "not real_engine"]
"""Its scheduler, and its runners' code that calls the connector: they need none of vLLM's compiled code."""
INTERFACE = ["tests/vllm/test_versions.py", "-k", "method or name or classes or fields"]
UPGRADE = ["tests/vllm/test_upgrade.py"]


def main() -> int:
    versions = sys.argv[1:] or sorted(folder.name for folder in ENVIRONMENTS.iterdir() if (folder / "ready").exists())
    for version in versions:
        folder = ENVIRONMENTS / version
        python = folder / "bin" / "python"
        if not python.exists():
            print(
                f"\n== vLLM {version}: no wheel for processors, so its sources are compared and run by hand", flush=True
            )
            run([sys.executable, *INTERFACE], KVDEPOT_VLLM_SOURCES=str(folder))
            run([sys.executable, *BY_HAND], PYTHONPATH=str(folder))
            continue
        print(f"\n== vLLM {version}: its engine", flush=True)
        run([str(python), "-n", "2", "--dist", "loadfile", *ENGINES])
        run([str(python), *BY_HAND])
        print(f"\n== vLLM {version}: an upgrade from it keeps its cache", flush=True)
        run([sys.executable, *UPGRADE], KVDEPOT_OLDER_VLLM=str(python))
    return 0


def run(command: list[str], **environ: str) -> None:
    python, *arguments = command
    subprocess.run([python, "-m", "pytest", *arguments], cwd=ROOT, env=os.environ | environ, check=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except subprocess.CalledProcessError as exc:
        sys.exit(exc.returncode)
