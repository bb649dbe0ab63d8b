"""Products along a split K: when pairs of warps share a sub-tile, and when they must not."""

from __future__ import annotations

import pytest

import tvm_tile.language as T
from tvm_tile import hardware, ir, ops
from tvm_tile.errors import TileShapeError
from tvm_tile.layout import find_instruction, halves_of_k, partition
from tvm_tile.schedule import decide, explain
from tvm_tile.schedule.decisions import encode, read_partial, read_partition

SM_80 = hardware.lookup("sm_80")


def deep(
    m=32,
    n=32,
    k=512,
    dtype="float16",
    accum="float32",
    policy="Square",
    threads=128,
    second=None,
    between=False,
    clears=False,
    room=0,
    a_fragment=False,
    order=None,
):
    """A product of depth ``k`` in a loop, a second one into the same accumulator, and what may keep them apart."""
    stage = None if order is None else [0] * len(order)

    @T.prim_func
    def deep(A: T.Tensor((m, k), dtype), B: T.Tensor((n, k), dtype), C: T.Tensor((m, n), accum)):
        with T.Kernel(1, threads=threads) as bx:
            A_shared = T.alloc_shared((m, k), dtype)
            A_local = T.alloc_fragment((m, k), dtype)
            B_shared = T.alloc_shared((n, k), dtype)
            C_local = T.alloc_fragment((m, n), accum)
            T.clear(C_local)
            if room:
                Z_shared = T.alloc_shared((max(room, 1),), "uint8")
                T.clear(Z_shared)
            T.copy(A, A_shared)
            if a_fragment:
                T.copy(A_shared, A_local)
            T.copy(B, B_shared)
            for _ in T.Pipelined(2, num_stages=0, order=order, stage=stage):
                if a_fragment:
                    T.gemm(A_local, B_shared, C_local, transpose_B=True, policy=policy)
                else:
                    T.gemm(A_shared, B_shared, C_local, transpose_B=True, policy=policy)
                if between:
                    for i, j in T.Parallel(m, n):
                        C_local[i, j] *= 2
                if second:
                    T.gemm(
                        A_shared[:, 0:second],
                        B_shared[:, 0:second],
                        C_local,
                        transpose_B=True,
                        policy=policy,
                        clear_accum=clears,
                    )
            if room:
                for i, j in T.Parallel(m, n):
                    C_local[i, j] += T.cast(Z_shared[i + j], accum)
            T.copy(C_local, C)

    return deep


def parts(func):
    """(split of K, whether it begins, whether it ends the partial sums) of every product."""
    gemms = [op for op in ir.tile_ops(func.body) if isinstance(op, ir.GemmOp)]
    return [(read_partition(g.annotations).k_groups, *read_partial(g.annotations)) for g in gemms]


def test_latent_attention_splits_the_depth_of_its_scores():
    func = decide(ops.flash_mla(2, 128, 512, target="sm_80"), SM_80)
    assert parts(func) == [(2, True, False), (2, False, True), (1, True, True)]
    text = explain(ops.flash_mla(2, 128, 512, target="sm_80"), "sm_80")
    assert "4 x 1 pairs of warps along K, each pair 16 x 32" in text


@pytest.mark.parametrize(
    "options, expected",
    [
        ({}, [(2, True, True)]),
        ({"second": 64}, [(2, True, False), (2, False, True)]),
        ({"dtype": "bfloat16"}, [(2, True, True)]),
        ({"k": 64}, [(1, True, True)]),  # the exchange would cost more than it saves
        ({"m": 128, "n": 128, "k": 128}, [(1, True, True)]),
        ({"policy": "FullRow", "m": 64}, [(1, True, True)]),
        ({"policy": "FullCol"}, [(1, True, True)]),
        ({"threads": 32}, [(1, True, True)]),  # one warp has no partner
        ({"accum": "float16"}, [(1, True, True)]),
        ({"dtype": "int8", "accum": "int32"}, [(1, True, True)]),
        ({"m": 24}, [(1, True, True)]),  # rows of padding
        ({"second": 16}, [(1, True, True), (1, True, True)]),  # one step of k has no halves
        ({"second": 64, "between": True}, [(1, True, True), (1, True, True)]),
        ({"second": 64, "clears": True}, [(1, True, True), (1, True, True)]),
        ({"a_fragment": True}, [(1, True, True)]),
        ({"room": 96 * 1024}, [(1, True, True)]),
        ({"second": 64, "order": [0, 1, 2]}, [(1, True, True), (1, True, True)]),
    ],
    ids=str,
)
def test_where_the_depth_is_split(options, expected):
    assert parts(decide(deep(**options), SM_80)) == expected


def test_a_decided_function_is_decided_the_same_again():
    func = decide(deep(second=64), SM_80)
    assert parts(decide(func, SM_80)) == parts(func)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"accum": "float16"}, "the accumulator is float16, and partial sums are float32"),
        ({"k": 16}, "K = 16 has no two halves of whole k = 16"),
        ({"a_fragment": True}, r"A \(A_local\) is in registers"),
    ],
)
def test_a_given_split_that_cannot_be(options, message):
    from tvm_tile.schedule import Rule, default_rules

    instruction = find_instruction("mma", "float16", "float16", options.get("accum", "float32"), 80)
    given = halves_of_k(partition("Square", 32, 32, 4, instruction), instruction)

    def annotate(sch, hw):
        for _, site in sch.sites(ir.GemmOp):
            sch.annotate(site, "tile.partition", encode(given))
        return []

    rules = default_rules(SM_80)
    rules.insert(1, Rule("given", annotate))
    with pytest.raises(TileShapeError, match=message):
        decide(deep(**options), SM_80, rules)
