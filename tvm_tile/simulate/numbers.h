// Bit-exact conversions between float and the narrow formats; shared by kernels and the runtime.
#pragma once
#include <stdint.h>

namespace tsim {
static inline uint32_t f_bits(float f) { uint32_t u; __builtin_memcpy(&u, &f, 4); return u; }
static inline float f_from(uint32_t u) { float f; __builtin_memcpy(&f, &u, 4); return f; }
static inline float bf16_to_f(uint16_t b) { return f_from((uint32_t)b << 16); }
static inline uint16_t f_to_bf16(float f) {
  uint32_t u = f_bits(f);
  if ((u & 0x7FFFFFFF) > 0x7F800000) return 0x7FFF;
  return (uint16_t)((u + 0x7FFF + ((u >> 16) & 1)) >> 16);
}
static inline uint16_t f_to_bf16_rz(float f) {
  uint32_t u = f_bits(f);
  return (u & 0x7FFFFFFF) > 0x7F800000 ? 0x7FFF : (uint16_t)(u >> 16);
}
// A small float format of E exponent and Mb mantissa bits, bias B, from its magnitude bits; no special values.
static inline float small_to_f(uint32_t mag, int mb, int bias) {
  uint32_t e = mag >> mb, m = mag & ((1u << mb) - 1);
  if (!e) return (float)m * f_from((uint32_t)(127 + 1 - bias - mb) << 23);
  return f_from(((e + 127 - bias) << 23) | (m << (23 - mb)));
}
// Round |f| (finite) to nearest even in the format; the result may exceed the largest finite value.
static inline uint32_t f_to_small(uint32_t u, int mb, int bias) {
  int e = (int)(u >> 23) - 127;
  uint32_t m = (u & 0x7FFFFF) | ((u >> 23) ? 0x800000 : 0);
  if (!(u >> 23)) e = -126;
  int shift = 23 - mb, ne = e + bias;
  if (ne < 1) { shift += 1 - ne; ne = 0; }
  if (shift > 25) return 0;
  uint32_t half = 1u << (shift - 1), rest = m & ((1u << shift) - 1), r = m >> shift;
  if (rest > half || (rest == half && (r & 1))) r++;
  return ne == 0 ? r : r + ((uint32_t)(ne - 1) << mb);  // the hidden bit adds one to the exponent
}
static inline float f16_to_f(uint16_t h) {
  uint32_t s = (uint32_t)(h & 0x8000) << 16, mag = h & 0x7FFF;
  if (mag >= 0x7C00) return f_from(s | 0x7F800000 | ((mag & 0x3FF) << 13));
  return f_from(s | f_bits(small_to_f(mag, 10, 15)));
}
static inline uint16_t f_to_f16(float f) {
  uint32_t u = f_bits(f), s = (u >> 16) & 0x8000; u &= 0x7FFFFFFF;
  if (u > 0x7F800000) return 0x7FFF;
  if (u == 0x7F800000) return (uint16_t)(s | 0x7C00);
  uint32_t r = f_to_small(u, 10, 15);
  return (uint16_t)(s | (r > 0x7C00 ? 0x7C00 : r));
}
static inline float e4m3_to_f(uint8_t b) {
  uint32_t s = (uint32_t)(b & 0x80) << 24, mag = b & 0x7F;
  if (mag == 0x7F) return f_from(0x7FFFFFFF);
  return f_from(s | f_bits(small_to_f(mag, 3, 7)));
}
static inline uint8_t f_to_e4m3(float f) {  // saturating, as every CUDA conversion to e4m3
  uint32_t u = f_bits(f), s = (u >> 24) & 0x80; u &= 0x7FFFFFFF;
  if (u > 0x7F800000) return 0x7F;
  if (u >= 0x43E80000) return (uint8_t)(s | 0x7E);
  uint32_t r = f_to_small(u, 3, 7);
  return (uint8_t)(s | (r > 0x7E ? 0x7E : r));
}
static inline float e5m2_to_f(uint8_t b) { return f16_to_f((uint16_t)(b << 8)); }
static inline uint8_t f_to_e5m2(float f) {
  uint32_t u = f_bits(f), s = (u >> 24) & 0x80; u &= 0x7FFFFFFF;
  if (u > 0x7F800000) return 0x7F;
  if (u == 0x7F800000) return (uint8_t)(s | 0x7B);
  uint32_t r = f_to_small(u, 2, 15);
  return (uint8_t)(s | (r > 0x7B ? 0x7B : r));
}
static inline uint32_t f_to_tf32(float f) {  // round to nearest, ties away
  uint32_t u = f_bits(f);
  if ((u & 0x7FFFFFFF) >= 0x7F800000) return u;
  return (u + 0x1000) & 0xFFFFE000;
}
}  // namespace tsim
