"""Re-exports protocol/keys.py."""

from kvdepot.protocol.keys import *  # noqa: F403
from kvdepot.protocol.keys import __all__ as __all__
