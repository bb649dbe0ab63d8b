// What a translated kernel calls. No standard C++ library here: this header is compiled with every kernel.
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace tsim {
typedef uint8_t u8; typedef uint16_t u16; typedef uint32_t u32; typedef uint64_t u64; typedef int64_t i64; typedef int32_t i32;

enum { C_SHARED_LOADS, C_SHARED_STORES, C_SHARED_WAVEFRONTS, C_BANK_CONFLICTS, C_GLOBAL_LOADS, C_GLOBAL_STORES,
       C_GLOBAL_SECTORS, C_GLOBAL_SECTORS_IDEAL, C_GLOBAL_READ_BYTES, C_GLOBAL_WRITE_BYTES, C_SHARED_READ_BYTES, C_SHARED_WRITE_BYTES,
       C_TMA_READ_BYTES, C_TMA_WRITE_BYTES, C_BARRIERS, C_SWITCHES, C_CTAS, C_THREADS, C_COUNT };

struct KernelInfo {
  const char* name; void (*entry)(void**); u32 nparams; const char* const* launch_tags; u32 nlaunch;
  u32 static_shared; const void* image; u32 registers;
};
struct TensorMap {  // our own encoding of a CUtensorMap; 128 bytes, 64-byte aligned
  u8* base; u64 stride[5]; u32 dim[5]; u16 box[5]; u8 estride[5]; u8 rank, bytes, swizzle, interleave, dtype, oob; u32 magic;
};
enum { EL_F16, EL_BF16, EL_TF32, EL_E4M3, EL_E5M2, EL_S8, EL_U8, EL_F32, EL_S32, EL_F64 };
struct WgmmaArgs { int n, k, ea, eb, ed; int rs; u64 adesc, bdesc; u32 scale_d; int neg_a, neg_b, trans_a, trans_b, sat; };

// --- addresses
u32 cvta_shared(const void* p);
void* cvta_generic(u32 addr);
void* dynamic_shared();
void* static_shared(u32 offset);
void poison(void* p, size_t n);             // a local array comes to life, undefined
void undefined_register(void* p, size_t n); // a register takes a value from memory that was never written
// --- memory named by PTX. `space`: 0 shared window, 1 global or generic pointer
u32 load_shared(u32 addr, void* dst, u32 n, u32 elem);   // bit i: element i of a vector was never written
void store_shared(u32 addr, const void* src, u32 n, u32 elem);
void load_global(const void* p, void* dst, u32 n, u32 elem);
void store_global(void* p, const void* src, u32 n, u32 elem);
void prefetch_global(const void* p);
void prefetch_map(const void* map);
// --- atomics: op is a name; returns the old value's bits
u64 atomic_generic(void* p, u32 bytes, int op, int type, const void* v, const void* v2, void* old);
u64 atomic_shared(u32 addr, u32 bytes, int op, int type, const void* v, const void* v2, void* old);
enum { AT_ADD, AT_MIN, AT_MAX, AT_EXCH, AT_CAS, AT_AND, AT_OR, AT_XOR, AT_INC, AT_DEC };
enum { TY_U32, TY_S32, TY_U64, TY_S64, TY_F32, TY_F64, TY_F16, TY_BF16, TY_F16X2, TY_BF16X2, TY_B16 };
// --- synchronisation
void bar_sync(u32 id, u32 count);         // count 0: all threads of the CTA
void bar_arrive(u32 id, u32 count);
u32 bar_red(u32 id, u32 count, int op, u32 pred);   // 0 and, 1 or, 2 popc
void warp_sync(u32 mask);
void thread_fence(int scope);
void proxy_fence();
void cluster_arrive(int release);
void cluster_wait(int acquire);
u32 mapa(u32 addr, u32 rank);
u64 mapa64(const void* p, u32 rank);
u32 cluster_special(const char* name);
// --- mbarrier
void mbar_init(u32 addr, u32 count);
void mbar_inval(u32 addr);
u64 mbar_arrive(u32 addr, u32 count, int drop);
u64 mbar_arrive_expect(u32 addr, u32 tx);
void mbar_expect(u32 addr, u32 tx);
void mbar_complete(u32 addr, u32 tx);
bool mbar_wait_parity(u32 addr, u32 parity, int blocking);
bool mbar_wait_state(u32 addr, u64 state, int blocking);
// --- warp collectives
void shfl(u32 mask, int mode, const void* v, void* out, u32 bytes, u32 lane_arg, u32 clamp_mask, u32* pred);  // mode 0 idx 1 up 2 down 3 bfly
u32 ballot(u32 mask, u32 pred);
u32 match(u32 mask, u64 v, int all, u32* pred);
u32 redux(u32 mask, int op, int is_signed, u32 v);
u32 elect(u32 mask, u32* leader);
u32 active_mask();
void ldmatrix(u32 addr, u32* r, int num, int trans, int bytes8);
void stmatrix(u32 addr, const u32* r, int num, int trans, int bytes8);
void mma(int m, int n, int k, int ea, int eb, int ec, int ed, const u32* a, const u32* b, const void* c, void* d, int sat);
// --- asynchronous engines
void cp_async(u32 dst, const void* src, u32 n, u32 src_size);
void cp_async_commit();
void cp_async_wait(u32 n);
void cp_async_wait_all();
void cp_async_mbar(u32 addr, int noinc);
void tma_load(u32 dst, const void* map, int rank, const i32* c, u32 bar, u32 mask, int has_mask);
void tma_store(const void* map, int rank, const i32* c, u32 src, int reduce);   // reduce: -1 none, AT_ADD...
void tma_prefetch(const void* map, int rank, const i32* c);
void bulk_load(u32 dst, const void* src, u32 n, u32 bar, u32 mask, int has_mask);
void bulk_store(void* dst, u32 src, u32 n, int reduce, int type);
void bulk_copy_cluster(u32 dst, u32 src, u32 n, u32 bar);
void bulk_commit();
void bulk_wait(u32 n, int read);
// --- wgmma
void wgmma(const WgmmaArgs& a, void* const* d, const u32* areg);
void wgmma_fence();
void wgmma_commit();
void wgmma_wait(u32 n);
void set_max_nreg(u32 n, int inc);
// --- rest
void count_op(const char* kind);
void nanosleep_(u32 ns);
u64 clock_();
[[noreturn]] void trap(const char* what);
[[noreturn]] void assert_fail(const char* expr, const char* file, int line, const char* func);
int printf_(const char* f, ...) __attribute__((format(printf, 1, 2)));
[[noreturn]] void unsupported(const char* what);
struct FFIAny { int32_t type_index; uint32_t pad; union { int64_t i; double f; void* p; } u; };
int launch(const KernelInfo& k, void** params, const FFIAny* launch_args);
}  // namespace tsim
