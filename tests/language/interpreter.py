"""The serial meaning of tile IR, executed: PrimFunc -> Python source over NumPy arrays.

Independent of TVM's code generation, so that it can judge it. On-chip memory starts as NaN (0x7f bytes for integers),
an index outside of a buffer raises, and every scalar has exactly its declared dtype.
"""

from __future__ import annotations

import re

import ml_dtypes
import numpy as np
import tvm
from tvm import tirx
from tvm.ir import TensorLoad, Var
from tvm.s_tir import SBlock, SBlockRealize

_BINARY = {
    "Add": "({} + {})", "Sub": "({} - {})", "Mul": "({} * {})", "FloorDiv": "({} // {})", "FloorMod": "({} % {})",
    "EQ": "({} == {})", "NE": "({} != {})", "LT": "({} < {})", "LE": "({} <= {})", "GT": "({} > {})",
    "GE": "({} >= {})", "And": "({} and {})", "Or": "({} or {})", "Min": "_min({}, {})", "Max": "_max({}, {})",
    "BitwiseAnd": "({} & {})", "BitwiseOr": "({} | {})", "BitwiseXor": "({} ^ {})", "LShift": "({} << {})",
    "RShift": "({} >> {})",
}  # fmt: skip
_CALLS = {
    "exp": np.exp, "exp2": np.exp2, "log": np.log, "log2": np.log2, "sqrt": np.sqrt, "tanh": np.tanh,
    "fabs": np.abs, "abs": np.abs, "isnan": np.isnan, "isinf": np.isinf, "floor": np.floor, "ceil": np.ceil,
    "round": np.round, "sin": np.sin, "cos": np.cos, "pow": lambda a, b: a**b,
    "rsqrt": lambda x: type(x)(1) / np.sqrt(x), "sigmoid": lambda x: type(x)(1) / (type(x)(1) + np.exp(-x)),
    "bitwise_and": lambda a, b: a & b, "bitwise_or": lambda a, b: a | b, "bitwise_xor": lambda a, b: a ^ b,
    "bitwise_not": lambda a: ~a, "shift_left": lambda a, b: a << b, "shift_right": lambda a, b: a >> b,
}  # fmt: skip


class DeviceAssertion(Exception):
    """A T.device_assert that did not hold."""


class UnsupportedNode(Exception):
    """A node that tile IR is not supposed to contain."""


def numpy_dtype(name: str) -> np.dtype:
    """The NumPy dtype (of ml_dtypes where NumPy has none) of a dtype's name."""
    return np.dtype(getattr(ml_dtypes, name, None) or name)


def poisoned(shape, dtype: str) -> np.ndarray:
    """An array of NaN, or of 0x7f bytes for dtypes without NaN."""
    kind = numpy_dtype(dtype)
    if dtype == "bool":
        return np.ones(shape, bool)
    if "float" in dtype:
        return np.full(shape, np.nan, kind)
    return np.full(int(np.prod(shape)) * kind.itemsize, 0x7F, np.uint8).view(kind).reshape(shape)


def _at(array, *index):
    for i, extent in zip(index, array.shape, strict=True):
        if not 0 <= i < extent:
            raise IndexError(f"index {tuple(int(x) for x in index)} is outside of shape {array.shape}")
    return tuple(int(i) for i in index)


def _cast(kind, value):
    if kind.kind in "iub" and np.asarray(value).dtype.kind == "f":
        return kind.type(int(value)) if kind.kind != "b" else kind.type(value != 0)
    return np.asarray(value).astype(kind)[()]


