"""`kvdepot serve` for environments without click: the tests and the benchmark of GPUs start it there.

    python scripts/serve.py serve --SETTING VALUE ...

Every flag is a setting with one value. Limits are not checked, and memcpy is not tuned. Without xxhash, chunks have no
checksums.
"""

from __future__ import annotations

import signal
import sys

from kvdepot import logs
from kvdepot.config import load
from kvdepot.server.loop import Server


def main() -> int:
    names = [flag.removeprefix("--").replace("-", "_") for flag in sys.argv[2::2]]
    given: dict[str, object] = dict(zip(names, sys.argv[3::2], strict=True))
    try:
        import xxhash  # noqa: F401
    except ImportError:
        given["verify"] = "off"
    config = load(flags=given)
    logs.configure(config.log_level, config.log_format)
    server = Server(config)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, server.stop)
    server.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
