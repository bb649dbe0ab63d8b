"""Barriers, fences and warp collectives."""

from __future__ import annotations

from .ptx import ATOMIC_OP, instruction


# -------------------------------------------------------------------------------- barriers and fences
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


# -------------------------------------------------------------------------------- warp collectives
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
    mask, value = i.value(i.operands[2], "uint32_t"), i.value(i.operands[1], "uint64_t")
    code = "uint32_t _p; " + i.store(dst, f"tsim::match({mask}, {value}, {int(i.has('all'))}, &_p)")
    return code + (f" tsim::set_pred({i.raw(p)}, _p);" if p else "")


@instruction(r"redux\.sync\.(add|min|max|and|or|xor)\.(u32|s32|b32)$")
def _redux(i):
    o = i.operands
    return i.store(
        o[0],
        f"tsim::redux({i.value(o[2], 'uint32_t')}, tsim::{ATOMIC_OP[i.parts[2]]}, {int(i.has('s32'))}, "
        f"{i.value(o[1], 'uint32_t')})",
    )


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
