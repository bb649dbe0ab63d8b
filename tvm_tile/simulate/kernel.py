"""The public entry: a lowered module made callable on the CPU, with every check on."""

from __future__ import annotations

import ctypes
import functools
import math
import re
import shutil
import subprocess
import threading
import time
from dataclasses import dataclass

import numpy as np
import tvm
import tvm_ffi
from tvm.tirx.build import codegen_build

from tvm_tile.errors import CallError, InternalError

from . import build
from .errors import BY_KIND, FaultSite, SimulationError
from .pipeline import Pipeline, lower
from .report import SimulationReport
from .translate import translate

_RUN_LOCK = threading.Lock()  # the simulated machine is one
_SOURCE_NAME = "kernel.cu"
_COUNTERS = 18
_MAX_SHARED = {
    "sm_80": 166912,
    "sm_86": 101376,
    "sm_89": 101376,
    "sm_87": 166912,
}  # bytes a block; CUDA guide, table of compute capabilities


def _cuda_target(target) -> tvm.target.Target:
    if target is None or isinstance(target, str) and target.startswith("sm_"):
        target = {"kind": "cuda", "arch": target or "sm_90a"}
    target = tvm.target.Target(target)
    if target.kind.name != "cuda":
        raise CallError(f"the simulator runs CUDA kernels; the target is `{target.kind.name}`")
    return target.with_host(tvm.target.Target("llvm"))


@dataclass
class _Region:
    """Simulated memory for one or more overlapping arguments."""

    lo: int
    hi: int
    granule: int
    names: list[str]
    undefined: bool = False
    base: int = 0

    def at(self, address: int) -> int:
        return self.base + (address - self.lo)


def _interface(array) -> tuple[int, tuple[int, ...], tuple[int, ...], str]:
    """(address, shape, strides in elements, dtype name) of a torch, NumPy or TVM array on the CPU."""
    if isinstance(array, np.ndarray):
        if any(s % array.itemsize for s in array.strides):
            raise CallError("an array whose strides are not whole elements cannot be passed to a kernel")
        return array.ctypes.data, array.shape, tuple(s // array.itemsize for s in array.strides), array.dtype.name
    if hasattr(array, "data_ptr"):  # torch
        if array.device.type != "cpu":
            raise CallError(f"the simulator takes tensors on the CPU; this one is on {array.device}")
        return array.data_ptr(), tuple(array.shape), tuple(array.stride()), str(array.dtype).removeprefix("torch.")
    if hasattr(array, "__dlpack__"):
        view = tvm_ffi.from_dlpack(array)
        address = int(view.data_ptr()) if hasattr(view, "data_ptr") else None
        if address is None:
            array = np.from_dlpack(array)
            return _interface(array)
        return address, tuple(view.shape), tuple(view.strides), str(view.dtype)
    raise CallError(f"a kernel takes tensors and numbers, not {type(array).__name__}")


class _DLDevice(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int32), ("id", ctypes.c_int32)]


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _DLDevice),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _DLManagedTensor(ctypes.Structure):
    pass


_DELETER = ctypes.CFUNCTYPE(None, ctypes.POINTER(_DLManagedTensor))
_DLManagedTensor._fields_ = [("dl_tensor", _DLTensor), ("manager_ctx", ctypes.c_void_p), ("deleter", _DELETER)]
_KEEP: dict[int, tuple] = {}


@_DELETER
def _forget(managed):
    _KEEP.pop(ctypes.addressof(managed.contents), None)


class _Capsule:
    """A DLPack exporter of memory that claims to lie on CUDA device 0: the host function checks device types."""

    def __init__(self, address: int, shape, strides, dtype: str):
        self._args = (address, shape, strides, dtype)

    def __dlpack__(self, **_):
        address, shape, strides, dtype = self._args
        dt = tvm_ffi.dtype(dtype) if dtype != "bool" else tvm_ffi.dtype("bool")
        n = len(shape)
        dims = (ctypes.c_int64 * max(n, 1))(*shape)
        steps = (ctypes.c_int64 * max(n, 1))(*strides)
        m = _DLManagedTensor()
        m.dl_tensor = _DLTensor(address, _DLDevice(2, 0), n, dt.type_code, dt.bits, dt.lanes, dims, steps, 0)
        m.deleter = _forget
        _KEEP[ctypes.addressof(m)] = (m, dims, steps)
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return new(ctypes.addressof(m), b"dltensor", None)

    def __dlpack_device__(self):
        return (2, 0)


