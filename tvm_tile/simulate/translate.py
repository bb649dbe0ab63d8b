"""From the CUDA source that TVM generates to C++ for the simulator: inline assembly, shared memory, kernel entries.

The text keeps its line numbers, so that a fault names the line of the original source.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from . import ptx, ptx_memory, ptx_registers, ptx_sync, ptx_tensor  # noqa: F401  (each fills the table)
from .errors import UnsupportedInstructionError

_INCLUDES = {
    "cstdint", "type_traits", "cuda.h", "cuda_fp16.h", "cuda_bf16.h", "cuda_fp8.h", "math_constants.h",
    "cuda/std/cstdint",
    "cuda/std/type_traits", "sm_61_intrinsics.h",
}  # fmt: skip


@dataclass(frozen=True)
class Kernel:
    """One ``__global__`` function: name and (type, name) of each parameter."""

    name: str
    params: tuple[tuple[str, str], ...]
    min_threads: int


def _closing(text: str, start: int) -> int:
    """Index of the parenthesis that closes the one at ``start``, strings skipped."""
    depth, i = 0, start
    while i < len(text):
        c = text[i]
        if c == '"':
            i += 1
            while text[i] != '"':
                i += 2 if text[i] == "\\" else 1
        elif c == "(":
            depth += 1
        elif c == ")":
            depth -= 1
            if depth == 0:
                return i
        i += 1
    raise UnsupportedInstructionError("unbalanced parentheses in the CUDA source")


def _split(text: str, sep: str) -> list[str]:
    """Split at ``sep`` outside strings, parentheses, brackets and braces."""
    out, depth, start, i = [], 0, 0, 0
    while i < len(text):
        c = text[i]
        if c == '"':
            i += 1
            while text[i] != '"':
                i += 2 if text[i] == "\\" else 1
        elif c in "([{":
            depth += 1
        elif c in ")]}":
            depth -= 1
        elif depth == 0 and c == sep:
            out.append(text[start:i])
            start = i + 1
        i += 1
    out.append(text[start:])
    return out


def _operands(section: str) -> list[tuple[str, str]]:
    """``"=r"(x), "r"(y)`` as (constraint, expression)."""
    out = []
    for item in _split(section, ","):
        item = item.strip()
        if not item:
            continue
        m = re.match(r'(?:\[\w+\]\s*)?"([^"]*)"\s*\((.*)\)$', item, re.S)
        if not m:
            raise UnsupportedInstructionError(f"asm operand `{item}`")
        out.append((m.group(1), m.group(2)))
    return out


def _parse_operands(text: str) -> list:
    """PTX operands; ``{...}`` and ``[...]`` become lists that start with their bracket."""
    items = []
    for part in _split(text, ","):
        part = part.strip()
        if not part:
            continue
        if part[0] == "{" and part[-1] == "}":
            items.append(["{", *_parse_operands(part[1:-1])])
        elif part[0] == "[" and part[-1] == "]":
            items.append(["[", *_parse_operands(part[1:-1])])
        else:
            items.append(part)
    return items


def _statements(asm: str):
    """The labels, declarations and instructions of an asm text."""
    asm = re.sub(r"//[^\n]*", "", asm).replace("%%", "%")
    pos, n = 0, len(asm)
    while pos < n:
        if asm[pos] in " \t\r\n;":
            pos += 1
        elif asm[pos] in "{}":  # a scope; register names are unique to the statement anyway
            pos += 1
        else:
            m = re.compile(r"([A-Za-z_$][\w$]*):(?!:)").match(asm, pos)
            if m:
                yield "label", m.group(1)
                pos = m.end()
                continue
            end = asm.find(";", pos)
            end = n if end < 0 else end
            yield "instruction", " ".join(asm[pos:end].split())
            pos = end + 1


_ASM = re.compile(r"(?<![\w])(?:asm|__asm__)(?:\s+(?:volatile|__volatile__))?\s*\(")


def _translate_asm(body: str, uid: int) -> str:
    """One asm statement's parenthesised content as a C++ block."""
    sections = _split_asm(body)
    text = "".join(m.encode().decode("unicode_escape") for m in re.findall(r'"((?:[^"\\]|\\.)*)"', sections[0], re.S))
    outs = _operands(sections[1]) if len(sections) > 1 else []
    ins = _operands(sections[2]) if len(sections) > 2 else []
    code = ["{"]
    for i, (constraint, expr) in enumerate(outs + ins):
        if i < len(outs):
            code.append(f"auto& _a{i} = ({expr});")
        elif constraint == "n":
            code.append(f"const int64_t _a{i} = ({expr});")
        else:
            code.append(f"const auto _a{i} = ({expr});")
        code.append(f"(void)_a{i};")
    registers: dict[str, str] = {}
    for kind, line in _statements(text):
        if kind == "label":
            code.append(f"_L{uid}_{line}:;")
            continue
        m = re.match(r"\.reg\s+\.(\w+)\s+(.*)$", line)
        if m:
            if m.group(1) not in ptx.C_TYPE:
                raise UnsupportedInstructionError(f"the PTX declaration `{line}`")
            for name in m.group(2).split(","):
                name = name.strip().lstrip("%")
                registers[name] = f"_r{uid}_{name}"
                code.insert(1, f"{ptx.C_TYPE[m.group(1)]} _r{uid}_{name} = 0; (void)_r{uid}_{name};")
            continue
        guard = None
        m = re.match(r"@(!?)(%?[\w$]+)\s+(.*)$", line)
        if m:
            guard, line = m.group(1) + m.group(2), m.group(3)
        opcode, _, rest = line.partition(" ")
        ins_ = ptx.Instruction(opcode, _parse_operands(rest), line, registers)
        if opcode in ("bra", "bra.uni"):
            stmt = f"goto _L{uid}_{rest.strip()};"
        elif opcode in ("ret", "exit", "call", "call.uni"):
            raise ins_.refuse()
        else:
            stmt = ptx.emit(ins_)
        code.append(f"if ({ins_.pred(guard)}) {{ {stmt} }}" if guard else f"{{ {stmt} }}")
    code.append("}")
    return " ".join(code)


