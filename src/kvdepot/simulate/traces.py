"""Public traces of requests: the blocks of each prompt.

Called by simulate/sweep.py. Invariant: two blocks are the same exactly if they and all before them in their prompts
are the same, like chunks in the index. So a block is identified by its id *and* its predecessor. That makes no
difference in formats whose ids depend on the whole prefix; in those that name each block by its own tokens (Bailian),
the same text behind two different beginnings is two blocks, as it is for an engine.

| format | a line is | ids | block |
|---|---|---|---|
| Mooncake | a request: `timestamp` (ms), `hash_ids` | of the whole file | 512 tokens |
| Bailian | a request: `chat_id`, `timestamp` (s), `hash_ids` | of the whole file | 16 tokens |
| WEKA | a session: `block_size`, `requests: [{t, hash_ids}]` (s) | of it (`hash_id_scope: local`) | its own |

A file may also be a JSON array of these or one object over several lines, and compressed with gzip; a folder is one
trace of all files in it. Traces do not contain generated tokens until a later prompt includes them.
"""

from __future__ import annotations

import gzip
import itertools
import zlib
from array import array
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from kvdepot.errors import ConfigError
from kvdepot.values import fault_of

__all__ = ["Request", "Trace", "load"]

Request: TypeAlias = tuple[float, Sequence[Hashable]]
"""When it arrived (s), and the ids of its prompt's blocks."""

MOONCAKE_TOKENS = 512
BAILIAN_TOKENS = 16
_ROOT = -1


class Trace:
    """Requests in order of arrival; blocks are numbered from 0, each after the one before it in its prompts."""

    def __init__(self, requests: Iterable[Request], name: str = "") -> None:
        numbers: dict[tuple[int, Hashable], int] = {}
        blocks, ends, times = array("I"), array("q"), array("d")
        for time, ids in requests:
            before = _ROOT
            for block_id in ids:
                before = numbers.setdefault((before, block_id), len(numbers))
                blocks.append(before)
            ends.append(len(blocks))
            times.append(time)
        self.name = name
        self.block_tokens = 0  # 0 = not known
        self.unique = len(numbers)
        self.blocks: npt.NDArray[np.uint32] = np.array(blocks, np.uint32)
        """uint32[references]: the blocks of all requests, concatenated."""
        self.ends: npt.NDArray[np.int64] = np.array(ends, np.int64)
        """int64[requests]: where each request ends in `blocks`."""
        self.times: npt.NDArray[np.float64] = np.array(times, np.float64)
        """float64[requests]: when each request arrived, in seconds."""
        self._sort()

    def _sort(self) -> None:
        if (np.diff(self.times) >= 0).all():
            return
        requests = list(self)
        order = np.argsort(self.times, kind="stable")
        self.blocks = np.concatenate([requests[i] for i in order])
        self.ends = np.cumsum([len(requests[i]) for i in order])
        self.times = self.times[order]

    def __repr__(self) -> str:
        return f"<Trace {self.name!r} {len(self)} requests, {len(self.blocks)} references to {self.unique} blocks>"

    def __len__(self) -> int:
        return len(self.ends)

    def __iter__(self) -> Iterator[npt.NDArray[np.uint32]]:
        """The blocks of each request."""
        start = 0
        for end in self.ends.tolist():
            yield self.blocks[start:end]
            start = end


class _Mooncake(msgspec.Struct, gc=False):
    timestamp: float
    hash_ids: list[int | str]


class _Bailian(msgspec.Struct, gc=False):
    chat_id: int | str
    timestamp: float
    hash_ids: list[int | str]


class _Call(msgspec.Struct):
    """A request of a session, or a subagent with requests of its own."""

    t: float
    type: str = ""
    hash_ids: list[int | str] | None = None
    requests: list[_Call] = []

    def __post_init__(self) -> None:
        if self.hash_ids is None and not self.requests and self.type != "subagent":
            raise ValueError("a request without `hash_ids`")


class _Session(msgspec.Struct):
    requests: list[_Call]
    block_size: int = 0
    hash_id_scope: str = "local"


def load(path: str) -> Trace:
    """Read a trace from a file or folder; detects its format from the contents.

    Raises ConfigError, with file and line, if it cannot be read.
    """
    sizes: set[int] = set()
    trace = Trace(_requests(path, sizes), path)
    if len(sizes) > 1:
        listed = " and ".join(map(str, sorted(sizes)))
        raise ConfigError(f"{path}: has blocks of {listed} tokens; a trace must have one block size")
    trace.block_tokens = max(sizes, default=0)
    return trace


