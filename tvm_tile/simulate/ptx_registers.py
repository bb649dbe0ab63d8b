"""Moves, predicates, arithmetic and conversions of registers."""

from __future__ import annotations

from .ptx import BITS, C_TYPE, instruction


# -------------------------------------------------------------------------------- registers
@instruction(r"setp\.")
def _setp(i):
    cmp = i.parts[1]
    ctype = C_TYPE[i.dtype()]
    a, b = i.value(i.operands[1], ctype), i.value(i.operands[2], ctype)
    op = {
        "eq": "==",
        "ne": "!=",
        "lt": "<",
        "le": "<=",
        "gt": ">",
        "ge": ">=",
        "lo": "<",
        "ls": "<=",
        "hi": ">",
        "hs": ">=",
    }
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
        part = {
            (64, 2): "uint32_t",
            (64, 4): "uint16_t",
            (32, 2): "uint16_t",
            (32, 4): "uint8_t",
            (16, 2): "uint8_t",
        }.get((BITS[whole], len(parts)))
        if part is None:
            raise i.refuse()
        if isinstance(dst, list):
            out = " ".join(i.store(r, f"_v[{j}]") for j, r in enumerate(parts) if str(r).strip() != "_")
            return (
                f"{whole} _w = {i.value(src, whole)}; {part} _v[{len(parts)}]; "
                f"__builtin_memcpy(_v, &_w, sizeof _w); {out}"
            )
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
        out = (
            f"tsim::p_relu({out})"
            if ctype not in ("half2", "nv_bfloat162")
            else f"tsim::p_max({out}, {ctype}({ctype[:-1]}(0), {ctype[:-1]}(0)))"
        )
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
    ctype, op = C_TYPE[i.dtype()], "/" if i.parts[0] == "div" else "%"
    return i.store(
        i.operands[0],
        f"({ctype})({i.value(i.operands[1], ctype)} {op} {i.value(i.operands[2], ctype)})",
    )


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
        out = (
            f"!({a[0]})"
            if i.parts[0] == "not"
            else f"({a[0]}) {({'and': '&&', 'or': '||', 'xor': '!='})[i.parts[0]]} ({a[1]})"
        )
        return f"tsim::set_pred({i.raw(i.operands[0])}, {out});"
    a = [i.value(x, ctype) for x in i.operands[1:]]
    out = f"~{a[0]}" if i.parts[0] == "not" else f"{a[0]} {({'and': '&', 'or': '|', 'xor': '^'})[i.parts[0]]} {a[1]}"
    return i.store(i.operands[0], f"({ctype})({out})")


@instruction(r"(shl|shr)\.\w+$")
def _shift(i):
    ctype = C_TYPE[i.dtype()]
    return i.store(
        i.operands[0],
        f"tsim::p_{i.parts[0]}<{ctype}>({i.value(i.operands[1], ctype)}, {i.value(i.operands[2], 'uint32_t')})",
    )


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
            return f"{C_TYPE[frm]} _h = {v}; " + i.store(
                o[0], f"(uint16_t)({f}({relu('(float)_h.x')}) | {f}({relu('(float)_h.y')}) << 8)"
            )
        raise i.refuse()
    if frm in ("e4m3x2", "e5m2x2"):
        if to != "f16x2":
            raise i.refuse()
        f = f"tsim::{frm[:4]}_to_f"
        return f"uint16_t _q = {i.value(o[1], 'uint16_t')}; " + i.store(
            o[0], f"half2({relu(f'half({f}(_q & 255))')}, {relu(f'half({f}(_q >> 8))')})"
        )
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
        return i.store(
            o[0],
            f"tsim::f_to_int<{C_TYPE[to]}>((double)(float)({src}), '{mode}')"
            if frm != "f64"
            else f"tsim::f_to_int<{C_TYPE[to]}>({src}, '{mode}')",
        )
    if "sat" in mods:
        return i.store(o[0], f"tsim::int_to_int_sat<{C_TYPE[to]}>({src})")
    return i.store(o[0], f"({C_TYPE[to]})({src})")
