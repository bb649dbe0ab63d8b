// The machine: fibers, scheduling, launches and the report of a fault.
#include <cstdarg>
#include <ctime>
#include <sys/mman.h>
#include "state.h"
#include "switch.h"

namespace tsim {
struct Dim3 { u32 x, y, z; };
}
// Read by kernels as constants: a fiber only ever sees its own values.
tsim::Dim3 tsim_thread_idx, tsim_block_idx, tsim_block_dim, tsim_grid_dim;

namespace tsim {
Machine M;
Fiber* cur = nullptr;
static void* scheduler_sp = nullptr;
static std::vector<Fiber*> fiber_pool;
static double deadline = 0;

static double now() { timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec + 1e-9 * t.tv_nsec; }
u64 random_u64() {  // splitmix64
  u64 z = (M.rng += 0x9E3779B97F4A7C15ull);
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull; z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}
std::string format(const char* f, ...) {
  char b[2048]; va_list ap; va_start(ap, f); vsnprintf(b, sizeof b, f, ap); va_end(ap); return b;
}
void count(const char* kind, u64 n) { M.kinds[kind] += n; }
void count_op(const char* kind) { count(kind); }

std::string thread_name(const Fiber* f) {
  std::string t = M.block[1] * M.block[2] > 1 ? format("(%u,%u,%u)", f->tx, f->ty, f->tz) : format("%u", f->tx);
  return format("thread %s (warp %d, lane %d) of block (%u,%u,%u)", t.c_str(), f->warp, f->lane, f->cta->bx, f->cta->by, f->cta->bz);
}
std::string agent_name(int a) {
  if (a < 0 || a >= (int)M.agents.size()) return "an earlier agent";
  const Agent& g = M.agents[a];
  std::string t = thread_name(M.fibers[g.owner]);
  switch (g.kind) {
    case A_THREAD: return t;
    case A_CPASYNC: return "cp.async issued by " + t;
    case A_WGMMA: return "wgmma of the warpgroup of " + t;
    case A_TMA: return "TMA / bulk load issued by " + t;
    case A_BULK_READ: return "shared-memory read of a bulk store issued by " + t;
    default: return "global write of a bulk store issued by " + t;
  }
}
std::string shared_name(const CTA* c, u32 off) {
  u32 first = SMEM_FIRST + M.kernel->static_shared;
  std::string s = off >= first ? format("dynamic shared memory byte %u", off - first)
                               : off >= SMEM_FIRST ? format("static shared memory byte %u", off - SMEM_FIRST)
                                                   : format("shared window address 0x%x", off);
  if (M.ctas.size() > 1) s += format(" of cluster rank %d", c->rank);
  return s;
}

u32 site_pc(const void* frame) {
  const void* const* fp = (const void* const*)frame;
  const void* entry = cur ? cur->entry_fp : nullptr;
  const u8* lo = cur ? cur->stack : nullptr;
  // fp[0] is the caller's frame. The kernel's frame is the one whose saved pointer is the entry's frame.
  for (int i = 0; i < 16; i++) {
    const void* const* up = (const void* const*)fp[0];
    if ((const u8*)up < lo || (const u8*)up >= lo + STACK_BYTES) break;
    if (up[0] == entry) break;
    fp = up;
  }
  return (u32)((const u8*)fp[1] - (const u8*)M.kernel->image) - 1;
}

int new_agent(int kind, int owner) {
  M.agents.push_back({kind, owner});
  return (int)M.agents.size() - 1;
}
void tick(Fiber* f) { f->know.all.set(f->id, ++f->clk); f->snap.reset(); f->dirty = false; }
KnowPtr snapshot(Fiber* f) {
  if (!f->snap || f->dirty) {
    auto k = std::make_shared<const Know>(f->know);
    tick(f);
    f->snap = k;
  }
  return f->snap;
}

// ---------------------------------------------------------------- faults
void fault(const char* kind, const std::string& text, std::vector<Site> sites) {
  if (!M.failed) {
    M.failed = true;
    M.fault = std::string(kind) + "\n" + text + "\n";
    for (auto& s : sites) M.fault += format("@%u\t%s\n", s.pc, s.role);
  }
  if (!cur) { fprintf(stderr, "tvm_tile.simulate: fault outside a kernel: %s\n", M.fault.c_str()); abort(); }
  extern bool in_engine; extern void engine_abort();
  if (in_engine) engine_abort();
  void* dead;
  tsim_switch(&dead, scheduler_sp);  // never resumed: the launch is given up
  abort();
}

// ---------------------------------------------------------------- fibers
static void** g_params;
static __attribute__((noinline)) void fiber_start() {
  M.kernel->entry(g_params);
  exit_checks(cur);
  cur->exited = true; M.live--; M.progress++;
  void* dead;
  tsim_switch(&dead, scheduler_sp);
}
static void* map(size_t n) {
  void* p = mmap(nullptr, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) { perror("tvm_tile.simulate: mmap"); abort(); }
  return p;
}
static Fiber* make_fiber(size_t i) {
  if (i >= fiber_pool.size()) {
    Fiber* f = new Fiber();
    const size_t guard = 64 * 1024;
    u8* p = (u8*)map(guard + STACK_BYTES);
    mprotect(p, guard, PROT_NONE);
    f->stack = p + guard;
    f->sflags = (u8*)map(STACK_BYTES);
    f->fence_at = (u16*)map(STACK_BYTES / 2);
    fiber_pool.push_back(f);
  }
  Fiber* f = fiber_pool[i];
  u8 *st = f->stack, *sf = f->sflags; u16* fa = f->fence_at;
  *f = Fiber();
  f->stack = st; f->sflags = sf; f->fence_at = fa;
  madvise(sf, STACK_BYTES, MADV_DONTNEED);
  madvise(fa, STACK_BYTES / 2, MADV_DONTNEED);
  f->sp = fiber_frame(st + STACK_BYTES, (void (*)())fiber_start);
  return f;
}
void yield_() { tsim_switch(&cur->sp, scheduler_sp); }
void block(const char* what, u32 a, u32 b) {
  cur->waits = what; cur->wait_a = a; cur->wait_b = b; cur->wait_pc = cur->cur_pc;
  yield_();
  cur->waits = nullptr;
}
void wake(Fiber* f) {
  M.progress++;
  if (!f->queued && !f->exited) { f->queued = true; M.ready.push_back(f); }
}
void wake_all(std::vector<Fiber*>& v) { for (auto* f : v) wake(f); v.clear(); }

static void resume(Fiber* f) {
  f->queued = false; cur = f;
  M.counters.v[C_SWITCHES]++;
  tsim_thread_idx = {f->tx, f->ty, f->tz};
  tsim_block_idx = {f->cta->bx, f->cta->by, f->cta->bz};
  tsim_switch(&scheduler_sp, f->sp);
}

// Everything is blocked: say who waits where, and which kind of fault that is.
static void stall() {
  std::map<std::string, std::pair<int, Fiber*>> groups;
  std::vector<std::string> order;
  bool mbar = false, divergent = false, exited = M.live < (int)M.fibers.size(), regs = false;
  for (auto* f : M.fibers) if (!f->exited) {
    std::string w = f->waits ? f->waits : "an unknown place";
    std::string key = format("%s|%u|%u|%u", w.c_str(), f->wait_a, f->wait_b, f->wait_pc);
    if (!groups.count(key)) order.push_back(key);
    auto& g = groups[key]; if (!g.first++) g.second = f;
    if (w.find("mbarrier") == 0) mbar = true;
    else if (w.find("setmaxnreg") == 0) regs = true;
    else if (w.find("bar.sync") != 0 || f->wait_a == 0) divergent = true;
  }
  std::string text, tx;
  std::vector<Site> sites; std::vector<std::string> roles;
  const char* kind = "deadlock";
  if (has_mbarrier_tx_error(&tx)) { kind = "barrier"; text = tx; }
  else if (mbar) text = "every thread is blocked";
  else if (regs && !divergent) text = "every thread is blocked: the register pool never frees what setmaxnreg.inc asks for";
  else if (divergent) { kind = "divergent"; text = exited ? "some threads wait at a barrier or warp collective that others left the kernel without reaching"
                                                           : "threads wait at different barriers or warp collectives"; }
  else text = "threads wait at a named barrier that too few threads reach";
  int shown = 0;
  static std::deque<std::string> keep; keep.clear();
  for (auto& k : order) {
    auto& g = groups[k]; Fiber* f = g.second;
    std::string what = f->waits ? f->waits : "?";
    if (what.find("mbarrier") == 0) {
      CTA* c = M.ctas[(f->wait_a >> 24) % M.ctas.size()];
      auto it = c->mbar.find(f->wait_a & 0xFFFFFF);
      if (it != c->mbar.end())
        what += format(" at %s for parity %u (completed phases %u, pending arrivals %lld of %u, pending bytes %lld)",
                       shared_name(c, it->first).c_str(), f->wait_b, it->second.phase, (long long)it->second.pending, it->second.expected, (long long)it->second.tx);
    } else if (what.find("bar.sync") == 0) {
      NamedBar& b = f->cta->bar[f->wait_a & 15];
      what = f->wait_a == 0 ? "__syncthreads / bar.sync 0" : format("bar.sync %u", f->wait_a);
      what += format(" (%u of %u threads arrived)", b.arrived, b.expected);
    } else if (what.find("warp") == 0) what += format(" with mask 0x%08x (lanes here: 0x%08x)", f->wait_a, f->wait_b);
    if (++shown > 12) { text += "\n  ..."; break; }
    text += format("\n  %d thread(s), first %s: wait at %s", g.first, thread_name(f).c_str(), what.c_str());
    keep.push_back(format("waiting: %s", thread_name(f).c_str()));
    sites.push_back({keep.back().c_str(), f->wait_pc});
  }
  if (exited) text += format("\n  %d thread(s) have left the kernel", (int)M.fibers.size() - M.live);
  M.failed = true;
  M.fault = std::string(kind) + "\n" + text + "\n";
  for (auto& s : sites) M.fault += format("@%u\t%s\n", s.pc, s.role);
}

static void schedule() {
  u32 rounds = 0;
  while (M.live > 0 && !M.failed) {
    if (M.opt.seed && !M.engine.empty() && random_u64() % 8 == 0) { run_engine(random_u64() % M.engine.size()); if (M.failed) return; }
    if (M.ready.empty()) {
      if (!M.engine.empty()) { run_engine(M.opt.seed ? random_u64() % M.engine.size() : 0); continue; }
      // A thread that polls may be told "not yet"; it is a deadlock when polling never leads to progress.
      bool any = false;
      for (auto* f : M.fibers) if (!f->exited && f->spurious) {
        if (f->progress_seen != M.progress) { f->progress_seen = M.progress; f->spurious_count = 0; }
        if (f->spurious_count++ < 64) { any = true; f->queued = true; M.ready.push_back(f); }
      }
      if (!any) { stall(); return; }
      continue;
    }
    size_t i = M.opt.seed ? random_u64() % M.ready.size() : 0;
    Fiber* f = M.ready[i];
    if (i) { M.ready[i] = M.ready.front(); }
    M.ready.pop_front();
    resume(f);
    cur = nullptr;
    if ((++rounds & 1023) == 0 && now() > deadline) {
      M.failed = true; M.fault = format("deadlock\nthe kernel did not finish within %g seconds of simulation\n", M.opt.timeout); return;
    }
  }
  while (!M.failed && !M.engine.empty()) run_engine(0);
}

// ---------------------------------------------------------------- launches
static void reset_shared(CTA* c, u32 used) {
  Shared& s = c->sh;
  if (s.flags.empty()) { s.flags.assign(SMEM_BYTES, 0); s.cells.assign(SMEM_BYTES, Cell{0, 0}); }
  u32 n = used > s.used ? used : s.used;
  memset(s.mem, 0xFF, n);
  std::fill(s.flags.begin(), s.flags.begin() + n, 0);
  memset((void*)s.cells.data(), 0, n * sizeof(Cell));
  s.used = used; s.pending.clear();
}
u8* arena() {
  static u8* a = nullptr;
  if (!a) a = (u8*)map((size_t)SMEM_STRIDE * 16);
  return a;
}
static std::vector<CTA*> cta_pool;

static void run_cluster(u32 cx, u32 cy, u32 cz, u64 launch_first) {
  u32 cs = M.cluster[0] * M.cluster[1] * M.cluster[2];
  u32 nw = (M.nthreads + 31) / 32, ng = (M.nthreads + 127) / 128;
  M.ctas.clear(); M.fibers.clear(); M.agents.clear(); M.ready.clear(); M.engine.clear();
  M.tma_agents.clear(); M.tma_clk.clear(); M.reads.clear(); M.greads.clear();
  M.cluster_bar = NamedBar(); M.cluster_gen = 0; M.cluster_done.assign(2, Know());
  for (u32 r = 0; r < cs; r++) {
    if (cta_pool.size() <= r) { cta_pool.push_back(new CTA()); cta_pool[r]->sh.mem = arena() + (size_t)r * SMEM_STRIDE; }
    CTA* c = cta_pool[r];
    c->rank = (int)r;
    c->bx = cx * M.cluster[0] + r % M.cluster[0];
    c->by = cy * M.cluster[1] + r / M.cluster[0] % M.cluster[1];
    c->bz = cz * M.cluster[2] + r / (M.cluster[0] * M.cluster[1]);
    c->serial = ++M.cta_serial;
    c->mbar.clear(); for (auto& b : c->bar) b = NamedBar();
    c->warp.assign(nw, Warp()); c->wg.assign(ng, WarpGroup());
    c->seen.assign(1, false);
    reset_shared(c, SMEM_FIRST + M.kernel->static_shared + M.dyn_shared);
    u32 per = 65536 / (M.nthreads ? M.nthreads : 1) / 8 * 8; if (per > 255) per = 255;
    c->warp_regs.assign(nw, (int)per); c->regs_free = 0; c->reg_waiters.clear();
    M.ctas.push_back(c);
    M.counters.v[C_CTAS]++;
  }
  M.launch_first = launch_first;
  for (u32 r = 0; r < cs; r++) for (u32 t = 0; t < M.nthreads; t++) {
    Fiber* f = make_fiber(r * M.nthreads + t);
    f->id = (int)(r * M.nthreads + t); f->tid = (int)t; f->warp = t / 32; f->lane = t % 32; f->cta = M.ctas[r];
    f->tx = t % M.block[0]; f->ty = t / M.block[0] % M.block[1]; f->tz = t / (M.block[0] * M.block[1]);
    f->know.all.set(f->id, 1);
    new_agent(A_THREAD, f->id);
    M.fibers.push_back(f); f->queued = true; M.ready.push_back(f);
    M.counters.v[C_THREADS]++;
  }
  for (auto* c : M.ctas) wg_members_init(c);
  M.live = (int)M.fibers.size();
  schedule();
  if (!M.failed) for (auto* c : M.ctas) for (u32 w = 0; w < nw; w++) flush_warp(c, (int)w);
  cur = nullptr;
}
void set_entry_frame(const void* fp) { cur->entry_fp = fp; }

int launch(const KernelInfo& info, void** params, const FFIAny* la) {
  const KernelInfo* k = &info;
  if (M.failed) return 0;  // an earlier kernel of the same call has failed
  M.kernel = k; g_params = params;
  u32* g = M.grid; u32* b = M.block;
  for (int i = 0; i < 3; i++) g[i] = b[i] = M.cluster[i] = 1;
  M.dyn_shared = 0;
  for (u32 i = 0; i < k->nlaunch; i++) {
    std::string t = k->launch_tags[i]; u64 v = (u64)la[i].u.i;
    if (t.find("blockIdx.") == 0) g[t[9] - 'x'] = (u32)v;
    else if (t.find("threadIdx.") == 0) b[t[10] - 'x'] = (u32)v;
    else if (t.find("clusterCtaIdx.") == 0) M.cluster[t[14] - 'x'] = (u32)v;
    else if (t == "tirx.use_dyn_shared_memory") M.dyn_shared = (u32)v;
    else if (t == "tirx.use_programtic_dependent_launch" || t == "tirx.use_programmatic_dependent_launch" || t == "tirx.use_cooperative_launch") {}
    else { M.failed = true; M.fault = "launch\nunknown launch parameter " + t + "\n"; return 0; }
  }
  tsim_block_dim = {b[0], b[1], b[2]}; tsim_grid_dim = {g[0], g[1], g[2]};
  u64 nt = (u64)b[0] * b[1] * b[2]; u32 cs = M.cluster[0] * M.cluster[1] * M.cluster[2];
  std::string bad;
  if (nt == 0 || nt > M.opt.max_threads) bad = format("%llu threads a block; the limit is %u", (unsigned long long)nt, M.opt.max_threads);
  else if (M.dyn_shared + k->static_shared > M.opt.max_shared)
    bad = format("%u bytes of shared memory a block (%u static, %u dynamic); the limit is %u", M.dyn_shared + k->static_shared, k->static_shared, M.dyn_shared, M.opt.max_shared);
  else if (!g[0] || !g[1] || !g[2]) bad = format("the grid (%u,%u,%u) is empty", g[0], g[1], g[2]);
  else if (g[1] > 65535 || g[2] > 65535) bad = format("grid (%u,%u,%u): y and z are limited to 65535", g[0], g[1], g[2]);
  else if (cs > 16 || g[0] % M.cluster[0] || g[1] % M.cluster[1] || g[2] % M.cluster[2])
    bad = format("grid (%u,%u,%u) does not divide into clusters of (%u,%u,%u)", g[0], g[1], g[2], M.cluster[0], M.cluster[1], M.cluster[2]);
  if (!bad.empty()) { M.failed = true; M.fault = std::string("launch\n") + k->name + ": " + bad + "\n"; return 0; }
  M.nthreads = (u32)nt;
  M.rng = M.opt.seed * 0x2545F4914F6CDD1Dull + 1;
  deadline = now() + M.opt.timeout;
  u64 first = M.cta_serial + 1;
  M.released.clear();
  for (u32 z = 0; z < g[2] / M.cluster[2] && !M.failed; z++)
    for (u32 y = 0; y < g[1] / M.cluster[1] && !M.failed; y++)
      for (u32 x = 0; x < g[0] / M.cluster[0] && !M.failed; x++) run_cluster(x, y, z, first);
  return 0;
}
}  // namespace tsim
