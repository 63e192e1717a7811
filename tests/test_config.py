"""The sources of settings, and the errors for wrong ones."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdepot import config
from kvdepot.config import ONLY_IN_FILE, Config, home_url, load
from kvdepot.errors import ConfigError
from kvdepot.protocol.keys import salt_tag
from kvdepot.protocol.quotas import Quota
from kvdepot.tiers.format import tenant_prefix

GIB = 1 << 30
WRONG: list[tuple[str, str]] = [
    ("verify", "sampled\n"),
    ("policy", "mru"),
    ("url", "nowhere"),
    ("url", "tcp://127.0.0.1:99999"),
    *(("kv_events", wrong) for wrong in ("nowhere", "ipc://", "tcp://127.0.0.1", "tcp://127.0.0.1:*", "tcp://h:65535")),
    ("http", "127.0.0.1:99999"),
    ("arena_gib", "nan"),
    ("arena_gib", "1e300"),
    ("arena_name", "a/b"),
    ("arena_dir", "shm"),
    ("arena_dir", ""),
    ("chunk_size", "0"),
    ("chunk_size", "atuo"),
    ("chunk_size", str(1 << 30)),
    ("drain_s", "inf"),
    ("max_queued", "-3"),
]


def write(folder: Path, text: str) -> str:
    path = folder / "depot.toml"
    path.write_text(text)
    return str(path)


def test_without_file_environment_and_flags_every_setting_has_its_default() -> None:
    loaded = load(environ={})
    assert loaded.url == config.home_url()
    assert msgspec.structs.replace(loaded, url="") == Config()


def test_a_variable_that_is_not_a_setting_is_reported_and_ignored() -> None:
    strays = {"KVDEPOT_HOME": "/x", "KVDEPOT_": "y", "KVDEPOT_CHUNK_SISE": "9", "KVDEPOT_TENANTS": "blue"}
    environ = {"CHUNK_SIZE": "9", **strays}
    loaded = load(environ=environ)
    assert (loaded.chunk_size, loaded.tenants) == ("auto", {})
    told = dict(config.stray_variables(environ))
    assert told.keys() == strays.keys()
    assert told["KVDEPOT_CHUNK_SISE"] == "did you mean KVDEPOT_CHUNK_SIZE?"
    assert told["KVDEPOT_HOME"] == "`kvdepot config` lists all settings"
    # What Kubernetes and docker put into the environment beside a service called kvdepot.
    links = "SERVICE_HOST SERVICE_PORT SERVICE_PORT_HTTP PORT PORT_7077_TCP PORT_7077_TCP_ADDR PORT_7077_TCP_PROTO"
    read_elsewhere = ["CHUNK_SIZE", "KEY", "TRACE", *links.split()]
    assert config.stray_variables({f"KVDEPOT_{name}": "" for name in read_elsewhere}) == []


@pytest.mark.parametrize(
    ("text", "gib"),
    [
        ("64GiB", 64.0), ("512MiB", 0.5), ("1.5GiB", 1.5), ("2 TiB", 2048.0), ("64gib", 64.0), (".5GiB", 0.5),
        ("8GB", 8e9 / GIB), ("64", 64.0), ("0.25", 0.25), ("0", 0.0),
    ],
)  # fmt: skip
def test_a_size_can_have_a_unit_wherever_it_is_a_setting(tmp_path: Path, text: str, gib: float) -> None:
    file = write(tmp_path, f'arena_gib = "{text}"')
    flags, environ = {"arena_gib": text}, {"KVDEPOT_ARENA_GIB": text}
    for loaded in (load(file, environ={}), load(environ=environ), load(flags=flags, environ={})):
        assert loaded.arena_gib == gib


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("arena_gib", "64G", "'64G' is not a size: write 64GiB or 512MiB, say, or a plain number of GiB"),
        ("arena_gib", "9" * 400 + "GiB", "inf is out of range, it must be <= 1073741824"),
        ("max_message_mib", "8GiB", "8192 is out of range, it must be <= 1024"),
        ("max_message_mib", "1536KiB", "1.5 MiB is not a whole number of MiB"),
    ],
)
def test_an_invalid_size_is_refused_with_an_example(name: str, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(flags={name: text}, environ={})
    assert str(caught.value).startswith(f"--{name.replace('_', '-')}: ")
    assert name not in str(caught.value), "the flag has said it"
    assert said in str(caught.value)


def test_a_bare_port_for_http_is_one_of_this_host(tmp_path: Path) -> None:
    for loaded in (load(flags={"http": "7177"}, environ={}), load(write(tmp_path, "http = 7177"), environ={})):
        assert loaded.http == "127.0.0.1:7177"


def test_the_folder_of_the_arena_is_a_servers_setting_and_a_clients_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVDEPOT_ARENA_DIR", raising=False)
    assert load().arena_dir == str(config.arena_folder()) == "/dev/shm"
    monkeypatch.setenv("KVDEPOT_ARENA_DIR", "/mnt/arena")
    assert load().arena_dir == str(config.arena_folder()) == "/mnt/arena"
    assert config.arena_folder("/mnt/other") == Path("/mnt/other"), "what is given counts more"
    monkeypatch.setenv("KVDEPOT_ARENA_DIR", "arena")
    for wrong, said in (("", "KVDEPOT_ARENA_DIR: 'arena'"), ("../arena", "arena_dir: '../arena'")):
        with pytest.raises(ConfigError, match=f"^{said} is not the absolute path of a folder$"):
            config.arena_folder(wrong)


def test_engines_choose_their_chunk_size_unless_a_number_or_a_remote_tier_forbids_it(tmp_path: Path) -> None:
    for tiers, free in (([], True), ([f"disk://{tmp_path}"], True), (["redis://localhost"], False)):
        loaded = load(flags={"tiers": tiers, "chunk_size": "auto"}, environ={})
        assert (loaded.chunk_tokens, loaded.has_free_chunks) == (256, free), tiers
    forced = load(write(tmp_path, "chunk_size = 512"), environ={})
    assert (forced.chunk_tokens, forced.has_free_chunks) == (512, False)


@pytest.mark.parametrize("source", ["flag", "variable"])
@pytest.mark.parametrize(("name", "value"), WRONG)
def test_a_wrong_value_is_refused_with_the_name_of_its_source(name: str, value: str, source: str) -> None:
    flags, environ = ({name: value}, {}) if source == "flag" else ({}, {f"KVDEPOT_{name.upper()}": value})
    with pytest.raises(ConfigError) as caught:
        load(flags=flags, environ=environ)
    told = f"--{name.replace('_', '-')}" if source == "flag" else f"KVDEPOT_{name.upper()}"
    assert str(caught.value).startswith(told)


def test_unknown_settings_of_a_file_are_all_told_with_what_was_meant(tmp_path: Path) -> None:
    file = write(tmp_path, 'chunk-size = 256\npolicies = "lru"\ncolour = "red"')
    with pytest.raises(ConfigError) as caught:
        load(file, environ={})
    assert str(caught.value) == (
        f"{file}: unknown setting chunk-size (did you mean chunk_size?), policies (did you mean policy?), colour; "
        "`kvdepot config` lists all settings"
    )


@pytest.mark.parametrize("data", [b"chunk_size = ", b"\xff\xfe", b"chunk_size = 1\nchunk_size = 2"])
def test_a_file_that_is_missing_or_no_toml_is_named(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "depot.toml"
    with pytest.raises(ConfigError, match=r"depot\.toml: No such file"):
        load(str(path), environ={})
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=r"depot\.toml is not TOML"):
        load(str(path), environ={})


def test_the_default_endpoint_is_in_the_first_folder_that_is_usable_and_short(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    own = f"kvdepot-{os.geteuid()}/depot.sock"
    longest = f"kvdepot-{os.geteuid()}/engine-{16 * '0'}.sock"
    fits = Path("/tmp") / ("x" * (107 - len(f"/tmp//{longest}")))
    long = f"{fits}x"
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        monkeypatch.setenv("TMPDIR", short)
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(fits))
        assert home_url() == f"ipc://{fits}/{own}"
        monkeypatch.setenv("XDG_RUNTIME_DIR", long)
        assert home_url() == f"ipc://{short}/{own}"
        monkeypatch.delenv("XDG_RUNTIME_DIR")
        monkeypatch.setenv("TMPDIR", long)  # which is not there
        monkeypatch.setenv("TEMP", short)
        assert home_url() == f"ipc://{short}/{own}"
        monkeypatch.delenv("TEMP")
        monkeypatch.delenv("TMP", raising=False)
        assert home_url() == f"ipc:///tmp/{own}"


def test_each_value_is_told_with_where_it_comes_from(tmp_path: Path) -> None:
    file = write(tmp_path, "chunk_size = 128\nmax_clients = 3\npolicy = 'lru'\n")
    loaded, sources = config.load_with_sources(file, {"policy": "learned"}, {"KVDEPOT_MAX_CLIENTS": "4"})
    assert (loaded.chunk_size, loaded.max_clients, loaded.policy) == (128, 4, "learned")
    assert set(sources) == set(Config.__struct_fields__)
    told = {name: source for name, source in sources.items() if source != "default"}
    assert told == {"chunk_size": file, "max_clients": "KVDEPOT_MAX_CLIENTS", "policy": "--policy"}


def test_settings_are_shown_without_their_passwords() -> None:
    harmless = ["disk:///a@b?capacity_gib=1&key_file=/k", "redis://h?password_file=/run/p", "s3://b?prefix=a%40b"]
    loaded = load(flags={"tiers": ["redis://user:pa@ss:w@h:1/0", *harmless]}, environ={})
    shown = ["redis://***@h:1/0", *harmless]
    assert config.masked(loaded)["tiers"] == shown
    assert repr(shown) in repr(loaded)


def test_tenants_are_tables_of_the_file_with_sizes_in_units(tmp_path: Path) -> None:
    text = """
        [tenants.blue]
        floor_bytes = "512MiB"
        cap_bytes = 2147483648
        weight = 3
        ttl_s = 60
        [tenants.red]
        disk_floor_bytes = "0.3GiB"
        disk_cap_bytes = "1.5TiB"
    """
    loaded = load(write(tmp_path, text), environ={})
    red = Quota(0, 0, 1.0, 0, 322122547, 1536 << 30)
    assert loaded.quotas == {("blue", b""): Quota(1 << 29, 2 << 30, 3.0, 60), ("red", b""): red}
    shown = config.masked(loaded)["tenants"]
    memory = {"floor_bytes": 1 << 29, "cap_bytes": 2 << 30, "weight": 3.0, "ttl_s": 60}
    assert json.loads(json.dumps(shown))["blue"] == memory | {"disk_floor_bytes": 0, "disk_cap_bytes": 0}


def test_salts_are_tables_of_the_file_and_are_not_shown(tmp_path: Path) -> None:
    loaded = load(write(tmp_path, "[salts.hush]\nttl_s = 60\n[salts.'with a blank']\nttl_s = 5"), environ={})
    assert loaded.salt_ttls == {salt_tag("hush"): 60, salt_tag("with a blank"): 5}
    assert "hush" not in repr(loaded) and "'ttl_s': 60" in repr(loaded)
    assert load(environ={"KVDEPOT_SALTS": "hush"}).salts == {} and loaded.quotas == {}


def test_a_salt_with_more_than_a_time_to_live_has_a_quota_of_one_tenant(tmp_path: Path) -> None:
    text = """
        [tenants.blue]
        floor_bytes = "1GiB"
        [salts.alice]
        cap_bytes = "512MiB"
        ttl_s = 60
        [salts.bob]
        tenant = "blue"
        disk_cap_bytes = "2GiB"
        [salts.hush]
        ttl_s = 5
        [salts.own]
        tenant = ""
    """
    loaded = load(write(tmp_path, text), environ={})
    assert loaded.quotas == {
        ("blue", b""): Quota(1 << 30),
        ("", salt_tag("alice")): Quota(0, 1 << 29, 1.0, 60),
        ("blue", salt_tag("bob")): Quota(0, 0, 1.0, 0, 0, 2 << 30),
        ("", salt_tag("own")): Quota(),
    }
    assert loaded.salt_ttls == {salt_tag("hush"): 5}
    own = f"{salt_tag('alice').hex()}/{tenant_prefix('')}"
    assert loaded.rules.quotas[own].ttl_s == 60 and len(loaded.rules.quotas) == 4
    assert not any(salt in repr(loaded) for salt in ("alice", "bob", "hush"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('chunk_size = "many"', "chunk_size: 'many' is neither auto nor"),
        ("chunk_size = [256]", "chunk_size: [256] is neither auto nor"),
        ("url = 5", "url: "),
        ("arena_gib = nan", "arena_gib: "),
        ("[serve]\nchunk_size = 256", "unknown setting serve"),
        ("tenants = 3", "tenants: 3 is not a table: write [tenants.NAME]"),
        ("[tenants]\nblue = 3", "tenants.blue: 3 is not a table: write [tenants.blue]"),
        ("[tenants.blue]\nfloor = 3", "tenants.blue.floor: "),
        ("[tenants.blue]\nfloor_bytes = -1", "tenants.blue.floor_bytes: -1 is out of range"),
        ('[tenants.blue]\ncap_bytes = "much"', "tenants.blue.cap_bytes: 'much' is not a size"),
        ("[tenants.blue]\nfloor_bytes = 2\ncap_bytes = 1", "tenants.blue.cap_bytes: 1 is below floor_bytes, 2"),
        (
            "[tenants.blue]\ndisk_floor_bytes = 2\ndisk_cap_bytes = 1",
            "tenants.blue.disk_cap_bytes: 1 is below disk_floor",
        ),
        ("[tenants.blue]\nweight = 0", "tenants.blue.weight: 0 is out of range"),
        ("[tenants.blue]\nweight = nan", "tenants.blue.weight: "),
        ("[tenants.blue]\nttl_s = 1.5", "tenants.blue.ttl_s: "),
        ("salts = 3", "salts: 3 is not a table: write [salts.NAME]"),
        ("[salts.hush]", "salts.hush: it says nothing: give ttl_s, or a quota"),
        ("[salts.hush]\nttl_s = -1", "salts.hush.ttl_s: -1 is out of range"),
        ("[salts.hush]\ncap_bytes = 1\nfloor_bytes = 2", "salts.hush.cap_bytes: 1 is below floor_bytes, 2"),
        ("[salts.'']\nttl_s = 1", "salts: a salt has at least one character"),
        ("\n".join(f"[salts.s{number}]\nttl_s = 1" for number in range(65)), "salts: 65 tables"),
    ],
)
def test_a_wrong_value_in_a_file_is_refused_with_its_table_and_setting(tmp_path: Path, text: str, said: str) -> None:
    file = write(tmp_path, text)
    with pytest.raises(ConfigError) as refused:
        load(file, environ={})
    assert str(refused.value).startswith(f"{file}: {said}")


WORDS = st.text(max_size=12) | st.sampled_from(["1", "0.5", "64MiB", "on", "off", "auto", "keep", "tcp://127.0.0.1:9"])
GIVEN = st.dictionaries(st.sampled_from(Config.__struct_fields__), WORDS, max_size=3)


@given(GIVEN, GIVEN)
def test_settings_of_any_text_are_refused_or_survive_a_round_trip(
    flags: dict[str, str], variables: dict[str, str]
) -> None:
    try:
        loaded = load(None, flags, {f"KVDEPOT_{name.upper()}": text for name, text in variables.items()})
    except ConfigError as exc:
        assert str(exc)
        return
    values = {name: getattr(loaded, name) for name in Config.__struct_fields__ if name not in ONLY_IN_FILE}
    texts = {name: " ".join(value) if isinstance(value, tuple) else str(value) for name, value in values.items()}
    assert load(None, texts, {}) == loaded
