"""Which version of weights is at a path, or in the local cache of a model hub, and since when.

Called by the packages of engines for models, and by vllm/lora.py for adapters. `find_weights` names a version by the
contents of its files (samples of them: samples.py), so the same model is the same on every host, through a link, in a
copy, and in the cache of a hub. `read_state` detects changes within one process by file metadata that no copy, rename
or `touch` can restore.

Both date the last change to what a path leads to: files, the links on the way to each of them, and the folders. A
folder is dated to when it was put in its place: a rename sets its `ctime` and its parent folder's `ctime`, and neither
can be set back. Entries that come and go also set the `ctime` of their folder, so the earlier of the two times counts.
Where both folders are busy, this counts as a change of the folder with the weights, the one it is in, and those with
links; further up (`/tmp`), and where the contents were known before, only a rename counts that no entry has come or
gone after. All this holds on ext4, XFS, Btrfs and tmpfs; a mount over a folder goes unnoticed.

In the cache of the Hugging Face hub, a link that is not older than the file that it leads to was made with it, by a
download. So a first start, which downloads the model, has not changed it; a file edited through its link has changed.
"""

from __future__ import annotations

import enum
import os
import re
import stat
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from fnmatch import translate
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from blake3 import blake3

from kvdepot.integrations.samples import hash_file

if TYPE_CHECKING:
    from vllm.config import ModelConfig

SETTLED_S = 2.0
"""Weights that changed less than this before an engine began to load count as changed while it loaded them: the clocks
of file systems lag behind ours."""
_MAX_FILES = 20_000
_MAX_LINKS = 40
"""Linux's limit: beyond it, a path counts as a loop."""
_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


class Kind(enum.Enum):
    """Which part of a loader reads a file; from its name."""

    HARMLESS = (
        "*.md", "*.log", "*.lock", "*.png", "*.jpg", "*.jpeg", "*.gif", "*.svg", "*.pdf", "license", "license.txt",
        "notice", "notice.txt", "use_policy.txt", "generation_config.json", "configuration.json", "trainer_state.json",
        "training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.bin", "scheduler.pt", "rng_state*.pth",
        "*.h5", "*.msgpack", "*.onnx", "*.onnx_data", "*.ot", "*.tflite",
    )  # fmt: skip
    """No KV depends on the file."""
    DUPLICATE = ("pytorch_model*",)
    """Weights that no loader reads where safetensors lie beside them, unless it must read this format."""
    WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf", "*.tensors", "*.index.json")
    CODE = ("*.py",)
    TOKENIZER = (
        "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model", "*.tiktoken",
        "tekken.json", "chat_template*", "*.jinja",
    )  # fmt: skip
    """The file says which tokens a text has. Chunks are named by their tokens, so it seldom matters."""
    OTHER = ("*processor*",)
    """The file says how images and audio become numbers, or its purpose is unknown."""
    CONFIG = ("*config*.json", "params.json", "modules.json")


ALL_KINDS = frozenset(Kind) - {Kind.HARMLESS, Kind.DUPLICATE}
_HARMLESS_FOLDERS = {"__pycache__", "original", "onnx", "openvino", "coreml", "metal"}
"""Folders with the same weights for other programs."""


@dataclass(frozen=True)
class Weights:
    """One version of a model's or an adapter's files."""

    digest: str
    """Equal digests mean equal files, on any host."""
    changed_at: float
    """Unix time of the last change to the files, or to the links and folders on their paths; 0.0: they never change."""
    place: str
    """A digest of where this host's file systems have the files, and since when: other contents have another digest."""


class _Folder(NamedTuple):
    """A folder on the way to files, and the times in ns at which its inode and that of the folder it is in changed.

    Both times are 0 where it does not matter whether it moved, or nothing says that it did.
    """

    path: str
    device: int
    inode: int
    own_ns: int
    outer_ns: int

    def has_moved_since(self, before: _Folder) -> bool:
        is_other = self[:3] != before[:3]
        return is_other or (self.own_ns not in (0, before.own_ns) and self.outer_ns != before.outer_ns)


