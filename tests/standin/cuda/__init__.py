"""Stands for NVIDIA's cuda-python; see tests/standin/__init__.py."""
