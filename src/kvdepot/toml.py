"""Python's TOML module, or before Python 3.11 its equivalent.

config.py and protocol/curve.py import it only when they read a file: it is slow to import, and most processes read
none.
"""

from __future__ import annotations

import sys

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover
    import tomli as tomllib

__all__ = ["tomllib"]
