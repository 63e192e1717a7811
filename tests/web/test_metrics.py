"""Each metric, compared with what the test did: chunks dropped, refused, damaged and forgotten, a tier, a GPU."""

from __future__ import annotations

import os

import pytest

from tests.conftest import eventually
from tests.devices.engines import Engine as GpuEngine
from tests.devices.engines import tokens_of
from tests.fakecuda.machine import VARIABLES, Machine
from tests.web.conftest import StartWeb, Web, samples

pytestmark = pytest.mark.faults  # a server and a web process each


def labelled(web: Web, name: str) -> dict[tuple[str, ...], float]:
    """Values of one metric, by the values of its labels, which are sorted by name."""
    return {
        tuple(value for _, value in labels): count
        for (found, labels), count in samples(web.get("/metrics")).items()
        if found == f"kvdepot_{name}"
    }


def test_what_the_server_has_of_a_gpu_is_told(start_web: StartWeb, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine()
    for name in VARIABLES:
        monkeypatch.setenv(name, machine.environment()[name])
    web = start_web("--gpu-staging-mib", "8", arena_mib=16)
    assert labelled(web, "device_up") == {}
    engines = [GpuEngine(web.depot.url, os.environ, gpu, seed=gpu) for gpu in (0, 1, 1)]
    try:
        for number, engine in enumerate(engines):
            assert engine.store(list(range(8)), tokens_of(number, 2))
        eventually(lambda: all(gpu["pinned_bytes"] == 16 << 20 for gpu in web.depot.status()["devices"]))
        gpus = {(gpu["uuid"],): gpu for gpu in web.status()["devices"]}
        assert len(gpus) == 2
        for field in ("registrations", "context_bytes", "staging_bytes", "pinned_bytes"):
            assert labelled(web, f"device_{field}") == {gpu: said[field] for gpu, said in gpus.items()}, field
        assert sorted(labelled(web, "device_registrations").values()) == [1, 2]
        assert set(labelled(web, "device_pinned_bytes").values()) == {16 << 20}
        assert set(labelled(web, "device_up").values()) == {1}
        machine.fail("copy", "CUDA_ERROR_ECC_UNCORRECTABLE", pid=web.depot.process.pid)
        engines[0].store(list(range(8, 16)), tokens_of(9, 2))
        web.status()  # one that is made after the store
        assert sorted(labelled(web, "device_up").values()) == [0, 1]
        assert labelled(web, "failed_shards_total") == {(): 2}
        engines[0].process.kill()
        eventually(lambda: len(labelled(web, "device_up")) == 1)
    finally:
        for engine in engines:
            engine.process.close()
        failures = machine.failures()
        web.depot.close()
        machine.close()
    assert failures == []


def test_prometheus_own_format_says_the_same_numbers(web: Web) -> None:
    from prometheus_client.openmetrics.parser import text_string_to_metric_families

    answer = web.get("/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    names = {
        sample.name for family in text_string_to_metric_families(answer.body.decode()) for sample in family.samples
    }
    assert names == {name for name, _ in samples(web.get("/metrics"))}
