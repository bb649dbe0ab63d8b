// Barriers, mbarriers, fences and warp collectives: who waits for whom, and what order that creates.
#include "state.h"

namespace tsim {
u8* arena();

// ---------------------------------------------------------------- addresses
u32 cvta_shared(const void* p) {
  const u8* a = arena();
  if ((const u8*)p < a || (const u8*)p >= a + (size_t)SMEM_STRIDE * 16) {
    SITE();
    fault("bounds", "conversion of a pointer that is not to shared memory by " + thread_name(cur), {{"here", cur->cur_pc}});
  }
  return (u32)((const u8*)p - a);
}
void* cvta_generic(u32 addr) { return arena() + addr; }
void* dynamic_shared() { return cur->cta->sh.mem + SMEM_FIRST + M.kernel->static_shared; }
void* static_shared(u32 offset) { return cur->cta->sh.mem + SMEM_FIRST + offset; }
u32 mapa(u32 addr, u32 rank) {
  SITE();
  if (rank >= M.ctas.size()) fault("bounds", format("mapa to rank %u of a cluster of %zu blocks", rank, M.ctas.size()), {{"here", cur->cur_pc}});
  return (addr & 0xFFFFFF) | rank << 24;
}
u64 mapa64(const void* p, u32 rank) { return (u64)(arena() + mapa(cvta_shared(p), rank)); }
u32 cluster_special(const char* name) {
  std::string s = name; const CTA* c = cur->cta; u32 r = (u32)c->rank;
  const u32* k = M.cluster; u32 g[3] = {M.grid[0], M.grid[1], M.grid[2]}; u32 b[3] = {c->bx, c->by, c->bz};
  u32 cr[3] = {r % k[0], r / k[0] % k[1], r / (k[0] * k[1])};
  if (s == "cluster_ctarank") return r;
  if (s == "cluster_nctarank") return (u32)M.ctas.size();
  if (s == "laneid") return (u32)cur->lane;
  if (s == "warpid") return (u32)cur->warp;
  if (s == "nwarpid") return (M.nthreads + 31) / 32;
  if (s == "is_explicit_cluster") return M.ctas.size() > 1;
  if (s == "smid" ) return (u32)(c->serial % 132);
  if (s == "nsmid") return 132;
  if (s == "dynamic_smem_size") return M.dyn_shared;
  if (s == "total_smem_size") return M.dyn_shared + M.kernel->static_shared;
  u32 d = (u32)(s.back() - 'x');
  if (d < 3) {
    if (s.find("cluster_ctaid.") == 0) return cr[d];
    if (s.find("cluster_nctaid.") == 0) return k[d];
    if (s.find("clusterid.") == 0) return b[d] / k[d];
    if (s.find("nclusterid.") == 0) return g[d] / k[d];
    if (s.find("ctaid.") == 0) return b[d];
    if (s.find("nctaid.") == 0) return g[d];
    if (s.find("tid.") == 0) return d == 0 ? cur->tx : d == 1 ? cur->ty : cur->tz;
    if (s.find("ntid.") == 0) return M.block[d];
  }
  if (s.find("lanemask_") == 0) {
    u32 l = (u32)cur->lane, eq = 1u << l;
    if (s == "lanemask_eq") return eq;
    if (s == "lanemask_lt") return eq - 1;
    if (s == "lanemask_le") return (eq - 1) | eq;
    if (s == "lanemask_gt") return ~((eq - 1) | eq);
    if (s == "lanemask_ge") return ~(eq - 1);
  }
  unsupported(("special register %" + s).c_str());
}

// ---------------------------------------------------------------- CTA barriers
static void bar_done(NamedBar& b) {
  for (auto* f : b.waiting) { f->know.join(b.acc); tick(f); wake(f); if (f->lane == 0) flush_warp(f->cta, f->warp); }
  b.waiting.clear(); b.acc.clear(); b.arrived = 0;
}
static NamedBar& bar_join(u32 id, u32 n, bool wait, const char* what) {
  if (id > 15) fault("barrier", format("%s: barrier %u of 16", what, id), {{"here", cur->cur_pc}});
  if (!n) n = M.nthreads;
  else if (n % 32) fault("barrier", format("%s: a count of %u threads is not a multiple of 32", what, n), {{"here", cur->cur_pc}});
  if (n > M.nthreads) fault("barrier", format("%s: a count of %u threads in a block of %u", what, n, M.nthreads), {{"here", cur->cur_pc}});
  NamedBar& b = cur->cta->bar[id];
  if (b.arrived && b.expected != n)
    fault("barrier", format("%s on barrier %u with %u threads by %s, while others use it with %u", what, id, n, thread_name(cur).c_str(), b.expected), {{"here", cur->cur_pc}});
  for (auto* f : b.waiting) if (f == cur) fault("barrier", format("%s twice on barrier %u by %s", what, id, thread_name(cur).c_str()), {{"here", cur->cur_pc}});
  b.expected = n; b.arrived++;
  b.acc.join(cur->know);
  tick(cur);
  if (wait) b.waiting.push_back(cur);
  M.progress++;
  return b;
}
void bar_sync(u32 id, u32 n) {
  SITE();
  if (cur->lane == 0) count(id ? "bar.sync (named)" : "__syncthreads");
  NamedBar& b = bar_join(id, n, true, id ? "bar.sync" : "__syncthreads");
  if (b.arrived == b.expected) { M.counters.v[C_BARRIERS]++; bar_done(b); }
  block("bar.sync", id);
}
void bar_arrive(u32 id, u32 n) {
  SITE();
  if (cur->lane == 0) count("bar.arrive");
  NamedBar& b = bar_join(id, n, false, "bar.arrive");
  if (b.arrived == b.expected) bar_done(b);
}
u32 bar_red(u32 id, u32 n, int op, u32 pred) {
  SITE();
  NamedBar& b = bar_join(id, n, true, "bar.red");
  if (b.arrived == 1) { b.red_and = 1; b.red_or = 0; b.red_pop = 0; }
  b.red_and &= pred != 0; b.red_or |= pred != 0; b.red_pop += pred != 0;
  struct Out { u32 v; } out{0};
  static std::map<Fiber*, u32> result;   // filled when the barrier completes
  if (b.arrived == b.expected) {
    for (auto* f : b.waiting) result[f] = op == 0 ? b.red_and : op == 1 ? b.red_or : b.red_pop;
    bar_done(b);
  }
  block("bar.sync", id);
  out.v = result[cur];
  return out.v;
}

// ---------------------------------------------------------------- clusters
void cluster_arrive(int) {
  SITE();
  NamedBar& b = M.cluster_bar;
  u64 gen = M.cluster_gen;
  if (cur->cluster_gen > gen) fault("barrier", "barrier.cluster.arrive twice without a wait by " + thread_name(cur), {{"here", cur->cur_pc}});
  cur->cluster_gen = gen + 1;
  b.acc.join(cur->know); tick(cur);
  b.expected = (u32)M.fibers.size();
  if (++b.arrived == b.expected) {
    M.cluster_done[gen & 1] = b.acc; b.acc.clear(); b.arrived = 0; M.cluster_gen++;
    wake_all(b.waiting);
  }
}
void cluster_wait(int) {
  SITE();
  if (!cur->cluster_gen) fault("barrier", "barrier.cluster.wait without an arrive by " + thread_name(cur), {{"here", cur->cur_pc}});
  while (M.cluster_gen < cur->cluster_gen) { M.cluster_bar.waiting.push_back(cur); block("barrier.cluster.wait"); }
  cur->know.join(M.cluster_done[(cur->cluster_gen - 1) & 1]);
  tick(cur);
}

// ---------------------------------------------------------------- fences
void thread_fence(int) { tick(cur); }
void proxy_fence() {
  SITE();
  cur->know.async = cur->know.all;
  tick(cur);
  if (cur->lane == 0) count("fence.proxy.async");
}

// ---------------------------------------------------------------- mbarrier
static MBar& mbar(u32 addr, CTA** pc, u32* off, const char* what) {
  CTA* c = shared_window(addr, 8, 8, what, off);
  auto it = c->mbar.find(*off);
  if (it == c->mbar.end())
    fault("barrier", format("%s on %s by %s: no mbarrier was initialised there", what, shared_name(c, *off).c_str(), thread_name(cur).c_str()), {{"here", cur->cur_pc}});
  *pc = c;
  return it->second;
}
void mbar_init(u32 addr, u32 n) {
  SITE();
  count("mbarrier.init");
  u32 off; CTA* c = shared_window(addr, 8, 8, "mbarrier.init", &off);
  if (!n || n >= 1u << 20) fault("barrier", format("mbarrier.init of %s with a count of %u", shared_name(c, off).c_str(), n), {{"here", cur->cur_pc}});
  if (c->mbar.count(off)) fault("barrier", "mbarrier.init of " + shared_name(c, off) + ", which already holds an mbarrier", {{"here", cur->cur_pc}});
  cur->dirty = true;
  shared_write(c, off, 8, thread_access(), "mbarrier.init");
  if (M.opt.checks) for (u32 i = 0; i < 8; i++) c->sh.flags[off + i] |= F_OBJECT;
  MBar b; b.expected = n; b.pending = n; b.init = thread_access().e;
  c->mbar[off] = b;
}
void mbar_inval(u32 addr) {
  SITE();
  u32 off; CTA* c; mbar(addr, &c, &off, "mbarrier.inval");
  shared_object(c, off, thread_access());
  c->mbar.erase(off);
  if (M.opt.checks) for (u32 i = 0; i < 8; i++) c->sh.flags[off + i] = 0;
}
static void mbar_check(MBar& b) {
  if (b.pending == 0 && b.tx == 0) {
    b.done[b.phase & 1] = b.acc; b.acc.clear();
    b.phase++; b.pending = b.expected;
    wake_all(b.waiting);
  }
}
static void arrive_on(CTA* c, u32 off, MBar& b, u32 n, const Know& k, const char* what) {
  b.acc.join(k);
  b.pending -= n;
  if (b.pending < 0)
    fault("barrier", format("%s on the mbarrier at %s by %s: more arrivals in one phase than its count of %u", what, shared_name(c, off).c_str(),
                            cur ? thread_name(cur).c_str() : "an engine", b.expected), {{"here", cur ? cur->cur_pc : 0}});
  M.progress++;
  mbar_check(b);
}
void mbar_arrive_know(CTA* c, u32 off, u32 n, const Know& k, const char* what) { arrive_on(c, off, c->mbar.at(off), n, k, what); }
u64 mbar_arrive(u32 addr, u32 n, int drop) {
  SITE();
  count("mbarrier.arrive");
  u32 off; CTA* c; MBar& b = mbar(addr, &c, &off, "mbarrier.arrive");
  shared_object(c, off, thread_access());
  u64 state = b.phase;
  if (drop) b.expected -= n;
  Know k = cur->know; tick(cur);
  arrive_on(c, off, b, n, k, "mbarrier.arrive");
  return state;
}
static void add_tx(CTA* c, u32 off, MBar& b, i64 n) {
  b.tx += n;
  if (b.tx > (1 << 20) - 1 || b.tx < -((1 << 20) - 1))
    fault("barrier", format("the mbarrier at %s counts %lld pending bytes; the limit is 2^20 - 1", shared_name(c, off).c_str(), (long long)b.tx), {{"here", cur ? cur->cur_pc : 0}});
}
u64 mbar_arrive_expect(u32 addr, u32 tx) {
  SITE();
  count("mbarrier.arrive.expect_tx");
  u32 off; CTA* c; MBar& b = mbar(addr, &c, &off, "mbarrier.arrive.expect_tx");
  shared_object(c, off, thread_access());
  u64 state = b.phase;
  Know k = cur->know; tick(cur);
  add_tx(c, off, b, tx);
  arrive_on(c, off, b, 1, k, "mbarrier.arrive.expect_tx");
  return state;
}
void mbar_expect(u32 addr, u32 tx) {
  SITE();
  u32 off; CTA* c; MBar& b = mbar(addr, &c, &off, "mbarrier.expect_tx");
  shared_object(c, off, thread_access());
  add_tx(c, off, b, tx);
}
void mbar_complete(u32 addr, u32 tx) {
  SITE();
  u32 off; CTA* c; MBar& b = mbar(addr, &c, &off, "mbarrier.complete_tx");
  add_tx(c, off, b, -(i64)tx);
  mbar_check(b);
}
void mbar_complete_tx(CTA* c, u32 off, i64 n, const Know& k, const char* what) {
  auto it = c->mbar.find(off);
  if (it == c->mbar.end()) fault("barrier", format("%s completes on %s, where no mbarrier was initialised", what, shared_name(c, off).c_str()));
  it->second.acc.join(k);
  add_tx(c, off, it->second, -n);
  M.progress++;
  mbar_check(it->second);
}
static bool wait_phase(u32 addr, u32 parity, bool blocking, const char* what) {
  u32 off; CTA* c; MBar* b = &mbar(addr, &c, &off, what);
  shared_object(c, off, thread_access());
  if ((b->phase & 1) == parity) {
    if (!blocking) {  // told "not yet", but only when nothing else can run
      cur->spurious = true; block("mbarrier.test_wait", addr, parity); cur->spurious = false;
      b = &mbar(addr, &c, &off, what);
      if ((b->phase & 1) == parity) return false;
    }
    while ((b->phase & 1) == parity) { b->waiting.push_back(cur); block("mbarrier wait", addr, parity); b = &mbar(addr, &c, &off, what); }
  }
  cur->know.join(b->done[parity & 1]);
  tick(cur);
  return true;
}
bool mbar_wait_parity(u32 addr, u32 parity, int blocking) {
  SITE();
  count(blocking ? "mbarrier.try_wait" : "mbarrier.test_wait");
  return wait_phase(addr, parity & 1, blocking, "mbarrier wait");
}
bool mbar_wait_state(u32 addr, u64 state, int blocking) { SITE(); return wait_phase(addr, (u32)state & 1, blocking, "mbarrier wait"); }
bool has_mbarrier_tx_error(std::string* text) {
  for (auto* c : M.ctas) for (auto& kv : c->mbar) {
    const MBar& b = kv.second;
    if (b.pending == 0 && b.tx != 0) {
      *text = format("the mbarrier at %s has all %u arrivals but %lld bytes %s: expect_tx and the bytes copied do not agree", shared_name(c, kv.first).c_str(), b.expected,
                     (long long)(b.tx < 0 ? -b.tx : b.tx), b.tx < 0 ? "too many were copied" : "never arrived");
      return true;
    }
  }
  return false;
}

// ---------------------------------------------------------------- warp collectives
enum { K_SYNC, K_SHFL, K_BALLOT, K_MATCH, K_REDUX, K_ELECT, K_LDM, K_STM, K_MMA };
static const char* kind_name[] = {"warp barrier (__syncwarp)", "warp shuffle", "warp vote", "warp match", "warp reduction", "warp elect", "warp ldmatrix", "warp stmatrix", "warp mma"};

void order_lanes(Fiber* const* who, u32 mask) {
  Know k;
  for (int l = 0; l < 32; l++) if (mask >> l & 1) k.join(who[l]->know);
  for (int l = 0; l < 32; l++) if (mask >> l & 1) { who[l]->know.join(k); tick(who[l]); }
}
// Meets the other lanes of the mask; the last to come runs `fn` for all of them.
template <class F> static void collective(int kind, u32 mask, void* data, F fn) {
  Warp& w = cur->cta->warp[cur->warp];
  u32 me = 1u << cur->lane;
  u32 have = M.nthreads - cur->warp * 32 >= 32 ? ~0u : (1u << (M.nthreads % 32)) - 1;
  if (!(mask & me)) fault("divergent", format("%s by %s, which is not in its mask 0x%08x", kind_name[kind], thread_name(cur).c_str(), mask), {{"here", cur->cur_pc}});
  mask &= have;  // lanes that the block does not have count as absent
  std::shared_ptr<Collective> c;
  for (auto& o : w.open) if (o->kind == kind && o->mask == mask && !(o->arrived & me)) { c = o; break; }
  if (!c) { c = std::make_shared<Collective>(); c->kind = kind; c->mask = mask; c->arrived = 0; c->done = false; w.open.push_back(c); }
  c->arrived |= me; c->data[cur->lane] = data; c->who[cur->lane] = cur;
  M.progress++;
  if (c->arrived == mask) {
    for (size_t i = 0; i < w.open.size(); i++) if (w.open[i] == c) { w.open.erase(w.open.begin() + i); break; }
    // A converged warp makes its memory accesses in order, so every collective orders its lanes; in strict mode only
    // __syncwarp does, as the CUDA guide has it ("Warp Shuffle Functions": no memory ordering is implied).
    if (kind == K_SYNC || !M.opt.strict_warp) order_lanes(c->who, mask);
    fn(*c);
    c->done = true;
    for (int l = 0; l < 32; l++) if ((mask >> l & 1) && l != cur->lane) wake(c->who[l]);
  } else while (!c->done) { block(kind_name[kind], mask, c->arrived); }
}
#define LANES(c, l) for (int l = 0; l < 32; l++) if ((c).mask >> l & 1)

void warp_sync(u32 mask) {
  SITE();
  if (cur->lane == 0) count("__syncwarp");
  collective(K_SYNC, mask, nullptr, [](Collective& c) { if (c.mask == ~0u) flush_warp(cur->cta, cur->warp); });
}
struct Shfl { int mode; const void* in; void* out; u32 bytes, arg, clamp; u32* pred; };
void shfl(u32 mask, int mode, const void* v, void* out, u32 bytes, u32 arg, u32 clamp, u32* pred) {
  SITE();
  if (cur->lane == 0) count("shfl.sync");
  Shfl s{mode, v, out, bytes, arg, clamp, pred};
  collective(K_SHFL, mask, &s, [](Collective& c) {
    u8 in[32][16];
    LANES(c, l) { Shfl* s = (Shfl*)c.data[l]; memcpy(in[l], s->in, s->bytes); }
    LANES(c, l) {
      Shfl* s = (Shfl*)c.data[l];
      int seg = (int)(s->clamp >> 8 & 31), cl = (int)(s->clamp & 31);
      int max = (l & seg) | (cl & ~seg), min = l & seg, j = l; bool p;
      int b = (int)(s->arg & 31);
      switch (s->mode) {
        case 0: j = min | (b & ~seg); p = j <= max; break;
        case 1: j = l - b; p = j >= max; break;
        case 2: j = l + b; p = j <= max; break;
        default: j = l ^ b; p = j <= max; break;
      }
      if (!p) j = l;
      if (!(c.mask >> j & 1)) fault("divergent", format("warp shuffle by %s reads lane %d, which is not in the mask 0x%08x", thread_name(c.who[l]).c_str(), j, c.mask), {{"here", c.who[l]->cur_pc}});
      memcpy(s->out, in[j], s->bytes); stack_write_mark(c.who[l], s->out, s->bytes);
      if (s->pred) *s->pred = p;
    }
  });
}
struct Vote { u32 in, out; };
u32 ballot(u32 mask, u32 pred) {
  SITE();
  if (cur->lane == 0) count("vote.sync");
  Vote v{pred, 0};
  collective(K_BALLOT, mask, &v, [](Collective& c) {
    u32 b = 0; LANES(c, l) if (((Vote*)c.data[l])->in) b |= 1u << l;
    LANES(c, l) ((Vote*)c.data[l])->out = b;
  });
  return v.out;
}
struct Match { u64 v; u32 out; bool all; };
u32 match(u32 mask, u64 value, int all, u32* pred) {
  SITE();
  Match v{value, 0, all != 0};
  collective(K_MATCH, mask, &v, [](Collective& c) {
    LANES(c, l) { Match* m = (Match*)c.data[l]; u32 b = 0; LANES(c, k) if (((Match*)c.data[k])->v == m->v) b |= 1u << k; m->out = m->all ? (b == c.mask ? b : 0) : b; }
  });
  if (pred) *pred = v.out != 0;
  return v.out;
}
struct Red { int op; bool sg; u32 in, out; };
u32 redux(u32 mask, int op, int is_signed, u32 value) {
  SITE();
  Red v{op, is_signed != 0, value, 0};
  collective(K_REDUX, mask, &v, [](Collective& c) {
    bool first = true; u32 r = 0;
    LANES(c, l) {
      Red* x = (Red*)c.data[l]; u32 a = x->in;
      if (first) { r = a; first = false; continue; }
      switch (x->op) {
        case AT_ADD: r += a; break;
        case AT_AND: r &= a; break;
        case AT_OR: r |= a; break;
        case AT_XOR: r ^= a; break;
        case AT_MIN: r = x->sg ? (u32)((i32)a < (i32)r ? a : r) : (a < r ? a : r); break;
        default: r = x->sg ? (u32)((i32)a > (i32)r ? a : r) : (a > r ? a : r); break;
      }
    }
    LANES(c, l) ((Red*)c.data[l])->out = r;
  });
  return v.out;
}
u32 elect(u32 mask, u32* leader) {
  SITE();
  Vote v{0, 0};
  collective(K_ELECT, mask, &v, [](Collective& c) { LANES(c, l) ((Vote*)c.data[l])->out = (u32)__builtin_ctz(c.mask); });
  if (leader) *leader = v.out;
  return v.out == (u32)cur->lane;
}
u32 active_mask() { return M.nthreads - cur->warp * 32 >= 32 ? ~0u : (1u << (M.nthreads % 32)) - 1; }
void warp_meet(int kind, void* data, void (*fn)(Collective&)) {
  collective(K_LDM + kind, ~0u, data, [fn](Collective& c) { fn(c); });
}
}  // namespace tsim
