"""The mooncake tier against a real master and real hosts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

from kvdepot.testing.tiers import TierConformance
from kvdepot.tiers import Tier, parse
from tests.tiers.mooncake_servers import Host, Master, needed


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    needed()


@pytest.fixture(scope="module")
def pool(installed: None) -> Iterator[Master]:
    """A master, and a host with memory that outlives every tier of a test."""
    master = Master().wait_ready()
    host = Host(master.url).wait_ready()
    yield master
    host.close()
    master.close()


class TestMooncake(TierConformance):
    shared: ClassVar[bool] = True
    examples: ClassVar[int] = 8

    def open_tier(self, place: Any) -> Tier:
        return parse(f"{place}?segment_gib=0&local_host=127.0.0.1").open()

    @pytest.fixture(scope="class")
    @classmethod
    def sweeper(cls, pool: Master) -> Iterator[Tier]:
        """A client of the pool that is there all the time: joining it takes long."""
        tier = parse(f"{pool.url}?segment_gib=0&local_host=127.0.0.1").open()
        yield tier
        tier.close()

    @pytest.fixture
    def place(self, pool: Master, sweeper: Tier) -> str:
        sweeper.forget("", "")
        return pool.url
