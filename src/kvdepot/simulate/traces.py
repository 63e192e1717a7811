"""Public traces of requests: the blocks of each prompt.

Called by simulate/sweep.py. Invariant: two blocks are the same exactly if they and all before them in their prompts
are the same, like chunks in the index. So a block is identified by its id *and* its predecessor. That makes no
difference in Mooncake's format, whose ids depend on the whole prefix; in Bailian's, whose ids name each block by its
own tokens, the same text behind two different beginnings is two blocks, as it is for an engine.

| format | a line is a request | block |
|---|---|---|
| Mooncake | `timestamp` (ms), `hash_ids` | 512 tokens |
| Bailian | `chat_id`, `timestamp` (s), `hash_ids` | 16 tokens |

A file may be compressed with gzip. Traces do not contain generated tokens until a later prompt includes them.
"""

from __future__ import annotations

import gzip
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
        self.block_tokens = 0
        """Tokens per block; 0 = not known."""
        self.unique = len(numbers)
        self.blocks: npt.NDArray[np.uint32] = np.array(blocks, np.uint32)
        """uint32[references]: the blocks of all requests, concatenated."""
        self.ends: npt.NDArray[np.int64] = np.array(ends, np.int64)
        """int64[requests]: where each request ends in `blocks`."""
        if (np.diff(times) < 0).any():
            found, order = list(self), np.argsort(times, kind="stable")
            self.blocks = np.concatenate([found[i] for i in order])
            self.ends = np.cumsum([len(found[i]) for i in order])

    @property
    def contents(self) -> str:
        """The numbers of its requests and blocks, for a title."""
        text = f"{len(self):,} requests, {len(self.blocks):,} block references, {self.unique:,} blocks"
        return f"{text} of {self.block_tokens} tokens" if self.block_tokens else text

    def __len__(self) -> int:
        return len(self.ends)

    def __iter__(self) -> Iterator[npt.NDArray[np.uint32]]:
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


def load(path: str) -> Trace:
    """Read a trace from a file; the first line shows its format. Raises ConfigError, with file and line, if it cannot
    be read."""
    sizes: set[int] = set()
    trace = Trace(_requests(Path(path), sizes), path)
    trace.block_tokens = max(sizes, default=0)
    return trace


def _requests(file: Path, sizes: set[int]) -> Iterator[Request]:
    """All requests. sizes: gets the tokens per block."""
    decode: Callable[[bytes], _Mooncake | _Bailian] | None = None
    try:
        with _open(file) as stream:
            for number, line in enumerate(stream, 1):
                if line.isspace():
                    continue
                try:
                    decode = decode or _decoder(line)
                    entry = decode(line)
                except (msgspec.DecodeError, UnicodeDecodeError) as exc:
                    raise ConfigError(f"{file}:{number}: {fault_of(exc)}") from exc
                is_bailian = isinstance(entry, _Bailian)
                sizes.add(BAILIAN_TOKENS if is_bailian else MOONCAKE_TOKENS)
                yield entry.timestamp if is_bailian else entry.timestamp / 1000, entry.hash_ids
    except (OSError, EOFError, zlib.error) as exc:
        raise ConfigError(f"{file}: cannot be read: {getattr(exc, 'strerror', None) or exc}") from exc


def _open(file: Path) -> IO[bytes]:
    stream = file.open("rb")
    if stream.peek(2)[:2] != b"\x1f\x8b":
        return stream
    stream.close()
    return gzip.open(file)  # type: ignore[return-value]  # it reads lines like any file


def _decoder(line: bytes) -> Callable[[bytes], _Mooncake | _Bailian]:
    """The decoder for objects like this one. Raises msgspec.DecodeError if it is not a JSON object."""
    fields = msgspec.json.decode(line, type=dict[str, msgspec.Raw])
    return msgspec.json.Decoder(_Bailian).decode if "chat_id" in fields else msgspec.json.Decoder(_Mooncake).decode
