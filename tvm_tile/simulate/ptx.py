"""The PTX instruction table: each opcode pattern and how it is executed by the simulator's runtime.

An emitter gets the parsed instruction and gives C++ statements. What has no emitter is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from .errors import UnsupportedInstructionError

C_TYPE = {
    "b8": "uint8_t", "u8": "uint8_t", "s8": "int8_t", "b16": "uint16_t", "u16": "uint16_t", "s16": "int16_t",
    "b32": "uint32_t", "u32": "uint32_t", "s32": "int32_t", "b64": "uint64_t", "u64": "uint64_t", "s64": "int64_t",
    "f32": "float", "f64": "double", "f16": "half", "bf16": "nv_bfloat16", "f16x2": "half2", "bf16x2": "nv_bfloat162",
    "f32x2": "float2", "tf32": "uint32_t", "pred": "bool",
}  # fmt: skip
BITS = {"uint8_t": 8, "int8_t": 8, "uint16_t": 16, "int16_t": 16, "half": 16, "nv_bfloat16": 16, "uint32_t": 32,
        "int32_t": 32, "float": 32, "half2": 32, "nv_bfloat162": 32, "uint64_t": 64, "int64_t": 64, "double": 64,
        "float2": 64}  # fmt: skip
ELEMENT = {"f16": "EL_F16", "bf16": "EL_BF16", "tf32": "EL_TF32", "e4m3": "EL_E4M3", "e5m2": "EL_E5M2",
           "s8": "EL_S8", "u8": "EL_U8", "f32": "EL_F32", "s32": "EL_S32"}  # fmt: skip
ATOMIC_TYPE = {"u32": "TY_U32", "b32": "TY_U32", "s32": "TY_S32", "u64": "TY_U64", "b64": "TY_U64", "s64": "TY_S64",
               "f32": "TY_F32", "f64": "TY_F64", "f16": "TY_F16", "bf16": "TY_BF16", "f16x2": "TY_F16X2",
               "bf16x2": "TY_BF16X2", "b16": "TY_B16"}  # fmt: skip
ATOMIC_OP = {"add": "AT_ADD", "min": "AT_MIN", "max": "AT_MAX", "exch": "AT_EXCH", "cas": "AT_CAS", "and": "AT_AND",
             "or": "AT_OR", "xor": "AT_XOR", "inc": "AT_INC", "dec": "AT_DEC"}  # fmt: skip

Operand = str | list


@dataclass
class Instruction:
    """One PTX instruction: opcode split at its dots, operands (a list is a ``{...}`` or ``[...]`` group)."""

    opcode: str
    operands: list
    text: str
    registers: dict = field(default_factory=dict)

    @property
    def parts(self) -> list[str]:
        return self.opcode.split(".")

    def has(self, token: str) -> bool:
        return token in self.parts

    def refuse(self, why: str = "") -> UnsupportedInstructionError:
        return UnsupportedInstructionError(
            f"the simulator does not implement the PTX instruction `{self.text}`" + (f": {why}" if why else "")
        )

    # ---- operands as C++ expressions
    def raw(self, op: Operand) -> str:
        """A register, literal or special register as a C++ expression of its own type."""
        if isinstance(op, list):
            raise self.refuse("a group where one register belongs")
        op = op.strip()
        if re.fullmatch(r"%\d+", op):
            return f"_a{op[1:]}"
        if op.startswith("%"):
            name = op[1:]
            if name in self.registers:
                return self.registers[name]
            if name.startswith(("clock", "globaltimer")):
                return "tsim::clock_()"
            return f'tsim::cluster_special("{name}")'
        if op in self.registers:
            return self.registers[op]
        if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", op):
            return f"tsim::f_from(0x{op[2:]}u)"
        if re.fullmatch(r"[+-]?(0[xX][0-9a-fA-F]+|\d+)U?", op):
            value = op.rstrip("U")
            return f"(int64_t){value}ll" if not value.startswith("0x") else f"(int64_t){value}ull"
        if re.fullmatch(r"[+-]?\d*\.\d+([eE][+-]?\d+)?", op):
            return f"(float){op}"
        raise self.refuse(f"operand `{op}`")

    def value(self, op: Operand, ctype: str) -> str:
        """An operand read as ``ctype`` (a register's low bits, or a converted literal)."""
        expr = self.raw(op)
        if expr.startswith("(int64_t)"):
            if ctype in ("half", "nv_bfloat16", "half2", "nv_bfloat162", "float2"):
                return f"tsim::as<{ctype}>({expr})"
            return f"({ctype}){expr}"
        return f"tsim::as<{ctype}>({expr})"

    def pred(self, op: str) -> str:
        op = op.strip()
        if op.startswith("!"):
            return f"!({self.raw(op[1:])})"
        return f"(({self.raw(op)}) != 0)"

    def group(self, op: Operand) -> list:
        return [x for x in op[1:]] if isinstance(op, list) else [op]

    def address(self, op: Operand) -> tuple[str, str]:
        """(base expression, byte offset) of ``[%0]`` or ``[%0+16]``."""
        if not isinstance(op, list) or op[0] != "[" or len(op) != 2:
            raise self.refuse("this address form")
        m = re.fullmatch(r"(%?[\w.]+)\s*(?:\+\s*(-?\w+))?", op[1].strip())
        if not m:
            raise self.refuse("this address form")
        return self.raw(m.group(1)), m.group(2) or "0"

    def shared(self, op: Operand) -> str:
        base, off = self.address(op)
        return f"(uint32_t)(tsim::as<uint32_t>({base}) + ({off}))"

    def pointer(self, op: Operand) -> str:
        base, off = self.address(op)
        return f"(void*)(tsim::as<uint64_t>({base}) + ({off}))"

    def store(self, op: Operand, expr: str) -> str:
        if isinstance(op, str) and op.strip() == "_":
            return f"(void)({expr});"
        return f"tsim::set({self.raw(op)}, {expr});"

    def dtype(self) -> str:
        for token in reversed(self.parts):
            if token in C_TYPE:
                return token
        raise self.refuse("no type")


TABLE: list[tuple[re.Pattern, Callable[[Instruction], str]]] = []


def instruction(pattern: str):
    """Register an emitter for opcodes that match ``pattern`` from their start."""

    def register(fn):
        TABLE.append((re.compile(pattern), fn))
        return fn

    return register


def emit(ins: Instruction) -> str:
    """C++ statements that execute one instruction."""
    for pattern, fn in TABLE:
        if pattern.match(ins.opcode):
            return fn(ins)
    raise ins.refuse()


# ------------------------------------------------------------------------------------------------ wgmma, mma, matrices
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
    m = re.match(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k(\d+)(\.satfinite)?\.(\w+)\.(\w+)\.(\w+)(\.satfinite)?$", i.opcode)
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
        f"(uint32_t)(({scale}) != 0), (int)({neg[0]}), (int)({neg[1]}), (int)({trans[0]}), (int)({trans[1]}), {int(sat)}}}; "
        f"tsim::wgmma(_w, _d, {'_ar' if rs else 'nullptr'});"
    )


@instruction(r"mma\.sync\.aligned\.m16n8k\d+\.row\.col\.")
def _mma(i):
    m = re.match(r"mma\.sync\.aligned\.m16n8k(\d+)\.row\.col(?:\.kind::\w+)?(\.satfinite)?\.(\w+)\.(\w+)\.(\w+)\.(\w+)$", i.opcode)
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


# ------------------------------------------------------------------------------------------------ asynchronous copies
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
    return f"const int32_t _c[] = {{{', '.join(c)}}}; tsim::tma_store({desc}, {len(c)}, _c, {i.shared(i.operands[1])}, {reduce});"


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
    return f"tsim::bulk_copy_cluster({i.shared(o[0])}, {i.shared(o[1])}, {i.value(o[2], 'uint32_t')}, {i.shared(o[3])});"


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


# ------------------------------------------------------------------------------------------------ barriers and fences
def _mbar_address(i, op):
    if any(p.startswith("shared") for p in i.parts):
        return i.shared(op)
    return f"tsim::cvta_shared({i.pointer(op)})"


@instruction(r"mbarrier\.init\.")
def _mbar_init(i):
    return f"tsim::mbar_init({_mbar_address(i, i.operands[0])}, {i.value(i.operands[1], 'uint32_t')});"


@instruction(r"mbarrier\.inval\.")
def _mbar_inval(i):
    return f"tsim::mbar_inval({_mbar_address(i, i.operands[0])});"


@instruction(r"mbarrier\.expect_tx\.")
def _mbar_expect(i):
    return f"tsim::mbar_expect({_mbar_address(i, i.operands[0])}, {i.value(i.operands[1], 'uint32_t')});"


@instruction(r"mbarrier\.complete_tx\.")
def _mbar_complete(i):
    return f"tsim::mbar_complete({_mbar_address(i, i.operands[0])}, {i.value(i.operands[1], 'uint32_t')});"


@instruction(r"mbarrier\.arrive(_drop)?\.")
def _mbar_arrive(i):
    o = i.operands
    has_dst = not isinstance(o[0], list)
    addr = _mbar_address(i, o[1] if has_dst else o[0])
    rest = o[2:] if has_dst else o[1:]
    if i.has("noComplete"):
        raise i.refuse()
    if i.has("expect_tx"):
        call = f"tsim::mbar_arrive_expect({addr}, {i.value(rest[0], 'uint32_t')})"
    else:
        n = i.value(rest[0], "uint32_t") if rest else "1"
        call = f"tsim::mbar_arrive({addr}, {n}, {int(i.opcode.startswith('mbarrier.arrive_drop'))})"
    return i.store(o[0], call) if has_dst else call + ";"


@instruction(r"mbarrier\.(try|test)_wait\.")
def _mbar_wait(i):
    blocking = int(i.opcode.startswith("mbarrier.try_wait"))
    addr = _mbar_address(i, i.operands[1])
    if i.has("parity"):
        call = f"tsim::mbar_wait_parity({addr}, {i.value(i.operands[2], 'uint32_t')}, {blocking})"
    else:
        call = f"tsim::mbar_wait_state({addr}, {i.value(i.operands[2], 'uint64_t')}, {blocking})"
    return f"tsim::set_pred({i.raw(i.operands[0])}, {call});"


@instruction(r"(bar|barrier)(\.cta)?\.(sync|arrive)(\.aligned)?$")
def _bar(i):
    n = i.value(i.operands[1], "uint32_t") if len(i.operands) > 1 else "0"
    name = "bar_arrive" if i.has("arrive") else "bar_sync"
    return f"tsim::{name}({i.value(i.operands[0], 'uint32_t')}, {n});"


@instruction(r"(bar|barrier)(\.cta)?\.red\.")
def _bar_red(i):
    op = {"and": 0, "or": 1, "popc": 2}[next(p for p in i.parts if p in ("and", "or", "popc"))]
    count = i.value(i.operands[2], "uint32_t") if len(i.operands) > 3 else "0"
    call = f"tsim::bar_red({i.value(i.operands[1], 'uint32_t')}, {count}, {op}, {i.pred(i.operands[-1])})"
    return i.store(i.operands[0], call)


@instruction(r"bar\.warp\.sync$")
def _warp_sync(i):
    return f"tsim::warp_sync({i.value(i.operands[0], 'uint32_t')});"


@instruction(r"barrier\.cluster\.arrive")
def _cluster_arrive(i):
    return f"tsim::cluster_arrive({int(not i.has('relaxed'))});"


@instruction(r"barrier\.cluster\.wait")
def _cluster_wait(i):
    return "tsim::cluster_wait(1);"


@instruction(r"fence\.proxy\.async")
def _fence_async(i):
    return "tsim::proxy_fence();"


@instruction(r"fence\.proxy\.(alias|tensormap)")
def _fence_other(i):
    return "tsim::thread_fence(1);"


@instruction(r"fence\.mbarrier_init\.")
def _fence_init(i):
    return "tsim::thread_fence(1);"


@instruction(r"(fence(\.sc|\.acq_rel|\.acquire|\.release)?\.|membar\.)(\w+)$")
def _fence(i):
    return "tsim::thread_fence(1);"


@instruction(r"griddepcontrol\.(wait|launch_dependents)$")
def _griddep(i):
    return f'tsim::count_op("{i.opcode}");'


# ------------------------------------------------------------------------------------------------ warp collectives
@instruction(r"shfl\.sync\.(idx|up|down|bfly)\.b32$")
def _shfl(i):
    mode = {"idx": 0, "up": 1, "down": 2, "bfly": 3}[i.parts[2]]
    dst, _, p = i.operands[0].partition("|")
    v, b, c, mask = (i.value(x, "uint32_t") for x in i.operands[1:5])
    code = f"uint32_t _v = {v}, _r, _p; tsim::shfl({mask}, {mode}, &_v, &_r, 4, {b}, {c}, &_p); {i.store(dst, '_r')}"
    return code + (f" tsim::set_pred({i.raw(p)}, _p);" if p else "")


@instruction(r"vote\.sync\.(all|any|uni|ballot)\.")
def _vote(i):
    kind, o = i.parts[2], i.operands
    p, mask = i.pred(o[1]), i.value(o[2], "uint32_t")
    if kind == "ballot":
        return i.store(o[0], f"tsim::ballot({mask}, {p})")
    if kind == "any":
        return f"tsim::set_pred({i.raw(o[0])}, tsim::ballot({mask}, {p}) != 0);"
    if kind == "all":
        return f"tsim::set_pred({i.raw(o[0])}, tsim::ballot({mask}, !({p})) == 0);"
    return f"uint32_t _b = tsim::ballot({mask}, {p}); tsim::set_pred({i.raw(o[0])}, _b == 0 || _b == ({mask}));"


@instruction(r"match\.(any|all)\.sync\.b(32|64)$")
def _match(i):
    dst, _, p = i.operands[0].partition("|")
    code = (
        f"uint32_t _p; {i.store(dst, f'''tsim::match({i.value(i.operands[2], 'uint32_t')}, {i.value(i.operands[1], 'uint64_t')}, {int(i.has('all'))}, &_p)''')}"
    )
    return code + (f" tsim::set_pred({i.raw(p)}, _p);" if p else "")


@instruction(r"redux\.sync\.(add|min|max|and|or|xor)\.(u32|s32|b32)$")
def _redux(i):
    o = i.operands
    return i.store(o[0], f"tsim::redux({i.value(o[2], 'uint32_t')}, tsim::{ATOMIC_OP[i.parts[2]]}, {int(i.has('s32'))}, {i.value(o[1], 'uint32_t')})")


@instruction(r"elect\.sync$")
def _elect(i):
    dst, _, p = i.operands[0].partition("|")
    code = f"uint32_t _l; uint32_t _p = tsim::elect({i.value(i.operands[1], 'uint32_t')}, &_l);"
    if dst.strip() != "_":
        code += " " + i.store(dst, "_l")
    return code + (f" tsim::set_pred({i.raw(p)}, _p);" if p else "")


@instruction(r"activemask\.b32$")
def _activemask(i):
    return i.store(i.operands[0], "tsim::active_mask()")


# ------------------------------------------------------------------------------------------------ memory
_CACHE = re.compile(r"^(weak|nc|ca|cg|cs|cv|lu|wb|wt|L1::\w+|L2::\w+|evict_\w+|level::\w+)$")


def _memory_form(i):
    """(space, vector length, type token, synchronising) of ld, st, atom, red."""
    space, vec, sync, kind = "generic", 1, False, None
    for token in i.parts[1:]:
        if token.startswith("shared"):
            space = "shared"
        elif token == "global":
            space = "global"
        elif re.fullmatch(r"v[248]", token):
            vec = int(token[1])
        elif token in C_TYPE or token in ("b128",):
            kind = token
        elif token in ("relaxed", "acquire", "release", "acq_rel", "mmio"):
            sync = True
        elif token in ("volatile", "cta", "cluster", "gpu", "sys", "unified", "noftz") or _CACHE.match(token):
            pass
        elif token in ATOMIC_OP:
            pass
        else:
            raise i.refuse(f"`.{token}`")
    return space, vec, kind, sync


@instruction(r"ld\.")
def _ld(i):
    space, vec, kind, sync = _memory_form(i)
    if kind not in C_TYPE:
        raise i.refuse()
    ctype = C_TYPE[kind]
    size = BITS[ctype] // 8
    regs = i.group(i.operands[0])
    if len(regs) != vec:
        raise i.refuse("register count")
    if sync and space != "shared":
        if vec != 1 or kind not in ATOMIC_TYPE:
            raise i.refuse()
        return i.store(regs[0], f"({ctype})tsim::ld_sync({i.pointer(i.operands[1])}, {size}, tsim::{'TY_U32' if size == 4 else 'TY_U64' if size == 8 else 'TY_B16'})")
    fn, addr = ("load_shared", i.shared(i.operands[1])) if space == "shared" else ("load_global", i.pointer(i.operands[1]))
    if space != "shared":
        out = " ".join(i.store(r, f"_v[{j}]") for j, r in enumerate(regs) if str(r).strip() != "_")
        return f"{ctype} _v[{vec}]; tsim::{fn}({addr}, _v, {size * vec}, {size}); {out}"
    out = " ".join(
        f"if (_u >> {j} & 1) tsim::undefined_register(&{i.raw(r)}, sizeof({i.raw(r)})); else {i.store(r, f'_v[{j}]')}"
        for j, r in enumerate(regs)
        if str(r).strip() != "_"
    )
    return f"{ctype} _v[{vec}]; const uint32_t _u = tsim::{fn}({addr}, _v, {size * vec}, {size}); {out}"


@instruction(r"st\.(?!async|bulk)")
def _st(i):
    space, vec, kind, sync = _memory_form(i)
    if kind not in C_TYPE:
        raise i.refuse()
    ctype = C_TYPE[kind]
    size = BITS[ctype] // 8
    regs = i.group(i.operands[1])
    if len(regs) != vec:
        raise i.refuse("register count")
    values = ", ".join(i.value(r, ctype) for r in regs)
    if sync and space != "shared":
        if vec != 1:
            raise i.refuse()
        t = "TY_U32" if size == 4 else "TY_U64" if size == 8 else "TY_B16"
        return f"{ctype} _v = {values}; tsim::atomic_generic({i.pointer(i.operands[0])}, {size}, tsim::AT_EXCH, tsim::{t}, &_v, nullptr, nullptr);"
    fn, addr = ("store_shared", i.shared(i.operands[0])) if space == "shared" else ("store_global", i.pointer(i.operands[0]))
    return f"const {ctype} _v[{vec}] = {{{values}}}; tsim::{fn}({addr}, _v, {size * vec}, {size});"


@instruction(r"(atom|red)\.(?!async)")
def _atom(i):
    space, vec, kind, _ = _memory_form(i)
    op = next((t for t in i.parts if t in ATOMIC_OP), None)
    if kind not in ATOMIC_TYPE or op is None:
        raise i.refuse()
    ctype = C_TYPE[kind]
    size = BITS[ctype] // 8
    o = list(i.operands)
    dst = o.pop(0) if i.opcode.startswith("atom") else None
    addr = i.shared(o[0]) if space == "shared" else i.pointer(o[0])
    fn = "atomic_shared" if space == "shared" else "atomic_generic"
    bs = i.group(o[1])
    if len(bs) != vec:
        raise i.refuse("register count")
    code = []
    for j, b in enumerate(bs):
        second = "nullptr"
        decl = f"{ctype} _b{j} = {i.value(b, ctype)}, _o{j};"
        if op == "cas":
            decl += f" {ctype} _c{j} = {i.value(o[2], ctype)};"
            second = f"&_c{j}"
        at = f"{addr} + {j * size}" if space == "shared" else f"(void*)((char*){addr} + {j * size})"
        code.append(f"{decl} tsim::{fn}({at}, {size}, tsim::{ATOMIC_OP[op]}, tsim::{ATOMIC_TYPE[kind]}, &_b{j}, {second}, &_o{j});")
    if dst is not None:
        code += [i.store(d, f"_o{j}") for j, d in enumerate(i.group(dst)) if str(d).strip() != "_"]
    return " ".join(code)


@instruction(r"prefetch\.tensormap$")
def _prefetch_map(i):
    return f"tsim::prefetch_map({i.pointer(i.operands[0])});"


@instruction(r"prefetch(u)?\.")
def _prefetch(i):
    return f"tsim::prefetch_global({i.pointer(i.operands[0])});"


@instruction(r"createpolicy\.")
def _createpolicy(i):
    return i.store(i.operands[0], "(uint64_t)0")


@instruction(r"mapa\.")
def _mapa(i):
    o = i.operands
    if i.has("shared::cluster"):
        return i.store(o[0], f"tsim::mapa({i.value(o[1], 'uint32_t')}, {i.value(o[2], 'uint32_t')})")
    return i.store(o[0], f"tsim::mapa64((void*){i.value(o[1], 'uint64_t')}, {i.value(o[2], 'uint32_t')})")


@instruction(r"cvta\.to\.shared\.(u64|u32)$")
def _cvta_to(i):
    return i.store(i.operands[0], f"tsim::cvta_shared((void*){i.value(i.operands[1], 'uint64_t')})")


@instruction(r"cvta\.shared\.(u64|u32)$")
def _cvta_from(i):
    return i.store(i.operands[0], f"(uint64_t)tsim::cvta_generic({i.value(i.operands[1], 'uint32_t')})")


@instruction(r"cvta\.(to\.)?global\.u64$")
def _cvta_global(i):
    return i.store(i.operands[0], i.value(i.operands[1], "uint64_t"))


@instruction(r"nanosleep\.u32$")
def _nanosleep(i):
    return f"tsim::nanosleep_({i.value(i.operands[0], 'uint32_t')});"


@instruction(r"trap$")
def _trap(i):
    return 'tsim::trap("trap");'


# ------------------------------------------------------------------------------------------------ registers
@instruction(r"setp\.")
def _setp(i):
    cmp = i.parts[1]
    ctype = C_TYPE[i.dtype()]
    a, b = i.value(i.operands[1], ctype), i.value(i.operands[2], ctype)
    op = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "lo": "<", "ls": "<=", "hi": ">", "hs": ">="}
    if cmp in op and not (i.has("and") or i.has("or") or i.has("xor")) and "|" not in str(i.operands[0]):
        test = f"({a}) {op[cmp]} ({b})"
        if ctype in ("float", "double", "half", "nv_bfloat16") and cmp == "ne":
            test = f"({a}) < ({b}) || ({a}) > ({b})"
        return f"tsim::set_pred({i.raw(i.operands[0])}, {test});"
    if cmp in ("ltu", "leu", "gtu", "geu", "equ", "neu") and len(i.operands) == 3:
        base = op[cmp[:2]]
        return f"tsim::set_pred({i.raw(i.operands[0])}, ({a}) {base} ({b}) || ({a}) != ({a}) || ({b}) != ({b}));"
    raise i.refuse()


