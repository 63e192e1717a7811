"""Stands for NVIDIA's cuda-bindings; see tests/standin/__init__.py."""

__version__ = "12.9.1"
