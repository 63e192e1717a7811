"""How tiers are written in the settings."""

from __future__ import annotations

import pytest

from kvdepot.errors import ConfigError
from kvdepot.tiers import parse


def test_options_of_all_tiers_and_those_of_one_kind_are_told_apart() -> None:
    config = parse("disk:///var/cache/kv?capacity_gib=2&write=on_evict&threads=3")
    assert (config.kind, config.url, config.own) == ("disk", "disk:///var/cache/kv", {"capacity_gib": "2"})
    assert (config.options.write, config.options.threads, config.options.compress) == ("on_evict", 3, "off")


@pytest.mark.parametrize("password", ["secret", "sec/ret", "sec@ret", "%23secret"])
def test_what_people_see_of_a_tier_holds_no_password(password: str) -> None:
    config = parse(f"redis://user:{password}@host:1/0?write=off")
    assert config.name == "redis://host:1/0"


@pytest.mark.parametrize(
    "text",
    [
        "redsi://:secret@host",
        "redis://:secret@host?write=sometimes",
        "redis://:sec#secret@host",
        "redis://:secret @host",
        "redis://:secret@[host",
        "user:secret@host",
        "redis:user:secret@host",
        "redis://:secret@host?threads=0",
    ],
)
def test_a_url_that_is_wrong_is_refused_without_its_password(text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse(text)
    assert "secret" not in str(refused.value) and "host" in str(refused.value)
