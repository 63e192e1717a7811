"""How tiers are written in the settings."""

from __future__ import annotations

import pytest

from kvdepot.errors import ConfigError
from kvdepot.tiers import convert, parse
from kvdepot.tiers.disk import DiskOptions


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


def test_sizes_among_the_options_of_a_tier_can_have_units() -> None:
    config = parse("disk:///d?capacity_gib=512MiB&queue_mib=2GiB")
    assert config.options.queue_mib == 2048
    assert convert(config.own, DiskOptions, config.name).capacity_gib == 0.5


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("capacty_gib=1", "unknown option capacty_gib (did you mean capacity_gib?)"),
        ("capacity_gib=1&colour=red", "unknown option colour"),
        ("capacity_gib=1&compres=zstd", "unknown option compres (did you mean compress?)"),
        ("", "capacity_gib: must be given"),
        ("capacity_gib=many", "capacity_gib: 'many' is not a size"),
        ("capacity_gib=1&threads=two", "threads: 'two' is not a whole number"),
        ("capacity_gib=1&threads=0", "threads: 0 is out of range, it must be >= 1"),
        ("capacity_gib=1&compress=gzip", "compress: 'gzip' is none of off, zstd"),
        ("capacity_gib=1&write=sometimes", "write: 'sometimes' is none of through, on_evict, off"),
    ],
)
def test_a_wrong_option_is_refused_with_its_name_and_what_could_be_written(options: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        config = parse(f"disk:///d?{options}")
        convert(config.own, DiskOptions, config.name)
    assert str(refused.value).startswith(f"tier disk:///d: {said}")


def test_a_word_of_a_password_that_looks_like_an_option_is_not_told() -> None:
    config = parse("redis://:pa?secret@host")
    with pytest.raises(ConfigError) as refused:
        convert(config.own, DiskOptions, config.name)
    assert "secret" not in str(refused.value)
