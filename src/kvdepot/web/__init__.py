"""HTTP: health, metrics, status and the web page, served by a separate process (docs/internals/web.md).

Invariant: no reader, however slow, and no response, however large, delays the deciding thread.
"""
