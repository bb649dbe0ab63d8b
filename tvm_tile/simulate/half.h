// half, nv_bfloat16, fp8 and their vectors with the arithmetic and intrinsics that CUDA's headers give them.
#pragma once
#include "numbers.h"

struct float2; struct float4;
template <bool B, class T = int> struct tsim_if {};
template <class T> struct tsim_if<true, T> { typedef T type; };
template <class T> struct tsim_int { enum { value = 0 }; };
#define TSIM_INT(T) template <> struct tsim_int<T> { enum { value = 1 }; };
TSIM_INT(bool) TSIM_INT(char) TSIM_INT(signed char) TSIM_INT(unsigned char) TSIM_INT(short) TSIM_INT(unsigned short) TSIM_INT(int) TSIM_INT(unsigned)
TSIM_INT(long) TSIM_INT(unsigned long) TSIM_INT(long long) TSIM_INT(unsigned long long) TSIM_INT(double)

#define TSIM_HALF(T, T2, TO, FROM) \
struct __attribute__((aligned(2))) T { \
  unsigned short __x; \
  T() = default; \
  T(float f) : __x(tsim::FROM(f)) {} \
  template <class I, typename tsim_if<tsim_int<I>::value>::type = 0> T(I i) : __x(tsim::FROM((float)i)) {} \
  operator float() const { return tsim::TO(__x); } \
  static T bits(unsigned short b) { T r; r.__x = b; return r; } \
}; \
inline T operator+(T a, T b) { return T((float)a + (float)b); } \
inline T operator-(T a, T b) { return T((float)a - (float)b); } \
inline T operator*(T a, T b) { return T((float)a * (float)b); } \
inline T operator/(T a, T b) { return T((float)a / (float)b); } \
inline T operator-(T a) { return T::bits(a.__x ^ 0x8000); } \
inline T& operator+=(T& a, T b) { return a = a + b; } \
inline T& operator-=(T& a, T b) { return a = a - b; } \
inline T& operator*=(T& a, T b) { return a = a * b; } \
inline T& operator/=(T& a, T b) { return a = a / b; } \
inline bool operator<(T a, T b) { return (float)a < (float)b; } \
inline bool operator>(T a, T b) { return (float)a > (float)b; } \
inline bool operator<=(T a, T b) { return (float)a <= (float)b; } \
inline bool operator>=(T a, T b) { return (float)a >= (float)b; } \
inline bool operator==(T a, T b) { return (float)a == (float)b; } \
inline bool operator!=(T a, T b) { return (float)a != (float)b; } \
inline T __hadd(T a, T b) { return a + b; } \
inline T __hsub(T a, T b) { return a - b; } \
inline T __hmul(T a, T b) { return a * b; } \
inline T __hdiv(T a, T b) { return a / b; } \
inline T __hneg(T a) { return -a; } \
inline T __habs(T a) { return T::bits(a.__x & 0x7FFF); } \
inline T __hfma(T a, T b, T c) { return T(__builtin_fmaf(a, b, c)); } \
inline bool __hgt(T a, T b) { return a > b; } \
inline bool __hlt(T a, T b) { return a < b; } \
inline bool __hge(T a, T b) { return a >= b; } \
inline bool __hle(T a, T b) { return a <= b; } \
inline bool __heq(T a, T b) { return a == b; } \
inline bool __hne(T a, T b) { return a != b; } \
inline bool __hisnan(T a) { return (float)a != (float)a; } \
inline T __hmax(T a, T b) { return T(__builtin_fmaxf(a, b)); } \
inline T __hmin(T a, T b) { return T(__builtin_fminf(a, b)); } \
inline T __hmax_nan(T a, T b) { return __hisnan(a) ? a : __hisnan(b) ? b : __hmax(a, b); } \
inline T __hmin_nan(T a, T b) { return __hisnan(a) ? a : __hisnan(b) ? b : __hmin(a, b); } \
inline T hexp(T a) { return T(expf(a)); } \
inline T hexp2(T a) { return T(exp2f(a)); } \
inline T hexp10(T a) { return T(powf(10.f, a)); } \
inline T hlog(T a) { return T(logf(a)); } \
inline T hlog2(T a) { return T(log2f(a)); } \
inline T hlog10(T a) { return T(log10f(a)); } \
inline T hsqrt(T a) { return T(sqrtf(a)); } \
inline T hrsqrt(T a) { return T(1.f / sqrtf(a)); } \
inline T hrcp(T a) { return T(1.f / (float)a); } \
inline T hsin(T a) { return T(sinf(a)); } \
inline T hcos(T a) { return T(cosf(a)); } \
inline T htanh(T a) { return T(tanhf(a)); } \
inline T hfloor(T a) { return T(floorf(a)); } \
inline T hceil(T a) { return T(ceilf(a)); } \
inline T htrunc(T a) { return T(truncf(a)); } \
inline T hrint(T a) { return T(nearbyintf(a)); } \
struct __attribute__((aligned(4))) T2 { \
  T x, y; \
  T2() = default; T2(T a, T b) : x(a), y(b) {} \
}; \
inline T2 operator+(T2 a, T2 b) { return T2(a.x + b.x, a.y + b.y); } \
inline T2 operator-(T2 a, T2 b) { return T2(a.x - b.x, a.y - b.y); } \
inline T2 operator*(T2 a, T2 b) { return T2(a.x * b.x, a.y * b.y); } \
inline T2 operator/(T2 a, T2 b) { return T2(a.x / b.x, a.y / b.y); } \
inline T2 __hadd2(T2 a, T2 b) { return a + b; } \
inline T2 __hsub2(T2 a, T2 b) { return a - b; } \
inline T2 __hmul2(T2 a, T2 b) { return a * b; } \
inline T2 __hfma2(T2 a, T2 b, T2 c) { return T2(__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)); } \
inline T2 __hmax2(T2 a, T2 b) { return T2(__hmax(a.x, b.x), __hmax(a.y, b.y)); } \
inline T2 __hmin2(T2 a, T2 b) { return T2(__hmin(a.x, b.x), __hmin(a.y, b.y)); } \
inline T2 __hneg2(T2 a) { return T2(-a.x, -a.y); } \
inline T2 h2exp2(T2 a) { return T2(hexp2(a.x), hexp2(a.y)); } \
inline T2 h2exp(T2 a) { return T2(hexp(a.x), hexp(a.y)); } \
inline T __low2##FROM(T2 a) { return a.x; }

