"""The numbers of `/metrics`."""

from __future__ import annotations

from tests.web.conftest import Answer, Web


def samples(answer: Answer) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every number of `/metrics`, by name and labels."""
    from prometheus_client.parser import text_string_to_metric_families

    found: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for family in text_string_to_metric_families(answer.body.decode()):
        for sample in family.samples:
            place = sample.name, tuple(sorted(sample.labels.items()))
            assert place not in found, f"{place} stands there twice"
            found[place] = sample.value
    return found


def read(web: Web) -> dict[str, float]:
    """Metrics without labels."""
    return {name: value for (name, labels), value in samples(web.get("/metrics")).items() if not labels}
