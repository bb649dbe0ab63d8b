"""CPU lowering: tile IR to flat vectorised TIR for LLVM.

``lower_cpu`` is the optimised lowering, ``lower_reference`` the serial meaning of tile IR (the oracle).
"""

from __future__ import annotations

from .amx import amx_available, request_permission
from .lowering import lower_cpu
from .passes import FLAT_ATTR, lowered_passes
from .reference import lower_reference

__all__ = ["FLAT_ATTR", "amx_available", "lower_cpu", "lower_reference", "lowered_passes", "request_permission"]
