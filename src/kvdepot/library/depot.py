"""The connection of a Python program to a depot: `kvdepot.connect`."""

from __future__ import annotations

import os
import secrets
from typing import TYPE_CHECKING

from kvdepot.client import admin
from kvdepot.client.calls import OwnClient
from kvdepot.client.launch import Embedded, Shared
from kvdepot.client.link import Link
from kvdepot.client.socket import CONNECT_S
from kvdepot.config import default_url, home_url, url_in_environment
from kvdepot.errors import Unavailable
from kvdepot.library.namespace import ModelFacts, Namespace
from kvdepot.library.shapes import library_of, name_of
from kvdepot.protocol.status import Status

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TypeVar

    import torch

    from kvdepot.library.shapes import Layers, NumPyType

    Shapes = TypeVar("Shapes", bound=Layers | Sequence[Layers])
    Dtype = TypeVar("Dtype", bound=NumPyType | torch.dtype)

_START_S = 30.0


def connect(url: str = "", key: str = "") -> Depot:
    """Connect to a depot; close it, or use it as a context manager.

    url: a server's address; empty: the address in `KVDEPOT_URL`, or else the server that this user's engines share,
    which is started if it does not run; "embedded": a server of this process alone, which ends with it. key: path of a
    key file, for a server that requires one; empty: KVDEPOT_KEY. Blocks until the server answers, 30 s at most. Raises
    Unavailable without a server.
    """
    server: Shared | Embedded | None = None
    own = f"library-{os.getpid()}-{secrets.token_hex(4)}" if url == "embedded" else ""
    if own:
        url = f"{home_url().rpartition('/')[0]}/{own}.sock"
    elif not url:
        url = default_url()
        if not url_in_environment():
            server = Shared(url)
            server.start()
    depot = Depot(url, Link(OwnClient(url, key, "library")))
    try:
        if own:
            server = depot._server = Embedded(url, own)
        with depot._link.call() as client:
            client.learn_chunk_size(CONNECT_S if server is None else _START_S)
    except BaseException as exc:
        is_running = server is None or server.is_running()
        depot.close()
        if not is_running:
            raise Unavailable(server.failure() if server is not None else "") from exc
        raise
    return depot


class Depot:
    """A connected depot; `connect` makes it. Any thread may use it; a forked child may not, and connects itself."""

    def __init__(self, url: str, link: Link) -> None:
        """link: closed with this."""
        self.url = url
        self._link = link
        self._server: Embedded | None = None  # its own server, which ends with this

    def __repr__(self) -> str:
        return f"<kvdepot.Depot {self.url}{' closed' if self._link.is_closed else ''}>"

    def __enter__(self) -> Depot:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def namespace(
        self, *, model: str, revision: str, dtype: Dtype, shape: Shapes, adapter: str = "", chunk_tokens: int = 0
    ) -> Namespace[Shapes, Dtype]:
        """The KV of one model. Two programs share it exactly if they give the same facts.

        model: its name. revision: a name for its weights, such as a commit or a digest. dtype: the KV's data type, by a
        name such as "bfloat16" or as NumPy's or torch's type of that name; for torch's, `get` returns tensors. shape:
        the shape of its layers' KV; several for layers of several kinds. adapter: a name for a LoRA adapter and its
        weights. chunk_tokens: tokens per chunk; 0: chosen by the size of a token's KV. Raises BadRequest for missing or
        impossible facts. Does not block.
        """
        shapes = tuple(shape) if isinstance(shape, list | tuple) else (shape,)
        facts = ModelFacts(model, revision, name_of(dtype), shapes, adapter, chunk_tokens, library=library_of(dtype))
        with self._link.call() as client:
            least = 0 if client.welcome.has_free_chunks else client.chunk_size
            return Namespace(self._link, facts.fit(least))

    def status(self) -> Status:
        """The server's status, as `kvdepot status --json` prints it. Blocks 30 s at most. Raises Unavailable."""
        with self._link.call() as client:
            return admin.status(client)

    def close(self) -> None:
        """Close the connection once calls in other threads have ended; they are bounded in time. An embedded server
        ends. Safe twice."""
        if self._link.close() and self._server is not None:
            self._server.close()
