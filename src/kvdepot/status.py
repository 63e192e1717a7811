"""Re-exports protocol/status.py."""

from kvdepot.protocol.status import *  # noqa: F403
from kvdepot.protocol.status import __all__ as __all__
