// Address space for tensors: each lies alone in a huge reserved range, so that a wrong index cannot reach another one.
#include <sys/mman.h>
#include "state.h"

using namespace tsim;
static const size_t SPACING = 1ull << 36;  // 64 GB of addresses, of which the tensor's own pages are mapped

extern "C" {
void* tsim_reserve(u64 bytes) {
  u8* p = (u8*)mmap(nullptr, SPACING + bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == (u8*)MAP_FAILED) return nullptr;
  u8* m = p + SPACING / 2;
  size_t n = (bytes + 4095) / 4096 * 4096 + 4096;
  if (mprotect(m, n, PROT_READ | PROT_WRITE)) { munmap(p, SPACING + bytes); return nullptr; }
  return m;
}
void tsim_release(void* m, u64 bytes) { if (m) munmap((u8*)m - SPACING / 2, SPACING + bytes); }
void tsim_clear_segments() {
  for (auto* s : M.segments) {
    if (s->cells) munmap((void*)s->cells, s->ncells * sizeof(GCell));
    free(s->init); delete s;
  }
  M.segments.clear(); M.last_seg = nullptr;
}
}
