"""How tiers are written in the settings, and that nothing said of them holds a secret."""

from __future__ import annotations

import logging
import re
import socket
import threading
import traceback
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from kvdepot.config import load, masked
from kvdepot.errors import ConfigError, KVDepotError, TierError
from kvdepot.tiers import Options, convert, parse
from kvdepot.tiers.disk import DiskOptions
from kvdepot.tiers.mooncake import MooncakeOptions
from kvdepot.tiers.object import ObjectOptions
from kvdepot.tiers.redis import RedisOptions
from kvdepot.tiers.urls import HARMLESS_OPTIONS, redact, shown
from tests.cli.command import run
from tests.ports import free_port

MARK = "Qx7v"
"""Each piece of a generated password holds it, so that none can be told unseen."""


SECRETS = ("sas_key", "account_key", "service_account_key", "pwd", "auth", "%73ig", "colour", "Region", "accountkey")
"""Options that no tier has: libraries take secrets by such names."""


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
        ("capacity_gib=1&compress=gzip", "compress: 'gzip' is not one of off, zstd"),
        ("capacity_gib=1&write=sometimes", "write: 'sometimes' is not one of through, on_evict, off"),
    ],
)
def test_a_wrong_option_is_refused_with_its_name_and_what_could_be_written(options: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        config = parse(f"disk:///d?{options}")
        convert(config.own, DiskOptions, config.name)
    assert str(refused.value).startswith(f"tier disk:///d: {said}")


def test_an_option_may_have_a_plus_and_whatever_is_percent_encoded() -> None:
    config = parse("redis://host?password_file=/srv/c++/a%20b%40%2B&key_file=/k+1")
    assert (config.own, config.options.key_file) == ({"password_file": "/srv/c++/a b@+"}, "/k+1")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("redis://", "no host"),
        ("redis://host:port", "no host:port"),
        ("redis://a:1,b:2", "several hosts"),
        ("redis://host/zero", "'zero' is not a database number"),
        ("redis+cluster://host/1", "a cluster has no databases"),
        ("redis://host?timeout_s=0", "timeout_s"),
        ("redis://host?tls_ca=ca.pem", "rediss://"),
        ("rediss://host?tls_ca=nowhere.pem", "nowhere.pem is not a file"),
        ("redis://host?password_file=nowhere", "nowhere: No such file"),
        ("redis://u:se/cret@host:x", "no host:port"),
        ("s3://", "no bucket"),
        ("s3://bucket?timeout_s=0", "timeout_s"),
        ("s3://bucket?account=me", "account does not apply to s3://"),
        ("gs://bucket?endpoint=http://127.0.0.1", "endpoint does not apply to gs://"),
        ("file:///somewhere?region=here", "region does not apply to file://"),
        ("file://relative/path", "absolute"),
        ("file:///proc/nowhere", "nowhere"),
        ("s3://bucket?tls_ca=/nowhere.pem", "/nowhere.pem: No such file"),
        ("az://container", "(?i)account"),
        ("s3://bucket?endpoint=127.0.0.1:9000", "write http://127.0.0.1:9000 or https://127.0.0.1:9000"),
        ("s3://bucket?endpoint=minio", "write http://minio"),
        *(
            (f"s3://bucket?endpoint={endpoint}", "endpoint: .* is not a URL such as")
            for endpoint in ("ftp://host", "http://", "http:///path", "http://h%20h", "http://[", "http://h:99999")
        ),
        ("s3://bücket", "bucket"),
        ("s3://bucket?region=eu%20west", "region"),
        ("disk:///d?capacity_gib=0", "capacity_gib"),
        ("disk:///d?capacity_gib=1&policy=best", "lru"),
        ("disk://host/d?capacity_gib=1", "three slashes"),
        ("disk:///?capacity_gib=1", "of its own"),
        ("mooncake:///", "host"),
        ("mooncake://host:port/", "port"),
        ("mooncake://host/path", "host"),
        ("mooncake://host/?segment_gib=-1", "segment_gib"),
        ("mooncake://host/?segment_gib=0.001", "segment_gib"),
        ("mooncake://host/?protocol=smoke", "protocol"),
        ("mooncake://host/?protocol=rdma", "device"),
        ("mooncake://host/?device=mlx5_0", "rdma"),
    ],
)
def test_a_setting_that_is_wrong_is_named(text: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(ConfigError, match=says) as failed:
        parse(text).open()
    assert "cret" not in str(failed.value)


_pieces = st.sampled_from([MARK, f"{MARK}8", f"{MARK}%40", f"{MARK}%3F{MARK}"])
_between = st.sampled_from(
    [*list("?#@/%:&=+ ;,[]\"'\\$!*|<>"), "://", "?a=", "&b=", "@x/", "%", "%25", "\n", "\t", "é"]
)
passwords = st.lists(st.tuples(_pieces, _between), min_size=1, max_size=5).map(
    lambda pairs: "".join(map("".join, pairs)) + MARK
)
places = st.sampled_from(
    [
        "redis://{}@127.0.0.1:1/0", "redis://user:{}@127.0.0.1:1", "rediss://:{}@127.0.0.1:1/0?timeout_s=1",
        "redis://:{}@127.0.0.1:1?threads=none", "redis://:{}@127.0.0.1:1?nothing=1&write=off", "redis://user:{}",
        "redis+cluster://:{}@127.0.0.1:1,127.0.0.1:1", "redis://127.0.0.1:1/0?password={}", "rediss:{}@127.0.0.1",
        "mooncake://u:{}@127.0.0.1:1", "mooncake://{}@127.0.0.1:1/?segment_gib=0", "mooncake://127.0.0.1:1/?token={}",
        "s3://key:{}@bucket", "s3://bucket?secret_access_key={}&region=eu", "s3://bucket?region=eu&session_token={}",
        "s3://bucket?endpoint=http://key:{}@127.0.0.1:1&region=eu&retries=0", "az://container?account=a&sig={}",
        "disk://user:{}@host/kv?capacity_gib=1", "unknown://u:{}@h", "{}@h", "az://container?colour={}&account=a",
        "gs://bucket?{}", "s3://bucket?region=eu;sas_key={}", "s3://bucket?endpoint=http://127.0.0.1:1/?sv={}",
    ]
)  # fmt: skip


@settings(deadline=None)
@given(place=places, password=passwords, is_quoted=st.booleans())
@example(place="redis://user:{}@127.0.0.1:1", password=f"{MARK}?{MARK}", is_quoted=False)
@example(place="redis://user:{}@127.0.0.1:1", password=f"{MARK}?x=http://{MARK}", is_quoted=False)
@example(place="mooncake://u:{}@127.0.0.1:1", password=MARK, is_quoted=False)
@example(place="gs://bucket?{}", password=f"{MARK}={MARK}", is_quoted=False)
@example(place="s3://bucket?endpoint=http://127.0.0.1:1/?sv={}", password=f"{MARK}%40/{MARK}", is_quoted=False)
@example(place="s3://bucket?endpoint=http://127.0.0.1:1/?sv={}", password=f"{MARK}@{MARK}", is_quoted=True)
def test_nothing_that_is_said_of_a_tier_holds_a_piece_of_its_password(
    place: str, password: str, is_quoted: bool
) -> None:
    assume(is_quoted or "}@" in place or "@" not in password)  # else what follows its @ is the host
    # Without a scheme before it, what stands before its :// is one.
    assume(is_quoted or not place.startswith("{}") or not re.match(r"[A-Za-z][A-Za-z0-9+.\-]*://", password))
    url = place.format(quote(password, safe="") if is_quoted else password)
    said = [shown(url), redact(f"an error of {url}: {password}", [password])] if is_quoted else [shown(url)]
    try:
        loaded = load(flags={"tiers": [url]}, environ={})
        said += [repr(loaded), repr(masked(loaded))]
        (config,) = loaded.tier_configs
        said += [repr(config), config.name]
        config.open().usage()
    except KVDepotError as exc:
        said += traceback.format_exception(exc)
    assert MARK not in "".join(said)


@pytest.mark.parametrize("option", SECRETS)
def test_the_value_of_an_option_that_is_not_known_to_be_harmless_is_shown_nowhere(option: str) -> None:
    url = f"az://container/prefix?account=me&{option}={MARK}&threads=2"
    assert shown(url) == f"az://container/prefix?account=me&{option}=***"
    done = run("config", "--tiers", url)
    assert "account=me" in done.stdout and MARK not in done.stdout + done.stderr
    with pytest.raises(ConfigError) as refused:  # before anybody is given it
        parse(url).open()
    assert MARK not in "".join(traceback.format_exception(refused.value))


@pytest.mark.parametrize("password", ["1", "redis", "127", "Error", "Connection refused", "a:0/b@c"])
@pytest.mark.parametrize("user", ["", "1", "redis"])
def test_a_password_that_occurs_elsewhere_in_a_message_garbles_nothing(user: str, password: str) -> None:
    port = free_port()
    for credentials in (f"{user}:{quote(password, safe='')}@", f"{quote(password, safe='')}@"):
        config = parse(f"redis://{credentials}127.0.0.1:{port}/1")
        tier = config.open()
        with pytest.raises(TierError) as failed:
            tier.find(["a"])
        said = f"redis://127.0.0.1:{port}/1: ConnectionError: Error 111 connecting to 127.0.0.1:{port}. "
        assert str(failed.value).startswith(said)


def test_the_options_that_are_shown_are_those_of_the_tiers() -> None:
    own = [Options, DiskOptions, ObjectOptions, RedisOptions, MooncakeOptions]
    assert {name for kind in own for name in kind.__struct_fields__} == HARMLESS_OPTIONS


class Echo:
    """A server that quotes what it is told in its error, as Redis does with commands that it does not know."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                with connection, suppress(OSError):
                    while told := connection.recv(65536):
                        words = told.decode(errors="replace").split("\r\n")
                        connection.sendall(f"-ERR unknown command: {' '.join(words)}\r\n".encode())

    def close(self) -> None:
        self._listener.close()


@pytest.mark.parametrize("password", ["hunter2", "h?u#n@t/e:r%2", "ab"])
def test_a_server_that_quotes_the_password_is_not_quoted(
    password: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    echo = Echo()
    (tmp_path / "password").write_text(password)
    said = []
    for url in (
        f"redis://me:{quote(password, safe='')}@127.0.0.1:{echo.port}/0",
        f"redis://127.0.0.1:{echo.port}/0?password_file={tmp_path}/password",
    ):
        with pytest.raises(TierError, match="unknown command") as failed:
            parse(url).open().usage()
        said += [*traceback.format_exception(failed.value), caplog.text]
    echo.close()
    words = [word.strip("'\"") for word in "".join(said).replace(str(tmp_path), "").split()]
    assert password not in words
    assert len(password) < 4 or not any(password in word for word in words)


@pytest.mark.parametrize(
    ("text", "meant"),
    [("disc:///kv?capacity_gib=1", "disk"), ("/var/cache/kv", "disk"), ("valkey://h", "redis"), ("gcs://b", "gs")],
)
def test_an_unknown_kind_of_tier_is_answered_with_the_one_that_is_meant(text: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"did you mean {meant}://"):
        parse(text)
