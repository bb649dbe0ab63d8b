// Asynchronous copies: cp.async, bulk copies and TMA. They run as late as the waits allow (seed 0) or at a random moment,
// as agents with clocks of their own, so that a missing wait is a race and usually a wrong value too.
#include <csetjmp>
#include "numbers.h"
#include "state.h"

namespace tsim {

static jmp_buf engine_fault;
bool in_engine = false;
void engine_abort() { longjmp(engine_fault, 1); }

void run_engine(size_t i) {
  AsyncOpPtr op = M.engine[i];
  M.engine.erase(M.engine.begin() + i);
  if (op->done) return;
  Fiber* me = cur;
  in_engine = true;
  if (!setjmp(engine_fault)) { op->done = true; op->run(); }
  in_engine = false;
  cur = me;
}
static void as_issuer(Fiber* f, u32 pc) { cur = f; f->cur_pc = pc; }

// ---------------------------------------------------------------- cp.async
static void cp_run(CpAsync& q, Fiber* f) {
  u32 off = q.dst & 0xFFFFFF; CTA* c = M.ctas[q.dst >> 24];
  Access a{make_epoch(f->cp_agent, q.clk, false, q.pc), q.know.get(), true, false};
  clear_pending(c, off, (u32)q.n);
  if (q.src_size) global_access(q.src, (u32)q.src_size, false, a, "cp.async read");
  shared_write(c, off, (u32)q.n, a, "cp.async write");
  memset(c->sh.mem + off, 0, (size_t)q.n);
  if (q.src_size) memcpy(c->sh.mem + off, q.src, (size_t)q.src_size);
}
void cp_async(u32 dst, const void* src, u32 n, u32 src_size) {
  SITE();
  if (cur->lane == 0) count("cp.async");
  if (src_size > n) fault("bounds", format("cp.async of %u bytes with a source size of %u", n, src_size), {{"here", cur->cur_pc}});
  u32 off; CTA* c = shared_window(dst, n, n, "cp.async destination", &off);
  if (src_size && (uintptr_t)src % n) fault("misaligned", format("cp.async of %u bytes by %s reads a global address that is not a multiple of %u", n, thread_name(cur).c_str(), n), {{"here", cur->cur_pc}});
  if (cur->cp_agent < 0) cur->cp_agent = new_agent(A_CPASYNC, cur->id);
  record_access(C_SHARED_STORES, dst, n);
  if (src_size) record_access(C_GLOBAL_LOADS, (u64)src, src_size);
  // A source outside every tensor is reported at the issue, where the thread still stands.
  if (src_size) { Segment* s = find_segment(src); if (!s || (const u8*)src + src_size > s->hi) global_access(src, src_size, false, thread_access(), "cp.async read"); }
  mark_pending(c, off, n, cur->cp_agent, "cp.async");
  cur->cp_cur.push_back({(u32)c->rank << 24 | off, (const u8*)src, (int)n, (int)src_size, cur->cur_pc, snapshot(cur), cur->cp_clk});
}
void cp_async_commit() {
  SITE();
  if (cur->lane == 0) count("cp.async.commit_group");
  cur->cp_groups.push_back(std::move(cur->cp_cur)); cur->cp_cur.clear(); cur->cp_clk++;
}
static void cp_wait(size_t n) {
  while (cur->cp_groups.size() > n) {
    for (auto& q : cur->cp_groups.front()) cp_run(q, cur);
    cur->cp_groups.pop_front();
    if (cur->cp_agent >= 0) cur->know.all.raise(cur->cp_agent, cur->cp_first);
    cur->cp_first++;
  }
  tick(cur);
}
void cp_async_wait(u32 n) {
  SITE();
  if (cur->lane == 0) count("cp.async.wait_group");
  cp_wait(n);
}
void cp_async_wait_all() { SITE(); if (!cur->cp_cur.empty()) cp_async_commit(); cp_wait(0); }
void cp_async_drain_all(Fiber* f) {
  for (auto& g : f->cp_groups) for (auto& q : g) cp_run(q, f);
  for (auto& q : f->cp_cur) cp_run(q, f);
  f->cp_groups.clear(); f->cp_cur.clear();
}
void cp_async_mbar(u32 addr, int noinc) {
  SITE();
  u32 off; CTA* c = shared_window(addr, 8, 8, "cp.async.mbarrier.arrive", &off);
  auto it = c->mbar.find(off);
  if (it == c->mbar.end()) fault("barrier", "cp.async.mbarrier.arrive on " + shared_name(c, off) + ", where no mbarrier was initialised", {{"here", cur->cur_pc}});
  shared_object(c, off, thread_access());
  if (!noinc) it->second.pending++;
  if (!cur->cp_cur.empty()) { cur->cp_groups.push_back(std::move(cur->cp_cur)); cur->cp_cur.clear(); cur->cp_clk++; }
  // The copies issued so far; later ones wait for another arrive.
  auto ops = std::make_shared<std::vector<CpAsync>>();
  for (auto& g : cur->cp_groups) for (auto& q : g) ops->push_back(q);
  u32 skipped = (u32)cur->cp_groups.size();
  cur->cp_groups.clear(); cur->cp_first += skipped;
  Fiber* f = cur; u32 pc = cur->cur_pc; KnowPtr k = snapshot(cur); u32 clk = cur->cp_clk - 1;
  auto op = std::make_shared<AsyncOp>();
  op->run = [=] {
    as_issuer(f, pc);
    for (auto& q : *ops) cp_run(q, f);
    Know kk = *k; if (f->cp_agent >= 0) kk.all.raise(f->cp_agent, clk);
    mbar_arrive_know(c, off, 1, kk, "cp.async.mbarrier.arrive");
  };
  M.engine.push_back(op);
}

// ---------------------------------------------------------------- TMA
static const TensorMap& tensor_map(const void* p, int rank, const char* what) {
  const TensorMap* t = (const TensorMap*)p;
  if ((uintptr_t)p % 64 || t->magic != 0x7E4504A9) fault("barrier", format("%s with a pointer that is not to a tensor map", what), {{"here", cur->cur_pc}});
  if (t->rank != rank) fault("bounds", format("%s of rank %d on a tensor map of rank %d", what, rank, t->rank), {{"here", cur->cur_pc}});
  return *t;
}
static u32 swizzled(const TensorMap& t, u32 a) {
  return t.swizzle == 3 ? a ^ ((a >> 7 & 7) << 4) : t.swizzle == 2 ? a ^ ((a >> 7 & 3) << 4) : t.swizzle == 1 ? a ^ ((a >> 7 & 1) << 4) : a;
}
static u32 box_count(const TensorMap& t, int i) { return ((u32)t.box[i] + t.estride[i] - 1) / t.estride[i]; }
static u32 box_bytes(const TensorMap& t) { u32 n = t.bytes; for (int i = 0; i < t.rank; i++) n *= box_count(t, i); return n; }

// Calls f(row start in the box, coordinates valid, global row, first valid element, valid elements) for each innermost row.
template <class F> static void each_row(const TensorMap& t, const i32* c, F f) {
  u32 n0 = box_count(t, 0), rows = 1;
  for (int i = 1; i < t.rank; i++) rows *= box_count(t, i);
  for (u32 r = 0; r < rows; r++) {
    u32 x = r; bool ok = true; u8* g = t.base;
    for (int i = 1; i < t.rank; i++) {
      u32 n = box_count(t, i); i64 p = (i64)c[i] + (i64)(x % n) * t.estride[i]; x /= n;
      if (p < 0 || p >= (i64)t.dim[i]) ok = false;
      g += p * (i64)t.stride[i];
    }
    f(r * n0 * t.bytes, ok, g, n0);
  }
}
static const u8* oob_pattern(const TensorMap& t) {
  static const u8 zero[8] = {0}; static const u8 nan16[2] = {0xFF, 0x7F}; static const u8 nan32[4] = {0xFF, 0xFF, 0xFF, 0x7F};
  return !t.oob ? zero : t.bytes == 2 ? nan16 : nan32;
}
// One row into shared memory, element by element runs of 16 bytes so that the swizzle can move them.
static void put_row(CTA* c, const TensorMap& t, u32 dst, const u8* row, u32 n, const Access& a) {
  for (u32 i = 0; i < n; i += 16) {
    u32 m = n - i < 16 ? n - i : 16, p = swizzled(t, dst + i);
    shared_write(c, p, m, a, "TMA write");
    memcpy(c->sh.mem + p, row + i, m);
  }
}
static int tma_agent(u32* clk) {
  const size_t slots = 256;
  size_t i = M.tma_next++ % slots;
  while (M.tma_agents.size() <= i) { M.tma_agents.push_back(new_agent(A_TMA, cur->id)); M.tma_clk.push_back(0); }
  M.agents[M.tma_agents[i]].owner = cur->id;
  *clk = ++M.tma_clk[i];
  return M.tma_agents[i];
}
static u32 tma_align(const TensorMap& t) { (void)t; return 128; }
struct Target { CTA* c; u32 dst, bar; };
static std::vector<Target> targets(u32 dst, u32 n, u32 align, u32 bar, u32 mask, int has_mask, const char* what) {
  std::vector<Target> v; u32 off, boff;
  CTA* d = shared_window(dst, n, align, what, &off);
  CTA* b = shared_window(bar, 8, 8, "mbarrier of a bulk copy", &boff);
  if (!has_mask) {
    if (d != b) fault("barrier", format("%s to cluster rank %d that completes on an mbarrier of rank %d", what, d->rank, b->rank), {{"here", cur->cur_pc}});
    v.push_back({d, off, boff});
  } else for (size_t r = 0; r < 16; r++) if (mask >> r & 1) {
    if (r >= M.ctas.size()) fault("bounds", format("%s multicast to rank %zu of a cluster of %zu blocks", what, r, M.ctas.size()), {{"here", cur->cur_pc}});
    v.push_back({M.ctas[r], off, boff});
  }
  for (auto& t : v) {
    if (!t.c->mbar.count(t.bar)) fault("barrier", format("%s completes on %s, where no mbarrier was initialised", what, shared_name(t.c, t.bar).c_str()), {{"here", cur->cur_pc}});
    shared_object(t.c, t.bar, thread_access());
  }
  return v;
}
void tma_load(u32 dst, const void* map, int rank, const i32* cc, u32 bar, u32 mask, int has_mask) {
  SITE();
  count("TMA load");
  TensorMap t = tensor_map(map, rank, "TMA load");
  u32 n = box_bytes(t), pc = cur->cur_pc, clk;
  auto to = targets(dst, n, tma_align(t), bar, mask, has_mask, "TMA load");
  int agent = tma_agent(&clk);
  for (auto& x : to) mark_pending(x.c, x.dst, n, agent, "TMA load");
  i32 c[5]; for (int i = 0; i < rank; i++) c[i] = cc[i];
  Fiber* f = cur; KnowPtr k = snapshot(cur);
  auto op = std::make_shared<AsyncOp>();
  op->run = [=] {
    as_issuer(f, pc);
    Access a{make_epoch(agent, clk, false, pc), k.get(), true, true};
    for (auto& x : to) clear_pending(x.c, x.dst, n);
    std::vector<u8> row(box_count(t, 0) * t.bytes);
    each_row(t, c, [&](u32 start, bool ok, const u8* g, u32 n0) {
      for (u32 i = 0; i < n0; i++) memcpy(&row[i * t.bytes], oob_pattern(t), t.bytes);
      if (ok) {
        u32 es = t.estride[0];
        i64 lo = c[0] >= 0 ? 0 : (-(i64)c[0] + es - 1) / es, hi = ((i64)t.dim[0] - c[0] + es - 1) / es;
        if (hi > (i64)n0) hi = n0;
        if (lo < hi) {
          const u8* p = g + ((i64)c[0] + lo * es) * t.bytes;
          u32 span = (u32)(((hi - lo - 1) * es + 1) * t.bytes);
          global_access(p, span, false, a, "TMA load's read");
          M.counters.v[C_TMA_READ_BYTES] += (u64)(hi - lo) * t.bytes;
          for (i64 i = lo; i < hi; i++) memcpy(&row[i * t.bytes], p + (i - lo) * es * t.bytes, t.bytes);
        }
      }
      for (auto& x : to) put_row(x.c, t, x.dst + start, row.data(), (u32)row.size(), a);
    });
    Know kk; kk.all.set(agent, clk);
    for (auto& x : to) mbar_complete_tx(x.c, x.bar, n, kk, "TMA load");
  };
  M.engine.push_back(op);
}
void tma_prefetch(const void* map, int rank, const i32*) { SITE(); count("TMA prefetch"); tensor_map(map, rank, "TMA prefetch"); }
void prefetch_map(const void* map) { SITE(); if (((const TensorMap*)map)->magic != 0x7E4504A9) fault("barrier", "prefetch.tensormap of something that is not a tensor map", {{"here", cur->cur_pc}}); }

static void bulk_agents() {
  if (cur->bulk_r < 0) { cur->bulk_r = new_agent(A_BULK_READ, cur->id); cur->bulk_w = new_agent(A_BULK_WRITE, cur->id); }
}
static void reduce_into(u8* p, const u8* v, u32 n, int reduce, int type) {
  auto combine = [&](auto a, auto b) { return reduce == AT_ADD ? decltype(a)(a + b) : reduce == AT_MIN ? (b < a ? b : a) : (b > a ? b : a); };
  switch (type) {
    case TY_F16: for (u32 i = 0; i < n; i += 2) { u16 x, y; memcpy(&x, p + i, 2); memcpy(&y, v + i, 2); x = f_to_f16(combine(f16_to_f(x), f16_to_f(y))); memcpy(p + i, &x, 2); } break;
    case TY_BF16: for (u32 i = 0; i < n; i += 2) { u16 x, y; memcpy(&x, p + i, 2); memcpy(&y, v + i, 2); x = f_to_bf16(combine(bf16_to_f(x), bf16_to_f(y))); memcpy(p + i, &x, 2); } break;
    case TY_F32: for (u32 i = 0; i < n; i += 4) { float x, y; memcpy(&x, p + i, 4); memcpy(&y, v + i, 4); x = combine(x, y); memcpy(p + i, &x, 4); } break;
    case TY_S32: for (u32 i = 0; i < n; i += 4) { i32 x, y; memcpy(&x, p + i, 4); memcpy(&y, v + i, 4); x = combine(x, y); memcpy(p + i, &x, 4); } break;
    case TY_U32: for (u32 i = 0; i < n; i += 4) { u32 x, y; memcpy(&x, p + i, 4); memcpy(&y, v + i, 4); x = combine(x, y); memcpy(p + i, &x, 4); } break;
    default: fault("unsupported", "this type in a reducing bulk store");
  }
}
static int type_of_map(const TensorMap& t) {  // CUtensorMapDataType
  switch (t.dtype) { case 2: return TY_U32; case 3: return TY_S32; case 6: return TY_F16; case 7: return TY_F32; case 9: return TY_BF16; default: return -1; }
}
void tma_store(const void* map, int rank, const i32* cc, u32 src, int reduce) {
  SITE();
  count(reduce < 0 ? "TMA store" : "TMA reduce");
  TensorMap t = tensor_map(map, rank, "TMA store");
  u32 n = box_bytes(t), pc = cur->cur_pc, off;
  CTA* sc = shared_window(src, n, tma_align(t), "TMA store source", &off);
  bulk_agents();
  i32 c[5]; for (int i = 0; i < rank; i++) c[i] = cc[i];
  Fiber* f = cur; KnowPtr k = snapshot(cur); u32 clk = cur->bulk_clk;
  auto op = std::make_shared<AsyncOp>();
  op->run = [=] {
    as_issuer(f, pc);
    Access r{make_epoch(f->bulk_r, clk, false, pc), k.get(), true, true}, w{make_epoch(f->bulk_w, clk, reduce >= 0, pc), k.get(), true, true};
    std::vector<u8> row(box_count(t, 0) * t.bytes);
    each_row(t, c, [&](u32 start, bool ok, u8* g, u32 n0) {
      for (u32 i = 0; i < row.size(); i += 16) {
        u32 m = (u32)row.size() - i < 16 ? (u32)row.size() - i : 16, p = swizzled(t, off + start + i);
        shared_read(sc, p, m, r, "TMA store's read");
        memcpy(&row[i], sc->sh.mem + p, m);
      }
      if (!ok) return;
      u32 es = t.estride[0];
      for (u32 i = 0; i < n0; i++) {
        i64 x = (i64)c[0] + (i64)i * es;
        if (x < 0 || x >= (i64)t.dim[0]) continue;
        u32 run = 1; if (es == 1) while (i + run < n0 && x + run < (i64)t.dim[0]) run++;
        u8* p = g + x * t.bytes;
        global_access(p, run * t.bytes, true, w, "TMA store");
        if (reduce < 0) memcpy(p, &row[i * t.bytes], run * t.bytes); else reduce_into(p, &row[i * t.bytes], run * t.bytes, reduce, type_of_map(t));
        M.counters.v[C_TMA_WRITE_BYTES] += run * t.bytes;
        i += run - 1;
      }
    });
  };
  cur->bulk_cur.push_back(op);
}
void bulk_load(u32 dst, const void* src, u32 n, u32 bar, u32 mask, int has_mask) {
  SITE();
  count("bulk load");
  if (!n || n % 16) fault("misaligned", format("bulk copy of %u bytes: the size is a multiple of 16", n), {{"here", cur->cur_pc}});
  if ((uintptr_t)src % 16) fault("misaligned", "bulk copy from a global address that is not a multiple of 16", {{"here", cur->cur_pc}});
  auto to = targets(dst, n, 16, bar, mask, has_mask, "bulk copy");
  u32 clk, pc = cur->cur_pc; int agent = tma_agent(&clk);
  for (auto& x : to) mark_pending(x.c, x.dst, n, agent, "bulk copy");
  Fiber* f = cur; KnowPtr k = snapshot(cur);
  auto op = std::make_shared<AsyncOp>();
  op->run = [=] {
    as_issuer(f, pc);
    Access a{make_epoch(agent, clk, false, pc), k.get(), true, true};
    for (auto& x : to) clear_pending(x.c, x.dst, n);
    global_access(src, n, false, a, "bulk copy's read");
    M.counters.v[C_TMA_READ_BYTES] += n;
    Know kk; kk.all.set(agent, clk);
    for (auto& x : to) { shared_write(x.c, x.dst, n, a, "bulk copy's write"); memcpy(x.c->sh.mem + x.dst, src, n); mbar_complete_tx(x.c, x.bar, n, kk, "bulk copy"); }
  };
  M.engine.push_back(op);
}
void bulk_copy_cluster(u32 dst, u32 src, u32 n, u32 bar) {
  SITE();
  count("bulk copy between blocks");
  if (!n || n % 16) fault("misaligned", format("bulk copy of %u bytes: the size is a multiple of 16", n), {{"here", cur->cur_pc}});
  u32 soff; CTA* sc = shared_window(src, n, 16, "bulk copy source", &soff);
  auto to = targets(dst, n, 16, bar, 0, 0, "bulk copy");
  u32 clk, pc = cur->cur_pc; int agent = tma_agent(&clk);
  mark_pending(to[0].c, to[0].dst, n, agent, "bulk copy");
  Fiber* f = cur; KnowPtr k = snapshot(cur);
  auto op = std::make_shared<AsyncOp>();
  op->run = [=] {
    as_issuer(f, pc);
    Access a{make_epoch(agent, clk, false, pc), k.get(), true, true};
    clear_pending(to[0].c, to[0].dst, n);
    shared_read(sc, soff, n, a, "bulk copy's read");
    shared_write(to[0].c, to[0].dst, n, a, "bulk copy's write");
    memcpy(to[0].c->sh.mem + to[0].dst, sc->sh.mem + soff, n);
    Know kk; kk.all.set(agent, clk);
    mbar_complete_tx(to[0].c, to[0].bar, n, kk, "bulk copy");
  };
  M.engine.push_back(op);
}
void bulk_store(void* dst, u32 src, u32 n, int reduce, int type) {
  SITE();
  count("bulk store");
  if (!n || n % 16 || (uintptr_t)dst % 16) fault("misaligned", format("bulk store of %u bytes: size and global address are multiples of 16", n), {{"here", cur->cur_pc}});
  u32 off, pc = cur->cur_pc; CTA* c = shared_window(src, n, 16, "bulk store source", &off);
  bulk_agents();
  Fiber* f = cur; KnowPtr k = snapshot(cur); u32 clk = cur->bulk_clk;
  auto op = std::make_shared<AsyncOp>();
  op->run = [=] {
    as_issuer(f, pc);
    Access r{make_epoch(f->bulk_r, clk, false, pc), k.get(), true, true}, w{make_epoch(f->bulk_w, clk, reduce >= 0, pc), k.get(), true, true};
    shared_read(c, off, n, r, "bulk store's read");
    global_access(dst, n, true, w, "bulk store");
    if (reduce < 0) memcpy(dst, c->sh.mem + off, n); else reduce_into((u8*)dst, c->sh.mem + off, n, reduce, type);
    M.counters.v[C_TMA_WRITE_BYTES] += n;
  };
  cur->bulk_cur.push_back(op);
}
void bulk_commit() { SITE(); count("bulk commit_group"); cur->bulk_groups.push_back(std::move(cur->bulk_cur)); cur->bulk_cur.clear(); cur->bulk_clk++; }
void bulk_wait(u32 n, int read) {
  SITE();
  count("bulk wait_group");
  Fiber* f = cur; u32 pc = cur->cur_pc;
  while (f->bulk_groups.size() > n) {
    for (auto& op : f->bulk_groups.front()) if (!op->done) { op->done = true; op->run(); as_issuer(f, pc); }
    f->bulk_groups.pop_front();
    if (f->bulk_r >= 0) f->know.all.raise(f->bulk_r, f->bulk_first);
    f->bulk_first++;
  }
  // A full wait covers the global writes of groups whose sources a .read wait has already released.
  if (!read && f->bulk_w >= 0) f->know.all.raise(f->bulk_w, f->bulk_first - 1);
  tick(f);
}
void exit_checks(Fiber* f) {
  if (!M.opt.checks) return;
  if (!f->bulk_groups.empty() || !f->bulk_cur.empty())
    fault("pending", thread_name(f) + " leaves the kernel while a bulk store may still read its shared memory (no cp.async.bulk.wait_group)", {{"last seen at", f->cur_pc}});
  if (f->inflight) fault("register", thread_name(f) + " leaves the kernel with a wgmma in flight (no wgmma.wait_group)", {{"last seen at", f->cur_pc}});
  cp_async_drain_all(f);
}
}  // namespace tsim