def _requests(path: str, sizes: set[int]) -> Iterator[Request]:
    """All requests, file by file. sizes: gets the tokens per block."""
    sessions = itertools.count()  # some with ids of their own
    for file in _files(path):
        try:
            with _open(file) as stream:
                for entry in _entries(file, stream):
                    if isinstance(entry, _Session):
                        sizes.add(entry.block_size)
                        session = next(sessions)
                        yield from _calls(entry.requests, session if entry.hash_id_scope == "local" else _ROOT)
                    elif isinstance(entry, _Bailian):
                        sizes.add(BAILIAN_TOKENS)
                        yield entry.timestamp, entry.hash_ids
                    else:
                        sizes.add(MOONCAKE_TOKENS)
                        yield entry.timestamp / 1000, entry.hash_ids
        except (OSError, EOFError, zlib.error) as exc:
            raise ConfigError(f"{file}: cannot be read: {getattr(exc, 'strerror', None) or exc}") from exc


def _files(path: str) -> list[Path]:
    if not Path(path).is_dir():
        return [Path(path)]
    return sorted(file for file in Path(path).iterdir() if file.is_file() and not file.name.startswith("."))


def _open(file: Path) -> IO[bytes]:
    stream = file.open("rb")
    if stream.peek(2)[:2] != b"\x1f\x8b":
        return stream
    stream.close()
    return gzip.open(file)  # type: ignore[return-value]  # it reads lines like any file


def _entries(file: Path, stream: IO[bytes]) -> Iterator[_Mooncake | _Bailian | _Session]:
    """The objects of a file: one per line, or, if the first line is not JSON, those of the whole file."""
    decode: Callable[[bytes | msgspec.Raw], _Mooncake | _Bailian | _Session] | None = None
    for number, line in enumerate(stream, 1):
        if line.isspace():
            continue
        try:
            decode = decode or _decoder(line)
        except msgspec.DecodeError as exc:
            yield from _whole(file, number, line + stream.read(), exc)
            return
        try:
            yield decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as exc:
            raise ConfigError(f"{file}:{number}: {fault_of(exc)}") from exc


def _whole(
    file: Path, number: int, text: bytes, problem: msgspec.DecodeError
) -> Iterator[_Mooncake | _Bailian | _Session]:
    """The objects of a file that is one JSON value.

    number, problem: the line where it begins, and why that line is not a value by itself.
    """
    try:
        value = msgspec.json.decode(text, type=msgspec.Raw)
        entries = msgspec.json.decode(text, type=list[msgspec.Raw]) if text.lstrip()[:1] == b"[" else [value]
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise ConfigError(f"{file}:{number}: {fault_of(problem)}") from problem
    for entry in entries:
        try:
            yield _decoder(entry)(entry)
        except (msgspec.DecodeError, UnicodeDecodeError) as exc:
            line = number + text.count(b"\n", 0, text.find(entry))
            raise ConfigError(f"{file}:{line}: {fault_of(exc)}") from exc


def _decoder(text: bytes | msgspec.Raw) -> Callable[[bytes | msgspec.Raw], _Mooncake | _Bailian | _Session]:
    """The decoder for objects like this one. Raises msgspec.DecodeError if it is not a JSON object."""
    fields = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    if "requests" in fields:
        return msgspec.json.Decoder(_Session).decode
    if "chat_id" in fields:
        return msgspec.json.Decoder(_Bailian).decode
    return msgspec.json.Decoder(_Mooncake).decode


def _calls(calls: list[_Call], scope: int, start_s: float = 0.0) -> Iterator[Request]:
    """The requests of a session and its subagents.

    Some files give the times of a subagent's requests from the session's start, others from the subagent's: those
    earlier than the subagent's start must be the latter.
    """
    for call in calls:
        if call.requests:
            own = min(inner.t for inner in call.requests) < call.t
            yield from _calls(call.requests, scope, start_s + call.t if own else start_s)
        elif call.hash_ids is None:
            continue
        elif scope == _ROOT or not call.hash_ids:
            yield start_s + call.t, call.hash_ids
        else:  # tagging the first block is enough, because blocks are identified by their predecessors
            yield start_s + call.t, [(scope, call.hash_ids[0]), *call.hash_ids[1:]]