class FolderState(NamedTuple):
    """The files, links and folders that a path leads to at one moment."""

    files: tuple[tuple[str | int, ...], ...]
    links: tuple[tuple[str | int, ...], ...]
    """The links on the way to the files."""
    folders: tuple[_Folder, ...]
    """The folders on the way to the files."""
    changed_at: float
    """Unix time of the last change to any of the files, links or folders."""

    def is_same(self, before: FolderState) -> bool:
        """Whether no weights were written, replaced, moved or relinked since `before`. Other files may change."""
        if (self.files, self.links, len(self.folders)) != (before.files, before.links, len(before.folders)):
            return False
        return not any(now.has_moved_since(then) for now, then in zip(self.folders, before.folders, strict=True))


class _File(NamedTuple):
    name: str
    """Its path within the folder."""
    path: Path
    state: os.stat_result
    changed_ns: int


def find_weights(
    name: str,
    revision: str | None = None,
    cache: str | None = None,
    kinds: Collection[Kind] = ALL_KINDS,
    known: Collection[str] = (),
) -> Weights | None:
    """The version of the files of these kinds at `name`: a path (`~` is expanded), or a repository of a model hub in
    its local cache (`cache`: the folder of the Hugging Face hub's, if not the default), found as vLLM's loader does.

    known: beginnings of the digests that were there before anything was loaded. If the version is one of them, a folder
    counts as moved only if nothing in it has changed since, so that files that come and go above the weights are no
    change. None if there is no such path or snapshot, more than 20,000 files, or an unreadable one. Does not use the
    network.
    """
    try:
        path = Path(name).expanduser()
        if name and path.exists():
            return _read_version([path], kinds, known)
        if uses_modelscope():
            return _in_modelscope_cache(name, revision, kinds)
        return _in_hub_cache(name, revision, cache, kinds)
    except (OSError, ValueError, RuntimeError):  # ValueError: a path with a null byte; RuntimeError: no home folder
        return None


def kinds_read(model: ModelConfig) -> frozenset[Kind]:
    """The kinds of a model's files that decide about its KV and exist once the model is loaded: vLLM downloads other
    kinds from a hub late or never."""
    kinds = {Kind.WEIGHTS, Kind.CONFIG}
    if model.is_multimodal_model:
        kinds |= {Kind.OTHER, Kind.TOKENIZER}
    if model.trust_remote_code:
        kinds |= {Kind.OTHER, Kind.CODE}
    return frozenset(kinds)


def read_state(folder: Path) -> FolderState:
    """The current state of a folder of weights. Raises OSError if it cannot be read."""
    trace = _Trace()
    files = _scan(folder, ALL_KINDS | {Kind.DUPLICATE}, trace)
    state: tuple[tuple[str | int, ...], ...] = tuple(
        (file.name, *_stat(file.path.lstat()), *_stat(file.state)) for file in files
    )
    changed_ns = max([trace.changed_ns, *(file.changed_ns for file in files)])
    return FolderState(state, trace.links, trace.folders, changed_ns / 1e9)


def read_place(file: Path) -> tuple[int, ...]:
    """A file's inode, its size, and since when it has been unchanged. Raises OSError if it cannot be read."""
    return _stat(file.stat())


def uses_modelscope() -> bool:
    """Whether vLLM takes names of repositories as ModelScope's."""
    return os.environ.get("VLLM_USE_MODELSCOPE", "").strip().lower() in {"1", "true"}


def _in_modelscope_cache(name: str, revision: str | None, kinds: Collection[Kind]) -> Weights | None:
    try:
        hub = import_module("modelscope.hub.snapshot_download")
        found = hub.snapshot_download(model_id=name, revision=revision, local_files_only=True)
    except Exception:  # noqa: BLE001 - it raises various errors where nothing is there, or is itself not there
        return None
    return _read_version([Path(found)], kinds)


