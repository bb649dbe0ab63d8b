"""A small statement builder for flat, explicitly vectorised TIR.

The CPU lowering emits one-dimensional buffers and ``Ramp`` indices itself, so that what LLVM sees does not depend on
the analysis of generic passes.  ``Builder`` keeps the list of statements of the scope being written; the functions
below it make vector expressions.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import tvm
from tvm import tirx
from tvm.ir import Call, Expr, PointerType, PrimType, Var
from tvm.tirx import ForKind
from tvm.tirx.buffer import buffer_data

from ...ir.kernels import const_int
from ...ir.visit import walk

CACHE_LINE = 64  # bytes; alignment of every scratch buffer


class Builder:
    """Writes statements into nested scopes."""

    def __init__(self) -> None:
        self._scopes: list[list[tirx.Stmt]] = [[]]

    # ---------------------------------------------------------------- statements
    def emit(self, stmt: tirx.Stmt) -> None:
        """Append a statement to the current scope."""
        self._scopes[-1].append(stmt)

    def evaluate(self, value: Expr) -> None:
        """Append a call made for its effect."""
        self.emit(tirx.Evaluate(value))

    def bind(self, value: Expr, name: str = "t") -> Expr:
        """Name a value: computed once, here.

        Vectors and floats go through a register: TVM's analyzer would inline bound values into each other and try its
        rewrite rules on the ever larger result, while a load stops it and costs nothing after LLVM's promotion.
        """
        dtype = str(value.ty.dtype)
        if dtype == "int32" or dtype == "int64" or dtype.startswith(("bool", "handle")):
            if isinstance(value, Var | tirx.IntImm):
                return value
            var = Var(name, dtype)
            self.emit(tirx.Bind(var, value))
            return var
        cell = self.alloc(1, dtype, name)
        self.store(cell, value, 0)
        return load(cell, 0)

    def store(self, buffer: Var, value: Expr, index) -> None:
        """Store a scalar or vector; a vector needs a vector index."""
        self.emit(tirx.BufferStore(buffer, value, [index]))

    def vstore(self, buffer: Var, value: Expr, base, lanes: int) -> None:
        """Store ``lanes`` contiguous elements from ``base`` on."""
        self.store(buffer, value, ramp(base, lanes))

    def alloc(self, count: int, dtype: str, name: str) -> Var:
        """Allocate a flat buffer of ``count`` elements in the current scope."""
        buffer = flat_buffer(count, dtype, name)
        self.emit(tirx.AllocBuffer(buffer))
        return buffer

    def register(self, dtype: str, lanes: int, name: str) -> Var:
        """A mutable vector (or scalar) held in a register; read and written at index 0.

        The element type is the vector itself: LLVM splits an array of scalars into scalars and never joins them again.
        """
        return self.alloc(1, vtype(dtype, lanes), name)

    def view(self, buffer: Var, dtype: str, count, name: str | None = None, scratch: bool = True) -> Var:
        """The memory of a buffer as a flat buffer of ``count`` elements of another type.

        Scratch memory is aligned to cache lines, other memory to its elements.
        """
        name = name or f"{buffer.name}_{dtype}"
        alignment = CACHE_LINE if scratch else max(1, tirx.const(0, dtype).ty.dtype.bits // 8)
        result = tirx.decl_buffer((count,), dtype, name=name, scope="global", data_alignment=alignment)
        pointer_type = PointerType(PrimType(dtype), "global")
        self.emit(tirx.DeclBuffer(result, data=tirx.reinterpret(pointer_type, buffer_data(buffer))))
        return result

    # ---------------------------------------------------------------- control flow
    @contextmanager
    def scope(self) -> Iterator[list[tirx.Stmt]]:
        """Collect statements without emitting them; the list is what was written."""
        statements: list[tirx.Stmt] = []
        self._scopes.append(statements)
        try:
            yield statements
        finally:
            self._scopes.pop()

    @contextmanager
    def loop(self, extent, name: str = "i", kind: ForKind = ForKind.SERIAL, dtype: str | None = None) -> Iterator[Expr]:
        """Loop from 0; an extent that is the constant 1 leaves no loop behind."""
        if dtype is None:
            dtype = "int32" if isinstance(extent, int) else str(extent.ty.dtype)
        if kind == ForKind.SERIAL and const_int(extent) == 1:
            yield tirx.const(0, dtype)
            return
        var = Var(name, dtype)
        with self.scope() as body:
            yield var
        if body:
            self.emit(tirx.For(var, tirx.const(0, dtype), as_expr(extent, dtype), kind, sequence(body)))

    @contextmanager
    def when(self, condition) -> Iterator[None]:
        """``if condition`` without an else branch; folded when the condition is constant."""
        decided = const_int(condition)
        with self.scope() as body:
            yield
        if not body or decided == 0:
            return
        if decided is not None:
            for stmt in body:
                self.emit(stmt)
        else:
            self.emit(tirx.IfThenElse(condition, sequence(body), None))

    def if_else(self, condition, then, otherwise) -> None:
        """``then()`` or ``otherwise()``, both callables that write into this builder."""
        decided = const_int(condition)
        if decided is not None:
            (then if decided else otherwise)()
            return
        with self.scope() as then_body:
            then()
        with self.scope() as else_body:
            otherwise()
        if not then_body and not else_body:
            return
        else_stmt = sequence(else_body) if else_body else None
        self.emit(tirx.IfThenElse(condition, sequence(then_body), else_stmt))

    def statements(self) -> list[tirx.Stmt]:
        """What was written outside of all scopes so far."""
        return list(self._scopes[0])

    def finish(self) -> tirx.Stmt:
        """The whole program written so far."""
        if len(self._scopes) != 1:
            raise RuntimeError("Builder.finish inside an open scope")
        return sequence(self._scopes[0])


# -------------------------------------------------------------------- expressions
def sequence(statements: list[tirx.Stmt]) -> tirx.Stmt:
    """One statement out of several."""
    if not statements:
        return tirx.Evaluate(tirx.const(0, "int32"))
    return statements[0] if len(statements) == 1 else tirx.SeqStmt(statements)


def flat_buffer(count, dtype: str, name: str) -> Var:
    """Declare (not allocate) a one-dimensional buffer."""
    return tirx.decl_buffer((count,), dtype, name=name, scope="global", data_alignment=CACHE_LINE)


def as_expr(value, dtype: str) -> Expr:
    """A Python number or an expression as an expression of ``dtype``."""
    if isinstance(value, int | float):
        return tirx.const(value, dtype)
    return value if str(value.ty.dtype) == dtype else tirx.Cast(dtype, value)


def ramp(base, lanes: int) -> Expr:
    """``lanes`` consecutive indices from ``base`` on; the plain index for one lane."""
    if lanes == 1:
        return as_expr(base, "int32") if isinstance(base, int) else base
    if isinstance(base, int):
        base = tirx.const(base, "int32")
    return tirx.Ramp(base, tirx.const(1, str(base.ty.dtype)), lanes)


def load(buffer: Var, index) -> Expr:
    """Load one element, or a vector when the index is a vector."""
    return tirx.BufferLoad(buffer, [index])


def vload(buffer: Var, base, lanes: int) -> Expr:
    """Load ``lanes`` contiguous elements from ``base`` on."""
    return load(buffer, ramp(base, lanes))


def vtype(dtype: str, lanes: int) -> str:
    """``float32, 16 -> float32x16``."""
    return dtype if lanes == 1 else f"{dtype}x{lanes}"


def lanes_of(value: Expr) -> int:
    """Lanes of a vector, 1 for a scalar."""
    return int(value.ty.dtype.lanes)


def splat(value, dtype: str, lanes: int) -> Expr:
    """The same value in every lane."""
    value = as_expr(value, dtype)
    return value if lanes == 1 else tirx.Broadcast(value, lanes)


def is_nan(value: Expr) -> Expr:
    """Whether a float is NaN, as an operator: TVM's simplifier takes ``x != x`` for false."""
    return Call(tvm.ir.Op.get("tirx.isnan"), [value], ret_ty=PrimType(vtype("bool", lanes_of(value))))


