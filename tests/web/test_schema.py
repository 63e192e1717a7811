"""The OpenAPI document, compared with the server: every allowed request gets a documented response."""

from __future__ import annotations

from typing import Any

import pytest

from tests.client.engine import CHUNK, PER_CHUNK, Engine, works
from tests.programs import module
from tests.web.conftest import StartWeb

pytestmark = pytest.mark.faults

EXAMPLES = 25
"""Of each operation."""


@pytest.mark.filterwarnings("default")  # what schemathesis says of itself and of its own dependencies
def test_what_the_document_allows_is_answered_as_it_says(start_web: StartWeb) -> None:
    schemathesis = module("schemathesis")
    from hypothesis import HealthCheck, given, settings
    from schemathesis.specs.openapi.checks import positive_data_acceptance

    web = start_web()
    engine = Engine(web.depot)  # so that there is a model to name
    engine.store(list(range(CHUNK)), list(range(PER_CHUNK)))
    url = f"http://127.0.0.1:{web.port}"
    asked: dict[str, int] = {}
    schema = schemathesis.openapi.from_url(f"{url}/schema/openapi.json")
    for found in schema.get_all_operations():
        operation = found.ok()
        # What takes nothing cannot be asked wrongly.
        takes = operation.method == "post" or len(operation.query)
        for mode in schemathesis.GenerationMode if takes else [schemathesis.GenerationMode.POSITIVE]:

            @settings(
                max_examples=EXAMPLES, deadline=None, derandomize=True, database=None,
                suppress_health_check=list(HealthCheck),
            )  # fmt: skip
            @given(case=operation.as_strategy(generation_mode=mode))
            def ask(case: Any) -> None:
                answer = case.call_and_validate(
                    base_url=url,
                    headers={"Authorization": f"Bearer {web.token}"},
                    excluded_checks=[positive_data_acceptance],  # two fields of which one must be said: no schema knows
                )
                asked[f"{case.method} {case.path} {answer.status_code}"] = 1
                assert answer.status_code < 500

            ask()
    engine.close()
    assert {
        "POST /v1/forget 200",
        "POST /v1/forget 400",
        "POST /v1/warm 400",
        "GET /v1/status 200",
    } <= asked.keys()
    assert works(web.depot)
    assert "Traceback" not in web.depot.logged()