@instruction(r"selp\.")
def _selp(i):
    ctype = C_TYPE[i.dtype()]
    o = i.operands
    return i.store(o[0], f"({i.pred(o[3])} ? {i.value(o[1], ctype)} : {i.value(o[2], ctype)})")


@instruction(r"mov\.")
def _mov(i):
    kind = i.dtype() if not i.has("b128") else None
    if kind is None:
        raise i.refuse()
    dst, src = i.operands
    if isinstance(dst, list) or isinstance(src, list):  # pack or unpack
        whole = C_TYPE[kind]
        parts = i.group(dst if isinstance(dst, list) else src)
        part = {(64, 2): "uint32_t", (64, 4): "uint16_t", (32, 2): "uint16_t", (32, 4): "uint8_t", (16, 2): "uint8_t"}.get((BITS[whole], len(parts)))
        if part is None:
            raise i.refuse()
        if isinstance(dst, list):
            out = " ".join(i.store(r, f"_v[{j}]") for j, r in enumerate(parts) if str(r).strip() != "_")
            return f"{whole} _w = {i.value(src, whole)}; {part} _v[{len(parts)}]; __builtin_memcpy(_v, &_w, sizeof _w); {out}"
        vals = ", ".join(i.value(r, part) for r in parts)
        return f"const {part} _v[] = {{{vals}}}; {whole} _w; __builtin_memcpy(&_w, _v, sizeof _w); {i.store(dst, '_w')}"
    if kind == "pred":
        return f"tsim::set_pred({i.raw(dst)}, {i.pred(src)});"
    return i.store(dst, i.value(src, C_TYPE[kind]))