TSIM_HALF(__half, __half2, f16_to_f, f_to_f16)
TSIM_HALF(__nv_bfloat16, __nv_bfloat162, bf16_to_f, f_to_bf16)
typedef __half half; typedef __half2 half2;
typedef __nv_bfloat16 nv_bfloat16; typedef __nv_bfloat162 nv_bfloat162;

inline float __half2float(half a) { return a; }
inline half __float2half(float a) { return half(a); }
inline half __float2half_rn(float a) { return half(a); }
inline half __double2half(double a) { return half((float)a); }
inline unsigned short __half_as_ushort(half a) { return a.__x; }
inline short __half_as_short(half a) { return (short)a.__x; }
inline half __ushort_as_half(unsigned short a) { return half::bits(a); }
inline half __short_as_half(short a) { return half::bits((unsigned short)a); }
inline float __bfloat162float(nv_bfloat16 a) { return a; }
inline nv_bfloat16 __float2bfloat16(float a) { return nv_bfloat16(a); }
inline nv_bfloat16 __float2bfloat16_rn(float a) { return nv_bfloat16(a); }
inline nv_bfloat16 __float2bfloat16_rz(float a) { return nv_bfloat16::bits(tsim::f_to_bf16_rz(a)); }
inline nv_bfloat16 __double2bfloat16(double a) { return nv_bfloat16((float)a); }
inline unsigned short __bfloat16_as_ushort(nv_bfloat16 a) { return a.__x; }
inline nv_bfloat16 __ushort_as_bfloat16(unsigned short a) { return nv_bfloat16::bits(a); }
inline half2 __halves2half2(half a, half b) { return half2(a, b); }
inline half2 make_half2(half a, half b) { return half2(a, b); }
inline nv_bfloat162 __halves2bfloat162(nv_bfloat16 a, nv_bfloat16 b) { return nv_bfloat162(a, b); }
inline half2 __half2half2(half a) { return half2(a, a); }
inline nv_bfloat162 __bfloat162bfloat162(nv_bfloat16 a) { return nv_bfloat162(a, a); }
inline half2 __floats2half2_rn(float a, float b) { return half2(half(a), half(b)); }
inline nv_bfloat162 __floats2bfloat162_rn(float a, float b) { return nv_bfloat162(nv_bfloat16(a), nv_bfloat16(b)); }
inline half2 __float22half2_rn(float2 a);
inline float2 __half22float2(half2 a);
inline nv_bfloat162 __float22bfloat162_rn(float2 a);
inline float2 __bfloat1622float2(nv_bfloat162 a);
inline float __low2float(half2 a) { return a.x; }
inline float __high2float(half2 a) { return a.y; }
inline float __low2float(nv_bfloat162 a) { return a.x; }
inline float __high2float(nv_bfloat162 a) { return a.y; }