def _in_hub_cache(name: str, revision: str | None, cache: str | None, kinds: Collection[Kind]) -> Weights | None:
    """The version in a hub's cache. vLLM's loader keeps weights in `cache`, and other files in the default cache."""
    try:
        from huggingface_hub import constants
        from huggingface_hub.file_download import repo_folder_name
    except ImportError:
        return None
    folder = repo_folder_name(repo_id=name, repo_type="model")
    caches = dict.fromkeys([cache or constants.HF_HUB_CACHE, constants.HF_HUB_CACHE])
    repositories = [Path(cache) / folder for cache in caches]
    changed_at = 0.0
    commit = getattr(revision, "resolved", revision) or ""  # vLLM pins a revision to its commit when it starts
    if not _COMMIT.fullmatch(commit):
        refs = [repository / "refs" / (revision or "main") for repository in repositories]
        ref = next(ref for ref in refs if ref.exists() or ref == refs[-1])
        commit, changed_at = ref.read_text().strip(), ref.stat().st_ctime_ns / 1e9
    snapshots = [repository / "snapshots" / commit for repository in repositories]
    snapshots = [snapshot for snapshot in snapshots if snapshot.is_dir()]
    if not snapshots:
        return None
    found = _read_version(snapshots, kinds)
    return Weights(found.digest, max(found.changed_at, changed_at), found.place)


def _read_version(paths: list[Path], kinds: Collection[Kind], known: Collection[str] = ()) -> Weights:
    """The version of one file, or of all files in some folders: of equal names, those in the first folder.

    Raises OSError for unreadable files, and for too many.
    """
    hasher = blake3()
    for file in _merge(_scan(path, kinds, _Trace()) for path in paths):
        hasher.update(f"{file.name}\0".encode("utf-8", "surrogateescape"))
        hasher.update(hash_file(file.path, file.state.st_size))
    trace = _Trace()  # made after the contents were read, so that a change meanwhile is dated
    trace.is_known = any(hasher.hexdigest().startswith(digest) for digest in known)
    files = _merge(_scan(path, kinds, trace) for path in paths)
    changed_ns = max([trace.changed_ns, *(file.changed_ns for file in files)])
    place = blake3(repr([(file.name, *_stat(file.state)) for file in files]).encode("utf-8", "surrogateescape"))
    return Weights(hasher.hexdigest(), changed_ns / 1e9, place.hexdigest())


def _merge(folders: Iterable[list[_File]]) -> list[_File]:
    merged: dict[str, _File] = {}
    for files in folders:
        merged = {file.name: file for file in files} | merged
    return [merged[name] for name in sorted(merged)]


def _scan(path: Path, kinds: Collection[Kind], trace: _Trace) -> list[_File]:
    """The files of these kinds at a path. Notes in `trace` the links and folders that lead to them."""
    resolved = trace.follow(path)
    if resolved.is_file():
        state = resolved.stat()
        return [_File("", resolved, state, state.st_ctime_ns)]
    is_snapshot = resolved.parent.name == "snapshots" and _COMMIT.fullmatch(resolved.name)
    blobs = resolved.parent.parent / "blobs" if is_snapshot else None  # where a hub's cache has contents
    trace.has_moving_folders = blobs is None
    trace.near = resolved.parent
    files: list[_File] = []
    for file in _walk(resolved, kinds):
        try:
            state, changed_ns = _date(file, blobs, trace)
        except FileNotFoundError:
            continue  # a dangling link: it cannot have been loaded
        if stat.S_ISREG(state.st_mode):
            files.append(_File(str(file.relative_to(resolved)), file, state, changed_ns))
    return sorted(files, key=lambda file: file.name)


def _walk(folder: Path, kinds: Collection[Kind]) -> Iterator[Path]:
    """The files below `folder` whose names are of these kinds."""
    count = 0
    for at, folders, files in os.walk(folder, followlinks=True, onerror=_raise):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in _HARMLESS_FOLDERS]
        has_safetensors = any(name.endswith(".safetensors") for name in files)
        for name in files:
            kind = _kind(name)
            if kind is Kind.DUPLICATE and not has_safetensors:
                kind = Kind.WEIGHTS
            if name.startswith(".") or kind not in kinds:
                continue
            count += 1
            if count > _MAX_FILES:
                raise OSError(f"more than {_MAX_FILES} files in {folder}")
            yield Path(at, name)


