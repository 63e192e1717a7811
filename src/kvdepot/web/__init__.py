"""HTTP: health, metrics, status and the web page, served by a separate process.

`child.py` runs in the server and keeps that process (`__main__.py`) alive. In it, `poll.py` is an ordinary client of
the server, `history.py` keeps its results for charts, `app.py` and `prometheus.py` answer from them, `guard.py` decides
who is admitted, `server.py` how long a connection may take, and `live.py` sends statuses as they come. Invariant: no
reader, however slow, and no response, however large, delays the deciding thread.
"""