def _pairwise(i, fn, n):
    ctype = C_TYPE[i.dtype()]
    args = ", ".join(i.value(x, ctype) for x in i.operands[1 : 1 + n])
    out = f"tsim::{fn}({args})"
    if i.has("relu"):
        out = f"tsim::p_relu({out})" if ctype not in ("half2", "nv_bfloat162") else f"tsim::p_max({out}, {ctype}({ctype[:-1] if ctype == 'half2' else 'nv_bfloat16'}(0), {'half' if ctype == 'half2' else 'nv_bfloat16'}(0)))"
    if i.has("sat") and ctype == "float":
        out = f"__saturatef({out})"
    if i.has("ftz") and ctype == "float":
        out = f"tsim::p_ftz({out})"
    return i.store(i.operands[0], out)


_ROUND = r"(\.(rn|rz|rm|rp|ftz|sat|relu|oob|full|approx))*"


@instruction(r"(add|sub|mul|div)" + _ROUND + r"\.(f16|bf16|f16x2|bf16x2|f32|f64|f32x2)$")
def _float_arith(i):
    if (i.has("rz") or i.has("rm") or i.has("rp")) and i.dtype() != "f64":
        raise i.refuse("only rounding to nearest")
    return _pairwise(i, f"p_{i.parts[0]}", 2)


