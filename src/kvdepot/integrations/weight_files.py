"""What tells one version of weight files on disk from another at the same path, without reading their contents."""

from __future__ import annotations

from pathlib import Path

__all__ = ["describe"]


def describe(path: Path) -> str:
    """What tells weights in a local folder from others at the same path: names, sizes and times of its files."""
    if not path.is_dir():
        return ""  # a hub name: the revision says it
    files = sorted(p for p in path.iterdir() if p.suffix in {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".json"})
    return " ".join(f"{p.name}:{p.stat().st_size}:{p.stat().st_mtime_ns}" for p in files)