class Interpreter:
    """A compiled-to-Python tile function: ``Interpreter(func)(*arrays_and_scalars)``; ``printed`` collects T.print."""

    def __init__(self, func: tirx.PrimFunc) -> None:
        self.func = func
        self.printed: list[str] = []
        self.names: dict[Var, str] = {}
        self.lines: list[str] = []
        self.depth = 1
        self.env = {
            "np": np,
            "_at": _at,
            "_cast": _cast,
            "_poisoned": poisoned,
            "_min": min,
            "_max": max,
            "_div": self._div,
            "_assert": self._assert,
            "_print": self._print,
            "DeviceAssertion": DeviceAssertion,
        }
        params = [self.name(p) for p in func.params]
        for param in func.params:
            if tirx.is_buffer_var(param):
                for dim, extent in enumerate(param.ty.shape):
                    if isinstance(extent, Var) and extent not in self.names:
                        self.emit(f"{self.name(extent)} = {self.name(param)}.shape[{dim}]")
        self.stmt(func.body)
        self.source = f"def run({', '.join(params)}):\n" + "\n".join(self.lines or ["    pass"]) + "\n"
        exec(compile(self.source, "<tile interpreter>", "exec"), self.env)

    def __call__(self, *args) -> None:
        arguments = []
        for param, value in zip(self.func.params, args, strict=True):
            if not tirx.is_buffer_var(param):
                value = numpy_dtype(str(param.ty.dtype)).type(value)
            arguments.append(value)
        with np.errstate(all="ignore"):
            self.env["run"](*arguments)

    # ---- helpers of the generated code

    @staticmethod
    def _div(a, b):
        if isinstance(a, int | np.integer):
            return type(a)(int(a / b)) if abs(int(a)) < 2**50 else a // b
        return a / b

    @staticmethod
    def _assert(condition, message) -> None:
        if not condition:
            raise DeviceAssertion(message)

    def _print(self, text, *values) -> None:
        self.printed.append(text + "|" + ",".join(str(v) for v in values))

    # ---- statements

    def name(self, var: Var) -> str:
        if var not in self.names:
            self.names[var] = re.sub(r"\W", "_", var.name) + f"_{len(self.names)}"
        return self.names[var]

    def emit(self, text: str) -> None:
        self.lines.append("    " * self.depth + text)

    def indented(self, stmt) -> None:
        self.depth += 1
        before = len(self.lines)
        self.stmt(stmt)
        if len(self.lines) == before:
            self.emit("pass")
        self.depth -= 1

    def stmt(self, node) -> None:
        getattr(self, "s_" + type(node).__name__, self.unknown)(node)

    def unknown(self, node):
        raise UnsupportedNode(f"{type(node).__name__}: {node}")

    def s_SeqStmt(self, node) -> None:  # noqa: N802
        for part in node.seq:
            self.stmt(part)

    def s_For(self, node) -> None:  # noqa: N802
        low, count = self.expr(node.min), self.expr(node.extent)
        step = "1" if node.step is None else self.expr(node.step)
        if step != "1":
            raise UnsupportedNode("a loop with a step")
        self.emit(f"for {self.name(node.loop_var)} in range({low}, {low} + {count}):")
        self.indented(node.body)

    def s_While(self, node) -> None:  # noqa: N802
        self.emit(f"while {self.expr(node.condition)}:")
        self.indented(node.body)

    def s_IfThenElse(self, node) -> None:  # noqa: N802
        self.emit(f"if {self.expr(node.condition)}:")
        self.indented(node.then_case)
        if node.else_case is not None:
            self.emit("else:")
            self.indented(node.else_case)

    def s_Bind(self, node) -> None:  # noqa: N802
        self.emit(f"{self.name(node.var)} = {self.expr(node.value)}")

    def s_Evaluate(self, node) -> None:  # noqa: N802
        self.emit(self.expr(node.value))

    def s_AssertStmt(self, node) -> None:  # noqa: N802
        self.emit(f"_assert({self.expr(node.condition)}, {''.join(str(p) for p in node.message_parts)!r})")

    def s_DeclBuffer(self, node) -> None:  # noqa: N802
        buffer = node.buffer
        base = node.data.args[0] if hasattr(node, "data") and isinstance(node.data, tvm.ir.Call) else node.data
        kind = self.constant(numpy_dtype(str(buffer.ty.dtype)))
        shape = tuple(int(e) for e in buffer.ty.shape)
        self.emit(f"{self.name(buffer)} = {self.name(base)}.reshape(-1).view({kind}).reshape({shape})")

    def s_BufferStore(self, node) -> None:  # noqa: N802
        array = self.name(node.buffer)
        self.emit(f"{array}[_at({array}, {', '.join(self.expr(i) for i in node.indices)})] = {self.expr(node.value)}")

    def s_SBlockRealize(self, node) -> None:  # noqa: N802
        block: SBlock = node.block
        for axis, value in zip(block.iter_vars, node.iter_values, strict=False):
            self.emit(f"{self.name(axis.var)} = {self.expr(value)}")
        for buffer in block.alloc_buffers:
            shape = tuple(int(e) for e in buffer.ty.shape)
            self.emit(f"{self.name(buffer)} = _poisoned({shape}, {str(buffer.ty.dtype)!r})")
        if block.init is not None:
            first = [
                f"{self.name(a.var)} == {self.expr(a.dom.min)}"
                for a in block.iter_vars
                if a.iter_type == tirx.IterVar.CommReduce
            ]
            self.emit(f"if {' and '.join(first) or 'True'}:")
            self.indented(block.init)
        self.stmt(block.body)

    # ---- expressions

    def constant(self, value) -> str:
        name = f"_k{len(self.env)}"
        for key, known in self.env.items():
            if key.startswith("_k") and type(known) is type(value) and repr(known) == repr(value):
                return key
        self.env[name] = value
        return name

    def expr(self, node) -> str:
        if isinstance(node, bool | int):
            return repr(node)
        kind = type(node).__name__
        if kind in _BINARY:
            return _BINARY[kind].format(self.expr(node.a), self.expr(node.b))
        return getattr(self, "e_" + kind, self.unknown)(node)

    def e_Div(self, node) -> str:  # noqa: N802
        return f"_div({self.expr(node.a)}, {self.expr(node.b)})"

    def e_Not(self, node) -> str:  # noqa: N802
        return f"(not {self.expr(node.a)})"

    def e_Var(self, node) -> str:  # noqa: N802
        return self.name(node)

    def e_IntImm(self, node) -> str:  # noqa: N802
        dtype = str(node.ty.dtype)
        return repr(bool(node.value)) if dtype == "bool" else repr(int(node.value))

    def e_FloatImm(self, node) -> str:  # noqa: N802
        return self.constant(numpy_dtype(str(node.ty.dtype)).type(node.value))

    def e_StringImm(self, node) -> str:  # noqa: N802
        return repr(str(node.value))

    def e_Cast(self, node) -> str:  # noqa: N802
        return f"_cast({self.constant(numpy_dtype(str(node.ty.dtype)))}, {self.expr(node.value)})"

    def e_Select(self, node) -> str:  # noqa: N802
        return f"({self.expr(node.true_value)} if {self.expr(node.condition)} else {self.expr(node.false_value)})"

    def e_TensorLoad(self, node: TensorLoad) -> str:  # noqa: N802
        array = self.name(node.source)
        return f"{array}[_at({array}, {', '.join(self.expr(i) for i in node.indices)})]"

    def e_Call(self, node) -> str:  # noqa: N802
        name = node.op.name.split(".")[-1]
        if name == "if_then_else":
            condition, then, other = (self.expr(a) for a in node.args)
            return f"({then} if {condition} else {other})"
        if name == "call_extern":
            return self.extern(str(node.args[0].value), node.args[1:])
        if name not in _CALLS:
            raise UnsupportedNode(f"call of {node.op.name}")
        return f"{self.constant_function(name)}({', '.join(self.expr(a) for a in node.args)})"

    def constant_function(self, name: str) -> str:
        self.env["_f_" + name] = _CALLS[name]
        return "_f_" + name

    def extern(self, name: str, args) -> str:
        if name.startswith("tile_atomic_"):
            load = args[0].args[0]
            combine = {"add": lambda a, b: a + b, "max": max, "min": min}[name.split("_")[-1]]

            def update(array, index, value):
                before = array[index]
                array[index] = combine(before, value)
                return before

            self.env["_" + name] = update
            array = self.name(load.source)
            index = ", ".join(self.expr(i) for i in load.indices)
            return f"_{name}({array}, _at({array}, {index}), {self.expr(args[1])})"
        if name in ("tile_print", "tile_assert"):
            return f"{name[4:]}({', '.join(self.expr(a) for a in args)})"
        if name == "tile_sync":
            return "None"
        raise UnsupportedNode(f"extern {name}")


def blocks(func: tirx.PrimFunc) -> list[SBlockRealize]:
    """All block realisations of a function, in order."""
    from tvm_tile.ir.visit import walk

    found: list[SBlockRealize] = []
    walk(func.body, (SBlockRealize, found.append))
    return found
