"""The `kvdepot` command. One module per family of commands.

Exit codes: 0 done, 1 failed (the message says why), 2 wrong usage or configuration, 130 interrupted.

Results go to standard output, errors and progress to standard error; `--json` prints JSON. `kvdepot serve` must start
fast, so this module imports little, and others import rich only when they print.
"""

from __future__ import annotations

import sys

from kvdepot.processes import prepare_standard_files, start_over_tuned


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns the exit code. Without `argv`, `serve` may first re-execute the process."""
    prepare_standard_files()
    words = sys.argv[1:] if argv is None else argv
    if argv is None and words[:1] == ["serve"]:
        start_over_tuned()
    from kvdepot.cli.root import run

    return run(words)
