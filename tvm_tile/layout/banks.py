"""Bank conflicts of shared-memory accesses: 32 banks of 4 bytes, one wavefront serves each bank once.

A warp's access of 4 bytes a lane (or less) is one request; 8 bytes are served by half-warps, 16 bytes by quarter-warps.
ldmatrix and stmatrix serve one 8x8 matrix (8 rows of 16 bytes) at a time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .errors import LayoutError
from .fragment import Fragment
from .shared import SharedLayout

BANKS, BANK_BYTES, WARP_SIZE = 32, 4, 32


@dataclass(frozen=True)
class Access:
    """One shared-memory instruction of a warp: where each lane starts (None: lane inactive), and bytes a lane."""

    name: str
    lanes: tuple[tuple[int, ...] | None, ...]
    bytes: int

    def __post_init__(self) -> None:
        if self.bytes not in (1, 2, 4, 8, 16):
            raise LayoutError(f"{self.name}: a lane accesses 1, 2, 4, 8 or 16 bytes, not {self.bytes}")
        if len(self.lanes) > WARP_SIZE:
            raise LayoutError(f"{self.name}: {len(self.lanes)} lanes in a warp of {WARP_SIZE}")


def wavefronts(addresses: Sequence[int | None], access_bytes: int) -> tuple[int, int]:
    """(wavefronts needed, wavefronts without conflicts) of one warp's byte addresses."""
    lanes_per_phase = WARP_SIZE * BANK_BYTES // max(access_bytes, BANK_BYTES)
    needed = least = 0
    for first in range(0, len(addresses), lanes_per_phase):
        words: dict[int, set[int]] = defaultdict(set)
        for address in addresses[first:first + lanes_per_phase]:
            if address is None:
                continue
            for word in range(address // BANK_BYTES, (address + access_bytes - 1) // BANK_BYTES + 1):
                words[word % BANKS].add(word)
        if words:
            needed += max(map(len, words.values()))
            least += 1
    return needed, least


def conflicts(layout: SharedLayout, accesses: Access | Iterable[Access]) -> int:
    """Extra wavefronts that bank conflicts cost, summed over the accesses (0: conflict-free).

    Raises
    ------
    LayoutError
        When an address is not aligned to the access: the hardware would fault.
    """
    extra = 0
    for access in [accesses] if isinstance(accesses, Access) else accesses:
        addresses: list[int | None] = []
        for coords in access.lanes:
            bits = None if coords is None else layout.offset(*coords) * layout.dtype_bits
            if bits is not None and bits % (access.bytes * 8):
                raise LayoutError(f"{access.name}: {coords} lies at bit {bits}, not aligned to {access.bytes} bytes",
                                  "use a narrower access or a layout with aligned rows")
            addresses.append(None if bits is None else bits // 8)
        needed, least = wavefronts(addresses, access.bytes)
        extra += needed - least
    return extra


def row_vector_access(layout: SharedLayout, access_bytes: int = 16, row: int = 0) -> Access:
    """Consecutive lanes access consecutive vectors of a column block's rows, as cp.async and vector copies do."""
    vector = access_bytes * 8 // layout.dtype_bits
    if vector < 1 or layout.block_columns % vector:
        raise LayoutError(f"rows of {layout.block_columns} {layout.dtype_bits}-bit elements do not divide into "
                          f"{access_bytes}-byte vectors")
    per_row = layout.block_columns // vector
    lead = (0,) * (len(layout.shape) - 2)
    lanes: list[tuple[int, ...] | None] = []
    for lane in range(WARP_SIZE):
        r, c = row + lane // per_row, lane % per_row * vector
        lanes.append((*lead, r, c) if r < layout.rows else None)
    return Access(f"{access_bytes}-byte rows", tuple(lanes), access_bytes)


def column_access(layout: SharedLayout, access_bytes: int = 4, row: int = 0, column: int = 0) -> Access:
    """Consecutive lanes access consecutive rows of one column."""
    lead = (0,) * (len(layout.shape) - 2)
    lanes = tuple((*lead, row + lane, column) if row + lane < layout.rows else None for lane in range(WARP_SIZE))
    return Access(f"{access_bytes}-byte column", lanes, access_bytes)


def fragment_accesses(fragment: Fragment, dtype_bits: int, warp: int = 0, max_bits: int = 128) -> list[Access]:
    """The accesses by which one warp moves its part of a fragment to or from a shared tile of the same shape."""
    vector = fragment.vector_width(-1, dtype_bits, max_bits) if fragment.ndim else 1
    size = max(1, vector * dtype_bits // 8)
    found = []
    for reg in range(0, fragment.registers, vector):
        lanes: list[tuple[int, ...] | None] = []
        for lane in range(WARP_SIZE):
            thread = warp * WARP_SIZE + lane
            coords = fragment.coords(thread, reg) if thread < fragment.used_threads else None
            inside = coords is not None and all(c < n for c, n in zip(coords, fragment.shape, strict=True))
            lanes.append(tuple(coords) if inside else None)
        found.append(Access(f"registers {reg}..{reg + vector - 1}", tuple(lanes), size))
    return found
