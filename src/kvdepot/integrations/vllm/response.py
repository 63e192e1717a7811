"""The result of a request in vLLM's response to whoever sent it: `kv_transfer_params["kvdepot"]`.

Used by scheduler.py when a request has finished. vLLM puts what a connector returns then into the `kv_transfer_params`
of the request's output, and its server into those of an answer that is not streamed. Below MultiConnector, vLLM merges
what several connectors return, and ends the engine if two of them return the same key.

A proxy of separate prefill and decode engines sends what the first engine returns to the second one, in place of what
the client had sent. So the request's own hints come back beside the result, with the bounds that stood beside them, and
hints.py ignores results.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import msgspec

from kvdepot.client.reuse import Reuse
from kvdepot.integrations.vllm.hints import KEY, Hints

if TYPE_CHECKING:
    from vllm.v1.request import Request

ResponseParams: TypeAlias = dict[str, dict[str, object]]
_TOLD = "_kvdepot_has_told"
"""Attribute of vLLM's request: whether one of our connectors has returned its result."""


def response_params(request: Request, reuse: Reuse | None, read: Hints) -> ResponseParams | None:
    """The params of a finished request's output. None: of one that was never scheduled with an answer of the depot, or
    if another connector of ours, of another server, has returned its own. read: the request's hints, as understood."""
    if reuse is None or hasattr(request, _TOLD):
        return None
    setattr(request, _TOLD, True)
    params = request.kv_transfer_params if isinstance(request.kv_transfer_params, dict) else {}
    given = params.get(KEY)
    hints: dict[str, object] = dict(given) if isinstance(given, dict) else {}
    if "max_load_tokens" in params and read.most_loaded is not None:
        hints["max_load_tokens"] = read.most_loaded
    if read.most_stored == 0:
        hints["store"] = False
    return {KEY: {**hints, **msgspec.structs.asdict(reuse)}}