class SimulatedKernel:
    """A lowered module that runs on the CPU through its own host function; call it like the compiled kernel.

    Attributes
    ----------
    source : str
        The CUDA source that is simulated; faults name its lines.
    """

    def __init__(
        self, mod: tvm.IRModule, target, *, seed: int, checks: bool, strict_warp: bool, pipeline, timeout: float
    ):
        self.target = _cuda_target(target)
        self.seed, self.checks, self.strict_warp, self.timeout = seed, checks, strict_warp, timeout
        entries = [
            str(f.attrs.get("global_symbol", g.name_hint))
            for g, f in mod.functions.items()
            if isinstance(f, tvm.tirx.PrimFunc)
        ]
        lowered = lower(mod, self.target, pipeline)
        self.source = lowered.source
        code, self._kernels = translate(lowered.source, lowered.launch_tags, _SOURCE_NAME)
        self._library = build.kernel_library(code)
        self._runtime = build.runtime()
        device = tvm_ffi.load_module(str(self._library))
        host = codegen_build(lowered.host, self.target.host)
        host.import_module(device)
        self._module = host
        self._entry = entries[0] if len(entries) == 1 else None
        self._entries = entries

    def __call__(self, *args, entry: str | None = None, undefined: tuple[int, ...] = ()) -> SimulationReport:
        """Run once, writing outputs in place.

        Parameters
        ----------
        *args : tensors (torch, NumPy, DLPack; on the CPU), int, float, bool
            The arguments of the function.
        entry : str or None
            Which function to call, where the module has several.
        undefined : tuple of int
            Positions of tensors that hold nothing yet: reading one before it is written is a fault.

        Returns
        -------
        SimulationReport

        Raises
        ------
        SimulationError
            The fault that was found; tensors keep what was written up to there.
        """
        name = entry or self._entry
        if name is None:
            raise CallError(f"the module has several functions ({', '.join(self._entries)}): name one with entry=")
        with _RUN_LOCK:
            return self._run(name, args, set(undefined))

    def _run(self, name, args, undefined) -> SimulationReport:
        dll = self._runtime
        regions, views = self._place(args, undefined)
        arch = str(self.target.attrs.get("arch", "sm_90a"))
        limit = int(self.target.attrs.get("max_shared_memory_per_block", 0) or 0)
        limit = max(limit, _MAX_SHARED.get(re.sub(r"[a-z]+$", "", arch), 232448))
        dll.tsim_clear_segments()
        try:
            for r in regions:
                r.base = dll.tsim_reserve(r.hi - r.lo)
                if not r.base:
                    raise InternalError("no address space for the simulated tensors")
                r.base += r.lo % 16 if len(r.names) == 1 and r.lo % 16 else 0
                ctypes.memmove(r.base, r.lo, r.hi - r.lo)
                dll.tsim_add_segment(r.base, r.hi - r.lo, r.granule, int(r.undefined), " / ".join(r.names).encode())
            call = []
            for a, v in zip(args, views, strict=True):
                if v is None:
                    call.append(a)
                else:
                    region, (address, shape, strides, dtype) = v
                    call.append(
                        tvm_ffi.from_dlpack(_Capsule(region.at(address) if region else 0, shape, strides, dtype))
                    )
            dll.tsim_begin(self.seed, int(self.checks), int(self.strict_warp), limit, 1024, self.timeout)
            start = time.perf_counter()
            self._module[name](*call)
            seconds = time.perf_counter() - start
            for r in regions:
                ctypes.memmove(r.lo, r.base, r.hi - r.lo)
            fault = dll.tsim_fault()
            if fault is not None:
                printed = dll.tsim_output().decode(errors="replace").strip()
                raise self._error(fault.decode(errors="replace"), printed)
            counters = [int(dll.tsim_counters()[i]) for i in range(_COUNTERS)]
            return SimulationReport.from_counters(
                counters, dll.tsim_kinds().decode(), dll.tsim_output().decode(errors="replace"), seconds
            )
        finally:
            dll.tsim_clear_segments()
            for r in regions:
                if r.base:
                    dll.tsim_release(r.base - (r.lo % 16 if len(r.names) == 1 and r.lo % 16 else 0), r.hi - r.lo)

    @staticmethod
    def _place(args, undefined):
        """Memory regions (arguments that overlap share one) and each argument's view."""
        spans, views = [], []
        for i, a in enumerate(args):
            if a is None or isinstance(a, (bool, int, float, np.integer, np.floating)):
                views.append(None)
                continue
            address, shape, strides, dtype = _interface(a)
            bits = tvm_ffi.dtype(dtype).bits if dtype != "bool" else 8
            size = max(1, bits // 8)
            if any(s == 0 for s in shape):
                # NumPy gives empty arrays strides of 0, which host functions take for a broadcast
                strides = tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))
                views.append((None, (address, shape, strides, dtype)))
                continue
            if any(st < 0 for st in strides):
                raise CallError(f"argument {i} has a negative stride")
            last = sum((s - 1) * st for s, st in zip(shape, strides, strict=True))
            spans.append(_Region(address, address + (last + 1) * size, size, [f"argument {i}"], i in undefined))
            views.append((spans[-1], (address, shape, strides, dtype)))
        regions: list[_Region] = []
        merged: dict[int, _Region] = {}
        for s in sorted(spans, key=lambda r: r.lo):
            if regions and s.lo < regions[-1].hi:
                r = regions[-1]
                r.hi, r.granule = max(r.hi, s.hi), min(r.granule, s.granule)
                r.names += s.names
                r.undefined = r.undefined and s.undefined
            else:
                r = _Region(s.lo, s.hi, s.granule, list(s.names), s.undefined)
                regions.append(r)
            merged[id(s)] = r
        return regions, [v if v is None or v[0] is None else (merged[id(v[0])], v[1]) for v in views]

    def _error(self, text: str, printed: str = "") -> SimulationError:
        kind, _, rest = text.partition("\n")
        sites, message = [], []
        lines = self.source.splitlines()
        for line in rest.splitlines():
            m = re.match(r"@(\d+)\t(.*)$", line)
            if not m:
                message.append(line)
                continue
            number = _line_of(str(self._library), int(m.group(1)))
            sites.append(
                FaultSite(m.group(2), number, lines[number - 1].strip()[:160] if 0 < number <= len(lines) else "")
            )
        name = self._kernels[0].name if len(self._kernels) == 1 else ""
        if printed:  # a failed T.device_assert says there what is wrong
            message.append("the kernel printed: " + "\n    ".join(printed.splitlines()[-5:]))
        return BY_KIND.get(kind, SimulationError)("\n".join(message), tuple(sites), name)


