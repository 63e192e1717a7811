"""Test kvdepot with releases of vLLM other than the main environment's.

    python scripts/test_versions.py [VERSION...]

For each release with a wheel for processors: the tests of `ENGINES` with its own engine, in its environment
(.venv-versions/VERSION, which the Makefile makes), an upgrade from it to the main environment's release among them. For
one whose environment holds only Python: the tests that need no kernels, with vLLM's own configuration, scheduler, KV
cache manager and the code of its runners that calls the connector. Default: all environments there are. Ends after the
first release that fails; a test that fails once is rerun alone, and named as flaky if it then passes (run_tests.py).
"""

from __future__ import annotations

import sys
from pathlib import Path

from scripts.run_tests import BY_FILE, ONE_THREAD, Interpreter, run

ROOT = Path(__file__).parents[1]
ENVIRONMENTS = ROOT / ".venv-versions"
ENGINES = [
    "tests/vllm/test_versions.py",
    "tests/vllm/test_identity.py::test_every_field_separates_engines_unless_it_is_listed_with_a_reason",
    "tests/vllm/test_identity.py::test_every_field_of_a_real_configuration_is_reached",
    "tests/vllm/test_layouts.py",
    "tests/vllm/test_oracle.py::test_hits_end_where_vllms_own_prefix_cache_says_and_give_the_same_answer[windows]",
    "tests/vllm/test_oracle.py::test_hits_end_where_vllms_own_prefix_cache_says_and_give_the_same_answer[states]",
    "tests/vllm/test_engine.py::test_a_load_that_fails_is_computed_as_if_nothing_had_been_promised[gqa]",
    "tests/vllm/test_engine.py::test_an_engine_is_refused_before_it_loads_a_model",
    "tests/vllm/test_engine.py::test_a_load_that_fails_is_computed_as_if_nothing_had_been_promised[windows]",
    "tests/vllm/test_beside.py::test_a_failure_policy_that_ends_requests_is_refused_before_loading",
    "tests/vllm/test_start.py::test_an_engine_runs_without_its_server_and_connects_when_it_comes",
    "tests/vllm/test_telemetry.py::test_metrics_and_log_of_an_engine_say_what_it_did",
    "tests/vllm/test_upgrade.py",
]
"""What depends on vLLM's code: loads, stores, windows, states, failed loads, MultiConnector, a server that starts
after its engine, metrics, refusals. Not drafters: EAGLE fails in 0.30's own backend for processors."""
BY_HAND = [
    "tests/vllm/test_runner_v2.py", "tests/vllm/test_in_step.py", "tests/vllm/test_tails.py",
    "tests/vllm/test_stalls.py", "tests/vllm/test_response.py",
]  # fmt: skip
"""Its scheduler, and its runners' code that calls the connector: they need none of vLLM's compiled code."""
NO_KERNELS = [
    "tests/vllm/test_versions.py", "tests/vllm/test_identity.py", "tests/vllm/test_groups.py",
    "tests/vllm/test_layouts.py",
]  # fmt: skip
"""What ENGINES has beside engines, of a release that has no wheel for processors."""
WITHOUT_ENGINES = "not real_engine and not deep_queue"
"""The tests of `BY_HAND` but those that need vLLM's kernels, or a client of Redis, which the main environment has."""


def main() -> int:
    versions = sys.argv[1:] or sorted(folder.name for folder in ENVIRONMENTS.iterdir() if (folder / "ready").exists())
    parts: dict[str, list[str]] = {}
    within: dict[str, Interpreter] = {}
    for version in versions:
        folder = ENVIRONMENTS / version
        python = str(folder / "bin" / "python")
        if Path(python).exists():
            tests, selected = [*ENGINES, *BY_HAND], WITHOUT_ENGINES
            within[version] = Interpreter([python], {"KVDEPOT_NEWER_VLLM": sys.executable, **ONE_THREAD})
        else:  # no wheel for processors
            tests, selected = [*NO_KERNELS, *BY_HAND], f"not engines_with and {WITHOUT_ENGINES}"
            within[version] = Interpreter([sys.executable], {"PYTHONPATH": str(folder), **ONE_THREAD})
        parts[version] = ["-n", "2", *BY_FILE, *tests, "-k", selected]
    return run(parts, within)


if __name__ == "__main__":
    sys.exit(main())
