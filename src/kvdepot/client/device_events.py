"""Events of an engine's device that a copy waits for: mostly, until the GPU has done the work that was queued.

The lane (client/lane.py) polls them, so that no load waits behind the event of a later store. Rejected: blocking in the
driver until an event happens, one at a time, without a deadline or an end when the engine shuts down.
"""

from __future__ import annotations

from kvdepot.devices.blocks import DeviceEvent
from kvdepot.errors import BadRequest, KVDepotError

EVENT_S = 60.0
"""A copy fails if its event has not happened after this long."""


def happened(event: DeviceEvent | None) -> bool:
    """Whether an event (None: nothing to wait for) has happened. Raises BadRequest for an object that is no event,
    KVDepotError for one that failed, as a CUDA event does once its GPU is lost."""
    try:
        return event is None or bool(event.query())
    except KVDepotError:
        raise
    except AttributeError as exc:
        raise BadRequest(f"{event!r:.80} is not an event: it has no query()") from exc
    except Exception as exc:
        raise KVDepotError(f"the event failed: {exc!r}") from exc
