"""Tensors of other libraries: what they are (for error messages) and how they reach a kernel without a copy."""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass

import numpy as np
import tvm_ffi

__all__ = ["Described", "compact_strides", "describe", "normalised", "numpy_view"]


@dataclass(frozen=True)
class Described:
    """A tensor argument as the checks see it; strides in elements, None when unknown."""

    shape: tuple[int, ...]
    dtype: str
    device: str
    strides: tuple[int, ...] | None
    address: int | None
    writeable: bool = True
    kind: str = "tensor"
    problem: str | None = None


class _DLDevice(ctypes.Structure):
    _fields_ = [("device_type", ctypes.c_int), ("device_id", ctypes.c_int)]


class _DLDataType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _DLDevice),
        ("ndim", ctypes.c_int),
        ("dtype", _DLDataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _DLManagedTensor(ctypes.Structure):
    pass


_Deleter = ctypes.CFUNCTYPE(None, ctypes.POINTER(_DLManagedTensor))
_DLManagedTensor._fields_ = [("dl_tensor", _DLTensor), ("manager_ctx", ctypes.c_void_p), ("deleter", _Deleter)]

_CAPSULE = ctypes.pythonapi.PyCapsule_New
_CAPSULE.restype = ctypes.py_object
_CAPSULE.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]

# What a capsule points into, kept alive until its consumer calls the deleter.
_ALIVE: dict[int, tuple] = {}


@_Deleter
def _release(managed):
    _ALIVE.pop(ctypes.addressof(managed.contents), None)


class _NumpyExport:
    """Hands a NumPy array over by DLPack, also where NumPy refuses (read-only arrays, ml_dtypes)."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)

    def __dlpack__(self, **_kwargs):
        array = self.array
        dtype = tvm_ffi.dtype(_dtype_name(array.dtype))
        shape = (ctypes.c_int64 * max(1, array.ndim))(*array.shape)
        strides = (ctypes.c_int64 * max(1, array.ndim))(*_element_strides(array))
        managed = _DLManagedTensor()
        tensor = managed.dl_tensor
        tensor.data = array.ctypes.data
        tensor.device = _DLDevice(1, 0)
        tensor.ndim = array.ndim
        tensor.dtype = _DLDataType(int(dtype.type_code), dtype.bits, dtype.lanes)
        tensor.shape = ctypes.cast(shape, ctypes.POINTER(ctypes.c_int64))
        tensor.strides = ctypes.cast(strides, ctypes.POINTER(ctypes.c_int64))
        tensor.byte_offset = 0
        managed.deleter = _release
        address = ctypes.addressof(managed)
        _ALIVE[address] = (managed, shape, strides, array)
        return _CAPSULE(address, b"dltensor", None)


def _dtype_name(dtype: np.dtype) -> str:
    return "bool" if dtype == np.bool_ else dtype.name


def compact_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides in elements, as a kernel's own check computes them (0 above an empty dimension)."""
    strides, run = [], 1
    for extent in reversed(shape):
        strides.append(run)
        run *= extent
    return tuple(reversed(strides))


def _element_strides(array: np.ndarray) -> tuple[int, ...]:
    # Strides of an empty array, or of a dimension of size 1, say nothing: write the compact ones, which kernels check.
    if array.size == 0:
        return compact_strides(array.shape)
    compact = compact_strides(array.shape)
    size = array.itemsize
    return tuple(c if n == 1 else s // size for n, s, c in zip(array.shape, array.strides, compact, strict=True))


def numpy_view(array: np.ndarray):
    """The array as a TVM tensor that shares its memory; read-only arrays too (the caller checks outputs)."""
    return tvm_ffi.from_dlpack(_NumpyExport(array))


def normalised(value):
    """The tensor with compact strides written where they say nothing (empty tensors, sizes of 1); else itself."""
    if isinstance(value, np.ndarray):
        return numpy_view(value)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor) and value.layout == torch.strided:
        wanted = _torch_strides(value)
        if wanted != value.stride():
            return value.detach().as_strided(value.shape, wanted)
    return value


def _torch_strides(value) -> tuple[int, ...]:
    shape, compact = tuple(value.shape), compact_strides(tuple(value.shape))
    if value.numel() == 0:
        return compact
    return tuple(c if n == 1 else s for n, s, c in zip(shape, value.stride(), compact, strict=True))


def _torch_device(device) -> str:
    return "cpu" if device.type == "cpu" else f"{device.type}:{device.index or 0}"


def describe(value) -> Described | None:
    """What a tensor-like argument is; None when it is no tensor."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return _describe_torch(torch, value)
    if isinstance(value, np.ndarray):
        misfit = value.itemsize and any(s % value.itemsize for s in value.strides)
        return Described(
            tuple(value.shape),
            _dtype_name(value.dtype),
            "cpu",
            _element_strides(value),
            value.ctypes.data,
            value.flags.writeable,
            "NumPy array",
            "its strides are no multiples of the element size" if misfit else None,
        )
    if not isinstance(value, tvm_ffi.core.Tensor):
        if not hasattr(value, "__dlpack__"):
            return None
        try:
            value = tvm_ffi.from_dlpack(value)
        except Exception as error:  # any library's exporter may refuse in its own way
            return Described((), "?", "?", None, None, True, type(value).__name__, _first_line(error))
    shape = tuple(int(s) for s in value.shape)
    strides = tuple(int(s) for s in value.strides) if hasattr(value, "strides") else None
    address = int(value.data_ptr()) if hasattr(value, "data_ptr") else None
    device = str(value.device)
    return Described(shape, str(value.dtype), "cpu" if device.startswith("cpu") else device, strides, address)


def _describe_torch(torch, value) -> Described:
    dtype = str(value.dtype).removeprefix("torch.")
    device = _torch_device(value.device)
    kind = "torch tensor"
    shape = tuple(value.shape)
    if value.layout != torch.strided:
        return Described(shape, dtype, device, None, None, True, kind, f"it has the layout {value.layout}; .to_dense()")
    if device.startswith("meta"):
        return Described(shape, dtype, device, None, None, True, kind, "it is on the meta device and has no memory")
    problem = None
    if value.is_neg():
        problem = "it is a lazily negated view; call .resolve_neg()"
    elif value.is_conj():
        problem = "it is a lazily conjugated view; call .resolve_conj()"
    strides = _torch_strides(value)
    return Described(shape, dtype, device, strides, value.data_ptr(), True, kind, problem)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
