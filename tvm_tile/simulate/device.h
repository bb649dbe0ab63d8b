// The CUDA language on the host: what a translated kernel sees instead of NVIDIA's headers.
#pragma once
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <type_traits>
#include "api.h"

#define __CUDA_ARCH__ 900
#define __CUDACC_VER_MAJOR__ 13
#define __CUDACC_VER_MINOR__ 0
#define __global__ __attribute__((noinline))
#define __device__
#define __host__
#define __constant__
#define __forceinline__ __attribute__((noinline)) static
#define __launch_bounds__(...)
#define __grid_constant__
#define __restrict__
#define __align__(n) __attribute__((aligned(n)))
#define CUDART_INF_F __builtin_inff()
#define CUDART_NAN_F __builtin_nanf("")
#define CUDART_INF __builtin_inf()
#define CUDART_NAN __builtin_nan("")

#define TSIM_V(T, B, a1, a2, a4) \
  struct __attribute__((aligned(a1))) B##1 { T x; }; \
  struct __attribute__((aligned(a2))) B##2 { T x, y; }; \
  struct B##3 { T x, y, z; }; \
  struct __attribute__((aligned(a4))) B##4 { T x, y, z, w; }; \
  inline B##1 make_##B##1(T x) { return {x}; } \
  inline B##2 make_##B##2(T x, T y) { return {x, y}; } \
  inline B##3 make_##B##3(T x, T y, T z) { return {x, y, z}; } \
  inline B##4 make_##B##4(T x, T y, T z, T w) { return {x, y, z, w}; }
TSIM_V(signed char, char, 1, 2, 4)
TSIM_V(unsigned char, uchar, 1, 2, 4)
TSIM_V(short, short, 2, 4, 8)
TSIM_V(unsigned short, ushort, 2, 4, 8)
TSIM_V(int, int, 4, 8, 16)
TSIM_V(unsigned int, uint, 4, 8, 16)
TSIM_V(long, long, 8, 16, 16)
TSIM_V(unsigned long, ulong, 8, 16, 16)
TSIM_V(long long, longlong, 8, 16, 16)
TSIM_V(unsigned long long, ulonglong, 8, 16, 16)
TSIM_V(float, float, 4, 8, 16)
TSIM_V(double, double, 8, 16, 16)
#include "half.h"
inline half2 __float22half2_rn(float2 a) { return half2(half(a.x), half(a.y)); }
inline float2 __half22float2(half2 a) { return {a.x, a.y}; }
inline nv_bfloat162 __float22bfloat162_rn(float2 a) { return nv_bfloat162(nv_bfloat16(a.x), nv_bfloat16(a.y)); }
inline float2 __bfloat1622float2(nv_bfloat162 a) { return {a.x, a.y}; }
#define TSIM_FP8_MORE(T, T2, T4, TO) \
  inline T2::T2(float2 f) : T2(f.x, f.y) {} \
  inline T2::operator float2() const { return {tsim::TO(__x & 255), tsim::TO(__x >> 8)}; } \
  inline T4::T4(float4 f) : T4(f.x, f.y, f.z, f.w) {} \
  inline T4::operator float4() const { return {tsim::TO(__x & 255), tsim::TO(__x >> 8 & 255), tsim::TO(__x >> 16 & 255), tsim::TO(__x >> 24)}; }
TSIM_FP8_MORE(__nv_fp8_e4m3, __nv_fp8x2_e4m3, __nv_fp8x4_e4m3, e4m3_to_f)
TSIM_FP8_MORE(__nv_fp8_e5m2, __nv_fp8x2_e5m2, __nv_fp8x4_e5m2, e5m2_to_f)
TSIM_FP8_MORE(__nv_fp8_e8m0, __nv_fp8x2_e8m0, __nv_fp8x4_e8m0, e8m0_to_f)