def _split_asm(body: str) -> list[str]:
    """Split an asm statement at its colons (those outside strings and parentheses)."""
    out, depth, start, i = [], 0, 0, 0
    while i < len(body):
        c = body[i]
        if c == '"':
            i += 1
            while body[i] != '"':
                i += 2 if body[i] == "\\" else 1
        elif c in "([":
            depth += 1
        elif c in ")]":
            depth -= 1
        elif c == ":" and depth == 0:
            out.append(body[start:i])
            start = i + 1
        i += 1
    out.append(body[start:])
    return out


def _all_asm(source: str) -> str:
    out, pos, uid = [], 0, 0
    for m in _ASM.finditer(source):
        if m.start() < pos:
            continue
        end = _closing(source, m.end() - 1)
        whole = source[m.start() : end + 1]
        out.append(source[pos : m.start()])
        uid += 1
        out.append(_translate_asm(source[m.end() : end], uid) + "\n" * whole.count("\n"))
        pos = end + 1
    out.append(source[pos:])
    return "".join(out)


_SCALAR = re.compile(
    r"^(\s*)(?:alignas\((\d+)\)\s+)?((?:unsigned |signed |long )*(?:int|uint|char|uchar|short|ushort|long|"
    r"float|double|half|nv_bfloat16|"
    r"__nv_fp8_e4m3|__nv_fp8_e5m2|int8_t|uint8_t|int16_t|uint16_t|int32_t|uint32_t|int64_t|uint64_t|bool|half2|"
    r"nv_bfloat162|"
    r"[a-z]+[234]))\s+(\w+)\[([^\]=]+)\];\s*$"
)
_SHARED = re.compile(
    r"^(\s*)(?:static\s+)?__shared__\s+(?:__align__\(\d+\)|alignas\(\d+\))?\s*([\w ]+?)\s+(\w+)\[(.+)\];\s*$"
)
_SHARED_ALIGN = re.compile(r"(?:__align__|alignas)\((\d+)\)")
_DYNAMIC = re.compile(r"^(\s*)extern\s+__shared__\s+(?:__align__\(\d+\)|alignas\(\d+\))?\s*([\w ]+?)\s+(\w+)\[\];\s*$")


