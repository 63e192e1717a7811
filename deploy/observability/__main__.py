"""`python -m deploy.observability dashboard|alerts`: print the Grafana dashboard, or the Prometheus alert rules."""

from __future__ import annotations

import argparse
import sys

from deploy.observability import alerts, dashboard


def main() -> int:
    """Print one of them; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m deploy.observability", description=__doc__)
    parser.add_argument("what", choices=("alerts", "dashboard"))
    what = parser.parse_args().what
    sys.stdout.write(alerts.render() if what == "alerts" else dashboard.render())
    return 0


if __name__ == "__main__":
    sys.exit(main())
