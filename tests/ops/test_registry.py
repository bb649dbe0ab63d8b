"""The catalogue: names, shapes, inputs, references and costs."""

from __future__ import annotations

import pytest
import torch
import tvm

from tests.ops.harness import generator
from tvm_tile.errors import TileError
from tvm_tile.ops import registry

SMALL = {
    "gemm": {"m": 20, "n": 24, "k": 40},
    "flash_attention": {"batch": 2, "heads": 2, "seq": 20, "dim": 16},
    "flash_mla": {"batch": 2, "heads": 4, "kv_len": 20, "dim": 32, "pe_dim": 16},
    "dequant_gemm": {"m": 5, "n": 24, "k": 64, "group_size": 32},
    "grouped_gemm": {"total": 40, "groups": 3, "n": 24, "k": 40},
    "softmax": {"rows": 5, "columns": 40},
    "rmsnorm": {"rows": 5, "columns": 40},
}
# every option that changes the kernel's source
VARIANTS = [(op, shape) for op, shape in SMALL.items()] + [
    ("gemm", {"trans_a": True, "trans_b": False, "bias": True, "split_k": 2, "k": 600}),
    ("flash_attention", {"causal": True, "window": 5, "kv_heads": 1}),
    ("flash_attention", {"window": 5}),
    ("flash_attention", {"block_mask": 64, "seq": 200}),
    ("flash_attention", {"bias": True}),
    ("flash_attention", {"varlen": True, "causal": True}),
    ("flash_mla", {"packed": True, "num_splits": 3}),
    ("flash_mla", {"page_size": 64, "ragged": True}),
    ("dequant_gemm", {"zeros": True}),
]


def test_names_and_specs_are_complete():
    assert set(registry.names()) == set(SMALL)
    for name in registry.names():
        spec = registry.get(name)
        assert spec.name == name and spec.doc and spec.dtypes
        for kind, default, text in spec.shape_params.values():
            assert text and (default is None or isinstance(default, kind))
        assert set(spec.defaults(SMALL[name], spec.dtypes[0], "cpu")) <= set(spec.tunables)


def test_unknown_op_names_the_nearest():
    with pytest.raises(TileError, match=r"unknown op 'flash_atention'[\s\S]*did you mean 'flash_attention'"):
        registry.get("flash_atention")


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        ({"hedas": 3}, r"no shape parameter 'hedas'[\s\S]*did you mean 'heads'\? it has batch=1, heads=8"),
        ({"heads": 2.5}, "heads=2.5 must be of type int"),
        ({"heads": True}, "heads=True must be of type int"),
        ({"causal": 2}, "causal=2 must be of type bool"),
        ({"heads": None}, "heads=None must be of type int"),
    ],
)
def test_wrong_shapes_are_refused(shape, text):
    with pytest.raises(TileError, match=text):
        registry.get("flash_attention").make(shape)


def test_unknown_dtype_and_tunable_are_refused():
    spec = registry.get("gemm")
    with pytest.raises(TileError, match=r"dtype='bfloat8'[\s\S]*did you mean 'bfloat16'"):
        spec.make({}, "bfloat8")
    with pytest.raises(TileError, match=r"no tunable 'block_Q'[\s\S]*block_M, block_N"):
        spec.make({}, "float16", block_Q=3)


@pytest.mark.parametrize(("op", "shape"), VARIANTS, ids=str)
@pytest.mark.parametrize("target", ["cpu", "sm_80", "sm_90"])
def test_script_parses_back(op, shape, target):
    spec = registry.get(op)
    func = spec.make({**SMALL[op], **shape}, None, "llvm" if target == "cpu" else target)
    tvm.ir.assert_structural_equal(tvm.script.from_source(func.script()), func)


@pytest.mark.parametrize(("op", "shape"), VARIANTS, ids=str)
def test_inputs_fit_the_kernel_and_outputs_are_poisoned(op, shape):
    spec = registry.get(op)
    shape = {**SMALL[op], **shape}
    for dtype in spec.dtypes:
        tensors, outputs = spec.inputs(shape, dtype, "cpu", generator())
        params = spec.make(shape, dtype, "llvm").params
        assert len(tensors) == len(params)
        for tensor, param in zip(tensors, params, strict=True):
            assert str(param.ty.dtype) == str(tensor.dtype).removeprefix("torch.")
            assert len(param.ty.shape) == tensor.dim()
            for extent, size in zip(param.ty.shape, tensor.shape, strict=True):
                assert not isinstance(extent, tvm.tirx.IntImm) or int(extent) == size
        for position in outputs:
            out = tensors[position]
            poison = out.isnan() if out.dtype.is_floating_point else out.view(torch.uint8) == 0x7F
            assert poison.all()


def test_inputs_follow_the_generator():
    spec = registry.get("gemm")
    first, second, other = (spec.inputs(SMALL["gemm"], "float32", "cpu", generator(s))[0] for s in (1, 1, 2))
    assert torch.equal(first[0], second[0]) and not torch.equal(first[0], other[0])


@pytest.mark.parametrize(
    ("op", "shape", "dtype"),
    [
        ("gemm", {"bias": True, "trans_a": True}, "float32"),
        ("flash_attention", {"causal": True, "kv_heads": 1}, "float32"),
        ("flash_attention", {"causal": True, "seq_kv": 30}, "float32"),
        ("flash_attention", {"window": 7, "causal": True}, "float32"),
        ("flash_attention", {"bias": True}, "float32"),
        ("flash_mla", {"kv_heads": 2}, "float32"),
        ("flash_mla", {"packed": True, "page_size": 16}, "float32"),
        ("dequant_gemm", {"zeros": True}, "bfloat16"),
        ("grouped_gemm", {}, "float32"),
        ("softmax", {}, "float32"),
        ("rmsnorm", {}, "float32"),
    ],
    ids=str,
)
def test_references_agree_with_torch_operators(op, shape, dtype):
    """The peers are other implementations: they check the references."""
    spec = registry.get(op)
    shape = {**SMALL[op], **shape}
    tensors, _ = spec.inputs(shape, dtype, "cpu", generator())
    want = spec.reference(shape, dtype, tensors)[0]
    got = spec.peers["torch"](shape, dtype, tensors)()
    if op == "flash_attention":
        got = got.transpose(1, 2)
    rtol, atol = spec.tolerance(shape, dtype)
    torch.testing.assert_close(got.reshape(want.shape).to(want.dtype), want, rtol=rtol, atol=atol)


def test_flops_count_the_visible_pairs():
    spec = registry.get("flash_attention")
    from tvm_tile.ops.specs.attention_math import visible

    for causal, window, seq, seq_kv in [(True, None, 9, 9), (True, 4, 9, 20), (False, 3, 11, 6), (True, None, 12, 5)]:
        shape = {"batch": 2, "heads": 3, "seq": seq, "seq_kv": seq_kv, "dim": 8, "causal": causal, "window": window}
        pairs = int(visible(seq, seq_kv, causal, window).sum())
        assert spec.flops(shape) == 4 * 2 * 3 * 8 * pairs
