"""Names of models that engines describe themselves: `NAME@kv-DIGEST`. The digest identifies the model: NAME is for
people, and engines may give different ones. Any other name identifies its model as a whole."""

from __future__ import annotations

_MARK = "@kv-"
_DIGITS = 32


def name_model(name: str, digest: str) -> str:
    """The model's name on the wire. digest: 32 hexadecimal digits, of everything that determines its KV."""
    return f"{name}{_MARK}{digest[:_DIGITS]}"


def key_of_model(model: str) -> str:
    """The part of a name that identifies the model."""
    _, mark, digest = model.rpartition(_MARK)
    return mark + digest if mark and len(digest) == _DIGITS else model
