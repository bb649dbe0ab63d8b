"""A front and a back: chains of products with the rows of one instruction, for any trip count, without races."""

import dataclasses
import functools

import pytest
import torch
import tvm
import tvm_ffi

import tvm_tile
import tvm_tile.language as T
from tvm_tile.lower.cuda import lower_cuda
from tvm_tile.ops import flash_attention, flash_mla, registry
from tvm_tile.schedule.analysis import kernel_views
from tvm_tile.schedule.decisions import read_roles
from tvm_tile.schedule.resources import register_estimate
from tvm_tile.simulate import simulate_module

from .harness import close, decided, machine, reason, simulated

QUERIES, WIDTH, OUT = 64, 192, 128


def chain(block: int = 32, stages: int = 2, clear_tail: bool = False, after: bool = True, rows: int = QUERIES):
    """``acc = sum over tiles of decay^... relu(Q K^T) V``, its rows divided by one more than the sum of the relus.

    No softmax: rows are scaled by what each tile says, a sum crosses behind the loop, the last tile may be cut.
    """

    @T.prim_func
    def main(
        Q: T.Tensor((rows, WIDTH), "bfloat16"),
        K: T.Tensor((320, WIDTH), "bfloat16"),
        V: T.Tensor((320, OUT), "bfloat16"),
        Out: T.Tensor((rows, OUT), "float32"),
        Sums: T.Tensor((rows,), "float32"),
        length: T.int32,
    ):
        with T.Kernel(1, threads=256) as bx:
            Q_s, K_s = T.alloc_shared((rows, WIDTH), "bfloat16"), T.alloc_shared((block, WIDTH), "bfloat16")
            V_s, P_s = T.alloc_shared((block, OUT), "bfloat16"), T.alloc_shared((rows, block), "bfloat16")
            s, acc = T.alloc_fragment((rows, block), "float32"), T.alloc_fragment((rows, OUT), "float32")
            high, decay = T.alloc_fragment((rows,), "float32"), T.alloc_fragment((rows,), "float32")
            total = T.alloc_fragment((rows,), "float32")
            T.copy(Q, Q_s)
            T.clear(acc)
            T.clear(total)
            for k in T.Pipelined(T.ceildiv(length, block), num_stages=stages):
                T.copy(K[k * block, 0], K_s)
                T.copy(V[k * block, 0], V_s)
                T.gemm(Q_s, K_s, s, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(rows, block):
                    s[i, j] = T.if_then_else(k * block + j < length, T.max(s[i, j], 0), 0)
                if clear_tail:
                    if (k + 1) * block > length:
                        for i, j in T.Parallel(block, OUT):
                            if k * block + i >= length:
                                V_s[i, j] = 0
                T.reduce_max(s, high, dim=1)
                for i in T.Parallel(rows):
                    decay[i] = 1 / (1 + high[i])
                T.copy(s, P_s)
                for i in T.Parallel(rows):
                    total[i] = total[i] * decay[i] + high[i]
                for i, j in T.Parallel(rows, OUT):
                    acc[i, j] *= decay[i]
                T.gemm(P_s, V_s, acc)
            if after:
                for i, j in T.Parallel(rows, OUT):
                    acc[i, j] = acc[i, j] / (1 + total[i])
            T.copy(acc, Out)
            T.copy(total, Sums)

    return main


def expected(q, k, v, length: int, block: int, after: bool):
    acc, total = torch.zeros(len(q), v.shape[1]).double(), torch.zeros(len(q)).double()
    for start in range(0, length, block):
        stop = min(start + block, length)
        s = (q.double() @ k[start:stop].double().T).clamp(min=0).float()
        high = s.amax(1).double()
        decay = 1 / (1 + high)
        total = total * decay + high
        acc = acc * decay[:, None] + s.bfloat16().double() @ v[start:stop].double()
    return (acc / (1 + total)[:, None] if after else acc), total


def inputs(seed: int, rows: int = QUERIES):
    g = torch.Generator().manual_seed(seed)
    return [(torch.randn(*shape, generator=g) / 4).bfloat16() for shape in ((rows, WIDTH), (320, WIDTH), (320, OUT))]


def roles(func) -> dict:
    """Roles of the first kernel's operations by name of the target buffer."""
    view = kernel_views(func)[0]
    assert view.split and read_roles(view.info.block), reason(func, "split") + reason(func, "roles")
    return {s.name: s.op.annotations.get("tile.role") for s in view.sites}


@functools.cache
def plain_chain(seed: int):
    return simulated(decided(chain()), seed)


@pytest.mark.parametrize("length", [0, 1, 32, 33, 64, 96, 300])
def test_any_trip_count(length):
    q, k, v = inputs(length)
    for seed in (0, 1):
        o, sums = torch.full((QUERIES, OUT), float("nan")), torch.full((QUERIES,), float("nan"))
        plain_chain(seed)(q, k, v, o, sums, length)
        want, total = expected(q, k, v, length, 32, True)
        close(o, want, 1000)
        close(sums, total, 1000)


@pytest.mark.parametrize(("block", "stages"), [(32, 3), (64, 2), (64, 4)])
def test_stages_and_tiles(block, stages):
    q, k, v = inputs(stages)
    o, sums = torch.full((QUERIES, OUT), float("nan")), torch.full((QUERIES,), float("nan"))
    func = decided(chain(block, stages))
    roles(func)
    simulated(func)(q, k, v, o, sums, 250)
    close(o, expected(q, k, v, 250, block, True)[0], 1000)


def test_the_back_changes_a_tile_behind_the_front():
    """Rows of V beyond the length hold NaN; the back clears them, in a branch with a barrier of its own."""
    q, k, v = inputs(3)
    v[200:] = float("nan")
    k[200:] = float("nan")
    o, sums = torch.full((QUERIES, OUT), float("nan")), torch.full((QUERIES,), float("nan"))
    func = decided(chain(clear_tail=True))
    roles(func)
    simulated(func)(q, k, v, o, sums, 200)
    close(o, expected(q, k.nan_to_num(), v.nan_to_num(), 200, 32, True)[0], 1000)


def test_nothing_crosses_behind_the_loop():
    """The back's epilogue then must not use memory that the front may still read."""
    q, k, v = inputs(4)
    o, sums = torch.full((QUERIES, OUT), float("nan")), torch.full((QUERIES,), float("nan"))
    func = decided(chain(after=False))
    assert len(read_roles(kernel_views(func)[0].info.block)["exchanges"]) == 1
    roles(func)
    simulated(func)(q, k, v, o, sums, 130)
    close(o, expected(q, k, v, 130, 32, False)[0], 1000)


def test_who_does_what():
    func = decided(chain())
    view = kernel_views(func)[0]
    found = roles(func)
    front = {n for n, role in found.items() if role == "front"}
    back = {n for n, role in found.items() if role == "back"}
    products = [s.name for s in view.sites if type(s.op).__name__ == "GemmOp"]
    assert set(products[:-1]) <= front and products[-1] in back
    assert {s.threads for s in view.sites if s.name in front} == {128}
    assert {s.threads for s in view.sites if s.name in back} == {256}
    loads = {n for n, role in found.items() if role is None}
    assert len(loads) == 4  # the kept columns of Q, the others, K, V
    # each fragment belongs to one role
    for buffer in view.buffers("local.fragment"):
        assert len({found[s.name] for s, _ in view.uses(buffer)}) == 1, buffer.name
    # part of Q stays in registers: the product is two, for the parts of K
    assert any(name.endswith("_kept_copy") for name in front) and len(products) == 3
    assert register_estimate(view, "front")[0] < register_estimate(view)[0]


def test_split_function_means_the_same():
    """The rewritten tile IR, as any tile IR, runs on the CPU."""
    from tvm_tile import hardware
    from tvm_tile.schedule.split import split_roles

    made, reasons = split_roles(chain(clear_tail=True), hardware.lookup("sm_90"))
    assert not reasons
    assert tvm.script.from_source(made.script(), s_tir=True) is not None
    q, k, v = inputs(5)
    o, sums = torch.full((QUERIES, OUT), float("nan")), torch.full((QUERIES,), float("nan"))
    tvm_tile.compile(made, "llvm", lowering="reference", cache=False)(q, k, v, o, sums, 250)
    close(o, expected(q, k, v, 250, 32, True)[0], 1000)


@pytest.mark.parametrize(
    ("func", "why"),
    [
        (chain(rows=128), "128 rows, so that warpgroups have rows of their own"),
        (flash_attention(1, 1, 256, 256, 64, threads=256, block_M=128, block_N=64), "warpgroups have rows"),
        (flash_mla(1, 128, 128, threads=128, block_H=64, num_stages=1), "128 threads are not two warpgroups"),
        (flash_mla(1, 128, 128, threads=256, block_H=64, num_stages=0), "not pipelined"),
        (flash_mla(1, 64, 128, dim=576, threads=256, block_H=64, block_N=32), "144 registers a thread, of 132"),
        (chain(stages=1), "tried, but not specialised: no loop is pipelined"),
    ],
)
def test_why_not(func, why):
    assert why in reason(decided(func), "split")


def test_falls_back_where_the_loads_cannot_run_ahead():
    """A row of 100 bytes cannot be a TMA load: all consumers then do the same, and the log says what was tried."""

    @T.prim_func
    def main(
        Q: T.Tensor((64, 64), "float16"), K: T.Tensor((128, 67), "float16"), V: T.Tensor((128, 64), "float16"),
        Out: T.Tensor((64, 64), "float32"),
    ):  # fmt: skip
        with T.Kernel(1, threads=256) as bx:
            Q_s, K_s = T.alloc_shared((64, 64), "float16"), T.alloc_shared((32, 64), "float16")
            V_s, P_s = T.alloc_shared((32, 64), "float16"), T.alloc_shared((64, 32), "float16")
            s, acc = T.alloc_fragment((64, 32), "float32"), T.alloc_fragment((64, 64), "float32")
            T.copy(Q, Q_s)
            T.clear(acc)
            for k in T.Pipelined(4, num_stages=2):
                T.copy(K[k * 32, 0], K_s)
                T.copy(V[k * 32, 0], V_s)
                T.gemm(Q_s, K_s, s, transpose_B=True, clear_accum=True)
                T.copy(s, P_s)
                T.gemm(P_s, V_s, acc)
            T.copy(acc, Out)

    func = decided(main)
    assert not kernel_views(func)[0].split
    assert "tried, but" in reason(func, "split")
    g = torch.Generator().manual_seed(1)
    q, k, v = ((torch.randn(*shape, generator=g) / 8).half() for shape in ((64, 64), (128, 67), (128, 64)))
    o = torch.full((64, 64), float("nan"))
    simulated(func)(q, k, v, o)
    scores = (q.double() @ k[:, :64].double().T).half().double()
    want = scores @ v.double()
    close(o, want, 100_000)


def mla_roles(**changes):
    """Roles of MLA with one tile of the cache for both products, on a machine with less shared memory if asked."""
    from tvm_tile.schedule import decide

    func = flash_mla(2, 64, 300, threads=256, block_H=64, block_N=64, num_stages=2)
    func = func.with_attr("global_symbol", "main").with_attr("target", tvm_tile.target("sm_90"))
    func = decide(func, dataclasses.replace(machine(2), **changes))
    return func, read_roles(kernel_views(func)[0].info.block)


def mla_is_right(func, shape: dict, tensors: list, outputs: list[int], seed: int = 0) -> None:
    """Outputs of a decided MLA function beside the reference, poisoned before."""
    spec = registry.get("flash_mla")
    want = spec.reference(shape, "bfloat16", tensors)
    for position in outputs:
        tensors[position].fill_(float("nan"))
    simulated(func, seed)(*tensors)
    rtol, atol = spec.tolerance(shape, "bfloat16")
    for position, value in zip(outputs, want, strict=True):
        torch.testing.assert_close(tensors[position].double(), value.double(), rtol=rtol, atol=atol)


def test_three_slots_for_what_both_roles_read():
    """Q passes through the last slot of KV, the weights take the rotary part's slots, the front's products go first."""
    _, found = mla_roles()
    rings = {r["name"]: r for r in found["rings"]}
    assert rings["ring_KV_shared"]["slots"] == 3 and rings["ring_K_pe_shared"]["slots"] == 2
    assert rings["load_Q_shared_first"]["inside"] == {"ring": "ring_KV_shared", "slot": 2}
    crossing = found["exchanges"][0]
    assert crossing["over"] == {"ring": "ring_K_pe_shared", "tile": "S_shared"} and crossing["slots"] == 2
    assert found["signal"] == 3
    spec, shape = registry.get("flash_mla"), {"batch": 2, "heads": 64, "kv_len": 300}
    config = {"block_H": 64, "block_N": 64, "num_stages": 2, "threads": 256}
    footprint = spec.footprint(spec.complete(shape), "bfloat16", "sm_90", config)
    assert footprint.slots == rings["ring_KV_shared"]["slots"]


def test_slots_of_two_tiles_for_any_length():
    """The rotary part and the weights take turns in two slots: no, one, two and more tiles, without races."""
    lengths = [0, 1, 64, 65, 190, 330]
    func = flash_mla(len(lengths), 64, 330, threads=256, block_H=64, block_N=64, num_stages=2)
    func = func.with_attr("global_symbol", "main").with_attr("target", tvm_tile.target("sm_90"))
    spec, shape = registry.get("flash_mla"), {"batch": len(lengths), "heads": 64, "kv_len": 330}
    tensors, outputs = spec.inputs(shape, "bfloat16", "cpu", torch.Generator().manual_seed(5))
    given = next(t for t in tensors if t.dtype == torch.int32)
    given.copy_(torch.tensor(lengths, dtype=torch.int32))
    for seed in (0, 3):
        mla_is_right(decided(func), shape, tensors, outputs, seed)


def test_slots_are_not_shared_by_tiles_of_different_size():
    """Weights of 8 KB do not fit where 4 KB of keys are loaded: the front waits for the back's product."""
    func = flash_mla(2, 64, 300, pe_dim=32, threads=256, block_H=64, block_N=64, num_stages=2)
    func = func.with_attr("global_symbol", "main").with_attr("target", tvm_tile.target("sm_90"))
    found = read_roles(kernel_views(decided(func))[0].info.block)
    assert all("over" not in e for e in found["exchanges"])


def test_two_slots_where_memory_is_short():
    """A machine with 8 KB less: no third slot, and no waiting for the front's next products."""
    func, found = mla_roles(shared_per_block=232448 - 8192)
    rings = {r["name"]: r for r in found["rings"]}
    assert rings["ring_KV_shared"]["slots"] == 2 and found["signal"] == 0
    assert rings["load_Q_shared_first"]["inside"]["slot"] == 1
    spec, shape = registry.get("flash_mla"), {"batch": 2, "heads": 64, "kv_len": 300}
    tensors, outputs = spec.inputs(shape, "bfloat16", "cpu", torch.Generator().manual_seed(1))
    mla_is_right(func, shape, tensors, outputs)


def test_every_signal_has_its_wait():
    """The counts of arrivals agree for each trip count: the simulator reports a deadlock."""
    q, k, v = inputs(6)
    for stages, length in ((2, 65), (3, 31)):
        o, sums = torch.full((QUERIES, OUT), float("nan")), torch.full((QUERIES,), float("nan"))
        func = decided(chain(stages=stages))
        assert read_roles(kernel_views(func)[0].info.block)["signal"] >= 2
        simulated(func)(q, k, v, o, sums, length)
        close(o, expected(q, k, v, length, 32, True)[0], 1000)


def test_deciding_again_changes_nothing():
    """Lowering decides what is decided already; the log still says why there are two roles."""
    func = decided(chain())
    again = decided(func)
    assert tvm_ffi.structural_equal(func.body, again.body)
    assert "the others accumulate" in reason(again, "split")


def test_an_extended_rule_list_keeps_the_roles():
    from tvm_tile.schedule import NotApplicable, Rule, decide, default_rules

    func = chain().with_attr("global_symbol", "main")
    extended = [*default_rules(machine(2)), Rule("mine", lambda sch, hw: NotApplicable("nothing to do"))]
    assert kernel_views(decide(func, machine(2), extended))[0].split
    only_mma = default_rules(machine(2), ("mma",))
    assert not kernel_views(decide(func, machine(2), only_mma))[0].split


@pytest.mark.parametrize(("block", "kept"), [(32, 176), (64, 176), (128, 176), (256, 48)])
def test_kept_columns_leave_room_for_the_scores(block, kept):
    """Of 168 registers the scores take half a column each, and 28 are needed otherwise."""
    from tvm_tile.schedule.split import split_roles

    made, _ = split_roles(chain(block, 2), machine(2))
    view = kernel_views(made)[0]
    shapes = {b.name: [int(e) for e in b.ty.shape] for b in view.buffers("local.fragment")}
    assert shapes["Q_s_kept"] == [QUERIES, kept]
    assert kept // 4 + block // 2 + 28 <= 168


def test_scratch_that_only_fits_in_one_role():
    """The back's epilogue turns its accumulator round through shared memory, which two roles have no room for."""

    @T.prim_func
    def main(
        Q: T.Tensor((64, 192), "bfloat16"), K: T.Tensor((320, 192), "bfloat16"), V: T.Tensor((320, 256), "bfloat16"),
        Out: T.Tensor((64, 256), "float32"),
    ):  # fmt: skip
        with T.Kernel(1, threads=256) as bx:
            Q_s, K_s = T.alloc_shared((64, 192), "bfloat16"), T.alloc_shared((64, 192), "bfloat16")
            V_s, P_s = T.alloc_shared((64, 256), "bfloat16"), T.alloc_shared((64, 64), "bfloat16")
            s, acc = T.alloc_fragment((64, 64), "float32"), T.alloc_fragment((64, 256), "float32")
            T.copy(Q, Q_s)
            T.clear(acc)
            for k in T.Pipelined(5, num_stages=3):
                T.copy(K[k * 64, 0], K_s)
                T.copy(V[k * 64, 0], V_s)
                T.gemm(Q_s, K_s, s, transpose_B=True, clear_accum=True)
                T.copy(s, P_s)
                T.gemm(P_s, V_s, acc)
            for i, j in T.Parallel(64, 256):
                Out[i, j] = acc[i, 255 - j]

    q, k = inputs(8)[:2]
    v = (torch.randn(320, 256, generator=torch.Generator().manual_seed(9)) / 4).bfloat16()
    out = torch.full((64, 256), float("nan"))
    func = main.with_attr("global_symbol", "main").with_attr("target", tvm_tile.target("sm_90"))
    lowered = lower_cuda(func, tvm_tile.target("sm_90"))
    assert "tried, but shared memory" in reason(lowered, "split")
    simulate_module(lowered, tvm_tile.target("sm_90"))(q, k, v, out)
    close(out, ((q.double() @ k.double().T).bfloat16().double() @ v.double()).flip(1), 2000)


def test_uneven_work_stays_in_one_role():
    """Three products that the front would have to make for one of the back."""

    @T.prim_func
    def main(
        A: T.Tensor((64, 64), "float16"), B: T.Tensor((256, 64), "float16"), C: T.Tensor((64, 64), "float32"),
        Flags: T.Tensor((4,), "int32"),
    ):  # fmt: skip
        with T.Kernel(1, threads=256) as bx:
            a, b = T.alloc_shared((64, 64), "float16"), T.alloc_shared((64, 64), "float16")
            p = T.alloc_shared((64, 64), "float16")
            s, acc = T.alloc_fragment((64, 64), "float32"), T.alloc_fragment((64, 64), "float32")
            T.copy(A, a)
            T.clear(acc)
            for k in T.Pipelined(4, num_stages=2):
                T.copy(B[k * 64, 0], b)
                T.gemm(a, b, s, transpose_B=True, clear_accum=True)
                T.gemm(a, b, s, transpose_B=True)
                T.copy(s, p)
                T.gemm(p, b, acc)
            T.copy(acc, C)

    assert "2.0 times the products" in reason(decided(main), "split")


def test_a_tile_that_the_back_changes_for_the_next_iteration_stays_in_one_role():
    """Q is loaded once, and each iteration halves it behind its products: the next one has to see that."""

    @T.prim_func
    def main(
        Q: T.Tensor((64, 64), "bfloat16"), K: T.Tensor((96, 64), "bfloat16"), Out: T.Tensor((64, 64), "float32")
    ):  # fmt: skip
        with T.Kernel(1, threads=256) as bx:
            q, k = T.alloc_shared((64, 64), "bfloat16"), T.alloc_shared((32, 64), "bfloat16")
            p = T.alloc_shared((64, 32), "bfloat16")
            s, acc = T.alloc_fragment((64, 32), "float32"), T.alloc_fragment((64, 64), "float32")
            T.copy(Q, q)
            T.clear(acc)
            for step in T.Pipelined(3, num_stages=2):
                T.copy(K[step * 32, 0], k)
                T.gemm(q, k, s, transpose_B=True, clear_accum=True)
                T.copy(s, p)
                T.gemm(p, k, acc)
                for i, j in T.Parallel(64, 64):
                    acc[i, j] += q[i, j]
                    q[i, j] = q[i, j] * T.bfloat16(0.5)
            T.copy(acc, Out)

    func = decided(main)
    assert "both roles would change q" in reason(func, "split")
    g = torch.Generator().manual_seed(3)
    q, k = ((torch.randn(rows, 64, generator=g) / 4).bfloat16() for rows in (64, 96))
    out, want = torch.full((64, 64), float("nan")), torch.zeros(64, 64).double()
    simulated(func)(q, k, out)
    for step in range(3):
        now, tile = q.double() * 0.5**step, k[step * 32 : step * 32 + 32].double()
        want += (now @ tile.T).bfloat16().double() @ tile + now
    close(out, want, 10_000)


def test_rotation_keeps_changes_of_a_tile_behind_its_load():
    """All consumers in one role: rows of V are cleared in a branch of the rotated loop, behind the wait for V."""
    q, k, v = inputs(7, 128)
    v[200:] = float("nan")
    o, sums = torch.full((128, OUT), float("nan")), torch.full((128,), float("nan"))
    func = decided(chain(64, clear_tail=True, rows=128))
    assert not kernel_views(func)[0].split and read_roles(kernel_views(func)[0].info.block)
    for seed in (0, 1):
        simulated(func, seed)(q, k, v, o, sums, 200)
        close(o, expected(q, k, v.nan_to_num(), 200, 64, True)[0], 1000)


@pytest.mark.parametrize("rows", [64, 128])
def test_rotation_keeps_a_branch_on_the_accumulator_in_its_place(rows):
    """The accumulator is doubled in a branch before the first product: the final product must be complete by then."""

    @T.prim_func
    def main(
        Q: T.Tensor((rows, 64), "bfloat16"), K: T.Tensor((160, 64), "bfloat16"), Out: T.Tensor((rows, 64), "float32"),
        n: T.int32,
    ):  # fmt: skip
        with T.Kernel(1, threads=256) as bx:
            q, k = T.alloc_shared((rows, 64), "bfloat16"), T.alloc_shared((32, 64), "bfloat16")
            v, p = T.alloc_shared((32, 64), "bfloat16"), T.alloc_shared((rows, 32), "bfloat16")
            s, acc = T.alloc_fragment((rows, 32), "float32"), T.alloc_fragment((rows, 64), "float32")
            T.copy(Q, q)
            T.clear(acc)
            for step in T.Pipelined(5, num_stages=2):
                T.copy(K[step * 32, 0], k)
                T.copy(K[step * 32, 0], v)
                if step >= n:
                    for i, j in T.Parallel(rows, 64):
                        acc[i, j] = acc[i, j] * 2
                T.gemm(q, k, s, transpose_B=True, clear_accum=True)
                T.copy(s, p)
                T.gemm(p, v, acc)
            T.copy(acc, Out)

    g = torch.Generator().manual_seed(rows)
    q, k = ((torch.randn(n, 64, generator=g) / 4).bfloat16() for n in (rows, 160))
    kernel = simulated(decided(main))
    for n in (0, 3, 9):
        out, want = torch.full((rows, 64), float("nan")), torch.zeros(rows, 64).double()
        kernel(q, k, out, n)
        for step in range(5):
            tile = k[step * 32 : step * 32 + 32].double()
            want = want * (2 if step >= n else 1) + (q.double() @ tile.T).bfloat16().double() @ tile
        close(out, want, 100_000)


@pytest.mark.parametrize("columns", [48, 96, 160])
def test_columns_that_warpgroups_share_unevenly_with_the_swizzle(columns):
    """Half of 96 columns begins inside of a 64-byte swizzle block, half of 48 inside of any."""

    @T.prim_func
    def main(
        Q: T.Tensor((64, 64), "bfloat16"), K: T.Tensor((128, 64), "bfloat16"), V: T.Tensor((128, columns), "bfloat16"),
        Out: T.Tensor((64, columns), "float32"),
    ):  # fmt: skip
        with T.Kernel(1, threads=256) as bx:
            q, k = T.alloc_shared((64, 64), "bfloat16"), T.alloc_shared((32, 64), "bfloat16")
            v, p = T.alloc_shared((32, columns), "bfloat16"), T.alloc_shared((64, 32), "bfloat16")
            s, acc = T.alloc_fragment((64, 32), "float32"), T.alloc_fragment((64, columns), "float32")
            T.copy(Q, q)
            T.clear(acc)
            for step in T.Pipelined(4, num_stages=2):
                T.copy(K[step * 32, 0], k)
                T.copy(V[step * 32, 0], v)
                T.gemm(q, k, s, transpose_B=True, clear_accum=True)
                T.copy(s, p)
                T.gemm(p, v, acc)
            T.copy(acc, Out)

    g = torch.Generator().manual_seed(columns)
    q, k, v = ((torch.randn(*shape, generator=g) / 4).bfloat16() for shape in ((64, 64), (128, 64), (128, columns)))
    out = torch.full((64, columns), float("nan"))
    func = decided(main)
    simulated(func)(q, k, v, out)
    close(out, (q.double() @ k.double().T).bfloat16().double() @ v.double(), 10_000)
    if columns == 48:
        assert "would cross swizzle blocks" in reason(func, "gemm_instruction")


def test_a_store_is_fenced_at_whichever_barrier_comes_first():
    """P is stored, then a sum over warps meets at a barrier of its own: wgmma still needs the fence between proxies."""

    @T.prim_func
    def main(
        Q: T.Tensor((128, 64), "bfloat16"), K: T.Tensor((144, 64), "bfloat16"), Out: T.Tensor((128, 64), "float32"),
        Sums: T.Tensor((128,), "float32"), n: T.int32,
    ):  # fmt: skip
        with T.Kernel(1, threads=256) as bx:
            q, k = T.alloc_shared((128, 64), "bfloat16"), T.alloc_shared((48, 64), "bfloat16")
            v, p = T.alloc_shared((48, 64), "bfloat16"), T.alloc_shared((128, 48), "bfloat16")
            s, acc = T.alloc_fragment((128, 48), "float32"), T.alloc_fragment((128, 64), "float32")
            part, total = T.alloc_fragment((128,), "float32"), T.alloc_fragment((128,), "float32")
            T.copy(Q, q)
            T.clear(acc)
            T.clear(total)
            for step in T.Pipelined(n, num_stages=2):
                T.copy(K[step * 48, 0], k)
                T.copy(K[step * 48, 0], v)
                T.gemm(q, k, s, transpose_B=True, clear_accum=True, policy=T.GemmWarpPolicy.FullCol)
                T.copy(s, p)
                T.reduce_sum(s, part, dim=1)
                for i in T.Parallel(128):
                    total[i] = T.max(total[i] * 0.5, part[i])
                T.gemm(p, v, acc, policy=T.GemmWarpPolicy.FullCol)
            T.copy(acc, Out)
            T.copy(total, Sums)

    g = torch.Generator().manual_seed(11)
    q, k = ((torch.randn(rows, 64, generator=g) / 4).bfloat16() for rows in (128, 144))
    kernel = simulated(decided(main))
    for n in (0, 1, 2, 3):
        out, sums = torch.full((128, 64), float("nan")), torch.full((128,), float("nan"))
        kernel(q, k, out, sums, n)
        want, total = torch.zeros(128, 64).double(), torch.zeros(128).double()
        for step in range(n):
            tile = k[step * 48 : step * 48 + 48].double()
            s = (q.double() @ tile.T).float()
            want, total = want + s.bfloat16().double() @ tile, torch.maximum(total * 0.5, s.double().sum(1))
        close(out, want, 100_000)
        close(sums, total, 100_000)


def weighted(block: int = 64):
    """``O = f(Q K^T) V`` without a softmax: only the product touches the accumulator, the weights are registers."""

    @T.prim_func
    def main(
        Q: T.Tensor((QUERIES, WIDTH), "bfloat16"),
        K: T.Tensor((320, WIDTH), "bfloat16"),
        V: T.Tensor((320, OUT), "bfloat16"),
        Out: T.Tensor((QUERIES, OUT), "float32"),
    ):
        with T.Kernel(2, threads=256) as bx:
            Q_s, K_s = T.alloc_shared((QUERIES, WIDTH), "bfloat16"), T.alloc_shared((block, WIDTH), "bfloat16")
            V_s, s = T.alloc_shared((block, OUT), "bfloat16"), T.alloc_fragment((QUERIES, block), "float32")
            w, acc = T.alloc_fragment((QUERIES, block), "bfloat16"), T.alloc_fragment((QUERIES, OUT), "float32")
            T.copy(Q, Q_s)
            T.clear(acc)
            for k in T.Pipelined(bx * 4 + 1, num_stages=2):
                T.copy(K[k * block, 0], K_s)
                T.copy(V[k * block, 0], V_s)
                T.gemm(Q_s, K_s, s, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(QUERIES, block):
                    s[i, j] = T.max(s[i, j], 0)
                T.copy(s, w)
                T.gemm(w, V_s, acc)
            if bx == 1:
                T.copy(acc, Out)

    return main


def test_an_operand_that_crosses_stays_in_shared_memory():
    """The back multiplies with what the front has written, and its products in flight are not serialised by ptxas."""
    func = decided(weighted())
    found = read_roles(kernel_views(func)[0].info.block)
    assert [e["tiles"] for e in found["exchanges"]] == [["w_channel"]]
    assert all("received" not in b.name for b in kernel_views(func)[0].info.buffers)
    q, k, v = inputs(11)
    out = torch.full((QUERIES, OUT), float("nan"))
    simulated(func)(q, k, v, out)
    weights = (q.double() @ k.double().T).clamp(min=0).float().bfloat16().double()
    close(out, weights @ v.double(), 10_000)
    said = tvm_tile.compile(weighted(), "sm_90", cache=False).resources
    assert "serialized" not in str(said) and "spilled" not in str(said)
