// Register moves, conversions and arithmetic of PTX, as templates that translated inline assembly uses.
#pragma once

namespace tsim {
template <class T, class S> inline T as(const S& s) {  // the low bits of a register, read as T
  T t; unsigned char b[sizeof(T) > sizeof(S) ? sizeof(T) : sizeof(S)] = {0};
  __builtin_memcpy(b, &s, sizeof(S)); __builtin_memcpy(&t, b, sizeof(T)); return t;
}
template <class D, class V> inline void set(D& d, const V& v) {
  if constexpr (std::is_integral<D>::value && std::is_integral<V>::value) d = (D)v;
  else if constexpr (std::is_same<D, V>::value) d = v;
  else d = as<D>(v);
}
template <class D, class V> inline void set_pred(D& d, V v) { d = v ? 1 : 0; }

template <class T> inline T p_min(T a, T b) { return b < a ? b : a; }
template <class T> inline T p_max(T a, T b) { return a < b ? b : a; }
inline float p_min(float a, float b) { return fminf(a, b); }
inline float p_max(float a, float b) { return fmaxf(a, b); }
inline half p_min(half a, half b) { return __hmin(a, b); }
inline half p_max(half a, half b) { return __hmax(a, b); }
inline nv_bfloat16 p_min(nv_bfloat16 a, nv_bfloat16 b) { return __hmin(a, b); }
inline nv_bfloat16 p_max(nv_bfloat16 a, nv_bfloat16 b) { return __hmax(a, b); }
inline half2 p_min(half2 a, half2 b) { return __hmin2(a, b); }
inline half2 p_max(half2 a, half2 b) { return __hmax2(a, b); }
inline nv_bfloat162 p_min(nv_bfloat162 a, nv_bfloat162 b) { return __hmin2(a, b); }
inline nv_bfloat162 p_max(nv_bfloat162 a, nv_bfloat162 b) { return __hmax2(a, b); }
template <class T> inline T p_min_nan(T a, T b) { return a != a ? a : b != b ? b : p_min(a, b); }
template <class T> inline T p_max_nan(T a, T b) { return a != a ? a : b != b ? b : p_max(a, b); }
template <class T> inline T p_add(T a, T b) { return (T)(a + b); }
template <class T> inline T p_sub(T a, T b) { return (T)(a - b); }
template <class T> inline T p_mul(T a, T b) { return (T)(a * b); }
template <class T> inline T p_div(T a, T b) { return (T)(a / b); }
inline float2 p_add(float2 a, float2 b) { return {a.x + b.x, a.y + b.y}; }
inline float2 p_sub(float2 a, float2 b) { return {a.x - b.x, a.y - b.y}; }
inline float2 p_mul(float2 a, float2 b) { return {a.x * b.x, a.y * b.y}; }
inline float p_fma(float a, float b, float c) { return fmaf(a, b, c); }
inline double p_fma(double a, double b, double c) { return fma(a, b, c); }
inline half p_fma(half a, half b, half c) { return __hfma(a, b, c); }
inline nv_bfloat16 p_fma(nv_bfloat16 a, nv_bfloat16 b, nv_bfloat16 c) { return __hfma(a, b, c); }
inline half2 p_fma(half2 a, half2 b, half2 c) { return __hfma2(a, b, c); }
inline nv_bfloat162 p_fma(nv_bfloat162 a, nv_bfloat162 b, nv_bfloat162 c) { return __hfma2(a, b, c); }
inline float2 p_fma(float2 a, float2 b, float2 c) { return {fmaf(a.x, b.x, c.x), fmaf(a.y, b.y, c.y)}; }
template <class T> inline T p_neg(T a) { return (T)(-a); }
inline half2 p_neg(half2 a) { return half2(-a.x, -a.y); }
inline nv_bfloat162 p_neg(nv_bfloat162 a) { return nv_bfloat162(-a.x, -a.y); }
template <class T> inline T p_abs(T a) { return a < T(0) ? (T)(-a) : a; }
inline float p_abs(float a) { return fabsf(a); }
inline half p_abs(half a) { return __habs(a); }
inline nv_bfloat16 p_abs(nv_bfloat16 a) { return __habs(a); }
inline half2 p_abs(half2 a) { return half2(__habs(a.x), __habs(a.y)); }
inline nv_bfloat162 p_abs(nv_bfloat162 a) { return nv_bfloat162(__habs(a.x), __habs(a.y)); }
template <class T> inline T p_relu(T a) { return a < T(0.f) ? T(0.f) : a; }
template <class T> inline T p_shl(T a, u32 n) { return n >= 8 * sizeof(T) ? T(0) : (T)(a << n); }
template <class T> inline T p_shr(T a, u32 n) { if (n >= 8 * sizeof(T)) n = 8 * sizeof(T) - 1, a = a < 0 ? T(-1) : T(0); return (T)(a >> n); }
// Elementary functions of one register, also on halves and pairs of them.
template <class F> inline float p_map(float a, F f) { return f(a); }
template <class F> inline double p_map(double a, F f) { return (double)f((float)a); }
template <class F> inline half p_map(half a, F f) { return half(f((float)a)); }
template <class F> inline nv_bfloat16 p_map(nv_bfloat16 a, F f) { return nv_bfloat16(f((float)a)); }
template <class F> inline half2 p_map(half2 a, F f) { return half2(p_map(a.x, f), p_map(a.y, f)); }
template <class F> inline nv_bfloat162 p_map(nv_bfloat162 a, F f) { return nv_bfloat162(p_map(a.x, f), p_map(a.y, f)); }
inline float p_ftz(float a) { return fabsf(a) < 1.17549435e-38f ? copysignf(0.f, a) : a; }
inline float f_ex2(float a) { return exp2f(a); }
inline float f_lg2(float a) { return log2f(a); }
inline float f_rcp(float a) { return 1.f / a; }
inline float f_rsqrt(float a) { return 1.f / sqrtf(a); }
inline float f_sqrt(float a) { return sqrtf(a); }
inline float f_sin(float a) { return sinf(a); }
inline float f_cos(float a) { return cosf(a); }
inline float f_tanh(float a) { return tanhf(a); }
// A float rounded to an integer: mode 'n' nearest even, 'z' to zero, 'm' down, 'p' up.
inline double p_round(double a, char mode) { return mode == 'z' ? trunc(a) : mode == 'm' ? floor(a) : mode == 'p' ? ceil(a) : nearbyint(a); }
template <class D> inline D f_to_int(double a, char mode) {
  if (a != a) return 0;
  a = p_round(a, mode);
  const double lo = std::is_signed<D>::value ? -ldexp(1., 8 * sizeof(D) - 1) : 0., hi = ldexp(1., 8 * sizeof(D) - std::is_signed<D>::value);
  if (a <= lo) return std::is_signed<D>::value ? (D)((u64)1 << (8 * sizeof(D) - 1)) : (D)0;
  if (a >= hi) return (D)(std::is_signed<D>::value ? ((u64)1 << (8 * sizeof(D) - 1)) - 1 : ~(u64)0);
  return (D)a;
}
template <class D, class S> inline D int_to_int_sat(S s) {
  const __int128 v = s, lo = std::is_signed<D>::value ? -((__int128)1 << (8 * sizeof(D) - 1)) : 0, hi = ((__int128)1 << (8 * sizeof(D) - std::is_signed<D>::value)) - 1;
  return (D)(v < lo ? lo : v > hi ? hi : v);
}
inline half f_to_half(float f, bool finite) { half h(f); if (finite && (h.__x & 0x7FFF) == 0x7C00) h.__x--; return h; }
inline nv_bfloat16 f_to_bf(float f, bool rz, bool finite) {
  nv_bfloat16 h = rz ? __float2bfloat16_rz(f) : nv_bfloat16(f);
  if (finite && (h.__x & 0x7FFF) == 0x7F80) h.__x--;
  return h;
}
inline half f_to_half_rz(float f) {
  half h(f);
  if (fabsf((float)h) > fabsf(f)) h.__x--;
  return h;
}
inline u64 ld_sync(const void* p, u32 bytes, int type) { u64 zero = 0; nanosleep_(0); return atomic_generic((void*)p, bytes, AT_OR, type, &zero, nullptr, nullptr); }
}  // namespace tsim
