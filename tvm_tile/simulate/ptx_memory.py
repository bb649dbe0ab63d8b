"""Loads, stores, atomics and addresses."""

from __future__ import annotations

import re

from .ptx import ATOMIC_OP, ATOMIC_TYPE, BITS, C_TYPE, instruction

# -------------------------------------------------------------------------------- memory
_WORD = {2: "TY_B16", 4: "TY_U32", 8: "TY_U64"}  # a synchronising access moves bits only
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
        if vec != 1 or size not in _WORD:
            raise i.refuse()
        return i.store(
            regs[0],
            f"({ctype})tsim::ld_sync({i.pointer(i.operands[1])}, {size}, tsim::{_WORD[size]})",
        )
    fn, addr = (
        ("load_shared", i.shared(i.operands[1])) if space == "shared" else ("load_global", i.pointer(i.operands[1]))
    )
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
        if vec != 1 or size not in _WORD:
            raise i.refuse()
        return (
            f"{ctype} _v = {values}; tsim::atomic_generic({i.pointer(i.operands[0])}, {size}, tsim::AT_EXCH, "
            f"tsim::{_WORD[size]}, &_v, nullptr, nullptr);"
        )
    fn, addr = (
        ("store_shared", i.shared(i.operands[0])) if space == "shared" else ("store_global", i.pointer(i.operands[0]))
    )
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
        code.append(
            f"{decl} tsim::{fn}({at}, {size}, tsim::{ATOMIC_OP[op]}, tsim::{ATOMIC_TYPE[kind]}, "
            f"&_b{j}, {second}, &_o{j});"
        )
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
