// Data of the simulator: fibers, clocks, shadow cells, CTAs, and the fault that stops a run. Internal to the runtime.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>
#include "api.h"

namespace tsim {

// ---------------------------------------------------------------- happens-before
// A vector clock over agents. Agents are CUDA threads and the asynchronous engines that work for them.
struct Clocks {
  std::vector<u32> v;
  u32 get(int i) const { return i < (int)v.size() ? v[i] : 0; }
  void set(int i, u32 c) { if (i >= (int)v.size()) v.resize(i + 1, 0); v[i] = c; }
  void raise(int i, u32 c) { if (get(i) < c) set(i, c); }
  void join(const Clocks& o) {
    if (o.v.size() > v.size()) v.resize(o.v.size(), 0);
    u32* a = v.data(); const u32* b = o.v.data();
    for (size_t i = 0, n = o.v.size(); i < n; i++) a[i] = a[i] > b[i] ? a[i] : b[i];
  }
  void meet(const Clocks& o) {
    if (v.size() > o.v.size()) v.resize(o.v.size());
    for (size_t i = 0; i < v.size(); i++) if (o.v[i] < v[i]) v[i] = o.v[i];
  }
};
// What an agent knows: `all` orders its accesses; `async` is the part that a proxy fence made visible to the async proxy.
struct Know {
  Clocks all, async;
  void join(const Know& o) { all.join(o.all); async.join(o.async); }
  void clear() { all.v.clear(); async.v.clear(); }
};
typedef std::shared_ptr<const Know> KnowPtr;

enum AgentKind { A_THREAD, A_CPASYNC, A_WGMMA, A_TMA, A_BULK_READ, A_BULK_WRITE };
struct Agent { int kind; int owner; };  // owner: linear thread in the cluster (or first thread of a warpgroup)

// Epoch of one access: agent:14 | clock:28 | atomic:1 | pc:21 (offset of the call in the kernel library).
typedef u64 Epoch;
inline Epoch make_epoch(int agent, u32 clk, bool atomic, u32 pc) {
  return ((u64)agent << 50) | ((u64)(clk & 0xFFFFFFF) << 22) | ((u64)atomic << 21) | (pc & 0x1FFFFF);
}
inline int e_agent(Epoch e) { return (int)(e >> 50); }
inline u32 e_clk(Epoch e) { return (u32)(e >> 22) & 0xFFFFFFF; }
inline bool e_atomic(Epoch e) { return (e >> 21) & 1; }
inline u32 e_pc(Epoch e) { return (u32)e & 0x1FFFFF; }

// One access about to be made.
struct Access {
  Epoch e;
  const Know* know;
  bool engine;      // made by an asynchronous engine: same-agent accesses are not ordered by program order
  bool async_proxy; // goes through the async proxy (TMA, bulk copies, wgmma operands)
};

// ---------------------------------------------------------------- shared memory
enum { F_INIT = 1, F_MBAR = 2, F_PENDING = 4, F_OBJECT = 8 };
struct Cell { Epoch w; u64 r; };  // r: 0, one epoch, or READ_SET | index
const u64 READ_SET = ~((1ull << 62) - 1);

struct ReadSets {  // interned sets of reader epochs
  std::vector<std::vector<Epoch>> sets;
  std::map<std::vector<Epoch>, u32> index;
  u64 memo_from = 0, memo_to = 0; Epoch memo_e = 0; const Know* memo_k = nullptr;
  u64 add(u64 r, const Access& a);
  void clear() { sets.clear(); index.clear(); memo_from = memo_to = 0; memo_e = 0; memo_k = nullptr; }
};

const u32 SMEM_STRIDE = 1u << 24;      // shared::cluster window of one CTA
const u32 SMEM_FIRST = 1024;           // the first KB belongs to the system, as on the device
const u32 SMEM_BYTES = 256 * 1024;

struct Fiber;
struct PendingWrite { u32 lo, hi; u32 pc; int agent; };

struct Shared {
  u8* mem;                 // SMEM_BYTES at window offset 0
  std::vector<u8> flags;
  std::vector<Cell> cells;
  u32 used = 0;            // end of what the kernel owns
  std::vector<PendingWrite> pending;
  bool use_mask = false;
};

struct MBar { u32 expected = 0; i64 pending = 0, tx = 0; u32 phase = 0; Know acc; Know done[2]; Epoch init = 0; std::vector<Fiber*> waiting; };
struct NamedBar { u32 expected = 0, arrived = 0; Know acc; std::vector<Fiber*> waiting; bool red = false; u32 red_and = 1, red_or = 0, red_pop = 0; };

// ---------------------------------------------------------------- warps and warpgroups
struct Collective { int kind; u32 mask, arrived; void* data[32]; Fiber* who[32]; bool done; };
struct AccessRec { u32 mask; u32 bytes; u64 addr[32]; };
struct SiteRecs { u32 count[32]; u32 base; int kind; std::deque<AccessRec> recs; };
struct Warp { std::vector<std::shared_ptr<Collective>> open; std::unordered_map<u32, SiteRecs> sites; };

struct Wgmma {
  WgmmaArgs a; int arrived; KnowPtr ks[128]; void* d[128][128]; u32 areg[128][4]; Fiber* who[128]; u32 pc; KnowPtr know;
};
struct WarpGroup {
  int agent = -1;
  std::deque<std::shared_ptr<Wgmma>> ops; u64 first_op = 0;          // ops[i] is operation number first_op + i
  std::deque<u64> group_end; u64 first_group = 0;                     // op number after each committed group
  u64 executed = 0;                                                   // operations already executed
  std::vector<Fiber*> members, at_wait;
  KnowPtr used[128], met;                                             // knowledge of the last operation, to reuse it
};

struct AsyncOp { std::function<void()> run; bool done = false; };
typedef std::shared_ptr<AsyncOp> AsyncOpPtr;
struct CpAsync { u32 dst; const u8* src; int n, src_size; u32 pc; KnowPtr know; u32 clk; };

struct CTA {
  int rank; u32 bx, by, bz; u64 serial;
  Shared sh;
  std::map<u32, MBar> mbar;
  NamedBar bar[16];
  std::vector<Warp> warp;
  std::vector<WarpGroup> wg;
  int regs_free = 0; std::vector<int> warp_regs; std::vector<Fiber*> reg_waiters;
  std::vector<bool> seen;       // CTAs whose global writes this CTA has acquired through atomics (by serial - launch first)
};

// ---------------------------------------------------------------- fibers
enum { S_POISON = 1, S_INFLIGHT = 2, S_INFLIGHT_READ = 4 };
const size_t STACK_BYTES = 512 * 1024;

struct Fiber {
  void* sp = nullptr;
  u8* stack = nullptr; u8* sflags = nullptr; u16* fence_at = nullptr;
  const void* entry_fp = nullptr;
  int id, tid, warp, lane; CTA* cta; u32 tx, ty, tz;
  Know know; u32 clk = 1; KnowPtr snap; bool dirty = true;
  u16 fence = 1;                 // counts wgmma.fence
  bool exited = false, queued = false;
  const char* waits = nullptr; u32 wait_a = 0, wait_b = 0; u32 wait_pc = 0; bool spurious = false;
  u32 spurious_count = 0; u64 progress_seen = 0;
  u32 cur_pc = 0;
  // cp.async
  int cp_agent = -1; std::vector<CpAsync> cp_cur; std::deque<std::vector<CpAsync>> cp_groups; u32 cp_clk = 1, cp_first = 1;
  // bulk stores
  int bulk_r = -1, bulk_w = -1; std::vector<AsyncOpPtr> bulk_cur; std::deque<std::vector<AsyncOpPtr>> bulk_groups; u32 bulk_clk = 1, bulk_first = 1;
  // wgmma, counted for this thread
  u64 wg_ops = 0, wg_groups = 0, wg_waited = 0; u64 wg_in_group = 0; int wg_wait_n = -1; int inflight = 0;
  u64 cluster_gen = 0;
  std::unordered_map<size_t, u32> undefined_from;  // stack offset of an undefined register -> the load that made it so
};

// ---------------------------------------------------------------- global memory
struct GCell { Epoch w; u64 r; u32 wcta, rcta, r1cta, pad; };
struct Segment {
  u8 *lo, *hi; u32 granule; bool undefined; std::string name;
  GCell* cells = nullptr; u8* init = nullptr; size_t ncells = 0;
};

// ---------------------------------------------------------------- the machine
struct Options { u64 seed = 0; bool checks = true, strict_warp = false; u32 max_shared = 232448; u32 max_threads = 1024; double timeout = 300; };
struct Counters { u64 v[C_COUNT]; };

struct Machine {
  Options opt;
  const KernelInfo* kernel = nullptr;
  std::vector<CTA*> ctas;                 // of the running cluster
  std::vector<Fiber*> fibers;
  std::vector<Agent> agents;
  std::deque<Fiber*> ready;
  std::vector<AsyncOpPtr> engine;         // TMA loads and asynchronous arrivals
  std::vector<int> tma_agents; size_t tma_next = 0; std::vector<u32> tma_clk;
  ReadSets reads; ReadSets greads;
  NamedBar cluster_bar; u64 cluster_gen = 0; std::vector<Know> cluster_done;
  int live = 0; u64 progress = 0, rng = 0;
  u64 cta_serial = 0, launch_first = 0;
  std::vector<Segment*> segments; Segment* last_seg = nullptr;
  std::unordered_map<u64, std::vector<bool>> released;
  Counters counters{};
  std::map<std::string, u64> kinds;
  bool failed = false; std::string fault;
  std::string output;                     // printf
  u32 grid[3], block[3], dyn_shared, cluster[3];
  u32 nthreads = 0;
};
extern Machine M;
extern Fiber* cur;

// ---------------------------------------------------------------- services
struct Site { const char* role; u32 pc; };
[[noreturn]] void fault(const char* kind, const std::string& text, std::vector<Site> sites = {});
std::string format(const char* f, ...) __attribute__((format(printf, 1, 2)));
std::string thread_name(const Fiber* f);
std::string agent_name(int agent);
std::string shared_name(const CTA* c, u32 off);

u32 site_pc(const void* frame);           // offset of the kernel's own call, walking frames from `frame`
#define SITE() (cur->cur_pc = site_pc(__builtin_frame_address(0)))

void yield_();                            // back to the scheduler
void block(const char* what, u32 a = 0, u32 b = 0);
void wake(Fiber* f);
void wake_all(std::vector<Fiber*>& v);
void tick(Fiber* f);
void order_lanes(Fiber* const* who, u32 mask);   // everything these lanes did happens before what they do next
KnowPtr snapshot(Fiber* f);
int new_agent(int kind, int owner);
u64 random_u64();
void run_engine(size_t i);
inline bool ordered(Epoch e, const Access& a) {
  int g = e_agent(e);
  if (g == e_agent(a.e) && (!a.engine || e_clk(e) == e_clk(a.e))) return true;
  return a.know->all.get(g) >= e_clk(e);
}
inline Access thread_access(bool atomic = false) {
  return Access{make_epoch(cur->id, cur->clk, atomic, cur->cur_pc), &cur->know, false, false};
}
void shared_read(CTA* c, u32 off, u32 n, const Access& a, const char* what);
void shared_write(CTA* c, u32 off, u32 n, const Access& a, const char* what);
void shared_object(CTA* c, u32 off, const Access& a);        // mbarrier: must be ordered after its init
void mark_pending(CTA* c, u32 off, u32 n, int agent, const char* what);
void clear_pending(CTA* c, u32 off, u32 n);
Segment* find_segment(const void* p);
void global_access(const void* p, u32 n, bool write, const Access& a, const char* what);
void global_atomic_sync(const void* p);
CTA* shared_window(u32 addr, u32 n, u32 align, const char* what, u32* off);
void record_access(int kind, u64 addr, u32 bytes);
void flush_warp(CTA* c, int warp);
u32 conflicts(const u64* addr, u32 mask, u32 bytes, u32* ideal);
void stack_read_check(const void* p, size_t n);
void stack_write_mark(Fiber* f, const void* p, size_t n);
void set_entry_frame(const void* fp);
void mbar_complete_tx(CTA* c, u32 off, i64 bytes, const Know& k, const char* what);
void mbar_arrive_know(CTA* c, u32 off, u32 count, const Know& k, const char* what);
void count(const char* kind, u64 n = 1);
void wg_members_init(CTA* c);
void exit_checks(Fiber* f);
bool has_mbarrier_tx_error(std::string* text);
void cp_async_drain_all(Fiber* f);

}  // namespace tsim
