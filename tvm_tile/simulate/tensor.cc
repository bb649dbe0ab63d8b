// Tensor-core instructions: mma.sync, ldmatrix, stmatrix and wgmma, with their PTX register and shared-memory layouts.
#include <cmath>
#include "numbers.h"
#include "state.h"

namespace tsim {
void warp_meet(int kind, void* data, void (*fn)(Collective&));
#define LANES(c, l) for (int l = 0; l < 32; l++) if ((c).mask >> l & 1)

static int bits_of(int el) { return el == EL_F16 || el == EL_BF16 ? 16 : el == EL_TF32 || el == EL_F32 || el == EL_S32 ? 32 : 8; }
static inline float element(int el, u32 raw) {
  switch (el) {
    case EL_F16: return f16_to_f((u16)raw);
    case EL_BF16: return bf16_to_f((u16)raw);
    case EL_TF32: return f_from(raw & 0xFFFFE000);  // the hardware ignores the low 13 bits
    case EL_E4M3: return e4m3_to_f((u8)raw);
    case EL_E5M2: return e5m2_to_f((u8)raw);
    case EL_S8: return (float)(int8_t)raw;
    case EL_U8: return (float)(u8)raw;
    default: return f_from(raw);
  }
}
static inline u32 pick(u32 reg, int i, int bits) { return bits == 32 ? reg : (reg >> (i * bits)) & ((1u << bits) - 1); }

// ---------------------------------------------------------------- mma.sync m16n8
struct Mma { int k, ea, eb, ec, ed; const u32 *a, *b; const void* c; void* d; int sat; };
static void mma_all(Collective& c) {
  const Mma& p = *(Mma*)c.data[0];
  bool integer = p.ed == EL_S32;
  float A[16][32], B[8][32]; int Ai[16][32], Bi[8][32];
  int bits = bits_of(p.ea), e = 32 / bits, na = p.k / (4 * e) * 2, nb = p.k / (4 * e);
  for (int l = 0; l < 32; l++) {
    const Mma& q = *(Mma*)c.data[l]; int g = l / 4, t = l % 4;
    for (int r = 0; r < na; r++) for (int i = 0; i < e; i++) {
      u32 v = pick(q.a[r], i, bits); int row = g + 8 * (r & 1), k = (r >> 1) * 4 * e + t * e + i;
      A[row][k] = element(p.ea, v); Ai[row][k] = p.ea == EL_S8 ? (int8_t)v : (int)v;
    }
    for (int r = 0; r < nb; r++) for (int i = 0; i < e; i++) {
      u32 v = pick(q.b[r], i, bits); int k = r * 4 * e + t * e + i;
      B[g][k] = element(p.eb, v); Bi[g][k] = p.eb == EL_S8 ? (int8_t)v : (int)v;
    }
  }
  for (int l = 0; l < 32; l++) {
    const Mma& q = *(Mma*)c.data[l]; int g = l / 4, t = l % 4;
    float out[4]; i64 outi[4];
    for (int i = 0; i < 4; i++) {
      int row = g + 8 * (i >> 1), n = t * 2 + (i & 1);
      if (integer) {
        i64 s = ((const i32*)q.c)[i];
        for (int k = 0; k < p.k; k++) s += (i64)Ai[row][k] * Bi[n][k];
        outi[i] = p.sat ? (s > INT32_MAX ? INT32_MAX : s < INT32_MIN ? INT32_MIN : s) : (i64)(i32)s;
      } else {
        double s = p.ec == EL_F16 ? f16_to_f(((const u16*)q.c)[i]) : ((const float*)q.c)[i];
        for (int k = 0; k < p.k; k++) s += (double)A[row][k] * B[n][k];
        out[i] = (float)s;
      }
    }
    for (int i = 0; i < 4; i++) {
      if (integer) ((i32*)q.d)[i] = (i32)outi[i];
      else if (p.ed == EL_F16) ((u16*)q.d)[i] = f_to_f16(out[i]);
      else ((float*)q.d)[i] = out[i];
    }
    stack_write_mark(c.who[l], q.d, p.ed == EL_F16 ? 8 : 16);
  }
}
void mma(int m, int n, int k, int ea, int eb, int ec, int ed, const u32* a, const u32* b, const void* c, void* d, int sat) {
  SITE();
  if (cur->lane == 0) count("mma.sync");
  Mma p{k, ea, eb, ec, ed, a, b, c, d, sat};
  warp_meet(2, &p, mma_all);
}

// ---------------------------------------------------------------- ldmatrix, stmatrix
struct Ldm { u32 addr; u32* r; const u32* w; int num, trans; };
static Access lane_access(Fiber* f) { f->dirty = true; return Access{make_epoch(f->id, f->clk, false, f->cur_pc), &f->know, false, false}; }
static void matrix_rows(Collective& c, int num, bool store, u8 (*rows)[8][16]) {
  for (int m = 0; m < num; m++) {
    u64 addr[32]; u32 mask = 0xFF, ideal;
    for (int r = 0; r < 8; r++) {
      int l = m * 8 + r; Fiber* f = c.who[l]; u32 off;
      Fiber* me = cur; cur = f;
      CTA* o = shared_window(((Ldm*)c.data[l])->addr, 16, 16, store ? "stmatrix row" : "ldmatrix row", &off);
      cur = me;
      addr[r] = off;
      if (store) { memcpy(o->sh.mem + off, rows[m][r], 16); shared_write(o, off, 16, lane_access(f), "stmatrix"); }
      else { shared_read(o, off, 16, lane_access(f), "ldmatrix"); memcpy(rows[m][r], o->sh.mem + off, 16); }
    }
    u32 w = conflicts(addr, mask, 16, &ideal);
    M.counters.v[C_SHARED_WAVEFRONTS] += w; M.counters.v[C_BANK_CONFLICTS] += w - ideal;
    M.counters.v[store ? C_SHARED_WRITE_BYTES : C_SHARED_READ_BYTES] += 128;
  }
}
static void ldm_all(Collective& c) {
  int num = ((Ldm*)c.data[0])->num, trans = ((Ldm*)c.data[0])->trans;
  u8 rows[4][8][16];
  matrix_rows(c, num, false, rows);
  for (int l = 0; l < 32; l++) {
    u32* r = ((Ldm*)c.data[l])->r;
    for (int m = 0; m < num; m++) {
      u16 h[2];
      for (int i = 0; i < 2; i++) {
        int row = trans ? (l % 4) * 2 + i : l / 4, col = trans ? l / 4 : (l % 4) * 2 + i;
        memcpy(&h[i], &rows[m][row][col * 2], 2);
      }
      r[m] = h[0] | (u32)h[1] << 16;
    }
    stack_write_mark(c.who[l], r, 4 * num);
  }
}
static void stm_all(Collective& c) {
  int num = ((Ldm*)c.data[0])->num, trans = ((Ldm*)c.data[0])->trans;
  u8 rows[4][8][16];
  for (int l = 0; l < 32; l++) for (int m = 0; m < num; m++) for (int i = 0; i < 2; i++) {
    int row = trans ? (l % 4) * 2 + i : l / 4, col = trans ? l / 4 : (l % 4) * 2 + i;
    u16 h = (u16)(((Ldm*)c.data[l])->w[m] >> (16 * i));
    memcpy(&rows[m][row][col * 2], &h, 2);
  }
  matrix_rows(c, num, true, rows);
}
void ldmatrix(u32 addr, u32* r, int num, int trans, int) {
  SITE();
  if (cur->lane == 0) count("ldmatrix");
  Ldm p{addr, r, nullptr, num, trans};
  warp_meet(0, &p, ldm_all);
}
void stmatrix(u32 addr, const u32* r, int num, int trans, int) {
  SITE();
  if (cur->lane == 0) count("stmatrix");
  Ldm p{addr, nullptr, r, num, trans};
  warp_meet(1, &p, stm_all);
}

// ---------------------------------------------------------------- wgmma
void wg_members_init(CTA* c) {
  for (auto* f : M.fibers) if (f->cta == c) c->wg[f->tid / 128].members.push_back(f);
}
static WarpGroup& warpgroup(const char* what) {
  WarpGroup& w = cur->cta->wg[cur->tid / 128];
  if (w.members.size() != 128) fault("divergent", format("%s in a warpgroup of %zu threads; it needs 128", what, w.members.size()), {{"here", cur->cur_pc}});
  if (w.agent < 0) w.agent = new_agent(A_WGMMA, w.members[0]->id);
  return w;
}
static u32 swizzle(u32 a, int type) { return type == 1 ? a ^ ((a >> 7 & 7) << 4) : type == 2 ? a ^ ((a >> 7 & 3) << 4) : type == 3 ? a ^ ((a >> 7 & 1) << 4) : a; }

// Byte address of the 16-byte chunk that holds element (mn, k) of an operand; both are multiples of the chunk there.
static u32 chunk_address(u64 desc, int mn, u32 kbyte, int k, bool mn_major) {
  u32 start = (u32)(desc & 0x3FFF) << 4, lbo = (u32)(desc >> 16 & 0x3FFF) << 4, sbo = (u32)(desc >> 32 & 0x3FFF) << 4;
  int type = (int)(desc >> 62);
  u32 w = type == 1 ? 128 : type == 2 ? 64 : 32, off;
  if (!mn_major) off = type ? (mn / 8) * sbo + (mn % 8) * w + kbyte : (mn / 8) * sbo + (kbyte / 16) * lbo + (mn % 8) * 16 + kbyte % 16;
  else {
    int per = (int)w / 2;
    off = type ? (mn / per) * lbo + (k / 8) * sbo + (k % 8) * w + (mn % per) * 2 : (mn / 8) * sbo + (k / 8) * lbo + (k % 8) * 16 + (mn % 8) * 2;
  }
  return swizzle(start + off, type);
}
static void load_operand(CTA* c, u64 desc, int rows, int k, int el, bool mn_major, const Access& a, float* out, const char* what) {
  int bits = bits_of(el), per = 128 / bits;
  if (desc >> 49 & 7) fault("unsupported", "a wgmma descriptor with a base offset", {{"here", e_pc(a.e)}});
  auto chunk = [&](u32 addr, u32* v) {
    if (addr < SMEM_FIRST || addr + 16 > c->sh.used)
      fault("bounds", format("wgmma reads %s outside the block's %u bytes of shared memory (%s)", shared_name(c, addr).c_str(), c->sh.used - SMEM_FIRST, what), {{"the wgmma", e_pc(a.e)}});
    shared_read(c, addr, 16, a, what);
    for (int i = 0; i < per; i++) {
      if (bits == 16) { u16 h; memcpy(&h, c->sh.mem + addr + 2 * i, 2); v[i] = h; }
      else if (bits == 8) v[i] = c->sh.mem[addr + i];
      else memcpy(&v[i], c->sh.mem + addr + 4 * i, 4);
    }
  };
  u32 v[16];
  if (!mn_major) {
    for (int r = 0; r < rows; r++) for (int kk = 0; kk < k; kk += per) {
      chunk(chunk_address(desc, r, (u32)(kk * bits / 8), kk, false), v);
      for (int i = 0; i < per; i++) out[(kk + i) * rows + r] = element(el, v[i]);
    }
  } else {
    for (int kk = 0; kk < k; kk++) for (int r = 0; r < rows; r += 8) {
      chunk(chunk_address(desc, r, 0, kk, true), v);
      for (int i = 0; i < 8; i++) out[kk * rows + r + i] = element(el, v[i]);
    }
  }
}
static void multiply(const float* A, const float* B, int n, int k, float* acc, bool integer) {
  (void)integer;
  for (int r = 0; r < 64; r++) for (int kk = 0; kk < k; kk++) {
    float a = A[kk * 64 + r]; const float* b = B + kk * n; float* o = acc + r * n;
    for (int j = 0; j < n; j++) o[j] += a * b[j];
  }
}
static void execute(CTA* c, WarpGroup& w, Wgmma& op, u64 group) {
  const WgmmaArgs& a = op.a;
  Access acc{make_epoch(w.agent, (u32)group + 1, false, op.pc), op.know.get(), true, true};
  std::vector<float> A(64 * 32), B(256 * 32), D(64 * 256);
  int n = a.n, k = a.k, bits = bits_of(a.ea), e = 32 / bits;
  if (a.rs) {
    for (int t = 0; t < 128; t++) for (int r = 0; r < 4; r++) for (int i = 0; i < e; i++) {
      int row = t / 32 * 16 + t % 32 / 4 + 8 * (r & 1), kk = (r >> 1) * 4 * e + (t % 4) * e + i;
      A[kk * 64 + row] = element(a.ea, pick(op.areg[t][r], i, bits));
    }
  } else load_operand(c, a.adesc, 64, k, a.ea, a.trans_a, acc, A.data(), "wgmma operand A");
  load_operand(c, a.bdesc, n, k, a.eb, a.trans_b, acc, B.data(), "wgmma operand B");
  if (a.neg_a) for (auto& x : A) x = -x;
  if (a.neg_b) for (auto& x : B) x = -x;
  bool integer = a.ed == EL_S32, half = a.ed == EL_F16;
  int regs = half ? n / 4 : n / 2;
  auto at = [&](int t, int i) { return (t / 32 * 16 + t % 32 / 4 + 8 * (i >> 1 & 1)) * n + i / 4 * 8 + t % 4 * 2 + (i & 1); };
  if (a.scale_d && !integer)
    for (int t = 0; t < 128; t++) for (int j = 0; j < regs; j++) {
      if (half) { u32 v; memcpy(&v, op.d[t][j], 4); D[at(t, 2 * j)] = f16_to_f((u16)v); D[at(t, 2 * j + 1)] = f16_to_f((u16)(v >> 16)); }
      else memcpy(&D[at(t, j)], op.d[t][j], 4);
    }
  multiply(A.data(), B.data(), n, k, D.data(), integer);   // products of 8-bit integers and their sums of 32 are exact in float
  for (int t = 0; t < 128; t++) {
    Fiber* f = op.who[t];
    for (int j = 0; j < regs; j++) {
      size_t o = (u8*)op.d[t][j] - f->stack;
      if (M.opt.checks && a.scale_d && o < STACK_BYTES && (f->sflags[o] & S_POISON))
        fault("uninitialized", format("wgmma accumulates (scale-d = 1) into a register that was never written, by %s", thread_name(f).c_str()), {{"the wgmma", op.pc}});
      if (half) { u32 v = f_to_f16(D[at(t, 2 * j)]) | (u32)f_to_f16(D[at(t, 2 * j + 1)]) << 16; memcpy(op.d[t][j], &v, 4); }
      else if (integer) {
        i64 old = 0; if (a.scale_d) { i32 v; memcpy(&v, op.d[t][j], 4); old = v; }
        i64 s = old + (i64)D[at(t, j)];
        i32 r = a.sat ? (i32)(s > INT32_MAX ? INT32_MAX : s < INT32_MIN ? INT32_MIN : s) : (i32)s;
        memcpy(op.d[t][j], &r, 4);
      } else memcpy(op.d[t][j], &D[at(t, j)], 4);
      stack_write_mark(f, op.d[t][j], 4);
    }
  }
}
static void mark_inflight(Wgmma& op, int t) {
  Fiber* f = op.who[t];
  int regs = op.a.ed == EL_F16 ? op.a.n / 4 : op.a.n / 2;
  for (int j = 0; j < regs; j++) {
    size_t o = (u8*)op.d[t][j] - f->stack;
    if (o < STACK_BYTES) for (int b = 0; b < 4; b++) f->sflags[o + b] |= S_INFLIGHT;
  }
}
void wgmma(const WgmmaArgs& a, void* const* d, const u32* areg) {
  SITE();
  WarpGroup& w = warpgroup("wgmma.mma_async");
  int t = cur->tid % 128;
  if (t == 0) count("wgmma.mma_async");
  if (cur->wg_ops < w.first_op) fault("divergent", "wgmma issued out of step with the warpgroup by " + thread_name(cur), {{"here", cur->cur_pc}});
  size_t i = (size_t)(cur->wg_ops - w.first_op);
  if (i == w.ops.size()) {
    auto op = std::make_shared<Wgmma>(); op->a = a; op->arrived = 0; op->pc = cur->cur_pc;
    w.ops.push_back(op);
  }
  Wgmma& op = *w.ops[i];
  if (op.pc != cur->cur_pc || op.a.bdesc != a.bdesc || (!a.rs && op.a.adesc != a.adesc) || (op.a.scale_d != 0) != (a.scale_d != 0))
    fault("divergent", format("the threads of a warpgroup issue different wgmma: descriptors 0x%llx, 0x%llx by %s and 0x%llx, 0x%llx by another", (unsigned long long)a.adesc, (unsigned long long)a.bdesc,
                              thread_name(cur).c_str(), (unsigned long long)op.a.adesc, (unsigned long long)op.a.bdesc), {{"here", cur->cur_pc}, {"the other", op.pc}});
  int regs = a.ed == EL_F16 ? a.n / 4 : a.n / 2;
  bool fenced = true;
  for (int j = 0; j < regs; j++) {
    op.d[t][j] = d[j];
    size_t o = (u8*)d[j] - cur->stack;
    if (o < STACK_BYTES && cur->fence_at[o / 4] == cur->fence) fenced = false;
  }
  if (!fenced && M.opt.checks)
    fault("register", format("wgmma by %s uses an accumulator written since the last wgmma.fence", thread_name(cur).c_str()), {{"the wgmma", cur->cur_pc}});
  if (a.rs) memcpy(op.areg[t], areg, 16);
  op.who[t] = cur;
  mark_inflight(op, t); cur->inflight++;
  op.ks[t] = snapshot(cur);
  if (op.arrived == 127) {
    // Every thread of the group must have seen the data: the operation knows what all of them know.
    bool same = w.met != nullptr;
    for (int i = 0; i < 128 && same; i++) same = w.used[i] == op.ks[i];
    if (!same) {
      auto m = std::make_shared<Know>(*op.ks[0]);
      for (int i = 1; i < 128; i++) { m->all.meet(op.ks[i]->all); m->async.meet(op.ks[i]->async); }
      w.met = m;
      for (int i = 0; i < 128; i++) w.used[i] = op.ks[i];
    }
    op.know = w.met;
  }
  op.arrived++; cur->wg_ops++; cur->wg_in_group++;
}
void wgmma_fence() {
  SITE();
  warpgroup("wgmma.fence");
  if (cur->tid % 128 == 0) count("wgmma.fence");
  cur->fence++;
}
void wgmma_commit() {
  SITE();
  WarpGroup& w = warpgroup("wgmma.commit_group");
  size_t i = (size_t)(cur->wg_groups - w.first_group);
  if (i == w.group_end.size()) w.group_end.push_back(cur->wg_ops);
  else if (w.group_end[i] != cur->wg_ops) fault("divergent", "the threads of a warpgroup commit different wgmma groups", {{"here", cur->cur_pc}});
  cur->wg_groups++; cur->wg_in_group = 0;
}
void wgmma_wait(u32 n) {
  SITE();
  WarpGroup& w = warpgroup("wgmma.wait_group");
  if (cur->tid % 128 == 0) count("wgmma.wait_group");
  for (auto* f : w.at_wait) if (f->wg_wait_n != (int)n) fault("divergent", "the threads of a warpgroup wait for different wgmma groups", {{"here", cur->cur_pc}, {"the other", f->cur_pc}});
  cur->wg_wait_n = (int)n;
  w.at_wait.push_back(cur); M.progress++;
  if (w.at_wait.size() < 128) { block("warpgroup wgmma.wait_group", n, (u32)w.at_wait.size()); return; }
  for (auto* f : w.at_wait) if (f->wg_ops != cur->wg_ops || f->wg_groups != cur->wg_groups)
    fault("divergent", "the threads of a warpgroup have issued different numbers of wgmma at a wait", {{"here", cur->cur_pc}});
  CTA* c = cur->cta;
  u64 upto = cur->wg_groups > n ? cur->wg_groups - n : 0;
  while (w.first_group < upto) {
    u64 end = w.group_end.front();
    while (w.first_op < end) {
      auto op = w.ops.front();
      execute(c, w, *op, w.first_group);
      for (int t = 0; t < 128; t++) op->who[t]->inflight--;
      w.ops.pop_front(); w.first_op++;
    }
    w.group_end.pop_front(); w.first_group++;
  }
  for (auto& op : w.ops) for (int t = 0; t < 128; t++) mark_inflight(*op, t);
  if (!M.opt.strict_warp) for (int q = 0; q < 4; q++) order_lanes(&w.members[q * 32], ~0u);   // .sync.aligned: each warp converges
  for (auto* f : w.at_wait) { f->know.all.raise(w.agent, (u32)w.first_group); tick(f); if (f != cur) wake(f); }
  w.at_wait.clear();
}
// ---------------------------------------------------------------- register reallocation
void set_max_nreg(u32 n, int inc) {
  SITE();
  if (n < 24 || n > 256 || n % 8) fault("launch", format("setmaxnreg to %u registers: the count is a multiple of 8 from 24 to 256", n), {{"here", cur->cur_pc}});
  CTA* c = cur->cta;
  if (cur->lane == 0) {
    int have = c->warp_regs[cur->warp];
    if (inc ? (int)n < have : (int)n > have)
      fault("launch", format("setmaxnreg.%s to %u by a warp that holds %d registers a thread", inc ? "inc" : "dec", n, have), {{"here", cur->cur_pc}});
    if (!inc) { c->regs_free += have - (int)n; c->warp_regs[cur->warp] = (int)n; wake_all(c->reg_waiters); }
    else {
      while (c->regs_free < (int)n - have) { c->reg_waiters.push_back(cur); block("setmaxnreg.inc", n, (u32)c->regs_free); }
      c->regs_free -= (int)n - have; c->warp_regs[cur->warp] = (int)n;
    }
    count("setmaxnreg");
  }
}
}  // namespace tsim
