"""A worker's end of order: all that this process has asked of a GPU is done before the server reads or writes there.

Used through `devices.finish`, on a thread that may wait. The one law: the engine's context stays as the engine made it.
"""

from __future__ import annotations

from kvdepot.devices.cuda.driver import load

__all__ = ["finish"]


def finish(uuid: str) -> None:
    """Wait until the GPU has done what this process asked of it so far. Blocks without the GIL. Raises DeviceError."""
    driver = load()
    device = driver.device(uuid)
    # Not `driver.retain`, which says how the context's threads wait: this one is the engine's.
    context = driver.call("cuDevicePrimaryCtxRetain", device)
    try:
        with driver.current(context):
            driver.call("cuCtxSynchronize")
    finally:
        driver.release(device)
