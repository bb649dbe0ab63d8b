"""Layout algebra: where tile elements live in registers and shared memory, and how warps share a tile.

Pure Python, without TVM state. All index functions accept ints, numpy arrays and TVM PrimExprs.

- `Fragment`: a tile over the registers of a CTA's threads; `contains`, `register_in`, `lanes_for_reduce` relate them.
- `SharedLayout`: plain, padded and swizzled tiles in shared memory; `choose`, `conflicts`.
- `WarpPartition`, `partition`, `register_policy`: how warps split a matrix product.
- `Instruction` and its fragments (`accumulator_fragment`, `a_fragment`, ...), `MatrixMove` (ldmatrix, stmatrix),
  `OperandDescriptor` (wgmma).
"""

from .atoms import a_atom, a_fragment, accumulator_fragment, b_atom, b_fragment, c_atom, feeds_a_operand
from .banks import Access, column_access, conflicts, fragment_accesses, row_vector_access, wavefronts
from .defaults import copy_fragment, default_fragment, replicated_fragment
from .errors import LayoutError
from .fragment import REG, THREAD, Digit, Fragment, PlacedDigit, Replica
from .instructions import (
    INSTRUCTIONS,
    MMA,
    WGMMA,
    Instruction,
    allowed_triples,
    find_instruction,
    supported,
    wgmma_valid_n,
)
from .matrix_moves import MatrixMove, load_a, load_b, store_c
from .partition import WarpPartition, halves_of_k, partition, policy_names, register_policy, unregister_policy
from .reduction import ReducePlan, lanes_for_reduce
from .relations import BROADCAST, contains, register_in, same_owners
from .shared import SPANS, LayoutChoice, SharedLayout, choose, crosses, why_not_swizzled
from .wgmma import OperandDescriptor, operand_descriptor

__all__ = [
    "BROADCAST", "INSTRUCTIONS", "MMA", "REG", "THREAD", "WGMMA", "Access", "Digit", "Fragment", "Instruction",
    "LayoutChoice", "LayoutError", "MatrixMove", "OperandDescriptor", "PlacedDigit", "ReducePlan", "Replica",
    "SPANS", "SharedLayout", "WarpPartition", "a_atom", "a_fragment", "accumulator_fragment", "allowed_triples",
    "b_atom", "b_fragment", "c_atom", "choose", "column_access", "conflicts", "contains", "copy_fragment",
    "crosses", "default_fragment",
    "feeds_a_operand", "find_instruction", "fragment_accesses", "halves_of_k", "lanes_for_reduce", "load_a", "load_b",
    "operand_descriptor", "partition", "policy_names", "register_in", "register_policy", "replicated_fragment",
    "row_vector_access", "same_owners", "store_c", "supported", "unregister_policy", "wavefronts", "wgmma_valid_n",
    "why_not_swizzled",
]
