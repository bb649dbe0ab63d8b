"""A compiled kernel: call it, look into it, export it. Works with TVM's runtime library alone."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tvm_ffi

from ..errors import TileError, TileTargetError, ToolchainError
from .arguments import normalised, numpy_view
from .check import check_arguments, check_scalar, scalar_range
from .resources import Resources
from .signature import Signature

__all__ = ["Artifacts", "Kernel"]


def _overlap(spans: list[tuple[int, int]]) -> bool:
    """Whether any two of some (address, bytes) have memory in common."""
    end = 0
    for start, size in sorted(spans):
        if start < end:
            return True
        end = start + size
    return False


@dataclass
class Artifacts:
    """What is known of a kernel beside its code: files of its cache entry, and the facts that went into them."""

    target: str
    arch: str | None = None
    lowering: str = "optimised"
    config: dict = field(default_factory=dict)
    config_source: str = ""
    resources: dict | None = None
    folder: Path | None = None
    library: Path | None = None
    script: str | None = None
    source: str | None = None
    cached: bool = False
    seconds: float = 0.0
    keep: Any = None


class Kernel:
    """A compiled tile kernel.

    Call it with one argument for each parameter: tensors of torch, NumPy, TVM or any library with ``__dlpack__``, and
    Python numbers for scalars. Nothing is copied; results are written into the tensors given. On a GPU the kernel runs
    on torch's current stream. Arguments that do not fit raise :class:`tvm_tile.CallError` before anything runs.

    A tensor that the kernel writes must share no memory with another argument: torch and NumPy tensors that overlap are
    refused (those with declared strides, whose elements may lie between each other's, where they start together).

    Made by :func:`tvm_tile.compile` and :func:`tvm_tile.load`.
    """

    def __init__(self, function, signature: Signature, artifacts: Artifacts) -> None:
        self._function = function
        self.signature = signature
        self._artifacts = artifacts
        self._direct_types = {tvm_ffi.core.Tensor, int, float}
        self._torch_types: frozenset = frozenset()
        self._count = len(signature.parameters)
        self._scalars = [
            (i, *(scalar_range(p.dtype) or (0, -1))) for i, p in enumerate(signature.parameters) if not p.is_tensor
        ]
        self._written = [i for i, p in enumerate(signature.parameters) if p.is_tensor and p.written]
        # On a GPU vector and TMA accesses need aligned tensors, which the host code does not check.
        gpu = signature.device == "cuda"
        self._tensors = [
            (i, p.align - 1 if gpu else 0, p.strides is None) for i, p in enumerate(signature.parameters) if p.is_tensor
        ]

    # ---- call

    def __call__(self, *args) -> None:
        """Run the kernel; see the class for the arguments."""
        if len(args) != self._count:
            check_arguments(self.signature, args)
        for position, low, high in self._scalars:
            value = args[position]
            # TVM would silently cut an integer to the parameter's width.
            if type(value) is not int or not low <= value <= high:
                args = (*args[:position], check_scalar(self.signature, position, value), *args[position + 1 :])
        if not self._direct_types.issuperset(map(type, args)):
            args = self._prepare(args)
        if self._torch_types:
            self._check_memory(args)
        try:
            self._function(*args)
            return
        except Exception as error:
            failure = error
        # Outside of the handler: TVM's own wording would be shown as the context of ours.
        self._recover(args, failure)

    def _prepare(self, args: tuple) -> tuple:
        """NumPy arrays wrapped, and the types of tensors that pass as they are remembered."""
        self._learn_types()
        prepared = list(args)
        spans = []
        for i, value in enumerate(args):
            if isinstance(value, np.ndarray):
                spans.append((value.__array_interface__["data"][0], value.nbytes if value.flags.c_contiguous else 1))
                if i in self._written and not value.flags.writeable:
                    check_arguments(self.signature, args)
                try:
                    prepared[i] = numpy_view(value)
                except Exception:
                    check_arguments(self.signature, args)
                    raise
        if self._written and _overlap(spans):
            check_arguments(self.signature, args)
        return tuple(prepared)

    def _check_memory(self, args: tuple) -> None:
        """What the host code cannot see of torch tensors: lazy negation, alignment for the GPU, shared memory."""
        spans = []
        try:
            for position, mask, compact in self._tensors:
                value = args[position]
                if type(value) in self._torch_types:
                    address = value.data_ptr()
                    # The export by DLPack ignores the bit of a lazily negated view: its values would be wrong.
                    if address & mask or value.is_neg():
                        check_arguments(self.signature, args)
                    spans.append((address, value.nbytes if compact else 1))
        except RuntimeError:  # a tensor without memory of its own (meta, fake)
            check_arguments(self.signature, args)
            raise
        # Kernels are compiled for tensors that share no memory with what they write.
        if self._written and _overlap(spans):
            check_arguments(self.signature, args)

    def _learn_types(self) -> None:
        torch = sys.modules.get("torch")
        if torch is not None and not self._torch_types:
            self._torch_types = frozenset((torch.Tensor, torch.nn.Parameter))
            self._direct_types |= self._torch_types
        tvm = sys.modules.get("tvm")
        if tvm is not None and hasattr(tvm, "runtime"):
            self._direct_types.add(tvm.runtime.Tensor)

    def _recover(self, args: tuple, error: Exception) -> None:
        """After a failed call: say what does not fit, or run again where only meaningless strides were in the way."""
        check_arguments(self.signature, args)
        usable = tuple(normalised(a) for a in args)
        if any(a is not b for a, b in zip(args, usable, strict=True)):
            self._function(*usable)
            return
        text = str(error)
        if "no kernel image" in text or "NO_BINARY_FOR_GPU" in text:
            raise TileTargetError(
                f"{self.signature.name} is compiled for {self._artifacts.arch}, which this GPU cannot run",
                advice="compile it again here with target='cuda'",
            ) from error
        raise error

    # ---- look

    @property
    def name(self) -> str:
        """The function's name."""
        return self.signature.name

    @property
    def target(self) -> str:
        """Short name of the target the kernel is compiled for."""
        return self._artifacts.target

    @property
    def config(self) -> dict:
        """Tunable parameters that the kernel was made with (empty where its factory recorded none)."""
        return dict(self._artifacts.config)

    @property
    def config_source(self) -> str:
        """Where :attr:`config` is from, for an op compiled by name: ``exact``, ``nearest`` or ``default``, and why."""
        return self._artifacts.config_source

    @property
    def resources(self) -> Resources:
        """Registers, spills, shared memory, threads and occupancy."""
        if self._artifacts.resources is None:
            raise TileError(f"{self.name} holds no record of its resources")
        return Resources.from_json(self._artifacts.resources)

    @property
    def source(self) -> str:
        """Generated code: CUDA C++ on a GPU, LLVM IR on a CPU."""
        return self._text("source", "source.cu" if self.signature.device == "cuda" else "source.ll")

    @property
    def ir(self) -> str:
        """The tile IR the kernel was compiled from, as TVMScript; the same as :meth:`script`."""
        return self._text("script", "script.py")

    def script(self) -> str:
        """The tile IR the kernel was compiled from, as TVMScript."""
        return self.ir

    @property
    def ptx(self) -> str:
        """PTX of the CUDA source (needs nvcc)."""
        from .toolchain import to_ptx

        self._require_cuda("PTX")
        return to_ptx(self.source, self._artifacts.arch)

    @property
    def sass(self) -> str:
        """Machine code of the CUDA kernels as cuobjdump shows it."""
        from .toolchain import to_sass

        self._require_cuda("SASS")
        folder = self._artifacts.folder
        if folder is None or not (folder / "device.fatbin").exists():
            raise TileError(f"{self.name} was loaded from a library; its machine code is kept where it was compiled")
        return to_sass((folder / "device.fatbin").read_bytes())

    @property
    def from_cache(self) -> bool:
        """Whether the kernel was found in the disk cache."""
        return self._artifacts.cached

    @property
    def compile_seconds(self) -> float:
        """Seconds that :func:`tvm_tile.compile` took."""
        return self._artifacts.seconds

    def _require_cuda(self, what: str) -> None:
        if self.signature.device != "cuda":
            raise TileError(f"{self.name} is compiled for {self.target}: {what} is a GPU's; see kernel.source")

    def _text(self, attribute: str, file: str) -> str:
        text = getattr(self._artifacts, attribute)
        if text is None and self._artifacts.folder is not None and (self._artifacts.folder / file).exists():
            text = (self._artifacts.folder / file).read_text()
        if text is None:
            raise TileError(f"{self.name} was loaded from a library, which holds no {attribute}")
        return text

    # ---- export

    def export(self, path: str | os.PathLike) -> Path:
        """Write the kernel as a shared library that :func:`tvm_tile.load` and TVM's runtime load.

        Parameters
        ----------
        path : str or path
            File to write, replaced at once when it exists.

        Returns
        -------
        pathlib.Path
            The file.
        """
        library = self._artifacts.library
        if library is None:
            raise ToolchainError(
                f"exporting {self.name} needs a C compiler, and there was none when it was compiled",
                advice="install gcc (Debian: apt install g++) and compile again",
            )
        path = Path(path)
        if not path.parent.exists():
            raise TileError(f"cannot export to {path}: the folder {path.parent} does not exist")
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name, delete=False) as scratch:
            try:
                with open(library, "rb") as source:
                    shutil.copyfileobj(source, scratch)
                scratch.close()
                os.chmod(scratch.name, 0o755)
                os.replace(scratch.name, path)
            except BaseException:
                os.unlink(scratch.name)
                raise
        return path

    def __repr__(self) -> str:
        return f"<tvm_tile.Kernel {self.signature} for {self.target}>"
