"""`python -m kvdepot.cli`: the same as `kvdepot`."""

from __future__ import annotations

import sys

from kvdepot.cli import main

if __name__ == "__main__":
    sys.exit(main())
