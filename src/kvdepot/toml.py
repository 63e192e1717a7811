"""What reads TOML: Python's own module, or before Python 3.11 the same by another name.

Imported by config.py and protocol/curve.py where there is a file to read: most processes read none, and it is slow to
import.
"""

from __future__ import annotations

import sys

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover
    import tomli as tomllib

__all__ = ["tomllib"]
