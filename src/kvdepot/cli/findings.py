"""The checks of `kvdepot doctor`: what could keep a server from working here, and what to do.

They change nothing. A check that cannot find something out reports that; it does not fail.
"""

from __future__ import annotations

import http.client
import importlib.util
import os
import platform
import resource
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import msgspec

from kvdepot import __version__, install, locks
from kvdepot.cli.connect import running
from kvdepot.cli.output import clean, size
from kvdepot.cli.web import ask_health
from kvdepot.config import Config, home_url, load, odd_chunk_size, reported, stray_variables
from kvdepot.errors import ConfigError, DeviceError, KVDepotError
from kvdepot.memory import shm
from kvdepot.memory.room import free_shm, limits
from kvdepot.protocol.addresses import MOST_PATH, socket_path
from kvdepot.protocol.endpoints import holder
from kvdepot.protocol.health import judge
from kvdepot.protocol.status import Status
from kvdepot.values import plural
from kvdepot.web.child import missing_packages

__all__ = ["VLLM_RELEASES", "Finding", "findings"]

VLLM_RELEASES = ("0.30", "0.31", "0.32", "0.33")
"""As in integrations/vllm/versions.py, which cannot be imported without vLLM; a test compares them."""

_FEW_FILES = 4096
_NAMED = 3


class Finding(msgspec.Struct, frozen=True):
    """The result of one check. state: ok, warn (it works, with a drawback) or fail. advice: what to do."""

    state: str
    what: str
    text: str
    advice: str = ""


def findings(file: str | None, url: str | None, key: str, looking: Callable[[str], None]) -> Iterator[Finding]:
    """Run all checks. looking: called with the name of a check that may take a while."""
    yield _python()
    yield _processor()
    try:
        config = load(file, {"url": url})
    except ConfigError as exc:
        yield Finding("fail", "settings", str(exc), "fix it; `kvdepot config` shows every setting")
        config = Config(url=url or load(environ={}).url)
    else:
        yield Finding("ok", "settings", f"those of a server started here: from {file or 'environment and defaults'}")
    yield _endpoint(config.url)
    if warning := odd_chunk_size(config.chunk_size):
        yield Finding("warn", "settings", warning, f"--chunk-size {Config().chunk_size}, the default, suits vLLM")
    yield from _variables()
    looking("the server")
    status = _ask(config.url, key)
    server = status if isinstance(status, Status) else None
    if server is not None:
        yield from _different(server, config)
    here = server if socket_path(config.url) is not None else None
    arena_bytes = here.capacity_bytes if here is not None else config.arena_bytes
    yield _shared_memory(config.arena, arena_bytes, here is not None)
    yield from _engine_kv(arena_bytes if here is None else 0)
    yield from _left_arenas()
    yield from _left_tensors()
    yield _memory(arena_bytes if here is None else 0)  # a running server's arena is no longer available memory
    yield _huge_pages()
    yield _memlock(config)
    yield _files(config)
    if server is None:
        yield from _tiers(config)
    yield _upper_bound()
    yield _torch()
    yield from _vllm()
    looking("the NVIDIA driver")
    yield from _nvidia()
    yield _key(key)
    yield from _server(config.url, status) if isinstance(status, Status) else [status]
    yield _web(config.http if server is None else server.settings.get("http", config.http), status)


def _endpoint(url: str) -> Finding:
    """Where clients look for the server, and why that is not where this user's environment would have it."""
    wanted = os.environ.get("XDG_RUNTIME_DIR") or os.environ.get("TMPDIR")
    path = socket_path(url)
    if path is not None and len(os.fsencode(path)) > MOST_PATH:
        text = f"{url}: a unix socket's path has at most {MOST_PATH} bytes"
        return Finding("fail", "endpoint", text, "choose a shorter --url")
    if url == home_url() and wanted and path is not None and not path.is_relative_to(Path(wanted).absolute()):
        return Finding("ok", "endpoint", f"{url}: {wanted} is too long for a unix socket, or not writable")
    return Finding("ok", "endpoint", url)


def _python() -> Finding:
    text = f"kvdepot {__version__} on Python {platform.python_version()}, {platform.system()} {platform.release()}"
    if sys.platform != "linux":
        return Finding("fail", "system", text, "kvdepot needs Linux: it relies on its shared memory and file locks")
    return Finding("ok", "system", text)


def _processor() -> Finding:
    usable = len(os.sched_getaffinity(0))
    text = f"{usable} of {os.cpu_count()} {os.uname().machine} cores are usable"
    if os.uname().machine != "x86_64":
        return Finding("warn", "processor", text, "only tested on x86-64; run `make test` here before you rely on it")
    if usable < 2:
        return Finding(
            "warn", "processor", text, "the server decides on one core and copies on others; give it at least two"
        )
    return Finding("ok", "processor", text)


