"""Re-exports protocol/metrics.py."""

from kvdepot.protocol.metrics import *  # noqa: F403
from kvdepot.protocol.metrics import __all__ as __all__