def _raise(error: OSError) -> None:
    raise error


def _kind(name: str) -> Kind:
    return next((kind for kind, pattern in _PATTERNS.items() if pattern.match(name.lower())), Kind.OTHER)


_PATTERNS = {kind: re.compile("|".join(map(translate, kind.value))) for kind in Kind}


def _date(file: Path, blobs: Path | None, trace: _Trace) -> tuple[os.stat_result, int]:
    """A file's state, and the time of its last change in ns; 0 if a hub's download made it and it is as it was.

    blobs: the folder of a hub's cache with the contents that a snapshot's links lead to.
    """
    entry, folder = file.lstat(), trace.follow(file.parent)
    if not stat.S_ISLNK(entry.st_mode):
        return entry, entry.st_ctime_ns
    blob = Path(os.path.normpath(folder / file.readlink()))
    if blob.parent == blobs:  # which may be a link, too, to a file that repositories share
        state = blob.stat()
        changed_ns = max(state.st_ctime_ns, blob.lstat().st_ctime_ns)
        return state, changed_ns if changed_ns > entry.st_ctime_ns else 0
    state = trace.follow(file).stat()
    return state, state.st_ctime_ns


class _Trace:
    """The links and folders on the way to files."""

    def __init__(self) -> None:
        self.is_known = False
        """Whether the contents of the files were known before anything was loaded."""
        self.has_moving_folders = True
        """Whether a folder that moved leads to other files than before. A hub's snapshots are named by contents."""
        self.near = Path("/")
        """The folder that the folder with the weights is in."""
        self._links: dict[Path, tuple[str | int, ...]] = {}
        self._folders = {Path("/"): os.lstat("/")}

    def follow(self, path: Path) -> Path:
        """The path without links. Raises OSError if it leads nowhere."""
        todo, done, links = list(reversed(path.absolute().parts)), Path("/"), 0
        while todo:
            part = todo.pop()
            if part in {"/", ".."}:
                done = done.parent if part == ".." else Path("/")
                continue
            done /= part
            if done in self._folders:
                continue
            state = done.lstat()
            if stat.S_ISLNK(state.st_mode):
                links += 1
                if links > _MAX_LINKS:
                    raise OSError(f"{path} leads through too many links")
                target = done.readlink()
                self._links[done] = (str(done), str(target), *_stat(state))
                todo += reversed(target.parts)
                done = done.parent
            elif stat.S_ISDIR(state.st_mode):
                self._folders[done] = state
        return done

    @property
    def links(self) -> tuple[tuple[str | int, ...], ...]:
        """Each link with its target and, last, the time in ns at which it was made or renamed."""
        return tuple(sorted(self._links.values()))

    @property
    def folders(self) -> tuple[_Folder, ...]:
        return tuple(self._folder(path, state) for path, state in sorted(self._folders.items()))

    def _folder(self, path: Path, state: os.stat_result) -> _Folder:
        times = (0, 0)
        is_renamed_last = state.st_ctime_ns != state.st_mtime_ns
        may_have_moved = is_renamed_last or (not self.is_known and self._is_near(path))
        if self.has_moving_folders and path.name and may_have_moved:
            times = state.st_ctime_ns, self._folders[path.parent].st_ctime_ns
        return _Folder(str(path), state.st_dev, state.st_ino, *times)

    def _is_near(self, folder: Path) -> bool:
        return self.near in (folder, *folder.parents) or any(link.parent == folder for link in self._links)

    @property
    def changed_ns(self) -> int:
        """When a link or a folder was last put in its place."""
        links = (int(link[-1]) for link in self.links)
        return max([*links, *(min(folder.own_ns, folder.outer_ns) for folder in self.folders)])


def _stat(state: os.stat_result) -> tuple[int, ...]:
    return state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns
