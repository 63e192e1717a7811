"""Puts and gets of the library: every bit comes back, in each form that KV may be given, and bad input is refused."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

import kvdepot
from kvdepot import Shape, State
from kvdepot.errors import BadRequest
from kvdepot.library.shapes import ITEM_BYTES
from tests.conftest import HANG_S, SHM, Depot, StartDepot
from tests.library.conftest import Connect, MakeNamespace, at_rest
from tests.library.kv import SMALL, TOKENS, Array, cut, open_namespace, random_kv, random_tokens
from tests.programs import hidden, module

HEADS = Shape(layers=3, heads=2, head_dim=8, order="heads")
MLA = Shape(layers=2, heads=1, head_dim=24, parts=1)
KINDS = {1: "u1", 2: "u2", 4: "u4", 8: "u8"}
COUNT = 4 * TOKENS + 5


def tensor(kv: Array, dtype: str) -> Any:
    """The same bits as a tensor of torch."""
    torch = module("torch")
    signed = torch.from_numpy(kv.view(f"i{kv.dtype.itemsize}"))
    return signed.view(getattr(torch, dtype))


def bits(kv: Any) -> Array:
    """The bits of an array or a tensor."""
    if isinstance(kv, np.ndarray):
        return kv.view(KINDS[kv.dtype.itemsize])
    torch = module("torch")
    signed = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[kv.element_size()]
    return bits(kv.view(signed).numpy())


def check(found: Any, kv: Array, shape: Shape, end: int, first: int = 0) -> None:
    assert np.array_equal(bits(found), cut(kv, shape, first, end))


# -- forms of KV


def test_several_threads_copy_much_kv(make: MakeNamespace) -> None:
    shape, count = Shape(layers=32, heads=8, head_dim=64), 512  # 32 MiB
    ns, tokens, kv = make(shape), random_tokens(count, 1), random_kv(shape, count, 1)
    target = np.zeros_like(kv)
    assert ns.put(tokens, kv) == ns.get_into(tokens, target) == count
    assert np.array_equal(target, kv)


@pytest.mark.parametrize("shape", [SMALL, HEADS, MLA], ids=["tokens", "heads", "MLA"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", "int8"])
def test_every_bit_of_every_dtype_comes_back_from_numpy_and_torch(
    make: MakeNamespace, shape: Shape, dtype: str
) -> None:
    ns = make(shape, dtype=dtype)
    size = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}.get(dtype, 1)
    for seed, convert in enumerate((lambda kv: kv, lambda kv: tensor(kv, dtype))):
        tokens, kv = random_tokens(COUNT, seed), random_kv(shape, COUNT, seed, KINDS[size])
        assert ns.put(tokens, convert(kv)) == 4 * TOKENS
        found, n = ns.get(tokens)
        assert n == 4 * TOKENS
        check(found, kv, shape, n)
        target = convert(random_kv(shape, COUNT + 9, 100, KINDS[size]))
        assert ns.get_into(tokens, target) == n
        check(cut(bits(target), shape, 0, n), kv, shape, n)


TYPES = ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float16", "float32", "float64", "int8", "uint8")


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("kind", ["a name", "a type", "a dtype of NumPy", "a dtype of torch"])
def test_get_returns_arrays_of_the_namespaces_type(make: MakeNamespace, name: str, kind: str) -> None:
    numpy_type = getattr(np, name, None) or getattr(module("ml_dtypes"), name)
    torch = module("torch")
    said = {"a type": numpy_type, "a dtype of NumPy": np.dtype(numpy_type), "a dtype of torch": getattr(torch, name)}
    tokens, states = random_tokens(TOKENS), make(SMALL, State(8), dtype=said.get(kind, name))
    kv = np.arange(1024).reshape(2, 2, TOKENS, 2, 8) % 5 + 1
    assert states.put(tokens, [kv.astype(numpy_type), np.ones(8, np.uint8)]) == TOKENS
    (found, state), n = states.get(tokens)
    if kind == "a dtype of torch":
        assert (found.dtype, state.dtype) == (getattr(torch, name), torch.uint8)
        found = found.to(torch.int64).numpy()
    else:
        assert (found.dtype, state.dtype) == (np.dtype(numpy_type), np.uint8)
    assert n == TOKENS and np.array_equal(found.astype(np.int64), kv) and state.tolist() == [1] * 8
    same = make(SMALL, State(8), dtype=name)
    assert same.contains(tokens) == TOKENS
    assert states.put(tokens, [same.get(tokens)[0][0], state]) == TOKENS  # what is got is taken again


def test_without_ml_dtypes_the_bits_of_bfloat16_come_as_unsigned_integers(server: Depot, tmp_path: Path) -> None:
    code = "import sys, kvdepot; from tests.library.kv import check, open_namespace, put, random_tokens\n"
    code += "with kvdepot.connect(sys.argv[1]) as depot:\n    ns = open_namespace(depot, 'bits')\n"
    code += "    print(put(ns, 1), check(ns, 1), ns.get(random_tokens(96, 1))[0].dtype)"
    environ = os.environ | {"PYTHONPATH": hidden(tmp_path / "hidden", "ml_dtypes")}
    command = [sys.executable, "-c", code, server.url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, env=environ, check=True)
    assert done.stdout == "96 96 uint16\n"


def other_types() -> dict[str, tuple[str, Callable[[], Any]]]:
    """KV as wide as that of a namespace, but of another type: a dtype, and how the KV is made."""
    kv, wide = np.ones((2, 2, TOKENS, 2, 8)), "float64"
    return {
        "NumPy's float16": ("bfloat16", lambda: kv.astype(np.float16)),
        "NumPy's int16": ("bfloat16", lambda: kv.astype(np.int16)),
        "NumPy's bfloat16": ("float16", lambda: kv.astype(module("ml_dtypes").bfloat16)),
        "torch's float16": ("bfloat16", lambda: module("torch").tensor(kv).half()),
        "torch's bfloat16": ("float16", lambda: module("torch").tensor(kv).bfloat16()),
        "torch's int16": ("bfloat16", lambda: module("torch").tensor(kv).short()),
        "integers": ("float32", lambda: kv.astype(np.int32)),
        "booleans": ("uint8", lambda: kv.astype(bool)),
        "signed": ("uint8", lambda: kv.astype(np.int8)),
        "another float8": ("float8_e4m3fn", lambda: module("torch").tensor(kv).to(module("torch").float8_e5m2)),
        "complex": (wide, lambda: kv.astype(np.complex64)),
        "complex tensors": (wide, lambda: module("torch").tensor(kv).to(module("torch").complex64)),
        "dates": (wide, lambda: np.zeros(kv.shape, "M8[s]")),
        "objects": (wide, lambda: kv.astype(object)),
        "records": ("float16", lambda: np.zeros(kv.shape, [("a", "u1"), ("b", "u1")])),
        "another byte order": ("float32", lambda: kv.astype(">f4")),
        "bits in another byte order": ("float32", lambda: kv.astype(np.float32).view(">u4")),
        "masked": ("float16", lambda: np.ma.masked_array(kv.astype(np.float16), mask=True)),
        "layers": ("bfloat16", lambda: [tuple(layer) for layer in kv.astype(np.float16)]),
    }


@pytest.mark.parametrize("name", other_types())
def test_kv_of_another_type_of_the_same_width_is_refused(make: MakeNamespace, name: str) -> None:
    dtype, kv = other_types()[name]
    ns, tokens = make(dtype=dtype), random_tokens(TOKENS)
    with pytest.raises(BadRequest, match=rf"{dtype}|numbers|masked"):
        ns.put(tokens, kv())
    assert ns.contains(tokens) == 0
    ns.put(tokens, random_kv(SMALL, TOKENS, kind=KINDS[ITEM_BYTES[dtype]]))
    with pytest.raises(BadRequest, match=rf"{dtype}|numbers|masked"):
        ns.get_into(tokens, kv())


def strided(kv: Array, way: str) -> Array:
    """The same values with other strides, between values that must not change."""
    if way == "transposed":
        return np.ascontiguousarray(kv.transpose(3, 4, 2, 0, 1)).transpose(3, 4, 2, 0, 1)
    if way == "reversed":
        return np.ascontiguousarray(kv[:, :, ::-1])[:, :, ::-1]
    wide = np.full((*kv.shape[:2], 2 * kv.shape[2], kv.shape[3], kv.shape[4] + 3), 7, kv.dtype)
    view = wide[:, :, ::2, :, 1:-2]
    view[:] = kv
    return view


@pytest.mark.parametrize("way", ["transposed", "reversed", "spread"])
def test_arrays_of_any_strides_are_stored_and_filled(make: MakeNamespace, way: str) -> None:
    ns = make()
    tokens, kv = random_tokens(3 * TOKENS), random_kv(SMALL, 3 * TOKENS)
    assert ns.put(tokens, strided(kv, way)) == 3 * TOKENS
    found, n = ns.get(tokens)
    check(found, kv, SMALL, n)
    target = strided(random_kv(SMALL, 3 * TOKENS, 5), way)
    around = target.base.copy() if way == "spread" and target.base is not None else None
    assert ns.get_into(tokens, target) == n
    assert np.array_equal(target, kv)
    if around is not None:
        assert target.base is not None
        around[:, :, ::2, :, 1:-2] = kv
        assert np.array_equal(target.base, around), "values beside the array have changed"


def overlapping() -> dict[str, Callable[[], Any]]:
    """Arrays to load into, some of whose elements share memory."""
    kv = random_kv(SMALL, TOKENS)
    layers, shifted = [tuple(layer) for layer in kv], np.zeros((TOKENS + 1, 2, 8), np.uint16)
    return {
        "broadcast": lambda: as_strided(kv, kv.shape, (0, *kv.strides[1:])),
        "expanded": lambda: tensor(kv[:1], "bfloat16").expand(kv.shape),
        "steps too small": lambda: as_strided(kv, kv.shape, (kv.strides[0] // 2, *kv.strides[1:])),
        "values in part": lambda: as_strided(kv, kv.shape, (*kv.strides[:4], 1)),
        "backwards": lambda: as_strided(kv, kv.shape, (kv.strides[1], *kv.strides[1:]))[:, :, ::-1],
        "one for all layers": lambda: [layers[0]] * 2,
        "keys as values": lambda: [(layer[0], layer[0]) for layer in layers],
        "shifted": lambda: [layers[0], (shifted[1:], shifted[:-1])],
    }


@pytest.mark.parametrize("name", overlapping())
def test_arrays_whose_elements_share_memory_are_stored_but_not_filled(make: MakeNamespace, name: str) -> None:
    ns, tokens, kv = make(), random_tokens(TOKENS), overlapping()[name]()
    assert ns.put(tokens, kv) == TOKENS
    with pytest.raises(BadRequest, match=r"overlap|share memory"):
        ns.get_into(tokens, kv)


def test_layers_that_lie_between_each_other_are_filled(make: MakeNamespace) -> None:
    ns, tokens, kv = make(), random_tokens(COUNT), random_kv(SMALL, COUNT)
    ns.put(tokens, kv)
    pages = np.zeros((COUNT, 2, 2, 2, 8), np.uint16)  # tokens first: each layer's keys and values lie between others'
    assert ns.get_into(tokens, [(pages[:, layer, 0], pages[:, layer, 1]) for layer in range(2)]) == 4 * TOKENS
    check(pages.transpose(1, 2, 0, 3, 4)[:, :, : 4 * TOKENS], kv, SMALL, 4 * TOKENS)


def test_a_state_that_lies_within_the_kv_is_not_filled(make: MakeNamespace) -> None:
    ns, tokens, kv = make(SMALL, State(8)), random_tokens(TOKENS), random_kv(SMALL, TOKENS)
    with pytest.raises(BadRequest, match="share memory"):
        ns.get_into(tokens, [kv, kv[0, 0, 0, 0, :4]])


@pytest.mark.parametrize("shape", [SMALL, HEADS, MLA], ids=["tokens", "heads", "MLA"])
def test_a_list_of_layers_is_the_same_as_one_array(make: MakeNamespace, shape: Shape) -> None:
    ns = make(shape)
    tokens, kv = random_tokens(COUNT), random_kv(shape, COUNT)
    layers: list[Any] = [tuple(part.copy() for part in layer) for layer in kv]
    if shape.parts == 1:
        layers = [layer[0] for layer in layers]
    assert ns.put(tokens, layers) == 4 * TOKENS
    found, n = ns.get(tokens)
    check(found, kv, shape, n)
    target = random_kv(shape, COUNT, 9)
    into: list[Any] = [tuple(layer) if shape.parts == 2 else layer[0] for layer in target]
    assert ns.get_into(tokens, into) == n == 4 * TOKENS
    check(cut(target, shape, 0, n), kv, shape, n)
    check(cut(target, shape, n, COUNT), random_kv(shape, COUNT, 9), shape, COUNT, n)


@pytest.mark.parametrize("form", [list, tuple, lambda ids: array("I", ids), np.array, lambda ids: np.array(ids, "u4")])
def test_the_form_of_tokens_does_not_matter(make: MakeNamespace, form: Callable[[list[int]], Any]) -> None:
    ns = make()
    tokens, kv = random_tokens(2 * TOKENS), random_kv(SMALL, 2 * TOKENS)
    tokens[:2] = [0, 2**32 - 1]
    assert ns.put(form(tokens), kv) == 2 * TOKENS
    assert ns.contains(tokens) == ns.contains(module("torch").tensor(tokens)) == 2 * TOKENS
    assert ns.get(form(tokens))[1] == 2 * TOKENS
    for other in (tokens[1:], [1, *tokens[1:]], [*tokens[: TOKENS - 1], 5]):
        assert ns.contains(form(other)) == 0


# -- sequences


def test_a_put_extends_a_stored_prefix_and_another_may_diverge(make: MakeNamespace) -> None:
    ns = make()
    tokens, kv = random_tokens(6 * TOKENS), random_kv(SMALL, 6 * TOKENS)
    assert ns.put(tokens[: 2 * TOKENS + 3], cut(kv, SMALL, 0, 2 * TOKENS + 3)) == 2 * TOKENS
    assert ns.put(tokens, kv) == 6 * TOKENS
    assert ns.get(tokens[: 5 * TOKENS - 1])[1] == 4 * TOKENS
    other = [*tokens[: 3 * TOKENS + 1], *random_tokens(2 * TOKENS, 1)]
    assert ns.contains(other) == 3 * TOKENS
    other_kv = random_kv(SMALL, len(other), 2)
    other_kv[:, :, : 3 * TOKENS] = kv[:, :, : 3 * TOKENS]
    assert ns.put(other, other_kv) == 5 * TOKENS
    for ids, of_ids in ((tokens, kv), (other, other_kv)):
        found, n = ns.get(ids)
        assert n == len(ids) // TOKENS * TOKENS
        check(found, of_ids, SMALL, n)


@pytest.mark.parametrize("count", [0, 1, TOKENS - 1])
def test_less_than_a_chunk_is_neither_stored_nor_found(make: MakeNamespace, count: int) -> None:
    ns = make()
    tokens, kv = random_tokens(count), random_kv(SMALL, count)
    assert ns.put(tokens, kv) == 0
    assert ns.get(tokens) == (None, 0)
    assert ns.get_into(tokens, kv) == ns.contains(tokens) == ns.delete(tokens) == ns.lease(tokens, 1) == 0


def test_a_miss_is_no_error_and_leaves_the_buffers(make: MakeNamespace) -> None:
    ns = make()
    tokens, target = random_tokens(2 * TOKENS), random_kv(SMALL, 2 * TOKENS)
    assert ns.get(tokens) == (None, 0)
    assert ns.get_into(tokens, target) == ns.contains(tokens) == 0
    check(target, random_kv(SMALL, 2 * TOKENS), SMALL, 2 * TOKENS)


def test_a_delete_removes_the_end_that_others_do_not_share(make: MakeNamespace) -> None:
    ns = make()
    tokens, kv = random_tokens(4 * TOKENS), random_kv(SMALL, 4 * TOKENS)
    other = [*tokens[:TOKENS], *random_tokens(TOKENS, 1)]
    ns.put(tokens, kv)
    ns.put(other, kv[:, :, : 2 * TOKENS])
    assert ns.delete(tokens) == 3
    assert ns.contains(tokens) == TOKENS
    assert ns.contains(other) == 2 * TOKENS
    assert ns.delete(tokens) == 0


# -- windows, states, several shapes

WINDOW = Shape(layers=2, heads=1, head_dim=4, window=24)
"""It needs the last 2 chunks."""


def test_a_window_keeps_and_loads_the_chunks_that_it_needs(make: MakeNamespace) -> None:
    ns = make(WINDOW)
    tokens, kv = random_tokens(6 * TOKENS), random_kv(WINDOW, 6 * TOKENS)
    assert ns.put(tokens, cut(kv, WINDOW, 4 * TOKENS, 6 * TOKENS)) == 6 * TOKENS
    found, n = ns.get(tokens)
    assert n == 6 * TOKENS
    check(found, kv, WINDOW, n, 4 * TOKENS)
    target = random_kv(WINDOW, 6 * TOKENS, 1)
    assert ns.get_into(tokens, target) == n
    check(cut(target, WINDOW, 4 * TOKENS, n), kv, WINDOW, n, 4 * TOKENS)
    check(cut(target, WINDOW, 0, 4 * TOKENS), random_kv(WINDOW, 6 * TOKENS, 1), WINDOW, 4 * TOKENS)
    assert ns.contains(tokens[: 5 * TOKENS]) == 0  # its window is not whole
    with pytest.raises(BadRequest, match="last 32 are needed"):
        ns.put(tokens, cut(kv, WINDOW, 5 * TOKENS, 6 * TOKENS))
    with pytest.raises(BadRequest, match="KV of 96 tokens for 80 tokens"):
        ns.put(tokens[: 5 * TOKENS], kv)


@pytest.mark.parametrize("kind", ["u1", "f4"])
def test_states_come_back_at_the_boundaries_where_they_were_stored(make: MakeNamespace, kind: str) -> None:
    ns = make(State(96))
    tokens = random_tokens(5 * TOKENS)
    states = {n: np.frombuffer(np.random.default_rng(n).bytes(96), kind) for n in (2 * TOKENS, 5 * TOKENS)}
    for n, state in states.items():
        assert ns.put(tokens[:n], state) == n
    for asked, n in ((5 * TOKENS, 5 * TOKENS), (4 * TOKENS + 2, 2 * TOKENS), (TOKENS, 0)):
        found, got = ns.get(tokens[:asked])
        assert got == n
        if n:
            assert isinstance(found, np.ndarray) and found.tobytes() == states[n].tobytes()
    target = module("torch").zeros(24)
    assert ns.get_into(tokens, target) == 5 * TOKENS
    assert target.numpy().tobytes() == states[5 * TOKENS].tobytes()
    with pytest.raises(BadRequest, match="not a multiple of 16"):
        ns.put(random_tokens(TOKENS + 1), states[2 * TOKENS])


def test_shapes_of_several_kinds_are_found_where_all_can_resume(make: MakeNamespace) -> None:
    shapes = SMALL, WINDOW, State(40)
    ns = make(*shapes)
    tokens = random_tokens(6 * TOKENS)
    full, window = random_kv(SMALL, 6 * TOKENS), random_kv(WINDOW, 6 * TOKENS, 1)

    def put(count: int) -> int:
        state = np.full(40, count, np.uint8)
        return ns.put(tokens[:count], [cut(full, SMALL, 0, count), cut(window, WINDOW, 0, count), state])

    assert put(3 * TOKENS) == 3 * TOKENS
    assert put(6 * TOKENS) == 6 * TOKENS
    for asked, n in ((6 * TOKENS, 6 * TOKENS), (5 * TOKENS, 3 * TOKENS)):
        found, got = ns.get(tokens[:asked])
        assert got == n and isinstance(found, list)
        check(found[0], full, SMALL, n)
        check(found[1], window, WINDOW, n, n - 2 * TOKENS)
        assert found[2].tolist() == [n] * 40
        into = [random_kv(SMALL, asked, 5), random_kv(WINDOW, asked, 6), np.zeros(40, np.uint8)]
        assert ns.get_into(tokens[:asked], into) == n
        check(cut(into[0], SMALL, 0, n), full, SMALL, n)
        check(cut(into[1], WINDOW, n - 2 * TOKENS, n), window, WINDOW, n, n - 2 * TOKENS)
        assert into[2].tolist() == [n] * 40


def test_tokens_that_a_program_loads_count_as_reused(start_depot: StartDepot, connect: Connect) -> None:
    depot = connect(start_depot(chunk_size=TOKENS))  # of its own: a server lists some models only
    for shapes in ((SMALL,), (SMALL, WINDOW)):
        ns, tokens = open_namespace(depot, "reused", *shapes), random_tokens(6 * TOKENS)
        kv = [random_kv(shape, 6 * TOKENS) for shape in shapes]
        assert ns.put(tokens, kv if len(kv) > 1 else kv[0]) == ns.get(tokens)[1] == 6 * TOKENS
        status = at_rest(depot)
        (usage,) = (each for each in status.model_usage if each.model == ns._spec.model)
        assert (usage.asked_tokens, usage.found_tokens, usage.reused_tokens) == (6 * TOKENS,) * 3


# -- sharing

FACTS: dict[str, Any] = {
    "model": "toy", "revision": "a", "dtype": "float16", "shape": SMALL, "adapter": "", "chunk_tokens": 16,
}  # fmt: skip
OTHERS: dict[str, Sequence[Any]] = {
    "model": ["toy2"],
    "revision": ["b"],
    "dtype": ["bfloat16"],
    "adapter": ["lora-1"],
    "chunk_tokens": [32],
    "shape": [
        Shape(layers=2, heads=2, head_dim=8, order="heads"), Shape(layers=2, heads=8, head_dim=2),
        Shape(layers=8, heads=2, head_dim=2), Shape(layers=4, heads=2, head_dim=8, parts=1),
        Shape(layers=2, heads=2, head_dim=8, window=1000), [SMALL, State(8)], State(1024),
    ],
}  # fmt: skip


def test_the_same_facts_share_and_each_other_fact_keeps_apart(
    server: Depot, connect: Connect, request: pytest.FixtureRequest
) -> None:
    facts = FACTS | {"revision": request.node.name}
    first, second = connect(server), connect(server)
    tokens, kv = random_tokens(2 * TOKENS), random_kv(SMALL, 2 * TOKENS)
    assert first.namespace(**facts).put(tokens, kv) == 2 * TOKENS
    found, n = second.namespace(**facts).get(tokens)
    assert n == 2 * TOKENS
    check(found, kv, SMALL, n)
    for name, values in OTHERS.items():
        for value in values:
            assert second.namespace(**(facts | {name: value})).contains(tokens) == 0, (name, value)


@pytest.mark.parametrize(
    "facts", [{"model": "a", "revision": "b-c"}, {"model": "a-b", "revision": "c"}, {"model": "a", "adapter": "b-c"}]
)
def test_facts_that_look_alike_side_by_side_do_not_share(
    server: Depot, connect: Connect, request: pytest.FixtureRequest, facts: dict[str, str]
) -> None:
    depot = connect(server)
    stored = depot.namespace(**(FACTS | {"model": "a", "revision": "b", "adapter": "c"}))
    assert stored.put(random_tokens(TOKENS), random_kv(SMALL, TOKENS)) == TOKENS
    assert depot.namespace(**(FACTS | facts)).contains(random_tokens(TOKENS)) == 0


def test_chunk_tokens_are_chosen_by_the_size_of_a_token(server: Depot, connect: Connect) -> None:
    depot = connect(server)
    facts = FACTS | {"chunk_tokens": 0}
    assert depot.namespace(**facts).chunk_tokens == 256
    assert depot.namespace(**(facts | {"shape": Shape(layers=32, heads=8, head_dim=128)})).chunk_tokens == 16
    assert depot.namespace(**(facts | {"chunk_tokens": 48})).chunk_tokens == 48
    with pytest.raises(BadRequest, match="--chunk-size is 16"):
        depot.namespace(**(facts | {"chunk_tokens": 8}))


def test_a_server_with_larger_chunks_decides_their_least_size(start_depot: StartDepot, connect: Connect) -> None:
    depot = connect(start_depot(chunk_size=256))
    large = FACTS | {"shape": Shape(layers=32, heads=8, head_dim=128)}
    assert depot.namespace(**(large | {"chunk_tokens": 0})).chunk_tokens == 256
    with pytest.raises(BadRequest, match="256"):
        depot.namespace(**large)


def test_threads_that_put_and_get_side_by_side_see_no_byte_of_each_other(make: MakeNamespace) -> None:
    ns = make()
    failures: list[BaseException] = []
    hits = [0] * 8

    def work(number: int) -> None:
        try:
            chance = np.random.default_rng(number)
            for _ in range(60):
                seed, count = int(chance.integers(12)), int(chance.integers(1, 8 * TOKENS))
                tokens, kv = random_tokens(8 * TOKENS, seed)[:count], random_kv(SMALL, 8 * TOKENS, seed)
                if chance.random() < 0.4:
                    assert ns.put(tokens, cut(kv, SMALL, 0, count)) == count // TOKENS * TOKENS
                else:
                    target = random_kv(SMALL, count, 99)
                    n = ns.get_into(tokens, target)
                    hits[number] += n > 0
                    check(cut(target, SMALL, 0, n), kv, SMALL, n)
        except BaseException as exc:  # noqa: BLE001 - the top of a thread: the test reports it
            failures.append(exc)

    threads = [threading.Thread(target=work, args=[number]) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and all(hits)


# -- memory


def test_a_small_arena_gives_back_only_right_bytes(start_depot: StartDepot, connect: Connect) -> None:
    shape = Shape(layers=4, heads=8, head_dim=128)
    depot = connect(start_depot("--verify", "always", arena_mib=4, chunk_size=TOKENS))
    ns = open_namespace(depot, "1", shape)
    found = 0
    for number in range(60):
        tokens, kv = random_tokens(4 * TOKENS, number), random_kv(shape, 4 * TOKENS, number)
        assert ns.put(tokens, kv) == 4 * TOKENS
        for earlier in (number, number // 2, number - 3):
            tokens, kv = random_tokens(4 * TOKENS, max(earlier, 0)), random_kv(shape, 4 * TOKENS, max(earlier, 0))
            got, n = ns.get(tokens)
            found += n
            if n:
                check(got, kv, shape, n)
    assert found > 60 * 4 * TOKENS
    assert depot.status().used_bytes <= 4 << 20


def test_a_put_larger_than_the_arena_stores_what_fits(start_depot: StartDepot, connect: Connect) -> None:
    shape = Shape(layers=4, heads=8, head_dim=128)
    depot = connect(start_depot(arena_mib=4, chunk_size=TOKENS))
    ns = open_namespace(depot, "1", shape)
    tokens, kv = random_tokens(64 * TOKENS), random_kv(shape, 64 * TOKENS)
    stored = ns.put(tokens, kv)
    assert 0 < stored < 64 * TOKENS
    found, n = ns.get(tokens)
    assert n == stored
    check(found, kv, shape, n)


def test_a_leased_sequence_survives_pressure(start_depot: StartDepot, connect: Connect) -> None:
    shape = Shape(layers=4, heads=8, head_dim=128)
    depot = connect(start_depot(arena_mib=4, chunk_size=TOKENS))
    ns = open_namespace(depot, "1", shape)
    leased, other = random_tokens(2 * TOKENS, 1000), random_tokens(2 * TOKENS, 1001)
    kv = random_kv(shape, 2 * TOKENS, 1000)
    ns.put(other, kv)
    ns.put(leased, kv)
    assert ns.lease(leased, 3600) == 2 * TOKENS
    for number in range(40):
        ns.put(random_tokens(4 * TOKENS, number), random_kv(shape, 4 * TOKENS, number))
    found, n = ns.get(leased)
    assert (n, ns.contains(other)) == (2 * TOKENS, 0)
    check(found, kv, shape, n)
    assert ns.release(leased) and not ns.release(leased)
    for number in range(40, 80):
        ns.put(random_tokens(4 * TOKENS, number), random_kv(shape, 4 * TOKENS, number))
    assert ns.contains(leased) == 0


def test_leases_of_equal_tokens_end_apart(server: Depot, connect: Connect) -> None:
    depot, tokens = connect(server), random_tokens(TOKENS, 7)
    before, spaces = depot.status().lease_count, [open_namespace(depot, f"lease {number}") for number in (1, 2)]
    for ns in spaces:
        ns.put(tokens, random_kv(SMALL, TOKENS))
        assert ns.lease(tokens, 60) == ns.lease(tokens, 60, "by name" + str(id(ns))) == TOKENS
    assert depot.status().lease_count == before + 4
    assert spaces[0].release(tokens) and not spaces[0].release(tokens)
    assert spaces[1].release(tokens) and not spaces[1].release(tokens[:-1])
    for ns in spaces:
        assert ns.release(tokens, "by name" + str(id(ns)))
    assert depot.status().lease_count == before


def test_bytes_that_change_in_the_arena_are_not_served(start_depot: StartDepot, connect: Connect) -> None:
    server = start_depot("--verify", "always", chunk_size=TOKENS)
    depot = connect(server)
    ns = open_namespace(depot, "1")
    tokens, kv = random_tokens(3 * TOKENS), random_kv(SMALL, 3 * TOKENS)
    ns.put(tokens, kv)
    path = SHM / server.name
    second = cut(kv, SMALL, TOKENS, 2 * TOKENS)[0, 0].tobytes()[:64]
    with path.open("r+b") as file:
        at = file.read().index(second)
        file.seek(at + 9)
        file.write(bytes([second[9] ^ 4]))
    assert ns.get(tokens) == (None, 0)
    assert depot.status().counters["corrupt_chunks"] == 1
    found, n = ns.get(tokens)
    assert n == TOKENS
    check(found, kv, SMALL, n)
    assert ns.put(tokens, kv) == 3 * TOKENS
    found, n = ns.get(tokens)
    assert n == 3 * TOKENS
    check(found, kv, SMALL, n)


# -- bad input


@pytest.mark.parametrize(
    "tokens",
    [
        [True] * TOKENS, [-1] * TOKENS, [2**40] * TOKENS, [2**32] * TOKENS, [np.int64(3)] * TOKENS, [1.0] * TOKENS,
        ["a"] * TOKENS, [None], np.ones(TOKENS, bool), np.full(TOKENS, -1), np.full(TOKENS, 2**40),
        np.ones(TOKENS), np.ones((2, TOKENS), int), array("b", [-1] * TOKENS), array("d", [1.0] * TOKENS),
        "a" * TOKENS, b"a" * TOKENS, None, 5, {1, 2}, range(TOKENS), np.ma.masked_array([1] * TOKENS, mask=True),
    ],
)  # fmt: skip
def test_every_call_refuses_what_is_not_token_ids(make: MakeNamespace, tokens: Any) -> None:
    ns = make()
    kv = random_kv(SMALL, TOKENS)
    calls: list[Callable[[], object]] = [
        lambda: ns.put(tokens, kv), lambda: ns.get(tokens), lambda: ns.get_into(tokens, kv),
        lambda: ns.contains(tokens), lambda: ns.delete(tokens), lambda: ns.lease(tokens, 5), lambda: ns.release(tokens),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(BadRequest, match="token"):
            call()


def test_tensors_of_tokens_on_another_device_or_of_other_kinds_are_refused(make: MakeNamespace) -> None:
    torch = module("torch")
    ns = make()
    for tokens in (
        torch.ones(TOKENS, dtype=torch.long, device="meta"), torch.ones(TOKENS), torch.ones(2, TOKENS, dtype=torch.int),
        torch.ones(TOKENS, dtype=torch.int).to_sparse(), torch.ones(TOKENS, dtype=torch.bool),
        torch.full((TOKENS,), -1), torch.ones(TOKENS, dtype=torch.bfloat16),
    ):  # fmt: skip
        with pytest.raises(BadRequest, match="token"):
            ns.contains(tokens)


def wrong_kvs() -> dict[str, Callable[[], Any]]:
    kv = random_kv(SMALL, TOKENS)
    layers = [tuple(layer) for layer in kv]
    return {
        "layers": lambda: kv[:1],
        "parts": lambda: kv[:, :1],
        "heads": lambda: kv[:, :, :, :1],
        "head_dim": lambda: kv[..., :4],
        "order": lambda: kv.swapaxes(2, 3),
        "four axes": lambda: kv[0],
        "scalar": lambda: np.uint16(1),
        "no axes": lambda: np.array(1, np.uint16),
        "dtype": lambda: kv.astype(np.float32),
        "bytes": lambda: kv.view(np.uint8),
        "a layer less": lambda: layers[:1],
        "values missing": lambda: [layer[:1] for layer in layers],
        "layers of other lengths": lambda: [layers[0], (kv[1, 0], kv[1, 1][:3])],
        "empty": list,
        "nothing": lambda: None,
        "text": lambda: "kv",
        "objects": lambda: np.full(kv.shape, None),
        "meta": lambda: tensor(kv, "bfloat16").to("meta"),
        "torch dtype": lambda: tensor(kv, "bfloat16").float(),
        "sparse": lambda: tensor(kv, "bfloat16").to_sparse(),
        "too short": lambda: kv[:, :, : TOKENS - 1],
        "too many layers": lambda: [*layers, layers[0]],
    }


@pytest.mark.parametrize("name", wrong_kvs())
def test_kv_that_does_not_fit_is_refused_and_nothing_is_stored(make: MakeNamespace, name: str) -> None:
    if name in ("meta", "torch dtype", "sparse"):
        module("torch")
    ns = make()
    tokens = random_tokens(TOKENS)
    with pytest.raises(BadRequest):
        ns.put(tokens, wrong_kvs()[name]())
    assert ns.contains(tokens) == 0
    ns.put(tokens, random_kv(SMALL, TOKENS))
    with pytest.raises(BadRequest):
        ns.get_into(tokens, wrong_kvs()[name]())


def test_read_only_arrays_are_stored_but_not_filled(make: MakeNamespace) -> None:
    ns = make()
    tokens, kv = random_tokens(TOKENS), random_kv(SMALL, TOKENS)
    kv.flags.writeable = False
    assert ns.put(tokens, kv) == TOKENS
    with pytest.raises(BadRequest, match="read-only"):
        ns.get_into(tokens, kv)
    states = make(State(8))
    state = np.zeros(8, np.uint8)
    state.flags.writeable = False
    assert states.put(tokens, state) == TOKENS
    with pytest.raises(BadRequest, match="read-only"):
        states.get_into(tokens, state)


@pytest.mark.parametrize(
    "state",
    [
        np.zeros(7, np.uint8), np.zeros((2, 8), np.uint8)[:, ::2], b"12345678", None, [1], np.array([None]),
        np.ma.masked_array(np.zeros(8, np.uint8), mask=True),
    ],
)  # fmt: skip
def test_states_of_another_size_or_form_are_refused(make: MakeNamespace, state: Any) -> None:
    ns = make(State(8))
    tokens = random_tokens(TOKENS)
    with pytest.raises(BadRequest, match="8 bytes"):
        ns.put(tokens, state)
    ns.put(tokens, np.ones(8, np.uint8))
    with pytest.raises(BadRequest, match="8 bytes"):
        ns.get_into(tokens, state)


@pytest.mark.parametrize("is_stored", [False, True])
def test_a_wrong_state_is_refused_before_anything_is_loaded(make: MakeNamespace, is_stored: bool) -> None:
    ns = make(SMALL, State(8))
    tokens, kv = random_tokens(TOKENS), random_kv(SMALL, TOKENS)
    if is_stored:
        ns.put(tokens, [kv, np.ones(8, np.uint8)])
    target = random_kv(SMALL, TOKENS, 1)
    with pytest.raises(BadRequest, match="8 bytes"):
        ns.get_into(tokens, [target, np.ones(7, np.uint8)])
    check(target, random_kv(SMALL, TOKENS, 1), SMALL, TOKENS)


def test_several_shapes_want_one_kv_each(make: MakeNamespace) -> None:
    ns = make(SMALL, State(8))
    for kv in (random_kv(SMALL, TOKENS), [random_kv(SMALL, TOKENS)], None):
        with pytest.raises(BadRequest, match="each of 2 shapes"):
            ns.put(random_tokens(TOKENS), kv)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model", ""), ("model", None), ("revision", ""), ("revision", None), ("dtype", ""), ("dtype", "bf16"),
        ("dtype", None), ("dtype", np.complex64), ("dtype", np.dtype(">f2")), ("dtype", np.floating),
        ("dtype", float), ("dtype", ["float16"]), ("adapter", None), ("adapter", 3), ("shape", []),
        ("shape", [SMALL, None]),
        ("shape", (2, 2, 16, 2, 8)), ("shape", None), ("chunk_tokens", -1), ("chunk_tokens", True),
        ("chunk_tokens", 16.0), ("chunk_tokens", 1 << 40), ("model", "\ud800"), ("adapter", "a\nb"),
    ],
)  # fmt: skip
def test_facts_that_are_missing_or_impossible_are_refused(
    server: Depot, connect: Connect, name: str, value: Any
) -> None:
    with pytest.raises(BadRequest, match=name):
        connect(server).namespace(**(FACTS | {name: value}))


@pytest.mark.parametrize(
    ("retain_s", "name"), [(-5, ""), (1 << 40, ""), (2.5, ""), (None, ""), (True, ""), (5, "a" * 5000)]
)
def test_leases_of_an_impossible_time_or_name_are_refused(make: MakeNamespace, retain_s: Any, name: str) -> None:
    ns = make()
    ns.put(random_tokens(TOKENS), random_kv(SMALL, TOKENS))
    with pytest.raises(BadRequest):
        ns.lease(random_tokens(TOKENS), retain_s, name)
    assert ns.contains(random_tokens(TOKENS)) == TOKENS


def test_a_namespace_says_what_to_do_once_its_depot_is_closed(server: Depot) -> None:
    with kvdepot.connect(server.url) as depot:
        ns = open_namespace(depot, "closed")
    calls: list[Callable[[], object]] = [
        lambda: ns.put(random_tokens(TOKENS), random_kv(SMALL, TOKENS)), lambda: ns.get(random_tokens(TOKENS)),
        lambda: ns.contains(random_tokens(TOKENS)), depot.status, lambda: open_namespace(depot, "closed"),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(BadRequest, match=r"kvdepot\.connect\(\)"):
            call()
    depot.close()


def test_a_get_into_longer_buffers_leaves_the_rest_as_it_was(make: MakeNamespace) -> None:
    ns = make()
    tokens, kv = random_tokens(2 * TOKENS), random_kv(SMALL, 2 * TOKENS)
    ns.put(tokens, kv)
    target, before = random_kv(SMALL, 9 * TOKENS, 3), random_kv(SMALL, 9 * TOKENS, 3)
    assert ns.get_into([*tokens, *random_tokens(TOKENS, 4)], target) == 2 * TOKENS
    check(cut(target, SMALL, 0, 2 * TOKENS), kv, SMALL, 2 * TOKENS)
    check(cut(target, SMALL, 2 * TOKENS, 9 * TOKENS), before, SMALL, 9 * TOKENS, 2 * TOKENS)