def shuffle(vectors: list[Expr], lanes: list[int]) -> Expr:
    """Pick lanes out of the concatenation of ``vectors`` (LLVM's shufflevector)."""
    return tirx.Shuffle(vectors, [tirx.const(i, "int32") for i in lanes])


def address(buffer: Var, index) -> Expr:
    """Pointer to an element."""
    return tirx.address_of(tirx.BufferLoad(buffer, [as_expr(index, "int32") if isinstance(index, int) else index]))


def emit_opaque_zero(b: Builder) -> Expr:
    """A zero whose value LLVM does not know, for the function's prologue.

    LLVM 22 turns a masked store of truncated lanes whose mask is *constant* with a single lane set into a scalar
    store of the untruncated width (x86, AVX-512): it overwrites the next element.  Positions that guard stores of 8-
    and 16-bit elements are offset by this zero, so that no mask becomes constant.
    """
    size = tirx.call_extern("int32", "getpagesize")
    return b.bind(size >> tirx.const(30, "int32"), "zero")


def stores_narrow(stmt) -> bool:
    """Whether a statement stores elements of 8 or 16 bits."""
    found: list = []
    walk(stmt, (tirx.BufferStore, lambda s: found.append(s) if s.buffer.ty.dtype.dtype.bits <= 16 else None))
    return bool(found)


_INTRINSIC_IDS: dict[str, int] = {}


def llvm_call(dtype: str, name: str, *args, pure: bool = True) -> Expr:
    """Call an LLVM intrinsic by name, for example ``llvm.x86.tilezero``."""
    if name not in _INTRINSIC_IDS:
        _INTRINSIC_IDS[name] = int(tvm.get_global_func("target.llvm_lookup_intrinsic_id")(name))
        if _INTRINSIC_IDS[name] == 0:
            raise ValueError(f"LLVM of this TVM build has no intrinsic {name}")
    make = tirx.call_llvm_pure_intrin if pure else tirx.call_llvm_intrin
    return make(dtype, tirx.const(_INTRINSIC_IDS[name], "uint32"), *args)
