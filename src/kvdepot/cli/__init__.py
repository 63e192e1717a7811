"""The `kvdepot` command: what people type, and what they are shown. One module a family of commands.

Exit codes: 0 done, 1 failed (the message says why), 2 wrong usage or configuration, 130 interrupted.

What is printed goes to standard output, what went wrong and progress to standard error; `--json` prints JSON. The one
law: `kvdepot serve` must start in a blink, so nothing is imported here, and rich only where something is shown.
"""

from __future__ import annotations

import sys

__all__ = ["main"]


def main(argv: list[str] | None = None) -> int:
    """Run the command; the exit code. As the process's own command, `serve` may start the process over once."""
    from kvdepot.standard_files import reserve

    reserve()
    words = sys.argv[1:] if argv is None else argv
    if argv is None and words[:1] == ["serve"]:
        from kvdepot.cli.copies import start_over_tuned

        start_over_tuned()
    from kvdepot.cli.root import run

    return run(words)
