"""Each planted fault is caught with its own exception class, on more than one schedule; the sound kernel passes."""

from __future__ import annotations

import functools
import importlib.util
import pathlib

import pytest
import torch

from tvm_tile import simulate as sim

_spec = importlib.util.spec_from_file_location("sim_kernels", pathlib.Path(__file__).with_name("kernels.py"))
K = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(K)
GEN = torch.Generator().manual_seed(20240)


def rand(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=GEN).to(dtype)


def nan(*shape, dtype=torch.float32):
    return torch.full(shape, float("nan")).to(dtype)


def run_exchange(seed, **fault):
    a, b = rand(64), nan(64)
    sim.simulate_module(K.exchange(**fault), "sm_90a", seed=seed)(a, b)
    return b, a.flip(0)


def run_diverge(seed, sync_below=64):
    a, b = rand(64), nan(64)
    sim.simulate_module(K.diverge(sync_below), "sm_90a", seed=seed)(a, b)
    return b, a


def run_shuffle(seed, **fault):
    a, b = rand(32), nan(32)
    sim.simulate_module(K.shuffle(**fault), "sm_90a", seed=seed)(a, b)
    return b, a.sum().expand(32)


def run_vector(seed, **fault):
    a = torch.randint(0, 1 << 30, (128,), generator=GEN).to(torch.uint32)
    b = torch.full((128,), 0x7F7F7F7F).to(torch.uint32)
    sim.simulate_module(K.vector_copy(**fault), "sm_90a", seed=seed)(a, b)
    return b.double(), a.double()


def run_buffer(seed, **fault):
    a, b = rand(4 * 128), nan(128)
    sim.simulate_module(K.double_buffer(**fault), "sm_90a", seed=seed)(a, b)
    return b, a.view(4, 128).sum(0)


def run_mma(seed, **fault):
    a, b, c = rand(64, 384, dtype=torch.bfloat16), rand(64, 384, dtype=torch.bfloat16), nan(64, 64)
    sim.simulate_module(K.mma_gemm(k=384, **fault), "sm_80", seed=seed)(a, b, c)
    return c, a.float() @ b.float().T


def run_wgmma(seed, **fault):
    a, b, c = (
        rand(64, 256, dtype=torch.bfloat16),
        rand(128, 256, dtype=torch.bfloat16),
        nan(64, 128, dtype=torch.bfloat16),
    )
    sim.simulate_module(K.wgmma_gemm(**fault), "sm_90a", seed=seed)(a, b, c)
    return c.float(), a.float() @ b.float().T


def run_named(seed, **fault):
    a, b = rand(32), nan(32)
    sim.simulate_module(K.named_barrier(**fault), "sm_90a", seed=seed)(a, b)
    return b, a.flip(0)


def run_accumulate(seed, **fault):
    c = torch.zeros(1)
    sim.simulate_module(K.accumulate(**fault), "sm_90a", seed=seed)(c)
    return c, torch.tensor([10.0])


def run_local(seed, **fault):
    a, b = rand(128), nan(32)
    sim.simulate_module(K.local_array(**fault), "sm_90a", seed=seed)(a, b)
    return b, a.view(32, 4).sum(1)


RUNS = [
    run_exchange,
    run_diverge,
    run_shuffle,
    run_vector,
    run_buffer,
    run_mma,
    run_wgmma,
    run_named,
    run_accumulate,
    run_local,
]


@pytest.mark.parametrize("run", RUNS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("seed", [0, 1, 7])
def test_sound_kernels_are_clean_and_right(run, seed):
    got, want = run(seed)
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-1 if run is run_wgmma else 1e-3)