@functools.lru_cache(maxsize=4096)
def _line_of(library: str, pc: int) -> int:
    """Source line of a call in a kernel library: the outermost frame that lies in the kernel's own source."""
    tool = shutil.which("addr2line")
    if tool is None or pc == 0:
        return 0
    p = subprocess.run([tool, "-i", "-e", library, hex(pc)], capture_output=True, text=True, timeout=60)
    found = [
        int(m.group(1))
        for m in (re.match(rf".*{re.escape(_SOURCE_NAME)}:(\d+)", x) for x in p.stdout.splitlines())
        if m
    ]
    return found[-1] if found else 0


def simulate_module(
    mod: tvm.IRModule | tvm.tirx.PrimFunc,
    target=None,
    *,
    seed: int = 0,
    checks: bool = True,
    strict_warp: bool = False,
    pipeline: str | Pipeline | None = None,
    timeout: float = 300.0,
) -> SimulatedKernel:
    """Make lowered CUDA TIR callable on the CPU.

    Parameters
    ----------
    mod : tvm.IRModule or PrimFunc
        Thread-level TIR, as the CUDA lowering leaves it.
    target : Target, dict or str, optional
        The cuda target (``"sm_80"``, ``"sm_90a"``, ...).
    seed : int
        0: threads run in order and asynchronous work finishes as late as its waits allow; other values vary both.
    checks : bool
        False: run without race, bounds of registers and initialisation checks (out-of-bounds is always reported).
    strict_warp : bool
        True: only ``__syncwarp`` orders memory between the lanes of a warp; False: every convergent warp instruction
        does (shuffles, votes, ldmatrix, mma, wgmma waits), as on the hardware.
    pipeline : str, callable or None
        How TIR becomes host and device modules, see :func:`tvm_tile.simulate.pipeline.lower`.
    timeout : float
        Seconds of simulation of one launch after which it counts as a deadlock.

    Returns
    -------
    SimulatedKernel

    Raises
    ------
    UnsupportedInstructionError
        For CUDA code that the simulator does not implement.
    ToolchainError
        Where there is no g++.
    """
    if isinstance(mod, tvm.tirx.PrimFunc):
        name = str(mod.attrs["global_symbol"]) if mod.attrs and "global_symbol" in mod.attrs else "main"
        mod = tvm.IRModule({name: mod.with_attr("global_symbol", name)})
    return SimulatedKernel(
        mod, target, seed=seed, checks=checks, strict_warp=strict_warp, pipeline=pipeline, timeout=timeout
    )