@instruction(r"(add|sub)(\.sat)?\.(u16|s16|u32|s32|u64|s64)$")
def _int_arith(i):
    if i.has("sat"):
        raise i.refuse()
    return _pairwise(i, f"p_{i.parts[0]}", 2)


@instruction(r"(fma|mad)" + _ROUND + r"\.(f16|bf16|f16x2|bf16x2|f32|f64|f32x2)$")
def _fma(i):
    if i.has("rz") or i.has("rm") or i.has("rp"):
        raise i.refuse("only rounding to nearest")
    return _pairwise(i, "p_fma", 3)


@instruction(r"(mul|mad)\.(lo|hi|wide)\.(u16|s16|u32|s32|u64|s64)$")
def _int_mul(i):
    kind = i.dtype()
    ctype, signed = C_TYPE[kind], kind[0] == "s"
    wide = "__int128" if signed else "unsigned __int128"
    out = f"(({wide}){i.value(i.operands[1], ctype)} * ({wide}){i.value(i.operands[2], ctype)})"
    result = ctype
    if i.parts[1] == "hi":
        out = f"({ctype})({out} >> {BITS[ctype]})"
    elif i.parts[1] == "wide":
        result = C_TYPE[kind[0] + str(BITS[ctype] * 2)]
        out = f"({result}){out}"
    else:
        out = f"({ctype}){out}"
    if i.parts[0] == "mad":
        out = f"({result})({out} + {i.value(i.operands[3], result)})"
    return i.store(i.operands[0], out)


