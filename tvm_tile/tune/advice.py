"""What to change in a configuration when shared memory, registers or pipeline bubbles are the limit of a GPU kernel.

The figures are rooflines of one iteration of the main loop on one SM: the time to load its tiles at the SM's share of
the bandwidth of memory and L2, and the time of its products at the SM's share of the tensor-core rate. They say which
resource binds, not how long the kernel takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..ops.footprint import Footprint, cdiv

__all__ = ["Iteration", "advise", "iteration"]

#: Seconds from asking global memory to having the data, on a loaded machine.
LATENCY = 1.0e-6
#: Bytes a clock and SM that loads from L2 reach in practice.
L2_BYTES_PER_CLOCK = 32
#: The guide's least number of iterations for a pipeline to pay.
FEW_ITERATIONS = 10


@dataclass(frozen=True)
class Iteration:
    """One trip of the main loop.

    Attributes
    ----------
    load, compute : float
        Seconds to load its tiles and to multiply them, with all resident CTAs sharing the SM.
    resident : int
        CTAs an SM.
    stages : int
        Depth from which on loads are hidden.
    """

    load: float
    compute: float
    resident: int
    stages: int


def iteration(
    footprint: Footprint, machine, dtype: str, unique: float = 1.0, registers: int | None = None
) -> Iteration:
    """The rooflines of one iteration.

    Parameters
    ----------
    footprint : Footprint
        Of the configuration.
    machine : GPU
        The hardware description.
    dtype : str
        Element dtype of the products.
    unique : float
        Share of the loaded bytes that comes from memory rather than from L2, where other CTAs' loads have brought it.
    registers : int, optional
        Registers a thread as the compiler reports them; the footprint's estimate otherwise.
    """
    from ..hardware import occupancy

    per_thread = min(footprint.registers if registers is None else registers, machine.registers_per_thread)
    fit = occupancy(machine, footprint.threads, per_thread, footprint.shared_bytes)
    resident = max(1, min(fit.blocks, cdiv(footprint.ctas, machine.sms)))
    rate = machine.tensor_flops.get(dtype, machine.fp32_flops)
    from_memory = unique * machine.sms / machine.memory_bandwidth
    from_l2 = 1 / (L2_BYTES_PER_CLOCK * machine.clock_hz)
    load = footprint.load_bytes * resident * max(from_memory, from_l2)
    compute = footprint.flops * resident * machine.sms / rate
    # a load that is issued `stages - 1` iterations ahead has that many iterations to arrive
    ahead = cdiv(int(1e12 * (LATENCY + load)), max(1, int(1e12 * max(load, compute))))
    return Iteration(load, compute, resident, 1 + ahead)


def _smaller(values: list, current) -> Any:
    below = [v for v in values if isinstance(v, int) and v < current]
    return max(below) if below else None


def _single_changes(space, config: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """(tunable, next smaller value) of tile extents and the pipeline depth, the depth first."""
    names = sorted(
        (n for n in space.choices if n == "num_stages" or n.startswith("block_")), key=lambda n: n != "num_stages"
    )
    out = []
    for name in names:
        value = _smaller(space.choices[name], config[name])
        if value is not None and not (name == "num_stages" and value < 1):
            out.append((name, value))
    return out


def advise(space, config: Mapping[str, Any], resources=None) -> list[str]:
    """What limits a configuration on a GPU, and which of its values to change.

    Parameters
    ----------
    space : Space
        The op's space on a machine; empty advice for a CPU.
    config : dict
        Tunables and options; what is left out is untuned.
    resources : Resources, optional
        What the compiler reported of the built kernel.

    Returns
    -------
    list of str
        One line each: the limit with its numbers, then the change. The first line says how the iterations stand.
    """
    machine = space.machine
    if machine.kind != "cuda":
        return []
    shape, tunables = space.problem.configured(config)
    full = {**{n: shape[n] for n in space.choices if n in shape}, **tunables}
    footprint = space.footprint(full)
    if footprint is None:
        return []
    lines: list[str] = []
    lines += _shared(space, full, footprint)
    lines += _registers(space, full, footprint, resources)
    if footprint.flops:
        lines += _bubbles(space, full, footprint, resources)
    lines += _grid(space, full, footprint)
    return lines


def _shared(space, config, footprint: Footprint) -> list[str]:
    limit = space.machine.shared_per_block
    tiles = ", ".join(
        f"{t.name} {t.bytes}" + (f" x {footprint.copies}" if t.staged and footprint.copies > 1 else "")
        for t in footprint.shared
    )
    if footprint.shared_bytes <= limit:
        return []
    fits = []
    for name, value in _single_changes(space, config):
        changed = space.footprint({**config, name: value})
        if changed.shared_bytes <= limit:
            fits.append(f"{name}={value} ({changed.shared_bytes})")
    way = "or ".join(f"{f} " for f in fits).strip() or "several of block_*, num_stages together must shrink"
    return [f"shared memory: {footprint.shared_bytes} of {limit} bytes ({tiles}); fits with {way}"]


def _registers(space, config, footprint: Footprint, resources) -> list[str]:
    machine = space.machine
    limit = min(machine.registers_per_thread, machine.registers_per_block // footprint.threads)
    spilled = getattr(resources, "spill_bytes", None)
    serialised = any("serialized" in w and "register" in w for w in getattr(resources, "warnings", ()))
    if resources is None and footprint.registers <= limit or resources is not None and not (spilled or serialised):
        return []
    each = sorted(((cdiv(t.bytes, 4 * footprint.threads), t.name) for t in footprint.fragments), reverse=True)
    names = ", ".join(f"{name} {count}" for count, name in each if count > 1)
    ways = []
    for name, value in _single_changes(space, config):
        if name != "num_stages" and space.footprint({**config, name: value}).registers < footprint.registers:
            ways.append(f"{name}={value}")
    bigger = [v for v in space.choices.get("threads", []) if v > config["threads"]]
    if bigger:
        ways.append(f"threads={min(bigger)}")
    if spilled:
        seen = f"{spilled} bytes a thread are spilled"
    elif serialised:
        seen = "too few for products in flight, which the compiler therefore serialises"
    else:
        seen = f"about {footprint.registers} of {limit} a thread"
    return [f"registers: {seen} ({names}); try {' or '.join(ways) or 'smaller tiles'}"]


def _bubbles(space, config, footprint: Footprint, resources) -> list[str]:
    machine, dtype = space.machine, space.problem.dtype
    shape, _ = space.problem.configured(config)
    loaded = footprint.ctas * footprint.iterations * footprint.load_bytes
    unique = min(1.0, space.problem.spec.bytes(shape, dtype) / max(1, loaded))
    one = iteration(footprint, machine, dtype, unique, getattr(resources, "registers", None))
    bound = "loads" if one.load > one.compute else "products"
    lines = [
        f"iterations: {footprint.iterations} a CTA, {footprint.stages} stages, {one.resident} CTAs an SM; an iteration "
        f"loads {one.load * 1e6:.2f} us and multiplies {one.compute * 1e6:.2f} us: bound by {bound}"
    ]
    # resident CTAs hide each other's latency as further stages do
    hidden = max(footprint.copies, footprint.slots) * one.resident
    if hidden < one.stages and "num_stages" in space.choices:
        deeper = [
            s
            for s in space.choices["num_stages"]
            if s > config["num_stages"]
            and space.footprint({**config, "num_stages": s}).shared_bytes <= machine.shared_per_block
        ]
        if deeper:
            enough = [s for s in deeper if s * one.resident >= one.stages] or [max(deeper)]
            lines.append(
                f"bubbles: loads take {(LATENCY + one.load) * 1e6:.2f} us to arrive, {one.stages} stages hide them; "
                f"try num_stages={min(enough)}"
            )
        else:
            ways = [f"{n}={v}" for n, v in _single_changes(space, config) if n in ("block_N", "block_K")]
            lines.append(
                f"bubbles: {one.stages} stages would hide the loads, and shared memory has no room for more than "
                f"{footprint.copies}; try {' or '.join(ways) or 'smaller tiles'}"
            )
    if footprint.iterations < FEW_ITERATIONS:
        name = next((n for n in ("block_K", "block_N") if n in space.choices), None)
        value = _smaller(space.choices[name], config[name]) if name else None
        if value:
            lines.append(
                f"bubbles: {footprint.iterations} iterations do not fill a pipeline (guide: {FEW_ITERATIONS}); "
                f"try {name}={value}"
            )
    return lines


def _grid(space, config, footprint: Footprint) -> list[str]:
    sms = space.machine.sms
    if footprint.ctas >= 0.9 * sms:
        return []
    ways = [
        f"{n}={v}" for n, v in _single_changes(space, config) if space.footprint({**config, n: v}).ctas > footprint.ctas
    ]
    ways += [f"a larger {n}" for n in space.problem.spec.options]
    return [f"grid: {footprint.ctas} CTAs for {sms} SMs; try {' or '.join(ways) or 'smaller tiles'}"]
