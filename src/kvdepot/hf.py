"""Re-exports integrations/huggingface."""

from kvdepot.integrations.huggingface import *  # noqa: F403
from kvdepot.integrations.huggingface import __all__ as __all__
