"""Runs a command on a machine with a fake GPU: `python -m tests.fakecuda COMMAND ...`.

Exits with the command's status, or with 1 if the command succeeded but misused the driver.
"""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing

from tests.fakecuda.machine import Machine


def main() -> int:
    with closing(Machine(gpus=1, total_mib=16384)) as machine:
        status = subprocess.run(sys.argv[1:], env=machine.environment(), check=False).returncode
        for failure in machine.failures():
            print(f"the driver was misused by process {failure}", file=sys.stderr)
        return status or int(bool(machine.failures()))


if __name__ == "__main__":
    sys.exit(main())