typedef unsigned char __nv_fp8_storage_t; typedef unsigned short __nv_fp8x2_storage_t; typedef unsigned int __nv_fp8x4_storage_t;
#define TSIM_FP8(T, T2, T4, TO, FROM) \
struct T { \
  unsigned char __x; \
  T() = default; \
  explicit T(float f) : __x(tsim::FROM(f)) {} \
  explicit T(double f) : __x(tsim::FROM((float)f)) {} \
  explicit T(half f) : __x(tsim::FROM((float)f)) {} \
  explicit T(nv_bfloat16 f) : __x(tsim::FROM((float)f)) {} \
  explicit T(int f) : __x(tsim::FROM((float)f)) {} \
  explicit T(unsigned f) : __x(tsim::FROM((float)f)) {} \
  operator float() const { return tsim::TO(__x); } \
  explicit operator half() const { return half(tsim::TO(__x)); } \
  explicit operator nv_bfloat16() const { return nv_bfloat16(tsim::TO(__x)); } \
}; \
struct __attribute__((aligned(2))) T2 { \
  unsigned short __x; \
  T2() = default; \
  T2(float a, float b) : __x((unsigned short)(tsim::FROM(a) | tsim::FROM(b) << 8)) {} \
  explicit T2(half2 f) : T2((float)f.x, (float)f.y) {} \
  explicit T2(nv_bfloat162 f) : T2((float)f.x, (float)f.y) {} \
  explicit T2(float2 f); \
  explicit operator float2() const; \
  explicit operator half2() const { return half2(half(tsim::TO(__x & 255)), half(tsim::TO(__x >> 8))); } \
}; \
struct __attribute__((aligned(4))) T4 { \
  unsigned int __x; \
  T4() = default; \
  T4(float a, float b, float c, float d) : __x(tsim::FROM(a) | tsim::FROM(b) << 8 | tsim::FROM(c) << 16 | (unsigned)tsim::FROM(d) << 24) {} \
  explicit T4(half2 a, half2 b) : T4((float)a.x, (float)a.y, (float)b.x, (float)b.y) {} \
  explicit T4(nv_bfloat162 a, nv_bfloat162 b) : T4((float)a.x, (float)a.y, (float)b.x, (float)b.y) {} \
  explicit T4(float4 f); \
  explicit operator float4() const; \
};
TSIM_FP8(__nv_fp8_e4m3, __nv_fp8x2_e4m3, __nv_fp8x4_e4m3, e4m3_to_f, f_to_e4m3)
TSIM_FP8(__nv_fp8_e5m2, __nv_fp8x2_e5m2, __nv_fp8x4_e5m2, e5m2_to_f, f_to_e5m2)
namespace tsim {  // e8m0: a power of two
static inline float e8m0_to_f(u8 b) { return b == 255 ? f_from(0x7FFFFFFF) : b ? f_from((u32)b << 23) : f_from(0x400000); }
static inline u8 f_to_e8m0(float f) {
  u32 u = f_bits(f) & 0x7FFFFFFF;
  if (u > 0x7F800000) return 255;
  u32 e = (u + 0x400000) >> 23;   // round to the nearest exponent
  return (u8)(e > 254 ? 254 : e);
}
}  // namespace tsim
TSIM_FP8(__nv_fp8_e8m0, __nv_fp8x2_e8m0, __nv_fp8x4_e8m0, e8m0_to_f, f_to_e8m0)
