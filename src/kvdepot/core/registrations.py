"""The KV tensors that workers have registered: when they are mapped, replaced and unmapped. Decisions only.

Called by core/depot.py on the deciding thread; copy threads run the mapping and unmapping, as Calls. Invariants:
tensors stay mapped until the last copy that uses them has ended; each request that waits for their unmapping gets one
reply.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from kvdepot.config import Config
from kvdepot.core.actions import Action, Reply
from kvdepot.core.admission import check_groups, check_names, check_shape, check_topic
from kvdepot.core.clients import Client, Instance
from kvdepot.core.index.chunk import Namespace
from kvdepot.core.index.index import Index
from kvdepot.core.index.matching import for_lookup
from kvdepot.errors import BadRequest, Busy, InternalError, KVDepotError
from kvdepot.memory.copier import Call, Mapped
from kvdepot.protocol import wire
from kvdepot.protocol.counters import Counters
from kvdepot.protocol.layout import Layout


@dataclass(slots=True, eq=False)
class Remapping:
    """The token of a Call that maps or unmaps an instance's tensors."""

    client: Client
    instance: Instance
    register: bytes | None = None  # the request to answer; None: the Call unmaps


class Registrations:
    def __init__(
        self, config: Config, index: Index, counters: Counters, map_layout: Callable[[Layout], Mapped]
    ) -> None:
        self.max_files = 1 << 30  # file descriptors that mappings of KV tensors may use
        self._files = 0  # in use
        self._config = config
        self._index = index
        self._counters = counters
        self._map_layout = map_layout

    def namespace(self, instance: Instance, model: str, world_size: int, rank: int, blocks_in_chunk: int) -> Namespace:
        """The namespace of an instance's chunks of this shape. Raises Busy, or BadRequest for other groups."""
        known = instance.namespaces.get((model, world_size, rank, blocks_in_chunk))
        if known is not None:
            return known
        if instance.groups and instance.namespaces:
            ((name, ranks, own, blocks),) = instance.namespaces
            raise BadRequest(
                f"instance {instance.number} has KV cache group {instance.group} of {name}, rank {own} of {ranks}, "
                f"{blocks} blocks a chunk; the request is for {model}, rank {rank} of {world_size}, {blocks_in_chunk}"
            )
        groups = instance.groups or [
            wire.Group(0, blocks_in_chunk, instance.layout.block_bytes * blocks_in_chunk, instance.layout.fingerprint)
        ]
        namespaces, most = self._index.namespaces, self._config.max_namespaces
        found = namespaces.find_groups(model, world_size, rank, groups, instance.tenant, instance.chunk_tokens)
        is_new = not any(each.live or each.chunks for each in found)
        known = found[instance.group]
        if (is_new and len(namespaces.all()) > most) or len(instance.namespaces) >= most:
            namespaces.forget(known)
            self._counters["namespaces_refused"] += 1
            raise Busy(f"{most} combinations of model, shape and layout exist, the limit set by max_namespaces")
        known.live += 1
        instance.namespaces[model, world_size, rank, blocks_in_chunk] = known
        return known

    def register(self, client: Client, number: bytes, request: wire.Register) -> list[Action]:
        """Map tensors; replies when they are mapped.

        Raises LayoutError, BadRequest or Busy, and then changes nothing.
        """
        request.layout.check()
        check_names("", request.model)
        if request.model:
            check_shape(request.world_size, request.rank)
            if request.blocks_in_chunk < 1:
                raise BadRequest(f"blocks_in_chunk is {request.blocks_in_chunk}")
        check_groups(request)
        check_topic(request.topic)
        self._check_registrations(client, request)
        instance = Instance(
            request.instance, request.layout, client.tenant, request.group, request.groups, request.chunk_tokens,
            request.topic, request.writer,
        )  # fmt: skip
        self._check_ranks(instance, request)
        if request.model:
            self.namespace(instance, request.model, request.world_size, request.rank, request.blocks_in_chunk)
        actions = self.unregister(client, request.instance, []) if request.instance in client.instances else []
        client.instances[request.instance] = instance
        client.model, client.is_engine = request.model or client.model, True
        self._files += _files(instance)
        token = Remapping(client, instance, number)
        # Map before unmapping what is replaced: closing a device's last mapping and reopening the device is expensive.
        return [Call(token, partial(self._map_layout, request.layout), _lane(instance)), *actions]

    def _check_ranks(self, instance: Instance, request: wire.Register) -> None:
        """Raise BadRequest if an engine of this model has other KV cache groups: no prefix would ever be complete."""
        if not request.model or request.world_size == 1:
            return
        mine = [each.reach for each in request.groups] or [0]
        model = instance.tenant, request.model, request.world_size
        for first in for_lookup(self._index.namespaces, model, chunk_tokens=request.chunk_tokens):
            theirs = [each.reach for each in first.groups]
            if first.live and theirs != mine:
                raise BadRequest(
                    f"rank {request.rank} has KV cache groups with reaches {mine}; another rank of {request.model} "
                    f"registered {theirs}"
                )

    def _check_registrations(self, client: Client, request: wire.Register) -> None:
        """Raise Busy if a client has too many registrations, including those being unmapped, or descriptors run out."""
        there = len(client.instances.keys() - {request.instance}) + sum(map(len, client.closing.values()))
        if there >= self._config.max_instances:
            self._counters["registrations_refused"] += 1
            raise Busy(f"{there} registrations of KV tensors, the limit set by max_instances")
        if self._files + len(request.layout.mappings) > self.max_files:
            self._counters["registrations_refused"] += 1
            raise Busy(f"too few file descriptors for {len(request.layout.mappings)} more files of KV tensors")

    def unregister(self, client: Client, number: int, tell: list[bytes]) -> list[Action]:
        """Close an instance; replies to the requests in `tell` once its tensors are unmapped.

        Raises Busy, and then changes nothing.
        """
        waits = len(client.waiting.get(number, ()))
        if waits + len(tell) > self._config.max_queued:
            raise Busy(f"{waits} requests already wait for instance {number} to be unmapped")
        instance = client.instances.pop(number, None)
        if instance is not None:
            self._leave_namespaces(instance)
            instance.closing = True
            client.closing.setdefault(number, []).append(instance)
        if number not in client.closing:
            return [Reply(client.identity, asked, None) for asked in tell]
        client.waiting.setdefault(number, []).extend(tell)
        if instance is None or instance.copies or instance.mapped is None:
            return []  # the end of the last copy, or of the mapping, continues this
        return [self.unmap(client, instance)]

    def _leave_namespaces(self, instance: Instance) -> None:
        for namespace in instance.namespaces.values():
            namespace.live -= 1
            self._index.namespaces.forget(namespace)
        instance.namespaces.clear()

    def unmap(self, client: Client, instance: Instance) -> Call:
        """Unmap an instance's tensors; no copy may be using them."""
        assert instance.mapped is not None and instance.closing
        mapped, instance.mapped = instance.mapped, None
        close = mapped.close_after_death if client.dead else mapped.close
        return Call(Remapping(client, instance), close, _lane(instance))

    def mapped(self, token: Remapping, outcome: Mapped | KVDepotError | None) -> list[Action]:
        """Handle the end of a mapping or unmapping; `outcome` as in copier.Copier."""
        client, instance = token.client, token.instance
        if token.register is None:
            return self._closed(client, instance)
        value: KVDepotError | None = None
        actions: list[Action] = []
        if isinstance(outcome, Mapped):
            instance.mapped = outcome
            if instance.closing:  # unregistered or replaced in the meantime, or the client died
                actions.append(self.unmap(client, instance))
        else:
            value = outcome if isinstance(outcome, KVDepotError) else InternalError("mapping failed")
            self._counters["errors"] += 1
            if instance.closing:
                actions += self._closed(client, instance)
            else:
                del client.instances[instance.number]
                self._files -= _files(instance)
                self._leave_namespaces(instance)
        if not client.dead:
            actions.append(Reply(client.identity, token.register, value))
        return actions

    def _closed(self, client: Client, instance: Instance) -> list[Action]:
        """An instance is unmapped: reply to waiting requests if it was the last one under its number."""
        self._files -= _files(instance)
        closing = client.closing[instance.number]
        closing.remove(instance)
        if closing:
            return []
        del client.closing[instance.number]
        waiting = client.waiting.pop(instance.number, [])
        return [] if client.dead else [Reply(client.identity, asked, None) for asked in waiting]


def _files(instance: Instance) -> int:
    """File descriptors that an instance's mappings use."""
    return len(instance.layout.mappings)


def _lane(instance: Instance) -> str:
    """Mappings of device memory have their own lane: a driver call may take seconds or hang, and must not delay copies
    of CPU memory."""
    return "devices" if instance.layout.is_on_gpu else ""
