"""The status for pages: what it has beside the server's own."""

from __future__ import annotations

import json
import shlex

import pytest

from kvdepot.config import default_url
from kvdepot.web.live import engine_flag
from tests.web.conftest import Web

pytestmark = pytest.mark.faults  # a server and a web process each


def test_the_flag_for_engines_names_this_server_unless_it_is_the_default_one(web: Web) -> None:
    option, given = shlex.split(web.latest()["engine_flag"])
    assert option == "--kv-transfer-config"
    connector = {"kv_connector": "KVDepotConnector", "kv_role": "kv_both"}
    assert json.loads(given) == {**connector, "kv_connector_extra_config": {"kvdepot.url": web.depot.url}}
    assert json.loads(shlex.split(engine_flag(default_url()))[1]) == connector