@instruction(r"(div|rem)\.(u16|s16|u32|s32|u64|s64)$")
def _int_div(i):
    ctype = C_TYPE[i.dtype()]
    return i.store(i.operands[0], f"({ctype})({i.value(i.operands[1], ctype)} {'/' if i.parts[0] == 'div' else '%'} {i.value(i.operands[2], ctype)})")


@instruction(r"(min|max)(\.ftz)?(\.NaN)?(\.xorsign\.abs)?(\.relu)?\.\w+$")
def _minmax(i):
    if i.has("xorsign"):
        raise i.refuse()
    if i.has("NaN") and i.dtype() in ("f16x2", "bf16x2"):
        raise i.refuse()
    return _pairwise(i, f"p_{i.parts[0]}" + ("_nan" if i.has("NaN") else ""), 2)


@instruction(r"(neg|abs)(\.ftz)?\.\w+$")
def _unary(i):
    return _pairwise(i, f"p_{i.parts[0]}", 1)


@instruction(r"(and|or|xor|not)\.(b16|b32|b64|pred)$")
def _bits(i):
    ctype = C_TYPE[i.dtype()]
    if ctype == "bool":
        a = [i.pred(x) for x in i.operands[1:]]
        out = f"!({a[0]})" if i.parts[0] == "not" else f"({a[0]}) {({'and': '&&', 'or': '||', 'xor': '!='})[i.parts[0]]} ({a[1]})"
        return f"tsim::set_pred({i.raw(i.operands[0])}, {out});"
    a = [i.value(x, ctype) for x in i.operands[1:]]
    out = f"~{a[0]}" if i.parts[0] == "not" else f"{a[0]} {({'and': '&', 'or': '|', 'xor': '^'})[i.parts[0]]} {a[1]}"
    return i.store(i.operands[0], f"({ctype})({out})")


