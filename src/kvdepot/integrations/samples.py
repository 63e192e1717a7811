"""A hash of a weight file's contents that reads a part of them. Called by weight_files.py.

Two files of equal hash have equal sizes and headers, equal small tensors (norms, biases, most scales: all of at most
64 KiB), and equal samples of every other tensor: 4 KiB of each MiB and of the end, and the beginning of each row of
embeddings and output layers, whose rows are edited one by one when tokens are added. So no tensor that was trained,
merged or quantized again goes unnoticed, nor a changed run of 1 MiB. What may go unnoticed is a smaller change within
one large matrix.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from blake3 import blake3

_WHOLE_BYTES = 1 << 20
"""Files up to this size are hashed whole."""
SMALL_BYTES = 1 << 16
"""Tensors up to this size are hashed whole."""
SAMPLE_BYTES = 4096
STEP_BYTES = 1 << 20
"""Distance between two samples of a tensor."""
_BLIND_STEP_BYTES = 1 << 16
"""Distance between two samples in files whose tensors are not known."""
_TAIL_BYTES = 1 << 20
"""Bytes at the end of such a file that are hashed whole: `torch.save` puts the checksums of its tensors there."""
_MOST_HEADER_BYTES = 100_000_000
"""The limit of the safetensors format."""
ROW_SAMPLE_BYTES = 64
_PIECE_BYTES = 1 << 20
BY_ROW = re.compile(r"embed|wte|lm_head|(^|\.)output\.weight$")
"""Names of tensors with a row for each token of the vocabulary."""


def hash_file(file: Path, size: int) -> bytes:
    """A hash of the contents of a file of this size, which does not depend on its name or times.

    Raises OSError if it cannot be read, or is not of this size any more.
    """
    descriptor = os.open(file, os.O_RDONLY)
    try:
        hasher = blake3(size.to_bytes(8, "little"))
        if size <= _WHOLE_BYTES:
            hasher.update(_read(descriptor, size, 0))
        elif file.suffix == ".safetensors" and (header := _read_header(descriptor, size)) is not None:
            hasher.update(header)
            _hash_tensors(hasher, descriptor, header, size)
        else:
            _hash_samples(hasher, descriptor, range(0, size, _BLIND_STEP_BYTES), size)
            hasher.update(_read(descriptor, _TAIL_BYTES, size - _TAIL_BYTES))
        return hasher.digest()
    finally:
        os.close(descriptor)


def _read(descriptor: int, size: int, offset: int) -> bytes:
    content = os.pread(descriptor, size, offset)
    if len(content) != size:
        raise OSError(f"a file of weights ended at {offset + len(content)} while it was read")
    return content


def _read_header(descriptor: int, size: int) -> bytes | None:
    """The header of a safetensors file; None if it has none."""
    length = int.from_bytes(_read(descriptor, 8, 0), "little")
    if length > min(size - 8, _MOST_HEADER_BYTES):
        return None
    header = _read(descriptor, length, 8)
    return header if header.lstrip().startswith(b"{") else None


def _tensors(header: bytes, size: int) -> Iterator[tuple[str, int, int, int]]:
    """Name, number of rows, and place `[start, end)` in the file of each tensor. Raises OSError for a bad header."""
    first = 8 + len(header)
    try:
        for name, tensor in json.loads(header).items():
            if name == "__metadata__":
                continue
            start, end = (first + int(offset) for offset in tensor["data_offsets"])
            if not first <= start <= end <= size:
                raise ValueError(f"tensor {name} is beyond the end of the file")
            yield name, int(tensor["shape"][0]) if len(tensor["shape"]) == 2 else 0, start, end
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise OSError(f"a safetensors file with a bad header: {exc}") from exc


def _hash_tensors(hasher: blake3, descriptor: int, header: bytes, size: int) -> None:
    for name, rows, start, end in _tensors(header, size):
        if end - start <= SMALL_BYTES:
            hasher.update(_read(descriptor, end - start, start))
            continue
        _hash_samples(hasher, descriptor, [*range(start, end, STEP_BYTES), end - SAMPLE_BYTES], end)
        if rows and BY_ROW.search(name) and (end - start) % rows == 0:
            _hash_rows(hasher, descriptor, (end - start) // rows, (start, end))


def _hash_samples(hasher: blake3, descriptor: int, offsets: range | list[int], end: int) -> None:
    """Hash 4 KiB at each of these offsets, none beyond `end`."""
    for first in range(0, len(offsets), _PIECE_BYTES // SAMPLE_BYTES):
        part = offsets[first : first + _PIECE_BYTES // SAMPLE_BYTES]
        hasher.update(b"".join(_read(descriptor, min(SAMPLE_BYTES, end - offset), offset) for offset in part))


def _hash_rows(hasher: blake3, descriptor: int, row_bytes: int, place: tuple[int, int]) -> None:
    """Hash the beginning of each row of a matrix at `place` in the file."""
    start, end = place
    piece_bytes = max(1, _PIECE_BYTES // row_bytes) * row_bytes
    for offset in range(start, end, piece_bytes):
        piece = _read(descriptor, min(piece_bytes, end - offset), offset)
        rows = np.frombuffer(piece, np.uint8).reshape(-1, row_bytes)
        hasher.update(rows[:, :ROW_SAMPLE_BYTES].tobytes())
