"""Tier URLs for people: credentials and other secrets are replaced by `***`.

Our own messages have no secret to remove: each URL in them is made by `shown`, however malformed it is. `redact` is
applied once to the text of libraries and servers, where it enters a message. To replace a short password in a whole
message would garble the URL in it, and show the password by the gap. Invariant: text that may be part of a password is
treated as a password.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from urllib.parse import quote, unquote

HIDDEN = "***"
HARMLESS_OPTIONS = frozenset(
    {
        *("write", "compress", "key_file", "ttl_s", "threads", "queue_mib"),  # of all tiers
        *("capacity_gib", "policy"),  # disk
        *("endpoint", "region", "account", "tls_ca", "timeout_s", "retries", "requests"),  # object stores
        *("prefix", "expire_s", "password_file", "tls_cert", "tls_key"),  # Redis
        *("local_host", "protocol", "device", "segment_gib", "metadata", "replicas", "buffer_mib"),  # Mooncake
    }
)
"""The options that tiers have. Their values are shown; any other option, however it is called, may be a secret."""

_PATHS = ("disk", "file")
"""Schemes of directories: they have no host, and an `@` in them does not end credentials."""
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]{0,31}")
_HOST = r"(\[[0-9A-Fa-f:.%]*\]|[\w.\-]+)(:\d{0,5})?"
_PLACE = re.compile(rf"{_HOST}(,{_HOST})*(/[^?#@\s]*)?")
"""Hosts with ports, and a path, without credentials: a port that is not a number may be a password without `@host`."""
_PLACE_AFTER = re.compile(r"[\w.,:%\[\]\-]*(/[^?#&=@\s]*)?")
"""Hosts and a path after credentials, however malformed these are."""
_NAME = re.compile(r"[A-Za-z_]{1,32}")
"""Text that may be the name of an option rather than a part of a password."""
_WORD = re.compile(r"[\w./+\-]*")
_IN_TEXT = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]{0,31}://[^\s\"'<>()]+")
_LONG = 4
"""A secret of this length is replaced anywhere; a shorter one only as a whole word, or it would garble the text."""


def credentials_of(url: str) -> tuple[str, str, str]:
    """`user`, `password` (percent-decoded, may be empty) and the URL without them and its options."""
    scheme, colon, rest = url.partition("://")
    place = rest.partition("?")[0]
    if scheme in _PATHS and place.startswith("/"):
        return "", "", f"{scheme}{colon}{place}"
    credentials, _, place = place.rpartition("@")
    user, _, password = credentials.partition(":")
    return unquote(user), unquote(password), f"{scheme}{colon}{place}"


def secrets_of(url: str) -> list[str]:
    """The credentials in this URL and in those of its options: text that a library or a server may quote. Values of
    options that no tier has are left out, as they are passed to nobody."""
    place, _, query = url.partition("?")
    if place.partition("://")[0] in _PATHS:
        place = ""
    found = []
    for part in (place, *(unquote(option.partition("=")[2]) for option in query.split("&"))):
        credentials = part.partition("://")[2].rpartition("@")[0] if "://" in part else part.rpartition("@")[0]
        user, colon, password = credentials.partition(":")
        found += [password if colon else user, credentials]
    return [secret for secret in found if secret]


def has_ambiguous_secret(url: str) -> bool:
    """Whether a password may contain a character that ends passwords, so that it is unclear where the host begins."""
    return "@" in url.partition("?")[2] or re.search(r"[\s\x00-\x1f#]", url) is not None


def has_place(url: str) -> bool:
    """Whether a directory, hosts with ports, or a bucket follow the credentials."""
    scheme, _, place = credentials_of(url)[2].partition("://")
    return scheme in _PATHS or _PLACE.fullmatch(place) is not None


def redact(text: str, secrets: Collection[str] = ()) -> str:
    """Text of a library or a server without these secrets, in any quoting, and without those of URLs in the text."""
    plains = {*secrets, *map(unquote, secrets)}
    forms = {form for p in plains for form in (p, quote(p), quote(p, safe=""), repr(p)[1:-1])}
    for form in sorted(forms, key=len, reverse=True):
        pattern = re.escape(form) if len(form) >= _LONG else rf"(?<!\w){re.escape(form)}(?!\w)"
        text = re.sub(pattern, HIDDEN, text)
    return _IN_TEXT.sub(lambda found: shown(found[0]), text)


def shown(url: str) -> str:
    """A URL with `***` for its secrets; if the URL is malformed, for everything that may be a secret."""
    scheme, colon, rest = url.partition("://")
    if not colon:
        return _after_credentials(url) if "@" in url else url if _WORD.fullmatch(url) else HIDDEN
    if not _SCHEME.fullmatch(scheme):
        return HIDDEN
    if has_ambiguous_secret(url):
        return f"{scheme}://{_after_credentials(rest) if '@' in rest else HIDDEN}"
    place, mark, query = rest.partition("?")
    if not (scheme in _PATHS and place.startswith("/")):
        place = _place(place)
    if place.endswith(HIDDEN):  # no host
        return f"{scheme}://{place}"  # the options may be the rest of a password that has no host
    return f"{scheme}://{place}{mark}{'&'.join(_options(query))}"


def shown_option(url: str) -> str:
    """A URL in an option, with `***` for its secrets; `***` alone if it is unclear where they end."""
    return HIDDEN if has_ambiguous_secret(url) else shown(url)


def _after_credentials(text: str) -> str:
    """The text after the last `@`, if that is only a host and a path."""
    place = text.rpartition("@")[2].partition("?")[0]
    return f"{HIDDEN}@{place}" if _PLACE_AFTER.fullmatch(place) else HIDDEN


def _place(place: str) -> str:
    _, at, host = place.rpartition("@")
    if not (_PLACE_AFTER if at else _PLACE).fullmatch(host):
        host = HIDDEN if host else ""
    return f"{HIDDEN}@{host}" if at else host


def _options(query: str) -> Iterator[str]:
    """The options up to the first that may be a secret: if its value contains an `&`, the rest is part of it."""
    for option in query.split("&") if query else ():
        name, equals, value = option.partition("=")
        read = unquote(value)
        is_url = "://" in read or (":" in read.partition("@")[0] and "@" in read)
        if name not in HARMLESS_OPTIONS or ("=" in read and not is_url):
            yield f"{name}={HIDDEN}" if equals and _NAME.fullmatch(unquote(name)) else HIDDEN
            return
        yield f"{name}{equals}{shown_option(read) if is_url else value}"
