// What a run costs: bank conflicts, global sectors and bytes, counted for each warp access.
//
// Lanes run one after another, so the accesses of one warp instruction are put together from the n-th access of each lane
// at the same place of the kernel; a warp-wide barrier ends the count.
#include "state.h"

namespace tsim {

// Wavefronts of one warp access to shared memory: 32 banks of 4 bytes; 8-byte accesses go in halves, 16-byte in quarters.
u32 conflicts(const u64* addr, u32 mask, u32 bytes, u32* ideal) {
  u32 per = bytes <= 4 ? 32 : bytes == 8 ? 16 : 8, total = 0; *ideal = 0;
  for (u32 g = 0; g < 32; g += per) {
    u32 words[32][32]; u32 n[32] = {0}; u32 worst = 0; bool any = false;
    for (u32 l = g; l < g + per; l++) if (mask >> l & 1) {
      any = true;
      for (u32 b = 0; b < bytes; b += 4) {
        u32 w = (u32)((addr[l] + b) >> 2), bank = w & 31, i = 0;
        while (i < n[bank] && words[bank][i] != w) i++;
        if (i == n[bank] && n[bank] < 32) words[bank][n[bank]++] = w;
        if (n[bank] > worst) worst = n[bank];
      }
    }
    if (any) { total += worst; ++*ideal; }
  }
  return total;
}
static void evaluate(int kind, const AccessRec& r) {
  u64* v = M.counters.v;
  if (kind == C_SHARED_LOADS || kind == C_SHARED_STORES) {
    u32 ideal, w = conflicts(r.addr, r.mask, r.bytes, &ideal);
    v[C_SHARED_WAVEFRONTS] += w; v[C_BANK_CONFLICTS] += w - ideal;
  } else {
    u64 sectors[64]; u32 n = 0, lanes = 0;
    for (int l = 0; l < 32; l++) if (r.mask >> l & 1) {
      lanes++;
      for (u64 s = r.addr[l] / 32; s <= (r.addr[l] + r.bytes - 1) / 32; s++) {
        u32 i = 0; while (i < n && sectors[i] != s) i++;
        if (i == n && n < 64) sectors[n++] = s;
      }
    }
    v[C_GLOBAL_SECTORS] += n; v[C_GLOBAL_SECTORS_IDEAL] += (lanes * r.bytes + 31) / 32;
  }
  v[kind]++;
}
void record_access(int kind, u64 addr, u32 bytes) {
  u64* v = M.counters.v;
  v[kind == C_SHARED_LOADS ? C_SHARED_READ_BYTES : kind == C_SHARED_STORES ? C_SHARED_WRITE_BYTES : kind == C_GLOBAL_LOADS ? C_GLOBAL_READ_BYTES : C_GLOBAL_WRITE_BYTES] += bytes;
  Warp& w = cur->cta->warp[cur->warp];
  SiteRecs& s = w.sites[cur->cur_pc * 4 + (kind & 3)];
  if (s.recs.empty() && !s.base) { memset(s.count, 0, sizeof s.count); s.kind = kind; }
  u32 i = s.count[cur->lane]++ - s.base;
  if (i >= s.recs.size()) s.recs.push_back(AccessRec{0, bytes, {}});
  AccessRec& r = s.recs[i];
  r.mask |= 1u << cur->lane; r.addr[cur->lane] = addr; if (bytes > r.bytes) r.bytes = bytes;
  while (!s.recs.empty() && s.recs.front().mask == ~0u) { evaluate(s.kind, s.recs.front()); s.recs.pop_front(); s.base++; }
}
void flush_warp(CTA* c, int warp) {
  Warp& w = c->warp[warp];
  for (auto& kv : w.sites) for (auto& r : kv.second.recs) evaluate(kv.second.kind, r);
  w.sites.clear();
}
}  // namespace tsim