def _lines(source: str, static: list[str]) -> str:
    out = []
    inside = False
    for line in source.split("\n"):
        m = re.match(r"\s*#\s*include\s*[<\"]([^>\"]+)[>\"]", line)
        if m:
            if m.group(1) not in _INCLUDES:
                raise UnsupportedInstructionError(f"the simulator does not implement the CUDA header <{m.group(1)}>")
            out.append("")
            continue
        if line.startswith('extern "C" __global__') or line.startswith("__forceinline__ __device__"):
            inside = True
        m = _DYNAMIC.match(line)
        if m:
            out.append(f"{m.group(1)}{m.group(2)}* {m.group(3)} = ({m.group(2)}*)tsim::dynamic_shared();")
            continue
        m = _SHARED.match(line) or re.match(
            r"^(\s*)(?:static\s+)?(?:__align__\(\d+\)|alignas\(\d+\))\s+__shared__\s+([\w ]+?)\s+(\w+)\[(.+)\];\s*$",
            line,
        )
        if m:
            indent, ctype, name, size = m.groups()
            align = _SHARED_ALIGN.search(line)
            index = len(static)
            static.append(f"{{sizeof({ctype}) * ({size}), {align.group(1) if align else f'alignof({ctype})'}}}")
            out.append(f"{indent}{ctype}* {name} = ({ctype}*)tsim::static_shared(_tsim_offset({index}));")
            continue
        if "__shared__" in line:
            raise UnsupportedInstructionError(f"this shared-memory declaration: `{line.strip()}`")
        m = _SCALAR.match(line)
        if m and inside:
            out.append(f"{line} tsim::poison({m.group(4)}, sizeof({m.group(4)}));")
            continue
        out.append(line)
    return "\n".join(out)


_KERNEL = re.compile(r'extern "C" __global__ void (?:__launch_bounds__\((\d+)(?:,\s*\d+)*\) )?(\w+)\(([^;{]*)\) \{')


def _find_kernels(source: str) -> list[Kernel]:
    kernels = []
    for m in _KERNEL.finditer(source):
        params = []
        for p in _split(m.group(3), ","):
            p = p.strip()
            if not p:
                continue
            p = p.replace("__grid_constant__", "").replace("__restrict__", "").strip()
            mm = re.match(r"(.*?[\s*&])(\w+)$", p)
            params.append((" ".join(mm.group(1).split()).replace("const CUtensorMap", "CUtensorMap"), mm.group(2)))
        kernels.append(Kernel(m.group(2), tuple(params), int(m.group(1) or 0)))
    return kernels


