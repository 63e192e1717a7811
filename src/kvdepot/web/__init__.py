"""HTTP: health, metrics, status and the web page, by a process of its own beside the server.

`child.py` runs in the server and keeps that process (`__main__.py`) alive. There `poll.py` is one client of the depot
like any other, `history.py` keeps what it heard for charts, `app.py` and `prometheus.py` answer from that, `guard.py`
decides who may ask and `connections.py` how long. The one law: no reader, however slow, and no answer, however large,
reaches the thread that decides.
"""
