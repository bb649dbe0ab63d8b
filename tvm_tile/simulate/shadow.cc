// Shadow state of shared and global memory: who wrote and read each byte last, and whether that is ordered (FastTrack,
// Flanagan and Freund 2009: one epoch for the last write, one epoch or a set of epochs for the reads since).
#include <algorithm>
#include <sys/mman.h>
#include "state.h"

namespace tsim {

u64 ReadSets::add(u64 r, const Access& a) {
  if (!r) return a.e;
  if ((r & READ_SET) != READ_SET) {
    if ((r >> 21) == (a.e >> 21)) return r;  // the same agent and clock
    if (ordered(r, a)) return a.e;
  } else if (r == memo_from && a.e == memo_e && a.know == memo_k) return memo_to;
  std::vector<Epoch> v;
  if ((r & READ_SET) != READ_SET) v.push_back(r);
  else for (Epoch e : sets[r & ~READ_SET]) if (e_agent(e) != e_agent(a.e) && !ordered(e, a)) v.push_back(e);
  u64 to;
  if (v.empty()) to = a.e;
  else {
    v.push_back(a.e);
    std::sort(v.begin(), v.end());
    auto it = index.find(v);
    if (it != index.end()) to = READ_SET | it->second;
    else { to = READ_SET | sets.size(); index.emplace(v, (u32)sets.size()); sets.push_back(v); }
  }
  memo_from = r; memo_to = to; memo_e = a.e; memo_k = a.know;
  return to;
}

static bool generic_writer(Epoch e) {
  int k = M.agents[e_agent(e)].kind;
  return k == A_THREAD || k == A_CPASYNC;
}
static void race(const char* what, const std::string& where, const char* first, Epoch e, const Access& a) {
  fault("race", format("%s of %s by %s is not ordered after its %s by %s", what, where.c_str(), agent_name(e_agent(a.e)).c_str(), first, agent_name(e_agent(e)).c_str()),
        {{"this access", e_pc(a.e)}, {"earlier access", e_pc(e)}});
}
static void proxy_check(CTA* c, u32 off, Epoch w, const Access& a, const char* what) {
  if (!a.async_proxy || !generic_writer(w)) return;
  int g = e_agent(w);
  if (a.know->async.get(g) < e_clk(w))
    fault("proxy", format("%s of %s through the async proxy by %s follows an ordinary write by %s with no fence.proxy.async between them",
                          what, shared_name(c, off).c_str(), agent_name(e_agent(a.e)).c_str(), agent_name(g).c_str()),
          {{"this access", e_pc(a.e)}, {"the write", e_pc(w)}});
}
static void pending_race(CTA* c, u32 off, const Access& a, const char* what) {
  for (auto& p : c->sh.pending) if (off >= p.lo && off < p.hi)
    fault("race", format("%s of %s by %s while %s is still in flight to it (its completion was not waited for)", what, shared_name(c, off).c_str(),
                         agent_name(e_agent(a.e)).c_str(), agent_name(p.agent).c_str()), {{"this access", e_pc(a.e)}, {"the copy in flight", p.pc}});
}

void shared_read(CTA* c, u32 off, u32 n, const Access& a, const char* what) {
  if (!M.opt.checks) return;
  Cell* cell = &c->sh.cells[off]; const u8* fl = &c->sh.flags[off];
  Epoch lw = ~0ull; u64 lr = ~0ull, nr = 0;
  for (u32 i = 0; i < n; i++) {
    u8 f = fl[i];
    if (f != F_INIT) {
      if (f & F_PENDING) pending_race(c, off + i, a, what);
      if (f & F_OBJECT) fault("barrier", format("%s of %s, which holds an mbarrier", what, shared_name(c, off + i).c_str()), {{"this access", e_pc(a.e)}});
      if (!(f & F_INIT)) fault("uninitialized", format("%s of %s by %s: never written", what, shared_name(c, off + i).c_str(), agent_name(e_agent(a.e)).c_str()), {{"this access", e_pc(a.e)}});
    }
    Cell& x = cell[i];
    if (x.w != lw) {
      lw = x.w;
      if (lw && !ordered(lw, a) && !(e_atomic(lw) && e_atomic(a.e))) race(what, shared_name(c, off + i), "write", lw, a);
      if (lw) proxy_check(c, off + i, lw, a, what);
    }
    if (x.r != lr) { lr = x.r; nr = M.reads.add(lr, a); }
    x.r = nr;
  }
}
static void check_readers(ReadSets& sets, u64 r, const std::string& where, const Access& a, const char* what) {
  if (!r) return;
  if ((r & READ_SET) != READ_SET) {
    if (!ordered(r, a) && !(e_atomic(r) && e_atomic(a.e))) race(what, where, "read", r, a);
  } else for (Epoch e : sets.sets[r & ~READ_SET]) if (!ordered(e, a) && !(e_atomic(e) && e_atomic(a.e))) race(what, where, "read", e, a);
}
void shared_write(CTA* c, u32 off, u32 n, const Access& a, const char* what) {
  if (!M.opt.checks) return;
  Cell* cell = &c->sh.cells[off]; u8* fl = &c->sh.flags[off];
  Epoch lw = ~0ull; u64 lr = ~0ull;
  for (u32 i = 0; i < n; i++) {
    u8 f = fl[i];
    if (f & (F_PENDING | F_OBJECT)) {
      if (f & F_PENDING) pending_race(c, off + i, a, what);
      fault("barrier", format("%s of %s, which holds an mbarrier", what, shared_name(c, off + i).c_str()), {{"this access", e_pc(a.e)}});
    }
    Cell& x = cell[i];
    if (x.w != lw) {
      lw = x.w;
      if (lw && !ordered(lw, a) && !(e_atomic(lw) && e_atomic(a.e))) race(what, shared_name(c, off + i), "write", lw, a);
      if (lw) proxy_check(c, off + i, lw, a, what);
    }
    if (x.r != lr) {
      lr = x.r;
      if (lr && ((lr & READ_SET) == READ_SET || !ordered(lr, a))) check_readers(M.reads, lr, shared_name(c, off + i), a, what);
    }
    x.w = a.e; x.r = 0; fl[i] = f | F_INIT;
  }
}
void shared_object(CTA* c, u32 off, const Access& a) {
  auto it = c->mbar.find(off);
  if (it != c->mbar.end() && it->second.init && !ordered(it->second.init, a))
    race("use of the mbarrier", shared_name(c, off), "initialisation", it->second.init, a);
}
void mark_pending(CTA* c, u32 off, u32 n, int agent, const char* what) {
  if (!M.opt.checks || !n) return;
  Access a = thread_access();
  u8* fl = &c->sh.flags[off];
  for (u32 i = 0; i < n; i++) {
    if (fl[i] & F_PENDING) pending_race(c, off + i, a, what);
    fl[i] |= F_PENDING;
  }
  c->sh.pending.push_back({off, off + n, cur->cur_pc, agent});
}
void clear_pending(CTA* c, u32 off, u32 n) {
  if (!M.opt.checks || !n) return;
  u8* fl = &c->sh.flags[off];
  for (u32 i = 0; i < n; i++) fl[i] &= (u8)~F_PENDING;
  auto& p = c->sh.pending;
  for (size_t i = 0; i < p.size(); i++) if (p[i].lo == off && p[i].hi == off + n) { p[i] = p.back(); p.pop_back(); return; }
}

CTA* shared_window(u32 addr, u32 n, u32 align, const char* what, u32* off) {
  u32 rank = addr >> 24, o = addr & 0xFFFFFF;
  if (rank >= M.ctas.size() || o < SMEM_FIRST || o + n > M.ctas[rank]->sh.used) {
    const CTA* c = rank < M.ctas.size() ? M.ctas[rank] : cur->cta;
    fault("bounds", format("%s of %u bytes at %s by %s: the block owns %u bytes of shared memory (%u dynamic)", what, n, shared_name(c, o).c_str(), thread_name(cur).c_str(),
                           c->sh.used - SMEM_FIRST, M.dyn_shared), {{"this access", cur->cur_pc}});
  }
  if (align > 1 && o % align)
    fault("misaligned", format("%s of %u bytes at %s by %s needs an address that is a multiple of %u", what, n, shared_name(M.ctas[rank], o).c_str(), thread_name(cur).c_str(), align),
          {{"this access", cur->cur_pc}});
  *off = o;
  return M.ctas[rank];
}

// ---------------------------------------------------------------- global memory
Segment* find_segment(const void* p) {
  if (M.last_seg && (const u8*)p >= M.last_seg->lo && (const u8*)p < M.last_seg->hi) return M.last_seg;
  for (auto* s : M.segments) if ((const u8*)p >= s->lo && (const u8*)p < s->hi) return M.last_seg = s;
  return nullptr;
}
static std::string global_name(const Segment* s, const void* p) { return format("%s, byte offset %lld", s->name.c_str(), (long long)((const u8*)p - s->lo)); }

static void out_of_bounds(const void* p, u32 n, const char* what) {
  std::string near = "no tensor is near";
  i64 best = INT64_MAX;
  for (auto* s : M.segments) {
    i64 d = (const u8*)p < s->lo ? s->lo - (const u8*)p : (const u8*)p - s->hi;
    if (d < best) { best = d; near = (const u8*)p < s->lo ? format("%lld bytes before %s", (long long)d, s->name.c_str()) : format("%lld bytes past the end of %s (%lld bytes)", (long long)d, s->name.c_str(), (long long)(s->hi - s->lo)); }
  }
  if (best > (1ll << 35)) near = format("address %p; no tensor is near", p);
  fault("bounds", format("%s of %u bytes outside every tensor by %s: %s", what, n, cur ? thread_name(cur).c_str() : "the kernel", near.c_str()), {{"this access", cur ? cur->cur_pc : 0}});
}
static bool cta_seen(u32 serial) {
  const CTA* c = cur ? cur->cta : M.ctas[0];
  u64 i = serial - M.launch_first;
  return i < c->seen.size() && c->seen[i];
}
static void cross_cta(const char* what, Segment* s, const void* p, const char* first, Epoch e, u32 serial, const Access& a) {
  fault("race", format("%s of %s by %s conflicts with a %s by another block of the same launch (block %llu of the launch); blocks run in no order", what, global_name(s, p).c_str(),
                       agent_name(e_agent(a.e)).c_str(), first, (unsigned long long)(serial - M.launch_first)), {{"this access", e_pc(a.e)}, {"the other block's access", e_pc(e)}});
}
void global_access(const void* p, u32 n, bool write, const Access& a, const char* what) {
  if (!n) return;
  Segment* s = find_segment(p);
  if (!s || (const u8*)p + n > s->hi) out_of_bounds(p, n, what);
  if (!M.opt.checks) return;
  if (!s->cells) {
    s->ncells = (size_t)(s->hi - s->lo + s->granule - 1) / s->granule;
    s->cells = (GCell*)mmap(nullptr, s->ncells * sizeof(GCell), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (s->undefined) s->init = (u8*)calloc(s->hi - s->lo, 1);
  }
  size_t o = (const u8*)p - s->lo;
  if (s->init) {
    if (write) memset(s->init + o, 1, n);
    else for (u32 i = 0; i < n; i++) if (!s->init[o + i])
      fault("uninitialized", format("%s of %s by %s: never written", what, global_name(s, (const u8*)p + i).c_str(), agent_name(e_agent(a.e)).c_str()), {{"this access", e_pc(a.e)}});
  }
  u32 me = (u32)M.ctas[0]->serial;  // the blocks of one cluster share clocks: they count as one here
  u32 first = (u32)M.launch_first;
  for (size_t i = o / s->granule, end = (o + n - 1) / s->granule; i <= end; i++) {
    GCell& c = s->cells[i];
    const void* q = s->lo + i * s->granule;
    bool at = e_atomic(a.e);
    if (c.w) {
      if (c.wcta == me) { if (!ordered(c.w, a) && !(e_atomic(c.w) && at)) race(what, global_name(s, q), "write", c.w, a); }
      else if (c.wcta >= first && !(e_atomic(c.w) && at) && !cta_seen(c.wcta)) cross_cta(what, s, q, "write", c.w, c.wcta, a);
    }
    if (write) {
      if (c.rcta == me) { if (c.r) check_readers(M.greads, c.r, global_name(s, q), a, what); }
      else if (c.r && c.rcta >= first && !at && !cta_seen(c.rcta)) cross_cta(what, s, q, "read", (c.r & READ_SET) == READ_SET ? 0 : c.r, c.rcta, a);
      if (c.r && c.r1cta >= first && c.r1cta != me && !at && !cta_seen(c.r1cta)) cross_cta(what, s, q, "read", (c.r & READ_SET) == READ_SET ? 0 : c.r, c.r1cta, a);
      c.w = a.e; c.wcta = me; c.r = 0; c.rcta = c.r1cta = 0;
    } else {
      if (c.rcta != me) { if (c.rcta < first) c.r1cta = me; c.rcta = me; c.r = a.e; }
      else c.r = M.greads.add(c.r, a);
    }
  }
}
// Atomics order blocks: a block that reads an atomic's value has everything that earlier writers of it had released.
void global_atomic_sync(const void* p) {
  auto& rel = M.released[(u64)p];
  auto& seen = cur->cta->seen;
  size_t me = (size_t)(M.ctas[0]->serial - M.launch_first);
  if (seen.size() <= me) seen.resize(me + 1, false);
  if (rel.size() > seen.size()) seen.resize(rel.size(), false);
  for (size_t i = 0; i < rel.size(); i++) if (rel[i]) seen[i] = true;
  if (rel.size() < seen.size()) rel.resize(seen.size(), false);
  for (size_t i = 0; i < seen.size(); i++) if (seen[i]) rel[i] = true;
  rel[me] = true;
}

// ---------------------------------------------------------------- thread-local memory (register arrays)
static void stack_fault(const u8* f, const void* p, size_t n, bool write) {
  SITE();
  if (*f & (S_INFLIGHT | (write ? S_INFLIGHT_READ : 0)))
    fault("register", format("%s of a register that %s by %s: wgmma has been issued and not waited for", write ? "write" : "read",
                             *f & S_INFLIGHT ? "an in-flight wgmma accumulates into" : "an in-flight wgmma reads", thread_name(cur).c_str()), {{"this access", cur->cur_pc}});
  if (!write && (*f & S_POISON)) {
    auto from = cur->undefined_from.find((size_t)(f - cur->sflags));
    if (from != cur->undefined_from.end())
      fault("uninitialized", format("%s uses a value that it loaded from shared memory never written", thread_name(cur).c_str()), {{"used here", cur->cur_pc}, {"loaded here", from->second}});
    fault("uninitialized", format("read of %zu bytes of a local array by %s: never written", n, thread_name(cur).c_str()), {{"this access", cur->cur_pc}});
  }
}
void stack_read_check(const void* p, size_t n) {
  size_t o = (const u8*)p - cur->stack;
  if (o >= STACK_BYTES || !M.opt.checks) return;
  for (size_t i = 0; i < n; i++) if (cur->sflags[o + i] & (S_POISON | S_INFLIGHT)) stack_fault(cur->sflags + o + i, p, n, false);
}
void stack_write_mark(Fiber* f, const void* p, size_t n) {
  size_t o = (const u8*)p - f->stack;
  if (o < STACK_BYTES) memset(f->sflags + o, 0, n);
}
void poison(void* p, size_t n) {
  memset(p, 0xFF, n);
  size_t o = (u8*)p - cur->stack;
  if (o < STACK_BYTES) memset(cur->sflags + o, S_POISON, n);
  if (!cur->undefined_from.empty()) for (size_t i = 0; i < n; i++) cur->undefined_from.erase(o + i);
}
void undefined_register(void* p, size_t n) {
  size_t o = (u8*)p - cur->stack;
  if (o >= STACK_BYTES) fault("uninitialized", thread_name(cur) + " loads shared memory that was never written", {{"loaded here", cur->cur_pc}});
  poison(p, n);
  for (size_t i = 0; i < n; i++) cur->undefined_from[o + i] = cur->cur_pc;
}

// ---------------------------------------------------------------- the compiler's instrumentation
static __attribute__((noinline)) void slow_access(const void* p, u32 n, bool write, u32 align, const void* frame) {
  if (!cur) return;
  cur->cur_pc = site_pc(frame);
  extern u8* arena();
  const u8* a = arena();
  if ((const u8*)p >= a && (const u8*)p < a + (size_t)SMEM_STRIDE * 16) {
    u32 off, addr = (u32)((const u8*)p - a);
    CTA* c = shared_window(addr, n, align, write ? "shared-memory write" : "shared-memory read", &off);
    record_access(write ? C_SHARED_STORES : C_SHARED_LOADS, addr, n);
    cur->dirty = true;
    if (write) shared_write(c, off, n, thread_access(), "write"); else shared_read(c, off, n, thread_access(), "read");
    return;
  }
  Segment* s = find_segment(p);
  if (!s && !write) {  // constant tables of the kernel library
    const u8* img = (const u8*)M.kernel->image;
    if ((const u8*)p > img && (const u8*)p < img + (64u << 20)) return;
  }
  if (!s) out_of_bounds(p, n, write ? "global write" : "global read");
  if (align > 1 && (uintptr_t)p % align)
    fault("misaligned", format("global %s of %u bytes at %s by %s needs an address that is a multiple of %u", write ? "write" : "read", n, global_name(s, p).c_str(), thread_name(cur).c_str(), align), {{"this access", cur->cur_pc}});
  record_access(write ? C_GLOBAL_STORES : C_GLOBAL_LOADS, (u64)p, n);
  cur->dirty = true;
  global_access(p, n, write, thread_access(), write ? "write" : "read");
}
static inline __attribute__((always_inline)) void access(void* p, u32 n, bool write, u32 align, const void* frame) {
  Fiber* f = cur;
  if (!f) return;
  size_t o = (u8*)p - f->stack;
  if (o < STACK_BYTES) {
    u8* fl = f->sflags + o;
    u64 bits = 0;
    if (n <= 8) memcpy(&bits, fl, n); else for (u32 i = 0; i < n; i++) bits |= fl[i];
    if (write) {
      if (bits) {
        if (f->inflight && M.opt.checks) for (u32 i = 0; i < n; i++) if (fl[i] & (S_INFLIGHT | S_INFLIGHT_READ)) stack_fault(fl + i, p, n, true);
        memset(fl, 0, n);
      }
      for (u32 i = 0; i < n; i += 4) f->fence_at[(o + i) / 4] = f->fence;
    } else if (bits && M.opt.checks) for (u32 i = 0; i < n; i++) if (fl[i] & (S_POISON | S_INFLIGHT)) stack_fault(fl + i, p, n, false);
    return;
  }
  slow_access(p, n, write, align, frame);
}
void load_global(const void* p, void* dst, u32 n, u32 elem) {
  SITE();
  size_t o = (const u8*)p - cur->stack;
  if (o >= STACK_BYTES) slow_access(p, n, false, n, __builtin_frame_address(0)); else stack_read_check(p, n);
  memcpy(dst, p, n); stack_write_mark(cur, dst, n);
}
void store_global(void* p, const void* src, u32 n, u32 elem) {
  SITE();
  size_t o = (const u8*)p - cur->stack;
  if (o >= STACK_BYTES) slow_access(p, n, true, n, __builtin_frame_address(0)); else stack_write_mark(cur, p, n);
  memcpy(p, src, n);
}
}  // namespace tsim

// GCC emits these calls for -fsanitize=thread; libtsan is not linked.
using tsim::access;
#define FRAME __builtin_frame_address(0)
extern "C" {
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
#define TSIM_HOOK(n) \
  void __tsan_read##n(void* p) { access(p, n, false, n, FRAME); } \
  void __tsan_write##n(void* p) { access(p, n, true, n, FRAME); } \
  void __tsan_volatile_read##n(void* p) { access(p, n, false, n, FRAME); } \
  void __tsan_volatile_write##n(void* p) { access(p, n, true, n, FRAME); } \
  void __tsan_unaligned_read##n(void* p) { access(p, n, false, 1, FRAME); } \
  void __tsan_unaligned_write##n(void* p) { access(p, n, true, 1, FRAME); } \
  void __tsan_unaligned_volatile_read##n(void* p) { access(p, n, false, 1, FRAME); } \
  void __tsan_unaligned_volatile_write##n(void* p) { access(p, n, true, 1, FRAME); }
TSIM_HOOK(1) TSIM_HOOK(2) TSIM_HOOK(4) TSIM_HOOK(8) TSIM_HOOK(16)
void __tsan_read_range(void* p, unsigned long n) { access(p, (tsim::u32)n, false, 1, FRAME); }
void __tsan_write_range(void* p, unsigned long n) { access(p, (tsim::u32)n, true, 1, FRAME); }
}
