"""Synchronises a worker with its GPU before the server reads or writes the GPU's memory.

Called through `devices.finish`, on a thread that may block. It does not change the engine's context.
"""

from __future__ import annotations

from kvdepot.devices.cuda.driver import load

__all__ = ["finish"]


def finish(uuid: str) -> None:
    """Wait until the GPU has finished all work that this process has submitted. Blocks without the GIL.

    Raises DeviceError.
    """
    driver = load()
    device = driver.device(uuid)
    # Not `driver.retain`, which sets how the context's threads wait: this context is the engine's.
    context = driver.call("cuDevicePrimaryCtxRetain", device)
    try:
        with driver.current(context):
            driver.call("cuCtxSynchronize")
    finally:
        driver.release(device)