FAULTS = [
    ("missing __syncthreads", run_exchange, dict(sync=False), (sim.DataRaceError, sim.UninitializedReadError)),
    ("shared index past the end", run_exchange, dict(shift=1), sim.OutOfBoundsError),
    ("global read past the end", run_exchange, dict(read=1), sim.OutOfBoundsError),
    ("global read before the start", run_exchange, dict(read=-1), sim.OutOfBoundsError),
    ("global write past the end", run_exchange, dict(write=1), sim.OutOfBoundsError),
    ("shared read never written", run_exchange, dict(skip_store=True), sim.UninitializedReadError),
    ("divergent __syncthreads", run_diverge, dict(sync_below=32), sim.DivergentBarrierError),
    ("lane missing in a shuffle", run_shuffle, dict(lanes=31), sim.DivergentBarrierError),
    ("shuffle reads a lane outside its mask", run_shuffle, dict(lanes=16, mask=0xFFFF), sim.DivergentBarrierError),
    ("misaligned 16-byte access", run_vector, dict(offset=4), sim.MisalignedAccessError),
    ("missing cp.async wait", run_buffer, dict(wait=False), sim.DataRaceError),
    ("cp.async without a barrier", run_buffer, dict(sync=False), (sim.DataRaceError, sim.UninitializedReadError)),
    ("stale double buffer", run_buffer, dict(stale=True), sim.DataRaceError),
    ("cp.async waits for one group too few", run_mma, dict(wait_slack=1), sim.DataRaceError),
    ("no barrier across the loop's back edge", run_buffer, dict(reuse_sync=False), sim.DataRaceError),
    ("no barrier after cp.async", run_mma, dict(reuse_sync=False), (sim.DataRaceError, sim.UninitializedReadError)),
    ("over-arrival on an mbarrier", run_wgmma, dict(extra_arrive=True), sim.BarrierProtocolError),
    ("missing wgmma wait", run_wgmma, dict(wgmma_wait=False), sim.SimulationError),
    ("missing wgmma fence", run_wgmma, dict(wgmma_fence=False), sim.RegisterHazardError),
    ("accumulator never initialised", run_wgmma, dict(zero_init=False), sim.UninitializedReadError),
    ("wrong mbarrier phase", run_wgmma, dict(phase=1), sim.SimulationError),
    ("no wait for the TMA load", run_wgmma, dict(full_wait=False), sim.SimulationError),
    ("too many transaction bytes", run_wgmma, dict(tx_delta=16), sim.BarrierProtocolError),
    ("too few transaction bytes", run_wgmma, dict(tx_delta=-16), sim.BarrierProtocolError),
    ("missing fence.proxy.async", run_wgmma, dict(proxy_fence=False), sim.ProxyFenceError),
    ("missing release of the stage", run_wgmma, dict(release=False), sim.DeadlockError),
    ("empty barrier counts one too many", run_wgmma, dict(init_count=2), sim.DeadlockError),
    ("producer does not wait for the stage", run_wgmma, dict(empty_wait=False), sim.SimulationError),
    ("stage released before wgmma has read it", run_wgmma, dict(late_release=False), sim.DataRaceError),
    ("TMA destination misaligned", run_wgmma, dict(misaligned=16), sim.MisalignedAccessError),
    ("TMA destination past the end", run_wgmma, dict(dst_offset=1 << 17), sim.OutOfBoundsError),
    ("exit without waiting for the TMA store", run_wgmma, dict(store_wait=False), sim.PendingAsyncError),
    ("missing bar.arrive", run_named, dict(arrive=False), sim.DeadlockError),
    ("named barrier with two counts", run_named, dict(count=32), sim.SimulationError),
    ("blocks race on global memory", run_accumulate, dict(atomic=False), sim.DataRaceError),
    ("local array partly unset", run_local, dict(init=False), sim.UninitializedReadError),
]


@pytest.mark.parametrize("name,run,fault,error", FAULTS, ids=[f[0] for f in FAULTS])
def test_planted_fault_is_caught(name, run, fault, error):
    for seed in (0, 5):
        with pytest.raises(error) as caught:
            run(seed, **fault)
        assert isinstance(caught.value, sim.SimulationError)


def test_wrong_swizzle_gives_a_wrong_result():
    got, want = run_wgmma(0, wrong_swizzle=True)
    assert ((got - want).norm() / want.norm()).item() > 0.1


def test_a_report_names_source_line_and_threads():
    a, b = rand(64), nan(64)
    kernel = sim.simulate_module(K.exchange(shift=1), "sm_90a")
    with pytest.raises(sim.OutOfBoundsError) as caught:
        kernel(a, b)
    line = kernel.source.splitlines()[caught.value.line - 1]
    assert "B_ptr" in line and "S_ptr" in line
    assert "thread 0" in str(caught.value) and "block (0,0,0)" in str(caught.value)


def test_a_fault_does_not_spoil_the_next_run():
    with pytest.raises(sim.DeadlockError):
        run_named(0, arrive=False)
    got, want = run_named(0)
    torch.testing.assert_close(got, want)


@functools.cache
def _exchange():
    return sim.simulate_module(K.exchange(), "sm_90a")


def test_output_read_before_it_is_written():
    c = torch.zeros(1)
    with pytest.raises(sim.UninitializedReadError):
        sim.simulate_module(K.accumulate(), "sm_90a")(c, undefined=(0,))
    a, b = rand(64), nan(64)
    _exchange()(a, b, undefined=(1,))
    torch.testing.assert_close(b, a.flip(0))
