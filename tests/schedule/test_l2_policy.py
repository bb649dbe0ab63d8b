"""What L2 keeps of loads: tiles that few CTAs read go first."""

import pytest
import torch

import tvm_tile
from tvm_tile.errors import TileTypeError
from tvm_tile.lower.cuda import lower_cuda
from tvm_tile.ops import flash_attention, flash_mla, gemm
from tvm_tile.schedule import decide
from tvm_tile.schedule.analysis import kernel_views
from tvm_tile.schedule.decisions import read_l2, read_log
from tvm_tile.schedule.rule import TileSchedule
from tvm_tile.simulate import simulate


def policies(func) -> dict:
    """Target tile of each load -> its policy."""
    target = tvm_tile.target("sm_90")
    func = func.with_attr("global_symbol", "main").with_attr("target", target)
    func = decide(func, tvm_tile.hardware.lookup("sm_90"))
    found = {}
    for site in kernel_views(func)[0].sites:
        if hasattr(site.op, "dst") and getattr(site.op, "src", None) is not None:
            found[site.op.dst.buffer.name] = read_l2(site.op.annotations)
    return found, " ".join(e[4] for e in read_log(func) if e[2] == "l2_policy")


def test_weights_of_a_thin_product_are_read_once():
    """64 rows: every CTA reads its own part of B, and all of A, which stays."""
    found, why = policies(gemm(64, 4096, 1024, dtype="bfloat16", trans_b=True, target="sm_90"))
    assert found["B_shared"] == "evict_first" and found["A_shared"] is None
    assert "one CTA reads each tile" in why


def test_operands_of_a_square_product_stay():
    found, _ = policies(gemm(4096, 4096, 1024, dtype="bfloat16", trans_b=True, target="sm_90"))
    assert found["A_shared"] is None and found["B_shared"] is None


def test_keys_stay_for_other_rows():
    """Attention: many blocks of rows read the same keys, each its own queries."""
    for heads in (4, 32):
        found, _ = policies(flash_attention(2, heads, 4096, 4096, 64, causal=True, dtype="bfloat16", target="sm_90"))
        assert found["K_shared"] is None and found["V_shared"] is None and found["Q_shared"] == "evict_first"


def test_the_cache_of_a_decoded_sequence():
    """64 heads are one block of rows; 128 heads are two, which read the same rows of the cache."""
    for heads, policy in ((64, "evict_first"), (128, None)):
        found, _ = policies(flash_mla(4, heads, 4096, target="sm_90"))
        assert found["KV_shared"] == found["K_pe_shared"] == policy


def test_hinted_loads_are_right():
    func = gemm(64, 512, 256, dtype="bfloat16", trans_b=True, target="sm_90")
    lowered = lower_cuda(func.with_attr("global_symbol", "main"), tvm_tile.target("sm_90"))
    assert "L2::cache_hint" in str(lowered.script())
    g = torch.Generator().manual_seed(2)
    a, b = torch.randn(64, 256, generator=g).bfloat16(), torch.randn(512, 256, generator=g).bfloat16()
    c = torch.full((64, 512), float("nan"), dtype=torch.bfloat16)
    simulate(func, "sm_90")(a, b, c)
    torch.testing.assert_close(c.double(), a.double() @ b.double().T, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("given", ["evict_normal", "evict_first", "evict_last"])
def test_given_policies(given):
    """A policy that was given is kept, also against the rule; an unknown one is refused."""
    func = gemm(64, 4096, 1024, dtype="bfloat16", trans_b=True, target="sm_90")
    schedule = TileSchedule(func)
    site = next(s for k in schedule.kernels for s in k.sites if getattr(s.op, "dst", None) is not None and s.is_load)
    schedule.annotate(site, "tile.l2", given)
    if given == "evict_last":
        with pytest.raises(TileTypeError, match="'evict_last', not one of evict_first"):
            policies(schedule.finished())
    else:
        found, _ = policies(schedule.finished())
        assert found[site.op.dst.buffer.name] == given
