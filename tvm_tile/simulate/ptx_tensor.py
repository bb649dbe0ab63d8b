"""Tensor-core instructions, matrix loads and asynchronous copies."""

from __future__ import annotations

import re

from .ptx import ATOMIC_OP, ATOMIC_TYPE, ELEMENT, instruction


# -------------------------------------------------------------------------------- wgmma, mma, matrices
@instruction(r"wgmma\.fence\.sync\.aligned$")
def _wgmma_fence(i):
    return "tsim::wgmma_fence();"


@instruction(r"wgmma\.commit_group\.sync\.aligned$")
def _wgmma_commit(i):
    return "tsim::wgmma_commit();"


@instruction(r"wgmma\.wait_group\.sync\.aligned$")
def _wgmma_wait(i):
    return f"tsim::wgmma_wait({i.value(i.operands[0], 'uint32_t')});"


@instruction(r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k\d+\.")
def _wgmma(i):
    m = re.match(
        r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k(\d+)(\.satfinite)?\.(\w+)\.(\w+)\.(\w+)(\.satfinite)?$", i.opcode
    )
    if not m or m.group(4) not in ELEMENT or m.group(5) not in ELEMENT or m.group(6) not in ELEMENT:
        raise i.refuse()
    n, k, d, a, b = int(m.group(1)), int(m.group(2)), m.group(4), m.group(5), m.group(6)
    sat = bool(m.group(3) or m.group(7))
    if n % 8 or not 8 <= n <= 256 or k != {"tf32": 8, "f16": 16, "bf16": 16}.get(a, 32):
        raise i.refuse("no such shape")
    ds = i.group(i.operands[0])
    if len(ds) != (n // 4 if d == "f16" else n // 2):
        raise i.refuse(f"{len(ds)} accumulator registers")
    rs = isinstance(i.operands[1], list)
    imm = i.operands[4:]
    neg = ["0", "0"]
    trans = ["0", "0"]
    if a in ("f16", "bf16"):
        neg = [f"({i.raw(x)}) < 0" for x in imm[:2]] or neg
        if len(imm) > 2:
            trans = ["0", i.raw(imm[2])] if rs else [i.raw(imm[2]), i.raw(imm[3])]
    elif a in ("tf32", "e4m3", "e5m2"):
        neg = [f"({i.raw(x)}) < 0" for x in imm[:2]] or neg
    scale = i.raw(i.operands[3])
    regs = ""
    if rs:
        regs = f"const uint32_t _ar[4] = {{{', '.join(i.value(x, 'uint32_t') for x in i.group(i.operands[1]))}}}; "
    ptrs = ", ".join(f"(void*)&{i.raw(x)}" for x in ds)
    adesc = "0" if rs else i.value(i.operands[1], "uint64_t")
    return (
        f"{regs}void* const _d[] = {{{ptrs}}}; const tsim::WgmmaArgs _w = {{{n}, {k}, tsim::{ELEMENT[a]}, "
        f"tsim::{ELEMENT[b]}, tsim::{ELEMENT[d]}, {int(rs)}, {adesc}, {i.value(i.operands[2], 'uint64_t')}, "
        f"(uint32_t)(({scale}) != 0), (int)({neg[0]}), (int)({neg[1]}), (int)({trans[0]}), (int)({trans[1]}), "
        f"{int(sat)}}}; "
        f"tsim::wgmma(_w, _d, {'_ar' if rs else 'nullptr'});"
    )


@instruction(r"mma\.sync\.aligned\.m16n8k\d+\.row\.col\.")
def _mma(i):
    m = re.match(
        r"mma\.sync\.aligned\.m16n8k(\d+)\.row\.col(?:\.kind::\w+)?(\.satfinite)?\.(\w+)\.(\w+)\.(\w+)\.(\w+)$",
        i.opcode,
    )
    if not m or any(t not in ELEMENT for t in m.groups()[2:]):
        raise i.refuse()
    k, d, a, b, c = int(m.group(1)), m.group(3), m.group(4), m.group(5), m.group(6)
    per = {"tf32": 1, "f16": 2, "bf16": 2}.get(a, 4)
    if k not in (4 * per, 8 * per) or (d == "s32") != (c == "s32") or (d == "f16") != (c == "f16"):
        raise i.refuse("no such shape")
    na, nb = k // (4 * per) * 2, k // (4 * per)
    ds, av, bv, cv = (i.group(x) for x in i.operands[:4])
    nd = 2 if d == "f16" else 4
    if (len(ds), len(av), len(bv), len(cv)) != (nd, na, nb, nd):
        raise i.refuse("operand counts")
    u = [", ".join(i.value(x, "uint32_t") for x in v) for v in (av, bv, cv)]
    out = " ".join(i.store(x, f"tsim::as<{'float' if d == 'f32' else 'uint32_t'}>(_d[{j}])") for j, x in enumerate(ds))
    return (
        f"const uint32_t _fa[] = {{{u[0]}}}, _fb[] = {{{u[1]}}}, _fc[] = {{{u[2]}}}; uint32_t _d[4]; "
        f"tsim::mma(16, 8, {k}, tsim::{ELEMENT[a]}, tsim::{ELEMENT[b]}, tsim::{ELEMENT[c]}, tsim::{ELEMENT[d]}, "
        f"_fa, _fb, _fc, _d, {int(bool(m.group(2)))}); {out}"
    )


@instruction(r"(ld|st)matrix\.sync\.aligned\.m8n8\.x[124](\.trans)?\.shared(::cta)?\.b16$")
def _matrix(i):
    n = int(re.search(r"\.x([124])", i.opcode).group(1))
    trans = int(i.has("trans"))
    if i.opcode.startswith("ld"):
        out = " ".join(i.store(x, f"_r[{j}]") for j, x in enumerate(i.group(i.operands[0])))
        return f"uint32_t _r[4]; tsim::ldmatrix({i.shared(i.operands[1])}, _r, {n}, {trans}, 0); {out}"
    regs = ", ".join(i.value(x, "uint32_t") for x in i.group(i.operands[1]))
    return f"const uint32_t _r[] = {{{regs}}}; tsim::stmatrix({i.shared(i.operands[0])}, _r, {n}, {trans}, 0);"


@instruction(r"setmaxnreg\.(inc|dec)\.sync\.aligned\.u32$")
def _setmaxnreg(i):
    return f"tsim::set_max_nreg({i.value(i.operands[0], 'uint32_t')}, {int(i.has('inc'))});"


# -------------------------------------------------------------------------------- asynchronous copies
@instruction(r"cp\.async\.(ca|cg)\.shared(::cta)?\.global")
def _cp_async(i):
    ops = i.operands
    n = i.value(ops[2], "uint32_t")
    size = n
    rest = ops[3:]
    if i.has("L2::cache_hint") and rest:
        rest = rest[:-1]
    if rest:
        size = i.value(rest[0], "uint32_t")
    return f"tsim::cp_async({i.shared(ops[0])}, {i.pointer(ops[1])}, {n}, {size});"


@instruction(r"cp\.async\.commit_group$")
def _cp_commit(i):
    return "tsim::cp_async_commit();"


@instruction(r"cp\.async\.wait_group$")
def _cp_wait(i):
    return f"tsim::cp_async_wait({i.value(i.operands[0], 'uint32_t')});"


@instruction(r"cp\.async\.wait_all$")
def _cp_wait_all(i):
    return "tsim::cp_async_wait_all();"


@instruction(r"cp\.async\.mbarrier\.arrive(\.noinc)?(\.shared(::cta)?)?\.b64$")
def _cp_mbar(i):
    if not i.has("shared") and not i.has("shared::cta"):
        return f"tsim::cp_async_mbar(tsim::cvta_shared({i.pointer(i.operands[0])}), {int(i.has('noinc'))});"
    return f"tsim::cp_async_mbar({i.shared(i.operands[0])}, {int(i.has('noinc'))});"


def _tensor_operand(i, op):
    """``[map, {c0, c1, ..}]`` as (map pointer, coordinates)."""
    if not isinstance(op, list) or op[0] != "[" or len(op) != 3:
        raise i.refuse("this tensor address")
    return f"(const void*){i.value(op[1], 'uint64_t')}", [i.value(x, "int32_t") for x in i.group(op[2])]


@instruction(r"cp\.async\.bulk\.prefetch\.tensor\.\dd\.L2\.global")
def _tma_prefetch(i):
    desc, c = _tensor_operand(i, i.operands[0])
    return f"const int32_t _c[] = {{{', '.join(c)}}}; tsim::tma_prefetch({desc}, {len(c)}, _c);"


@instruction(r"cp\.async\.bulk\.prefetch\.L2\.global")
def _bulk_prefetch(i):
    return f"tsim::prefetch_global({i.pointer(i.operands[0])});"


@instruction(r"cp\.async\.bulk\.commit_group$")
def _bulk_commit(i):
    return "tsim::bulk_commit();"


@instruction(r"cp\.async\.bulk\.wait_group(\.read)?$")
def _bulk_wait(i):
    return f"tsim::bulk_wait({i.value(i.operands[0], 'uint32_t')}, {int(i.has('read'))});"


_TMA_LOAD_EXTRA = {"tile", "mbarrier::complete_tx::bytes", "multicast::cluster", "L2::cache_hint", "cta_group::1"}


@instruction(r"cp\.async\.bulk\.tensor\.\dd\.shared::(cluster|cta)\.global")
def _tma_load(i):
    if set(i.parts[6:]) - _TMA_LOAD_EXTRA - {"global"}:
        raise i.refuse()
    desc, c = _tensor_operand(i, i.operands[1])
    if len(c) != int(i.parts[4][0]):
        raise i.refuse("the number of coordinates")
    multicast = i.has("multicast::cluster")
    mask = i.value(i.operands[3], "uint16_t") if multicast else "0"
    return (
        f"const int32_t _c[] = {{{', '.join(c)}}}; tsim::tma_load({i.shared(i.operands[0])}, {desc}, {len(c)}, _c, "
        f"{i.shared(i.operands[2])}, {mask}, {int(multicast)});"
    )


@instruction(r"cp\.(reduce\.)?async\.bulk\.tensor\.\dd\.global\.shared::cta")
def _tma_store(i):
    reduce = "-1"
    if i.opcode.startswith("cp.reduce"):
        op = next((t for t in i.parts if t in ATOMIC_OP), None)
        if op not in ("add", "min", "max"):
            raise i.refuse()
        reduce = f"tsim::{ATOMIC_OP[op]}"
    if "im2col" in i.opcode:
        raise i.refuse()
    desc, c = _tensor_operand(i, i.operands[0])
    source = i.shared(i.operands[1])
    return f"const int32_t _c[] = {{{', '.join(c)}}}; tsim::tma_store({desc}, {len(c)}, _c, {source}, {reduce});"


@instruction(r"cp\.async\.bulk\.shared::(cluster|cta)\.global\.mbarrier::complete_tx::bytes")
def _bulk_load(i):
    multicast = i.has("multicast::cluster")
    mask = i.value(i.operands[4], "uint16_t") if multicast else "0"
    return (
        f"tsim::bulk_load({i.shared(i.operands[0])}, {i.pointer(i.operands[1])}, {i.value(i.operands[2], 'uint32_t')}, "
        f"{i.shared(i.operands[3])}, {mask}, {int(multicast)});"
    )


@instruction(r"cp\.async\.bulk\.shared::cluster\.shared::cta\.mbarrier::complete_tx::bytes")
def _bulk_cluster(i):
    o = i.operands
    return (
        f"tsim::bulk_copy_cluster({i.shared(o[0])}, {i.shared(o[1])}, {i.value(o[2], 'uint32_t')}, {i.shared(o[3])});"
    )


@instruction(r"cp\.(reduce\.)?async\.bulk\.global\.shared::cta\.bulk_group")
def _bulk_store(i):
    reduce, kind = "-1", "0"
    if i.opcode.startswith("cp.reduce"):
        op = next((t for t in i.parts if t in ATOMIC_OP), None)
        kind_token = next((t for t in i.parts if t in ATOMIC_TYPE), None)
        if op not in ("add", "min", "max") or kind_token is None:
            raise i.refuse()
        reduce, kind = f"tsim::{ATOMIC_OP[op]}", f"tsim::{ATOMIC_TYPE[kind_token]}"
    elif i.has("cp_mask"):
        raise i.refuse()
    o = i.operands
    return f"tsim::bulk_store({i.pointer(o[0])}, {i.shared(o[1])}, {i.value(o[2], 'uint32_t')}, {reduce}, {kind});"