@instruction(r"(shl|shr)\.\w+$")
def _shift(i):
    ctype = C_TYPE[i.dtype()]
    return i.store(i.operands[0], f"tsim::p_{i.parts[0]}<{ctype}>({i.value(i.operands[1], ctype)}, {i.value(i.operands[2], 'uint32_t')})")


@instruction(r"(ex2|lg2|rcp|rsqrt|sqrt|sin|cos|tanh)" + _ROUND + r"\.(f16|bf16|f16x2|bf16x2|f32|f64)$")
def _special(i):
    ctype = C_TYPE[i.dtype()]
    arg = i.value(i.operands[1], ctype)
    out = f"tsim::p_map({arg}, tsim::f_{i.parts[0]})"
    if ctype == "float" and i.has("ftz"):
        out = f"tsim::p_ftz(tsim::p_map(tsim::p_ftz({arg}), tsim::f_{i.parts[0]}))"
    return i.store(i.operands[0], out)


@instruction(r"(popc|clz|brev|ffs)\.b(32|64)$")
def _count(i):
    wide = "ll" if i.has("b64") else ""
    if i.parts[0] == "brev" and wide:
        raise i.refuse()
    ctype = C_TYPE[i.dtype()]
    return i.store(i.operands[0], f"(uint32_t)__{i.parts[0]}{wide}({i.value(i.operands[1], ctype)})")


