"""Hugging Face transformers: caches of models, in a depot. Import it as `kvdepot.hf`."""

from kvdepot.integrations.huggingface.prefix_cache import PrefixCache

__all__ = ["PrefixCache"]