def _variables() -> Iterator[Finding]:
    """Variables that look like settings but are not."""
    for name, advice in stray_variables(os.environ):
        yield Finding("warn", "settings", f"environment variable {name} is not a setting", advice)


def _different(server: Status, config: Config) -> Iterator[Finding]:
    """What the running server has been given otherwise than a server started here would be."""
    here = reported(config)
    told = [
        f"{name} {value or 'empty'} (here {here[name] or 'empty'})"
        for name, value in server.settings.items()
        if name in here and name != "url" and value != here[name]
    ]
    if told:
        text = f"the running server (pid {server.pid}) has others: {', '.join(told)}"
        yield Finding("ok", "settings", text, "`kvdepot config` shows both; a server reads its settings when it starts")


def _shared_memory(name: str, wanted: int, is_running: bool) -> Finding:
    """name, wanted: of the arena, and its bytes. is_running: they are those of a server that runs on this host."""
    try:
        room = os.statvfs(shm.SHM)
    except OSError as exc:
        advice = f"mount it: mkdir -p {shm.SHM} && mount -t tmpfs tmpfs {shm.SHM}; containers have it by default"
        return Finding("fail", "shared memory", f"{shm.SHM}: {exc.strerror}; the arena is a file there", advice)
    whole, free = room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize
    path = shm.SHM / name
    there = path.stat().st_blocks * 512 if path.exists() else 0  # already allocated to the arena
    if is_running and not there:
        there = wanted  # under a name that only the server knows
    whose = "the running server's" if is_running else "the"
    text = f"{shm.SHM}: {size(whole)}, of which {size(free)} free; {whose} arena takes {size(wanted)}"
    more = (
        "enlarge it (mount -o remount,size=... /dev/shm; docker run --shm-size=...; Kubernetes: an emptyDir with "
        "medium Memory), or make the arena smaller: --arena-gib"
    )
    if not os.access(shm.SHM, os.W_OK):
        return Finding("fail", "shared memory", f"{shm.SHM} is not writable", "make it writable for this user")
    if wanted - there > free:
        return Finding("fail", "shared memory", text, more)
    if free - (wanted - there) < whole // 20:
        return Finding("warn", "shared memory", f"{text}, which leaves little for engines", more)
    return Finding("ok", "shared memory", text)


def _engine_kv(arena_bytes: int) -> Iterator[Finding]:
    """Engines on CPUs have their own KV in shared memory, too. arena_bytes: of an arena that is yet to be filled."""
    space = os.environ.get("VLLM_CPU_KVCACHE_SPACE", "")
    if not space.isdecimal() or not int(space):
        return
    try:
        free = free_shm() - arena_bytes
    except OSError:
        return  # another finding says so
    text = f"an engine's KV takes {space} GiB of {shm.SHM} (VLLM_CPU_KVCACHE_SPACE)"
    if int(space) << 30 > free:
        text += f", which has {size(max(0, free))} free beside the arena"
        advice = f"enlarge {shm.SHM}, or lower VLLM_CPU_KVCACHE_SPACE: an engine whose KV does not fit is not cached"
        yield Finding("warn", "shared memory", text, advice)
    else:
        yield Finding("ok", "shared memory", text)


def _left_arenas() -> Iterator[Finding]:
    """Arenas of this user without a server."""
    left = [(path.name, taken) for path in sorted(shm.SHM.glob("*")) if (taken := _left_bytes(path))]
    if not left:
        return
    names = ", ".join(name for name, _ in left[:_NAMED]) + (", ..." if len(left) > _NAMED else "")
    take = "takes" if len(left) == 1 else "take"
    text = f"{plural(len(left), 'unused arena')} {take} {size(sum(taken for _, taken in left))}: {names}"
    advice = f"start a server with the same --url or --arena-name to reuse one, or remove the files in {shm.SHM}"
    yield Finding("warn", "shared memory", text, advice)


def _left_tensors() -> Iterator[Finding]:
    """KV of engines that were killed together with torch's helper process, which would have removed it."""
    left = dict(shm.left_tensors())
    if left:
        text = f"{plural(len(left), 'file')} of ended engines take {size(sum(left.values()))}: {next(iter(left))}"
        text += ", ..." if len(left) > 1 else ""
        yield Finding("warn", "shared memory", text, "no process has them open: kvdepot doctor --fix removes them")


