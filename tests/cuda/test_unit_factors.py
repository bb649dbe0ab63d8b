"""Rescaling that warps skip, and factors of exactly one: what the code computes."""

import torch

from tvm_tile.ops import registry

from ..schedule.scaled_accumulators import ROWS, STEPS, online, scaled


def inputs(columns: int, seed: int):
    g = torch.Generator().manual_seed(seed)
    a = (torch.randn(ROWS, STEPS * 32, generator=g) / 4).half()
    b = (torch.randn(STEPS * 32, columns, generator=g) / 4).half()
    return a, b


def expected(a, b, factor):
    acc = torch.zeros(ROWS, b.shape[1], dtype=torch.float64)
    for k in range(STEPS):
        part = slice(k * 32, k * 32 + 32)
        acc = acc * factor[k].double()[:, None] + a[:, part].double() @ b[part].double()
    return acc


def test_factors_of_one_and_others(device):
    """A single factor other than one in a warp, in each place in turn; all one; none one; zero and NaN."""
    kernel = device.compile(scaled())
    a, b = inputs(128, 3)
    g = torch.Generator().manual_seed(4)
    cases = [torch.ones(STEPS, ROWS), torch.rand(STEPS, ROWS, generator=g)]
    for row in (0, 7, 8, 17, 63):
        one = torch.ones(STEPS, ROWS)
        one[2, row] = 0.25
        cases.append(one)
    special = torch.ones(STEPS, ROWS)
    special[1, 5], special[3, 40] = 0.0, float("nan")
    cases.append(special)
    for factor in cases:
        c = torch.full((ROWS, 128), float("nan"))
        c = kernel([a, b, factor, c]).args[3]
        torch.testing.assert_close(c.double(), expected(a, b, factor), rtol=1e-5, atol=1e-5, equal_nan=True)


def test_equal_maxima_give_exactly_one(device):
    """Large scores, the largest first: on GPUs a contracted difference of products would not be zero."""
    g = torch.Generator().manual_seed(8)
    x = torch.rand(ROWS, STEPS * 32, generator=g).half() * 100 + 1000
    x[:, 3] = 1101.5
    b = torch.randn(STEPS * 32, 128, generator=g).half()
    outer = 0.1234567
    c, factors = torch.full((ROWS, 128), float("nan")), torch.full((STEPS, ROWS), float("nan"))
    c, factors = device.compile(online(outer))([x, b, c, factors]).args[2:]
    assert bool((factors[0] == 0).all()) and bool((factors[1:] == 1).all())
    weights = torch.exp2((x.double() - x.double().max(1, keepdim=True).values) * outer)
    torch.testing.assert_close(c.double(), weights @ b.double(), rtol=5e-3, atol=5e-3)


def test_maxima_that_grow_little_by_little(device):
    """Attention whose scores grow by less than the kept growth with each tile, and by much more over all of them."""
    spec = registry.get("flash_attention")
    shape = spec.complete({"batch": 1, "heads": 1, "seq": 64, "dim": 128, "seq_kv": 512})
    func = spec.make(shape, "float16", device.arch, block_M=64, block_N=32)
    tensors, outputs = spec.inputs(shape, "float16", "cpu", torch.Generator().manual_seed(9))
    q, k = tensors[0], tensors[1]
    q[..., 0], k[..., 0] = 4.0, torch.linspace(-80, 80, 512, dtype=torch.float16)[None, :, None].expand_as(k[..., 0])
    want = spec.reference(shape, "float16", tensors)
    for position in outputs:
        tensors[position].fill_(float("nan"))
    got = device.compile(func)(tensors).args
    rtol, atol = spec.tolerance(shape, "float16")
    for position, value in zip(outputs, want, strict=True):
        torch.testing.assert_close(got[position].double(), value.double(), rtol=rtol, atol=atol)
