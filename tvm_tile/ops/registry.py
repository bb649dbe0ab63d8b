"""The kernel library's catalogue: for each op its shapes, dtypes, inputs, reference, tolerance and cost.

The command line, the benchmarks, the tuner and the tests take everything they know of an op from its :class:`OpSpec`.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Mapping
from typing import Any

from tvm import tirx

from ..errors import TileError
from .common import check_dtype, next_power_of_two, target_class
from .footprint import Footprint

__all__ = ["OpSpec", "get", "names", "poisoned", "random_tensor"]

# name -> (module of tvm_tile.ops.specs, class)
_SPECS = {
    "gemm": ("gemm", "Gemm"),
    "flash_attention": ("flash_attention", "FlashAttention"),
    "flash_mla": ("flash_mla", "FlashMLA"),
    "dequant_gemm": ("more_gemm", "DequantGemm"),
    "grouped_gemm": ("more_gemm", "GroupedGemm"),
    "softmax": ("normalize", "Softmax"),
    "rmsnorm": ("normalize", "RMSNorm"),
}


def names() -> list[str]:
    """Names of the ops."""
    return list(_SPECS)


def get(name: str) -> OpSpec:
    """The op of that name.

    Raises
    ------
    TileError
        When there is none; the message lists those that exist.
    """
    if name not in _SPECS:
        near = difflib.get_close_matches(name, _SPECS, n=1)
        raise TileError(
            f"unknown op {name!r}", advice=(f"did you mean {near[0]!r}? " if near else "") + f"ops: {', '.join(_SPECS)}"
        )
    module, attribute = _SPECS[name]
    return getattr(importlib.import_module(f".specs.{module}", __package__), attribute)()


class OpSpec:
    """What the tools know of an op; one subclass an op.

    Attributes
    ----------
    name, doc : str
        Name and one line of description.
    shape_params : dict of str to (type, default, help)
        Shape parameters and options, all that the inputs and the reference depend on.
    dtypes : list of str
        Possible dtypes, the default one first.
    tunables : dict of str to list
        Parameters of the factory that change speed only, each with values worth trying; their meaning is in the
        factory's documentation.
    version : int
        Raised when the kernel's source or its tunables change so that older tuning records no longer describe it.
    sizes : tuple of str
        The shape parameters that are sizes; two shapes that differ in nothing else are of one class, and a tuning
        record of one may serve the other.
    options : dict of str to list
        Shape parameters that a value of 0 leaves open, and values worth trying for them. They are tuned beside the
        tunables; unlike those they change the tensors of a call (workspaces).
    coupled : tuple of (str, str)
        Decisions that share a resource, which the tuner also changes together.
    peers : dict of str to callable
        Implementations to compare with: ``peer(shape, dtype, tensors)`` returns a function without arguments that
        computes the op with torch on the same tensors.
    """

    name: str
    doc: str
    shape_params: dict[str, tuple[type, Any, str]]
    dtypes: list[str]
    tunables: dict[str, list] = {}
    version: int = 1
    sizes: tuple[str, ...] = ()
    options: dict[str, list] = {}
    coupled: tuple[tuple[str, str], ...] = ()
    peers: dict[str, Callable] = {}

    # ---- to be defined by each op

    def build(self, shape: Mapping[str, Any], dtype: str, target: str, **tunables) -> tirx.PrimFunc:
        """The kernel of a complete, checked shape for a class of targets."""
        raise NotImplementedError

    def arguments(self, shape: Mapping[str, Any], dtype: str, generator) -> tuple[list, list[int]]:
        """The tensors of a call, on any device, and the positions of the outputs."""
        raise NotImplementedError

    def expected(self, shape: Mapping[str, Any], dtype: str, tensors: list) -> list:
        """The outputs by plain torch, in float32 or float64 (integers stay integers)."""
        raise NotImplementedError

    def tolerance(self, shape: Mapping[str, Any], dtype: str) -> tuple[float, float]:
        """(relative, absolute) tolerance against the reference."""
        raise NotImplementedError

    def flops(self, shape: Mapping[str, Any]) -> int:
        """Floating-point operations of the products (a multiply-add counts 2)."""
        raise NotImplementedError

    def bytes(self, shape: Mapping[str, Any], dtype: str) -> int:
        """Bytes that must be read and written at least once."""
        raise NotImplementedError

    def footprint(
        self, shape: Mapping[str, Any], dtype: str, target: str, config: Mapping[str, Any]
    ) -> Footprint | None:
        """What a complete configuration takes of the machine; None for an op that does not say."""
        return None

    def illegal(self, shape: Mapping[str, Any], dtype: str, target: str, config: Mapping[str, Any]) -> str | None:
        """Why a complete configuration cannot be built, beside the limits of the machine; None where it can."""
        return None

    # ---- common to all

    def complete(self, shape: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The shape with defaults put in, checked.

        Raises
        ------
        TileError
            For a parameter that does not exist or has another type; the message lists those that exist.
        """
        out = {key: default for key, (_, default, _) in self.shape_params.items()}
        for key, value in (shape or {}).items():
            if key not in self.shape_params:
                known = ", ".join(f"{k}={d}" for k, (_, d, _) in self.shape_params.items())
                near = difflib.get_close_matches(key, self.shape_params, n=1)
                raise TileError(
                    f"{self.name} has no shape parameter {key!r}",
                    advice=(f"did you mean {near[0]!r}? " if near else "") + f"it has {known}",
                )
            kind, default, _ = self.shape_params[key]
            if value is None and default is None:
                continue
            if kind is bool and isinstance(value, int) and value in (0, 1):
                value = bool(value)
            if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
                raise TileError(f"{self.name}: {key}={value!r} must be of type {kind.__name__}")
            out[key] = value
        return out

    def defaults(self, shape: Mapping[str, Any], dtype: str, target: str) -> dict[str, Any]:
        """The untuned values of the tunables for a class of targets (``"cpu"``, ``"sm_80"``, ``"sm_90"``)."""
        return {}

    #: Tunables that decide something on a CPU; the others are of a GPU's CTA.
    cpu_tunables: tuple[str, ...] = ("block_M", "block_N", "block_K", "block_H")

    def choices(self, shape: Mapping[str, Any], dtype: str, target: str) -> dict[str, list]:
        """The values to try for a shape and a class of targets, the untuned one among them.

        Tile extents beyond the size they cover are left out where the size has a smaller tile that covers it
        (:meth:`extents`), and so is what has no meaning on the target.
        """
        left_open = [name for name in self.options if shape.get(name) == 0]
        shape = self.complete(shape)
        defaults, extents = self.defaults(shape, dtype, target), self.extents(shape)
        out: dict[str, list] = {}
        for name, values in self.tunables.items():
            if target == "cpu" and name not in self.cpu_tunables:
                continue
            if name in extents:
                limit = next_power_of_two(extents[name])
                values = [v for v in values if v <= limit] or [min(values)]
            default = defaults.get(name)
            if default is not None and default not in values:
                values = sorted([*values, default])
            out[name] = list(values)
        for name in left_open:
            out[name] = sorted({*self.options[name], shape[name]})
        return out

    def extents(self, shape: Mapping[str, Any]) -> dict[str, int]:
        """The size that a tile extent covers, for those where a larger tile than the size is a waste."""
        return {}

    def configured(
        self, shape: Mapping[str, Any], dtype: str, target: str, config: Mapping[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """(complete shape with its open options decided, complete tunables) of a configuration.

        Parameters
        ----------
        config : dict, optional
            Values of tunables and of open options; those left out take their untuned values.
        """
        shape, config = dict(shape), dict(config or {})
        for name in self.options:
            if name in config:
                shape[name] = config.pop(name)
        shape = self.complete(shape)
        return shape, {**self.defaults(shape, dtype, target), **config}

    def identity(self, shape: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The complete shape, in which options that are left open to the tuner stay 0: what names a tuning record."""
        left_open = {name: 0 for name in self.options if (shape or {}).get(name) == 0}
        return {**self.complete(shape), **left_open}

    def shape_class(self, shape: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, int]]:
        """(what two shapes must share for a record of one to serve the other, the sizes that may differ)."""
        shape = self.identity(shape)
        return {k: v for k, v in shape.items() if k not in self.sizes}, {k: shape[k] for k in self.sizes}

    def make(
        self, shape: Mapping[str, Any] | None = None, dtype: str | None = None, target=None, **tunables
    ) -> tirx.PrimFunc:
        """The op's kernel.

        Parameters
        ----------
        shape : dict
            Shape parameters; those left out take their defaults.
        dtype : str, optional
            Element dtype, the first of :attr:`dtypes` by default.
        target : str or tvm.target.Target, optional
            Whose default tile sizes to take; the GPU at hand, else the CPU.
        **tunables
            Values of :attr:`tunables`.
        """
        dtype = check_dtype(self.name, "dtype", self.dtypes[0] if dtype is None else dtype, self.dtypes)
        where = target_class(target)
        for key in tunables:
            if key not in self.tunables:
                raise TileError(
                    f"{self.name} has no tunable {key!r}", advice=f"it has {', '.join(self.tunables) or 'none'}"
                )
        shape, config = self.configured(shape or {}, dtype, where, tunables)
        func = self.build(shape, dtype, where, **config)
        if not isinstance(func, tirx.PrimFunc):
            return func
        # what `kernel.config` shows, and by which the compiler's advice names tile sizes
        return func.with_attr("tile.config", config)

    def inputs(self, shape: Mapping[str, Any], dtype: str, device="cpu", generator=None) -> tuple[list, list[int]]:
        """Random tensors of a call in order, outputs and workspaces poisoned, and the positions of the outputs.

        Parameters
        ----------
        shape : dict
            As for :meth:`make`.
        dtype : str
            Element dtype.
        device : str or torch.device
            Where the tensors go.
        generator : torch.Generator, optional
            A fresh one of the CPU otherwise; one of a GPU is faster, and makes other numbers.
        """
        import torch

        generator = generator if generator is not None else torch.Generator().manual_seed(torch.seed() % 2**31)
        tensors, outputs = self.arguments(self.complete(shape), dtype, generator)
        return [t.to(device) for t in tensors], outputs

    def reference(self, shape: Mapping[str, Any], dtype: str, tensors: list) -> list:
        """The outputs by plain torch, in float32 or float64 (integers stay integers)."""
        return self.expected(self.complete(shape), dtype, tensors)


def torch_dtype(name: str):
    """The torch dtype of a dtype's name."""
    import torch

    return getattr(torch, name)


def random_tensor(shape, dtype: str, generator, scale: float = 1.0):
    """Normally distributed numbers, or integers over the whole range of an integer dtype, where the generator is."""
    import torch

    kind = torch_dtype(dtype)
    if not kind.is_floating_point:
        info = torch.iinfo(kind)
        return torch.randint(
            info.min, info.max + 1, tuple(shape), generator=generator, device=generator.device, dtype=torch.int64
        ).to(kind)
    return (torch.randn(tuple(shape), generator=generator, device=generator.device) * scale).to(kind)


def poisoned(shape, dtype: str):
    """A tensor that no correct kernel leaves as it is: NaN, or bytes 0x7f."""
    import torch

    kind = torch_dtype(dtype)
    out = torch.empty(tuple(shape), dtype=kind)
    if kind.is_floating_point and kind.itemsize > 1:
        return out.fill_(float("nan"))
    out.view(torch.uint8).fill_(0x7F)
    return out
