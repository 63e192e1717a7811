"""Workers' registrations of their KV tensors: formats, models and KV cache groups. Decisions only.

Called by core/depot.py and core/transfers.py on the deciding thread. Invariant: `Namespace.live` is the number of
registrations that use the namespace.
"""

from __future__ import annotations

from kvdepot.config import Config
from kvdepot.core.admission import check_groups, check_names, check_shape, check_topic
from kvdepot.core.clients import Client, Instance
from kvdepot.core.index.chunk import Namespace
from kvdepot.core.index.index import Index
from kvdepot.core.index.matching import for_lookup
from kvdepot.errors import BadRequest, Busy
from kvdepot.protocol import wire
from kvdepot.protocol.counters import Counters


class Registrations:
    def __init__(self, config: Config, index: Index, counters: Counters) -> None:
        self._config = config
        self._index = index
        self._counters = counters

    def namespace(self, instance: Instance, model: str, world_size: int, rank: int, blocks_in_chunk: int) -> Namespace:
        """The namespace of an instance's chunks of this shape. Raises Busy, or BadRequest for another KV cache
        group."""
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

    def register(self, client: Client, request: wire.Register) -> None:
        """Add a registration in place of an earlier one with its number.

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
        there = len(client.instances.keys() - {request.instance})
        if there >= self._config.max_instances:
            self._counters["registrations_refused"] += 1
            raise Busy(f"{there} registrations of KV tensors, the limit set by max_instances")
        instance = Instance(
            request.instance, request.layout, client.tenant, request.group, request.groups, request.chunk_tokens,
            request.topic, request.writer, request.fault[: wire.MAX_ERROR],
        )  # fmt: skip
        self._check_ranks(instance, request)
        if request.model:
            self.namespace(instance, request.model, request.world_size, request.rank, request.blocks_in_chunk)
        self.unregister(client, request.instance)
        client.instances[request.instance] = instance
        client.model, client.is_engine = request.model or client.model, True

    def _check_ranks(self, instance: Instance, request: wire.Register) -> None:
        """Raise BadRequest if another rank of a model has other KV cache groups: no prefix would be complete."""
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

    def unregister(self, client: Client, number: int) -> None:
        """Remove a registration, if there is one. Operations in progress go on."""
        instance = client.instances.pop(number, None)
        for namespace in instance.namespaces.values() if instance is not None else ():
            namespace.live -= 1
            self._index.namespaces.forget(namespace)
