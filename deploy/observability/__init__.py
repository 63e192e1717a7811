"""A Grafana dashboard and Prometheus alert rules, generated from Python.

`python -m deploy.observability dashboard` and `... alerts` print them. Of the package they import only the declarations
of counters and figures, and the server does not import them. Invariant: every metric in a query exists in `/metrics`.
"""

from __future__ import annotations