@instruction(r"prmt\.b32$")
def _prmt(i):
    return i.store(i.operands[0], f"__byte_perm({', '.join(i.value(x, 'uint32_t') for x in i.operands[1:4])})")


@instruction(r"lop3\.b32$")
def _lop3(i):
    a, b, c = (i.value(x, "uint32_t") for x in i.operands[1:4])
    lut = i.value(i.operands[4], "uint32_t")
    return (
        f"uint32_t _x = {a}, _y = {b}, _z = {c}, _t = {lut}, _r = 0; for (int _i = 0; _i < 8; _i++) if (_t >> _i & 1) "
        f"_r |= (_i & 4 ? _x : ~_x) & (_i & 2 ? _y : ~_y) & (_i & 1 ? _z : ~_z); {i.store(i.operands[0], '_r')}"
    )


@instruction(r"shf\.(l|r)\.(wrap|clamp)\.b32$")
def _shf(i):
    a, b, n = (i.value(x, "uint32_t") for x in i.operands[1:4])
    amount = f"(({n}) & 31)" if i.has("wrap") else f"(({n}) > 32 ? 32 : ({n}))"
    whole = f"((uint64_t){b} << 32 | {a})"
    out = f"(uint32_t)({whole} >> {amount})" if i.parts[1] == "r" else f"(uint32_t)(({whole} << {amount}) >> 32)"
    return i.store(i.operands[0], out)


