"""Put the `vllm` package of a release's source distribution into a folder, without building or installing anything.

    python scripts/vllm_sources.py VERSION FOLDER

A build for no device (VLLM_TARGET_DEVICE=empty) installs the same files, but its name lets vLLM find no platform to run
on. pip can fetch a source distribution only together with its metadata, for which vLLM's wants PyTorch for CUDA and a
Rust compiler. It unpacks it first, and is told to leave that there, so its failure afterwards is expected.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path


def main() -> int:
    version, folder = sys.argv[1], Path(sys.argv[2])
    with tempfile.TemporaryDirectory() as unpacked:
        command = [
            sys.executable, "-m", "pip", "download", "--quiet", "--no-clean", "--no-deps", "--no-build-isolation",
            "--no-binary", "vllm", "--dest", unpacked, f"vllm=={version}",
        ]  # fmt: skip
        ended = subprocess.run(
            command, env=os.environ | {"TMPDIR": unpacked}, capture_output=True, text=True, check=False
        )
        found = [file.parent for file in Path(unpacked).glob("*/*/vllm/__init__.py")]
        if len(found) != 1:
            sys.stderr.write(f"pip did not fetch the source distribution of vLLM {version}:\n{ended.stderr}")
            return 1
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        shutil.move(found[0], folder / "vllm")
    return 0


if __name__ == "__main__":
    sys.exit(main())