struct CUtensorMap { alignas(64) unsigned char opaque[128]; };
struct dim3 { unsigned x, y, z; };
// Constant for the life of a fiber, so the compiler may keep them and does not instrument them.
extern const dim3 tsim_thread_idx, tsim_block_idx, tsim_block_dim, tsim_grid_dim;
#define threadIdx tsim_thread_idx
#define blockIdx tsim_block_idx
#define blockDim tsim_block_dim
#define gridDim tsim_grid_dim
static const int warpSize = 32;
namespace tsim { void set_entry_frame(const void* fp); }

#define TSIM_MINMAX(T) inline T max(T a, T b) { return a > b ? a : b; } inline T min(T a, T b) { return a < b ? a : b; }
TSIM_MINMAX(int) TSIM_MINMAX(unsigned) TSIM_MINMAX(long) TSIM_MINMAX(unsigned long) TSIM_MINMAX(long long) TSIM_MINMAX(unsigned long long)
inline float max(float a, float b) { return fmaxf(a, b); }
inline float min(float a, float b) { return fminf(a, b); }
inline double max(double a, double b) { return fmax(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline unsigned max(int a, unsigned b) { return max((unsigned)a, b); }
inline unsigned max(unsigned a, int b) { return max(a, (unsigned)b); }
inline unsigned min(int a, unsigned b) { return min((unsigned)a, b); }
inline unsigned min(unsigned a, int b) { return min(a, (unsigned)b); }
inline long long max(int a, long long b) { return max((long long)a, b); }
inline long long max(long long a, int b) { return max(a, (long long)b); }
inline long long min(int a, long long b) { return min((long long)a, b); }
inline long long min(long long a, int b) { return min(a, (long long)b); }

// --- arithmetic
inline float rsqrtf(float x) { return 1.f / sqrtf(x); }
inline double rsqrt(double x) { return 1. / sqrt(x); }
inline float __expf(float x) { return expf(x); }
inline float __exp10f(float x) { return powf(10.f, x); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __log10f(float x) { return log10f(x); }
inline float __sinf(float x) { return sinf(x); }
inline float __cosf(float x) { return cosf(x); }
inline float __tanf(float x) { return tanf(x); }
inline float __powf(float x, float y) { return powf(x, y); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __frcp_rn(float x) { return 1.f / x; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __frsqrt_rn(float x) { return 1.f / sqrtf(x); }
inline float __saturatef(float x) { return !(x > 0.f) ? 0.f : x > 1.f ? 1.f : x; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float2 __fmul2_rn(float2 a, float2 b) { return {a.x * b.x, a.y * b.y}; }
inline float2 __fadd2_rn(float2 a, float2 b) { return {a.x + b.x, a.y + b.y}; }
inline float2 __ffma2_rn(float2 a, float2 b, float2 c) { return {fmaf(a.x, b.x, c.x), fmaf(a.y, b.y, c.y)}; }
inline float normcdff(float x) { return 0.5f * erfcf(-x * 0.70710678118654752f); }
inline int __float2int_rn(float x) { return (int)nearbyintf(x); }
inline int __float2int_rz(float x) { return (int)x; }
inline int __float2int_rd(float x) { return (int)floorf(x); }
inline int __float2int_ru(float x) { return (int)ceilf(x); }
inline unsigned __float2uint_rn(float x) { return (unsigned)nearbyintf(x); }
inline float __int2float_rn(int x) { return (float)x; }
inline float __uint2float_rn(unsigned x) { return (float)x; }
inline unsigned __float_as_uint(float x) { return tsim::f_bits(x); }
inline int __float_as_int(float x) { return (int)tsim::f_bits(x); }
inline float __uint_as_float(unsigned x) { return tsim::f_from(x); }
inline float __int_as_float(int x) { return tsim::f_from((unsigned)x); }
inline long long __double_as_longlong(double x) { long long r; __builtin_memcpy(&r, &x, 8); return r; }
inline double __longlong_as_double(long long x) { double r; __builtin_memcpy(&r, &x, 8); return r; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll((unsigned long long)x) : 64; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline unsigned __brev(unsigned x) { unsigned r = 0; for (int i = 0; i < 32; i++) r |= (x >> i & 1) << (31 - i); return r; }
inline int __mul24(int a, int b) { return (int)((unsigned)a * (unsigned)b); }
inline int __mulhi(int a, int b) { return (int)((long long)a * b >> 32); }
inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((unsigned long long)a * b >> 32); }
inline int __dp4a(int a, int b, int c) { for (int i = 0; i < 4; i++) c += (int)(signed char)(a >> 8 * i) * (signed char)(b >> 8 * i); return c; }
inline unsigned __dp4a(unsigned a, unsigned b, unsigned c) { for (int i = 0; i < 4; i++) c += (a >> 8 * i & 255) * (b >> 8 * i & 255); return c; }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned s) {
  unsigned long long v = (unsigned long long)b << 32 | a; unsigned r = 0;
  for (int i = 0; i < 4; i++) { unsigned k = s >> 4 * i; unsigned x = (unsigned)(v >> 8 * (k & 7)) & 255; if (k & 8) x = x & 128 ? 255 : 0; r |= x << 8 * i; }
  return r;
}
template <class T> inline T __ldg(const T* p) { return *p; }
template <class T> inline T __ldcg(const T* p) { return *p; }
template <class T> inline T __ldcs(const T* p) { return *p; }
template <class T> inline T __ldca(const T* p) { return *p; }
template <class T> inline void __stcs(T* p, T v) { *p = v; }
template <class T> inline void __stcg(T* p, T v) { *p = v; }

// --- synchronisation and warp collectives
#define TSIM_INLINE inline __attribute__((always_inline))
TSIM_INLINE void __syncthreads() { tsim::bar_sync(0, 0); }
TSIM_INLINE int __syncthreads_and(int p) { return (int)tsim::bar_red(0, 0, 0, (unsigned)p); }
TSIM_INLINE int __syncthreads_or(int p) { return (int)tsim::bar_red(0, 0, 1, (unsigned)p); }
TSIM_INLINE int __syncthreads_count(int p) { return (int)tsim::bar_red(0, 0, 2, (unsigned)p); }
TSIM_INLINE void __syncwarp(unsigned mask = 0xFFFFFFFFu) { tsim::warp_sync(mask); }
TSIM_INLINE void __threadfence() { tsim::thread_fence(1); }
TSIM_INLINE void __threadfence_block() { tsim::thread_fence(0); }
TSIM_INLINE void __threadfence_system() { tsim::thread_fence(2); }
TSIM_INLINE unsigned __activemask() { return tsim::active_mask(); }
TSIM_INLINE unsigned __ballot_sync(unsigned m, int p) { return tsim::ballot(m, (unsigned)p); }
TSIM_INLINE int __any_sync(unsigned m, int p) { return tsim::ballot(m, (unsigned)p) != 0; }
TSIM_INLINE int __all_sync(unsigned m, int p) { return tsim::ballot(m, !p) == 0; }
template <class T> TSIM_INLINE unsigned __match_any_sync(unsigned m, T v) { tsim::u64 b = 0; __builtin_memcpy(&b, &v, sizeof v); return tsim::match(m, b, 0, nullptr); }
template <class T> TSIM_INLINE unsigned __match_all_sync(unsigned m, T v, int* p) { tsim::u64 b = 0; tsim::u32 q; __builtin_memcpy(&b, &v, sizeof v); unsigned r = tsim::match(m, b, 1, &q); *p = (int)q; return r; }
#define TSIM_REDUX(name, op) \
  TSIM_INLINE unsigned __reduce_##name##_sync(unsigned m, unsigned v) { return tsim::redux(m, op, 0, v); } \
  TSIM_INLINE int __reduce_##name##_sync(unsigned m, int v) { return (int)tsim::redux(m, op, 1, (unsigned)v); }
TSIM_REDUX(add, tsim::AT_ADD) TSIM_REDUX(min, tsim::AT_MIN) TSIM_REDUX(max, tsim::AT_MAX) TSIM_REDUX(and, tsim::AT_AND) TSIM_REDUX(or, tsim::AT_OR) TSIM_REDUX(xor, tsim::AT_XOR)
#define TSIM_SHFL(name, mode, lane_t, clamp) \
  template <class T> TSIM_INLINE T name(unsigned mask, T v, lane_t lane, int width = 32) { \
    T out; tsim::shfl(mask, mode, &v, &out, sizeof(T), (unsigned)lane, (unsigned)(32 - width) << 8 | clamp, nullptr); return out; }
TSIM_SHFL(__shfl_sync, 0, int, 31) TSIM_SHFL(__shfl_up_sync, 1, unsigned, 0) TSIM_SHFL(__shfl_down_sync, 2, unsigned, 31) TSIM_SHFL(__shfl_xor_sync, 3, int, 31)
TSIM_INLINE unsigned __cvta_generic_to_shared(const void* p) { return tsim::cvta_shared(p); }
TSIM_INLINE void __nanosleep(unsigned ns) { tsim::nanosleep_(ns); }
TSIM_INLINE void __trap() { tsim::trap("__trap()"); }
inline long long clock64() { return (long long)tsim::clock_(); }
inline int clock() { return (int)tsim::clock_(); }
#define printf tsim::printf_
#undef assert
#define assert(e) ((e) ? (void)0 : tsim::assert_fail(#e, __FILE__, __LINE__, __func__))

// --- atomics
template <class T> struct tsim_type {};
#define TSIM_TYPE(T, K) template <> struct tsim_type<T> { enum { value = tsim::K }; };
TSIM_TYPE(unsigned, TY_U32) TSIM_TYPE(int, TY_S32) TSIM_TYPE(unsigned long long, TY_U64) TSIM_TYPE(unsigned long, TY_U64) TSIM_TYPE(long long, TY_S64) TSIM_TYPE(long, TY_S64)
TSIM_TYPE(float, TY_F32) TSIM_TYPE(double, TY_F64) TSIM_TYPE(half, TY_F16) TSIM_TYPE(nv_bfloat16, TY_BF16) TSIM_TYPE(half2, TY_F16X2) TSIM_TYPE(nv_bfloat162, TY_BF16X2) TSIM_TYPE(unsigned short, TY_B16)
#define TSIM_ATOMIC(name, op) \
  template <class T> TSIM_INLINE T name(T* p, T v) { T old; tsim::atomic_generic(p, sizeof(T), op, tsim_type<T>::value, &v, nullptr, &old); return old; }
TSIM_ATOMIC(atomicAdd, tsim::AT_ADD) TSIM_ATOMIC(atomicMin, tsim::AT_MIN) TSIM_ATOMIC(atomicMax, tsim::AT_MAX) TSIM_ATOMIC(atomicExch, tsim::AT_EXCH)
TSIM_ATOMIC(atomicAnd, tsim::AT_AND) TSIM_ATOMIC(atomicOr, tsim::AT_OR) TSIM_ATOMIC(atomicXor, tsim::AT_XOR) TSIM_ATOMIC(atomicInc, tsim::AT_INC) TSIM_ATOMIC(atomicDec, tsim::AT_DEC)
template <class T> TSIM_INLINE T atomicSub(T* p, T v) { return atomicAdd(p, (T)-v); }
template <class T> TSIM_INLINE T atomicCAS(T* p, T c, T v) { T old; tsim::atomic_generic(p, sizeof(T), tsim::AT_CAS, tsim_type<T>::value, &c, &v, &old); return old; }
#include "ptx.h"
#define __noinline__ __attribute__((noinline))  // last: system headers spell the attribute so