@instruction(r"dp4a\.(u32|s32)\.(u32|s32)$")
def _dp4a(i):
    cast = ["(int8_t)" if t == "s32" else "(uint8_t)" for t in i.parts[1:3]]
    a, b, c = (i.value(x, "uint32_t") for x in i.operands[1:4])
    return (
        f"uint32_t _x = {a}, _y = {b}; int32_t _r = (int32_t){c}; for (int _i = 0; _i < 4; _i++) "
        f"_r += (int){cast[0]}(_x >> 8 * _i) * (int){cast[1]}(_y >> 8 * _i); {i.store(i.operands[0], '_r')}"
    )


@instruction(r"cvt\.")
def _cvt(i):
    types = [t for t in i.parts if t in C_TYPE or t in ("e4m3x2", "e5m2x2")]
    if len(types) != 2:
        raise i.refuse()
    to, frm = types
    mods = set(i.parts[1:]) - {to, frm}
    if mods - {"rn", "rz", "rm", "rp", "rna", "rni", "rzi", "rmi", "rpi", "ftz", "sat", "satfinite", "relu"}:
        raise i.refuse()
    o = i.operands
    relu = (lambda e: f"tsim::p_relu({e})") if "relu" in mods else (lambda e: e)
    if to in ("f16x2", "bf16x2") and frm == "f32":
        one = "half" if to == "f16x2" else "nv_bfloat16"

        def half_of(x):
            e = relu(i.value(x, "float"))
            if one == "half":
                if "rz" in mods:
                    return f"tsim::f_to_half_rz({e})"
                return f"tsim::f_to_half({e}, {int('satfinite' in mods)})"
            return f"tsim::f_to_bf({e}, {int('rz' in mods)}, {int('satfinite' in mods)})"

        return i.store(o[0], f"{C_TYPE[to]}({half_of(o[2])}, {half_of(o[1])})")
    if to in ("e4m3x2", "e5m2x2"):
        f = f"tsim::f_to_{to[:4]}"
        if frm == "f32":
            hi, lo = relu(i.value(o[1], "float")), relu(i.value(o[2], "float"))
            return i.store(o[0], f"(uint16_t)({f}({lo}) | {f}({hi}) << 8)")
        if frm in ("f16x2", "bf16x2"):
            v = i.value(o[1], C_TYPE[frm])
            return f"{C_TYPE[frm]} _h = {v}; " + i.store(o[0], f"(uint16_t)({f}({relu('(float)_h.x')}) | {f}({relu('(float)_h.y')}) << 8)")
        raise i.refuse()
    if frm in ("e4m3x2", "e5m2x2"):
        if to != "f16x2":
            raise i.refuse()
        f = f"tsim::{frm[:4]}_to_f"
        return f"uint16_t _q = {i.value(o[1], 'uint16_t')}; " + i.store(o[0], f"half2({relu(f'half({f}(_q & 255))')}, {relu(f'half({f}(_q >> 8))')})")
    if to == "tf32":
        if frm != "f32" or "relu" in mods:
            raise i.refuse()
        return i.store(o[0], f"tsim::f_to_tf32({i.value(o[1], 'float')})")
    if len(o) != 2 or "x2" in to or "x2" in frm:
        raise i.refuse()
    is_float = {"f16", "bf16", "f32", "f64"}
    src = i.value(o[1], C_TYPE[frm])
    if to in is_float:
        e = f"(float)({src})" if to != "f64" else f"(double)({src})"
        mode = next((m for m in ("rni", "rzi", "rmi", "rpi") if m in mods), None)
        if mode:
            e = f"(float)tsim::p_round({e}, '{mode[1]}')"
        if "sat" in mods:
            e = f"__saturatef({e})"
        e = relu(e)
        if to == "bf16":
            e = f"tsim::f_to_bf({e}, {int('rz' in mods)}, {int('satfinite' in mods)})"
        elif to == "f16":
            e = f"tsim::f_to_half_rz({e})" if "rz" in mods else f"tsim::f_to_half({e}, {int('satfinite' in mods)})"
        elif "rz" in mods or "rm" in mods or "rp" in mods:
            raise i.refuse("only rounding to nearest")
        return i.store(o[0], e)
    if frm in is_float:
        mode = next((m[1] for m in ("rni", "rzi", "rmi", "rpi") if m in mods), None)
        if mode is None:
            raise i.refuse("no integer rounding")
        return i.store(o[0], f"tsim::f_to_int<{C_TYPE[to]}>((double)(float)({src}), '{mode}')" if frm != "f64" else f"tsim::f_to_int<{C_TYPE[to]}>({src}, '{mode}')")
    if "sat" in mods:
        return i.store(o[0], f"tsim::int_to_int_sat<{C_TYPE[to]}>({src})")
    return i.store(o[0], f"({C_TYPE[to]})({src})")
