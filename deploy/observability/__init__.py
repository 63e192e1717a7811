"""What watches a depot from outside: a Grafana dashboard and Prometheus alert rules, made from Python.

`python -m deploy.observability dashboard` and `... alerts` print them. Nothing of the server is imported, and nothing
of the server imports this. The one law: a name that a query uses is a name that `/metrics` has.
"""

from __future__ import annotations
