"""Modules that SGLang imports and that are not installed, or not made for processors."""

from __future__ import annotations

import importlib.util
import sys
import types
from typing import ClassVar

import transformers  # noqa: F401 - looks for torchvision before it is stubbed


class Stub(types.ModuleType):
    """A module in which any name is a class."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


if importlib.util.find_spec("torchvision") is None:  # only image processors use it
    for _name in ("", ".io", ".transforms", ".transforms.functional"):
        sys.modules[f"torchvision{_name}"] = Stub(f"torchvision{_name}")