def _left_bytes(path: Path) -> int:
    """The bytes that a shared-memory file occupies if it is an arena without a server; otherwise 0."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:
        return 0  # another user's, or gone
    try:
        is_arena = os.pread(descriptor, len(shm.ARENA_MAGIC), 0) == shm.ARENA_MAGIC
        return os.fstat(descriptor).st_blocks * 512 if is_arena and not locks.is_locked(descriptor) else 0
    except OSError:
        return 0  # not a plain file
    finally:
        os.close(descriptor)


def _memory(arena_bytes: int) -> Finding:
    """arena_bytes: of an arena that is yet to be filled."""
    found = [limit for limit in limits() if limit.what != str(shm.SHM)]
    text = "; ".join(f"{limit.what}: {size(limit.free)} of {size(limit.most)} available" for limit in found)
    if found and arena_bytes > found[0].free:
        state = "fail" if found[0].is_hard and arena_bytes > found[0].most else "warn"
        advice = f"the arena alone takes {size(arena_bytes)}: lower --arena-gib, or {found[0].advice}"
        return Finding(state, "memory", text, advice)
    return Finding("ok", "memory", text)


def _huge_pages() -> Finding:
    path = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    try:
        modes = path.read_text(encoding="utf-8")
    except OSError:
        return Finding("ok", "huge pages", "not supported for shared memory by this kernel")
    mode = modes.partition("[")[2].partition("]")[0]
    if mode in ("never", "deny"):
        return Finding(
            "warn", "huge pages", f"disabled for shared memory ({mode}): the first use of the arena is slower",
            f"as root: echo advise > {path}",
        )  # fmt: skip
    return Finding("ok", "huge pages", f"enabled for shared memory: {mode}")


def _memlock(config: Config) -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Finding("ok", "locked memory", "unlimited")
    needs = [tier.name for tier in config.tier_configs if tier.own.get("protocol") == "rdma"]
    if needs:
        advice = "ulimit -l unlimited (docker: --ulimit memlock=-1; systemd: LimitMEMLOCK=infinity)"
        return Finding("fail", "locked memory", f"limit {size(soft)}, but {needs[0]} registers memory for RDMA", advice)
    return Finding("ok", "locked memory", f"limit {size(soft)}; only a Mooncake pool over RDMA needs more")


def _files(config: Config) -> Finding:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or hard >= _FEW_FILES:
        return Finding("ok", "open files", "unlimited" if hard == resource.RLIM_INFINITY else f"limit {hard}")
    advice = f"ulimit -Hn 65536 (systemd: LimitNOFILE=65536), or accept fewer than {config.max_clients} clients"
    return Finding("warn", "open files", f"limit {hard}: enough for a few engines only", advice)


_PACKAGES = {"redis": "redis", "object": "obstore", "mooncake": "mooncake"}
"""The module that a tier imports, by extra."""


def _tiers(config: Config) -> Iterator[Finding]:
    from kvdepot.tiers import KINDS

    for tier in config.tier_configs:
        extra = KINDS[tier.kind]
        module = _PACKAGES.get(extra, "")
        if module and importlib.util.find_spec(module) is None:
            yield Finding("fail", "tier", f"{tier.name}: {module} is not installed", install.advice(extra))
        else:
            yield Finding("ok", "tier", f"{tier.name}: its packages are installed")


def _upper_bound() -> Finding:
    gain = "hit rates are shown with their upper bound (infinite cache)"
    if importlib.util.find_spec("datasketches") is None:
        return Finding("warn", "upper bound", "datasketches is not installed", f"{install.advice()}: {gain}")
    return Finding("ok", "upper bound", gain)


def _torch() -> Finding:
    found = _version("torch")
    if not found:
        return Finding("ok", "PyTorch", "not installed here; engines need it, the server does not")
    return Finding("ok", "PyTorch", found)


def _version(*names: str) -> str:
    """The version of the first of these distributions that is installed; empty if none is."""
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return ""


def _vllm() -> Iterator[Finding]:
    found = _version("vllm", "vllm-cpu")
    if not found:
        yield Finding("ok", "vLLM", "not installed here; only engines need it")
        return
    if not found.startswith(tuple(f"{release}." for release in VLLM_RELEASES)):
        advice = f"KVDepotConnector refuses to start: it supports vLLM {VLLM_RELEASES[0]} to {VLLM_RELEASES[-1]}"
        yield Finding("warn", "vLLM", found, advice)
    else:
        yield Finding("ok", "vLLM", found)
    points = metadata.entry_points(group="vllm.general_plugins")
    if not any(point.value == "kvdepot.integrations:register_vllm" for point in points):
        advice = f"install it into vLLM's environment: {install.again()}"
        yield Finding("fail", "vLLM plugin", "vLLM does not find KVDepotConnector", advice)
        return
    wanted = os.environ.get("VLLM_PLUGINS")
    if wanted is not None and "kvdepot" not in wanted.split(","):
        advice = "add kvdepot to it, or unset it"
        yield Finding("fail", "vLLM plugin", f"VLLM_PLUGINS={clean(wanted)} excludes it", advice)
        return
    yield Finding("ok", "vLLM plugin", "vLLM finds KVDepotConnector")


def _nvidia() -> Iterator[Finding]:
    driver = Path("/proc/driver/nvidia/version")
    bindings = _version("cuda-bindings")
    try:
        has_driver = driver.exists()
    except OSError:
        has_driver = False
    if not has_driver:
        yield Finding("ok", "NVIDIA", "no driver here; KV is kept in CPU memory")
        return
    if not bindings:
        advice = f"{install.advice('cuda')}, in the environments of the server and the engines"
        yield Finding("fail", "NVIDIA", "driver found, but cuda-python is not installed", advice)
        return
    from kvdepot.devices.cuda.driver import load as load_driver

    try:
        cuda = load_driver()
        names = [f"{cuda.name(device)} {uuid}" for uuid, device in cuda.devices().items()]
    except DeviceError as exc:
        yield Finding("fail", "NVIDIA", str(exc), "KV on GPUs cannot be shared until this is fixed")
        return
    if not names:
        advice = "check CUDA_VISIBLE_DEVICES and the devices given to the container"
        yield Finding("warn", "NVIDIA", "the driver lists no GPU", advice)
    for name in names:
        yield Finding("ok", "NVIDIA", f"{name}, cuda-python {bindings}")


def _key(key: str) -> Finding:
    if not key:
        return Finding("ok", "key", "none; a server of the same user on this host needs none")
    from kvdepot.protocol.curve import read_client_key

    try:
        read_client_key(key)
    except KVDepotError as exc:
        return Finding(
            "fail", "key", str(exc), "create keys with `kvdepot keygen`; give the file as KVDEPOT_KEY or --key"
        )
    return Finding("ok", "key", clean(key))


def _ask(url: str, key: str) -> Status | Finding:
    """The server's status, or why there is none."""
    path = socket_path(url)
    start = "start one with `kvdepot serve`, or give its endpoint: --url or KVDEPOT_URL"
    if path is not None and not path.exists():
        return Finding("warn", "server", f"no server of this user at {url}", start)
    if path is not None and path.stat().st_uid != os.geteuid():
        owner = path.stat().st_uid
        advice = f"run as user {owner}, or start your own server with another --url"
        return Finding("fail", "server", f"{path} belongs to user {owner}, not to {os.geteuid()}", advice)
    try:
        return running(url, key)
    except KVDepotError as exc:
        if path is not None and not holder(url):
            return Finding("warn", "server", f"the server at {url} has stopped", start)
        what, _, advice = str(exc).partition("; ")
        return Finding("fail", "server", what, advice or "see its log")


