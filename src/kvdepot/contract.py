"""Re-exports the contract's requests from client/contract.py."""

from kvdepot.client.contract import *  # noqa: F403
from kvdepot.client.contract import __all__ as __all__