def translate(source: str, launch_tags: dict[str, list[str]], path: str) -> tuple[str, list[Kernel]]:
    """C++ for one CUDA source.

    Parameters
    ----------
    source : str
        CUDA source as TVM generates it.
    launch_tags : dict of str to list of str
        For each kernel, its ``tirx.kernel_launch_params`` in order.
    path : str
        File name for the line table.

    Returns
    -------
    code, kernels : str, list of Kernel
        The translation unit and the kernels it exports.

    Raises
    ------
    UnsupportedInstructionError
        For assembly, headers or declarations that the simulator does not know.
    """
    kernels = _find_kernels(source)
    static: list[str] = []
    body = _lines(_all_asm(source), static)
    table = "".join(entry + ", " for entry in static)
    head = '#include "device.h"\nstatic uint32_t _tsim_offset(int);\n'
    tail = [
        "\nstruct TsimStatic { uint32_t size, align; };",
        f"static const TsimStatic tsim_static[] = {{{table}{{0, 1}}}};",
        "__attribute__((no_sanitize_thread)) static uint32_t _tsim_offset(int n) { uint32_t o = 0; "
        "for (int i = 0; i <= n; i++) { "
        "uint32_t a = tsim_static[i].align; o = (o + a - 1) / a * a; if (i < n) o += tsim_static[i].size; } "
        "return o; }",
        '#define TSIM_EXPORT __attribute__((visibility("default"), no_sanitize_thread))',
        "extern const char __ehdr_start;  // the linker's name for the start of this library",
    ]
    for k in kernels:
        args = ", ".join(f"*({t}*)_p[{i}]" for i, (t, _) in enumerate(k.params))
        tags = launch_tags.get(k.name, [])
        quoted = ", ".join('"' + t + '"' for t in tags)
        loads = []
        for i, (t, _) in enumerate(k.params):
            if t.endswith("*"):
                loads.append(f"{t} v{i} = ({t})_a[{i}].u.p; _p[{i}] = (void*)&v{i};")
            elif t == "CUtensorMap":
                loads.append(f"_p[{i}] = _a[{i}].u.p;")
            else:
                loads.append(
                    f"{t} v{i} = _a[{i}].type_index == 3 ? ({t})(float)_a[{i}].u.f : ({t})_a[{i}].u.i; "
                    f"_p[{i}] = (void*)&v{i};"
                )
        n = len(k.params)
        tail += [
            f"__attribute__((noinline, no_sanitize_thread)) static void tsim_entry_{k.name}(void** _p) {{ (void)_p; "
            f"tsim::set_entry_frame(__builtin_frame_address(0)); {k.name}({args}); "
            '__asm__ volatile("" ::: "memory"); }',
            f"static const char* const tsim_tags_{k.name}[] = {{{quoted or '0'}}};",
            f'extern "C" TSIM_EXPORT int __tvm_ffi_{k.name}(void*, const tsim::FFIAny* _a, int32_t _n, '
            "tsim::FFIAny* _r) {",
            f'  static tsim::KernelInfo info = {{"{k.name}", tsim_entry_{k.name}, {n}, '
            f"tsim_tags_{k.name}, {len(tags)}, _tsim_offset({len(static)}), &__ehdr_start, 0}};",
            f"  _r->type_index = 0; _r->pad = 0; _r->u.i = 0; if (_n != {n + len(tags)}) return -1; void* _p[{n + 1}];",
            "  " + " ".join(loads),
            f"  return tsim::launch(info, _p, _a + {n});",
            "}",
        ]
    text = "\n".join(tail)
    encode = (
        '\nextern "C" int tsim_ffi_encode(void*, const tsim::FFIAny*, int32_t, tsim::FFIAny*);\n'
        'extern "C" TSIM_EXPORT int tsim_encode_here(void* s, const tsim::FFIAny* a, int32_t n, tsim::FFIAny* r) '
        '__asm__("__tvm_ffi_runtime.cuTensorMapEncodeTiled");\n'
        "int tsim_encode_here(void* s, const tsim::FFIAny* a, int32_t n, tsim::FFIAny* r) { "
        "return tsim_ffi_encode(s, a, n, r); }\n"
        # The host function selects the CUDA device; here there is none to select.
        'extern "C" TSIM_EXPORT int __tvm_ffi___tvm_set_device(void*, const tsim::FFIAny*, int32_t, tsim::FFIAny* r) '
        "{ r->type_index = 0; r->pad = 0; r->u.i = 0; return 0; }\n"
    )
    return f'{head}#line 1 "{path}"\n{body}\n#line 1 "tsim-entries"\n{text}{encode}', kernels