def _server(url: str, now: Status) -> Iterator[Finding]:
    text = (
        f"version {now.version} at {url}, pid {now.pid}: {plural(now.chunks, 'chunk')}, {plural(now.clients, 'client')}"
    )
    if now.version != __version__:
        yield Finding("warn", "server", text, f"this command is {__version__}; restart the server when convenient")
    else:
        yield Finding("ok", "server", text)
    for concern in judge(now).concerns:
        yield Finding("warn", "server", concern.what.rstrip("."), concern.advice.rstrip("."))


def _web(address: str, status: Status | Finding) -> Finding:
    """address: the setting `http`, of the running server if it reports it."""
    if isinstance(status, Status) and status.http:
        return _page(status.http)
    if address == "off":
        return Finding("ok", "web page", "disabled (http = off)")
    if missing := missing_packages():
        advice = f"{install.advice()} for the page, metrics and API, or --http off"
        return Finding("warn", "web page", f"{', '.join(missing)} is not installed", advice)
    answered = ask_health(address) is not None
    if isinstance(status, Finding):
        if status.state == "fail":
            return Finding("warn", "web page", "not checked", "the finding about the server comes first")
        text = f"{address} answers, but no kvdepot server of this user is running" if answered else "none"
        return Finding("warn", "web page", text, "`kvdepot serve` starts it; see the finding about the server")
    if answered:
        text = f"another program listens at {address}; do not give it this server's token"
        return Finding("warn", "web page", text, "restart the server with another --http, such as 127.0.0.1:7078")
    return Finding(
        "warn", "web page", f"the server does not listen for HTTP, although {address} is free", "see its log"
    )


def _page(address: str) -> Finding:
    """address: of HTTP, as the server reports it."""
    answer = ask_health(address)
    if answer == http.client.OK:
        return Finding("ok", "web page", f"{address} answers; `kvdepot open` prints its URL")
    said = "nothing" if answer is None else str(answer)
    advice = "see `kvdepot top` and the server's log"
    return Finding(
        "warn", "web page", f"{address}/healthz answers {said}: its server does not respond, or is overloaded", advice
    )
