"""Loads exported kernels with TVM's runtime library alone; imports neither TVM's compiler nor the language."""

from __future__ import annotations

import ctypes
import json
import os
import sys
from pathlib import Path

import tvm_ffi

from ..errors import TileError
from .kernel import Artifacts, Kernel
from .signature import FORMAT, Signature

__all__ = ["METADATA_SYMBOL", "load", "open_library"]

METADATA_SYMBOL = "tvm_tile_metadata"


def load(path: str | os.PathLike) -> Kernel:
    """Load a kernel that :meth:`Kernel.export` wrote.

    It works in a process with ``TVM_USE_RUNTIME_LIB=1`` and does not import TVM itself: the runtime library is enough.
    Calls are checked as they are for a freshly compiled kernel.

    Parameters
    ----------
    path : str or path
        The library.

    Raises
    ------
    TileError
        The file is missing, is no library of ours, or needs a GPU driver that is not here.

    Examples
    --------
    >>> import os, tempfile
    >>> kernel = tvm_tile.compile(tvm_tile.ops.gemm(8, 8, 8, dtype="float32"), "llvm")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     loaded = tvm_tile.load(kernel.export(os.path.join(folder, "gemm.so")))
    >>> loaded.signature == kernel.signature
    True
    """
    path = Path(path)
    if not path.is_file():
        raise TileError(f"cannot load {path}: there is no such file")
    metadata = read_metadata(path)
    signature = Signature.from_json(metadata["signature"])
    artifacts = Artifacts(
        target=metadata["target"],
        arch=metadata.get("arch"),
        lowering=metadata.get("lowering", "optimised"),
        config=metadata.get("config", {}),
        config_source=metadata.get("config_source", ""),
        resources=metadata.get("resources"),
        library=path.resolve(),
    )
    return Kernel(open_library(path, signature), signature, artifacts)


def read_metadata(path: Path) -> dict:
    """The JSON document that the library carries."""
    from .tvm_setup import check_versions, load_runtime_libraries

    check_versions()
    if "tvm" not in sys.modules:
        load_runtime_libraries()
    try:
        library = ctypes.CDLL(str(path.resolve()), mode=os.RTLD_LAZY)
    except OSError as error:
        raise TileError(f"cannot load {path}: it is no shared library for this machine ({error})") from None
    try:
        symbol = ctypes.c_char.in_dll(library, METADATA_SYMBOL)
    except ValueError:
        raise TileError(
            f"cannot load {path}: it was not exported by tvm_tile",
            advice="load other TVM libraries with tvm.runtime.load_module",
        ) from None
    metadata = json.loads(ctypes.string_at(ctypes.addressof(symbol)))
    if metadata.get("format") != FORMAT:
        raise TileError(
            f"cannot load {path}: its format is {metadata.get('format')}, and this version reads {FORMAT}",
            advice="export it again with this version of tvm_tile",
        )
    return metadata


def open_library(path: Path, signature: Signature):
    """The kernel's function in a library; TVM's CUDA runtime is loaded when the kernel needs it."""
    from .tvm_setup import ensure_cuda_runtime, load_runtime_libraries, use_all_cores

    use_all_cores()
    if signature.device == "cuda":
        ensure_cuda_runtime()
    elif "tvm" not in sys.modules:
        load_runtime_libraries()
    module = tvm_ffi.load_module(str(Path(path).resolve()))
    return module.get_function(signature.name)
