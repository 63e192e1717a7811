"""Re-exports the client contract from client/lmcache.py."""

from kvdepot.client.lmcache import *  # noqa: F403
from kvdepot.client.lmcache import __all__ as __all__
