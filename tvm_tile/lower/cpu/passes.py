"""The passes that take lowered CPU functions to host functions.

The optimised lowering emits flat buffers and explicit vectors, so nothing is left to flatten, vectorise or simplify;
the generic simplifier would take most of the compile time (it tries its rewrite rules on every polynomial of vector
mathematics) and knows nothing that LLVM does not find in milliseconds.
"""

from __future__ import annotations

from tvm import tirx

FLAT_ATTR = "tvm_tile.flat"
"""Attribute of functions that the optimised lowering made."""


def lowered_passes(flat: bool = True) -> list:
    """Passes for one kind of lowered function.

    Parameters
    ----------
    flat : bool
        For functions with :data:`FLAT_ATTR`; False for those of the reference lowering.
    """
    t = tirx.transform
    generic = [t.FlattenBuffer(), t.BF16ComputeLegalize(), t.FP8ComputeLegalize()]
    final = [
        t.VerifyMemory(),
        t.AnnotateEntryFunc(),
        t.SplitHostDevice(),
        t.MakePackedAPI(),
        t.FP8StorageLegalize(),
        t.BF16StorageLegalize(),
    ]
    return final if flat else generic + final
