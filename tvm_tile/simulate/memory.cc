// Loads, stores and atomics that PTX names, printf, traps, and the functions Python calls.
#include <cmath>
#include <cstdarg>
#include <ctime>
#include <unistd.h>
#include "numbers.h"
#include "state.h"

namespace tsim {

// A load may carry elements that nobody uses; those that were never written become undefined registers, reported at use.
u32 load_shared(u32 addr, void* dst, u32 n, u32 elem) {
  SITE();
  u32 off, undefined = 0; CTA* c = shared_window(addr, n, n, "shared-memory read", &off);
  record_access(C_SHARED_LOADS, addr, n);
  cur->dirty = true;
  for (u32 i = 0; i < n; i += elem) {
    bool written = !M.opt.checks;
    if (!written) { written = true; for (u32 b = 0; b < elem; b++) written &= (c->sh.flags[off + i + b] & (F_INIT | F_PENDING)) != 0; }
    if (written) shared_read(c, off + i, elem, thread_access(), "read"); else undefined |= 1u << (i / elem);
  }
  memcpy(dst, c->sh.mem + off, n); stack_write_mark(cur, dst, n);
  return undefined;
}
void store_shared(u32 addr, const void* src, u32 n, u32) {
  SITE();
  u32 off; CTA* c = shared_window(addr, n, n, "shared-memory write", &off);
  record_access(C_SHARED_STORES, addr, n);
  cur->dirty = true;
  shared_write(c, off, n, thread_access(), "write");
  memcpy(c->sh.mem + off, src, n);
}
void prefetch_global(const void* p) { SITE(); if (!find_segment(p)) global_access(p, 1, false, thread_access(), "prefetch"); }

// ---------------------------------------------------------------- atomics
template <class T> static T apply(int op, T a, T b, T c) {
  switch (op) {
    case AT_ADD: return (T)(a + b);
    case AT_MIN: return b < a ? b : a;
    case AT_MAX: return b > a ? b : a;
    case AT_EXCH: return b;
    case AT_CAS: return a == b ? c : a;
    default: fault("unsupported", "this atomic operation on this type", {{"here", cur->cur_pc}});
  }
}
template <class T> static T apply_bits(int op, T a, T b, T c) {
  switch (op) {
    case AT_AND: return a & b;
    case AT_OR: return a | b;
    case AT_XOR: return a ^ b;
    case AT_INC: return a >= b ? 0 : a + 1;
    case AT_DEC: return a == 0 || a > b ? b : a - 1;
    default: return apply<T>(op, a, b, c);
  }
}
template <class T> static T get(const void* p) { T v; memcpy(&v, p, sizeof v); return v; }
template <class T> static void put(void* p, T v) { memcpy(p, &v, sizeof v); }

static void modify(u8* m, u32 n, int op, int type, const void* v, const void* v2) {
  const void* w = v2 ? v2 : v;
  auto half = [&](u32 i, float (*to)(u16), u16 (*from)(float)) {
    u16 a = get<u16>(m + i), b = get<u16>((const u8*)v + i);
    if (op == AT_CAS) put<u16>(m + i, a == b ? get<u16>((const u8*)w + i) : a);
    else if (op == AT_EXCH) put<u16>(m + i, b);
    else put<u16>(m + i, from(apply<float>(op, to(a), to(b), 0)));
  };
  switch (type) {
    case TY_U32: put<u32>(m, apply_bits<u32>(op, get<u32>(m), get<u32>(v), get<u32>(w))); break;
    case TY_S32: put<i32>(m, apply_bits<i32>(op, get<i32>(m), get<i32>(v), get<i32>(w))); break;
    case TY_U64: put<u64>(m, apply_bits<u64>(op, get<u64>(m), get<u64>(v), get<u64>(w))); break;
    case TY_S64: put<i64>(m, apply_bits<i64>(op, get<i64>(m), get<i64>(v), get<i64>(w))); break;
    case TY_F32: put<float>(m, apply<float>(op, get<float>(m), get<float>(v), get<float>(w))); break;
    case TY_F64: put<double>(m, apply<double>(op, get<double>(m), get<double>(v), get<double>(w))); break;
    case TY_B16: put<u16>(m, apply_bits<u16>(op, get<u16>(m), get<u16>(v), get<u16>(w))); break;
    case TY_F16: half(0, f16_to_f, f_to_f16); break;
    case TY_BF16: half(0, bf16_to_f, f_to_bf16); break;
    case TY_F16X2: for (u32 i = 0; i < n; i += 2) half(i, f16_to_f, f_to_f16); break;
    case TY_BF16X2: for (u32 i = 0; i < n; i += 2) half(i, bf16_to_f, f_to_bf16); break;
    default: fault("unsupported", "this type in an atomic", {{"here", cur->cur_pc}});
  }
}
u64 atomic_shared(u32 addr, u32 n, int op, int type, const void* v, const void* v2, void* old) {
  SITE();
  count("atomic on shared memory");
  u32 off; CTA* c = shared_window(addr, n, n, "atomic", &off);
  cur->dirty = true;
  shared_read(c, off, n, thread_access(true), "atomic");
  shared_write(c, off, n, thread_access(true), "atomic");
  u64 r = 0; memcpy(&r, c->sh.mem + off, n < 8 ? n : 8);
  if (old) memcpy(old, c->sh.mem + off, n);
  modify(c->sh.mem + off, n, op, type, v, v2);
  return r;
}
u8* arena();
u64 atomic_generic(void* p, u32 n, int op, int type, const void* v, const void* v2, void* old) {
  const u8* a = arena();
  if ((u8*)p >= a && (u8*)p < a + (size_t)SMEM_STRIDE * 16) return atomic_shared((u32)((u8*)p - a), n, op, type, v, v2, old);
  SITE();
  count("atomic on global memory");
  if ((uintptr_t)p % n) fault("misaligned", format("atomic of %u bytes by %s on an address that is not a multiple of %u", n, thread_name(cur).c_str(), n), {{"here", cur->cur_pc}});
  cur->dirty = true;
  global_access(p, n, false, thread_access(true), "atomic");
  global_access(p, n, true, thread_access(true), "atomic");
  global_atomic_sync(p);
  u64 r = 0; memcpy(&r, p, n < 8 ? n : 8);
  if (old) memcpy(old, p, n);
  modify((u8*)p, n, op, type, v, v2);
  return r;
}

// ---------------------------------------------------------------- rest of the device
void nanosleep_(u32) { cur->spurious = true; block("nanosleep"); cur->spurious = false; }
u64 clock_() { return M.counters.v[C_SWITCHES] * 32 + M.progress; }
void trap(const char* what) { SITE(); fault("trap", format("%s executed by %s", what, thread_name(cur).c_str()), {{"here", cur->cur_pc}}); }
void assert_fail(const char* expr, const char*, int, const char*) {
  SITE();
  fault("trap", format("device assertion `%s` failed for %s", expr, thread_name(cur).c_str()), {{"here", cur->cur_pc}});
}
int printf_(const char* f, ...) {
  SITE();
  char b[4096]; va_list ap; va_start(ap, f); int n = vsnprintf(b, sizeof b, f, ap); va_end(ap);
  M.output += b;
  count("printf");
  return n;
}
void unsupported(const char* what) { SITE(); fault("unsupported", std::string("the simulator does not implement ") + what, {{"here", cur->cur_pc}}); }

// ---------------------------------------------------------------- tensor maps, as the driver's cuTensorMapEncodeTiled
static const char* dtype_names[] = {"uint8", "uint16", "uint32", "int32", "uint64", "int64", "float16", "float32", "float64", "bfloat16"};
static int encode_error(const std::string& t) { M.failed = true; M.fault = "launch\ncuTensorMapEncodeTiled: " + t + "\n"; return 0; }

// (map, dtype, rank, ptr, dims.., byte strides[1:].., box.., element strides.., interleave, swizzle, l2 promotion, oob fill)
static int encode(const FFIAny* a, int n, const std::string& dtype) {
  if (M.failed) return 0;
  TensorMap* t = (TensorMap*)a[0].u.p;
  int rank = (int)a[2].u.i;
  if (rank < 1 || rank > 5) return encode_error(format("rank %d", rank));
  if (n != 4 + rank * 4 - 1 + 4) return encode_error(format("%d arguments for rank %d", n, rank));
  memset((void*)t, 0, 128);
  int kind = -1; u32 bytes = 0;
  for (int i = 0; i < 10; i++) if (dtype == dtype_names[i]) { kind = i; static const u8 b[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2}; bytes = b[i]; }
  if (dtype == "int8" || dtype.find("float8") == 0) { kind = 0; bytes = 1; }
  if (kind < 0) return encode_error("element type " + dtype);
  t->base = (u8*)a[3].u.p; t->rank = (u8)rank; t->bytes = (u8)bytes; t->dtype = (u8)kind; t->magic = 0x7E4504A9;
  const FFIAny* p = a + 4;
  if ((uintptr_t)t % 64) return encode_error("the map is not 64-byte aligned");
  if ((uintptr_t)t->base % 16) return encode_error("the global address is not 16-byte aligned");
  for (int i = 0; i < rank; i++, p++) {
    if (p->u.i < 1 || p->u.i > (1ll << 32)) return encode_error(format("dimension %d is %lld", i, (long long)p->u.i));
    t->dim[i] = (u32)(p->u.i > 0xFFFFFFFFll ? 0xFFFFFFFFll : p->u.i);
  }
  t->stride[0] = bytes;
  for (int i = 1; i < rank; i++, p++) {
    if (p->u.i % 16 || p->u.i < 0 || p->u.i >= (1ll << 40)) return encode_error(format("the byte stride of dimension %d is %lld; it is a multiple of 16 below 2^40", i, (long long)p->u.i));
    t->stride[i] = (u64)p->u.i;
  }
  for (int i = 0; i < rank; i++, p++) {
    if (p->u.i < 1 || p->u.i > 256) return encode_error(format("box dimension %d is %lld; it is 1 to 256", i, (long long)p->u.i));
    t->box[i] = (u16)p->u.i;
  }
  for (int i = 0; i < rank; i++, p++) {
    if (p->u.i < 1 || p->u.i > 8) return encode_error(format("element stride %d is %lld; it is 1 to 8", i, (long long)p->u.i));
    t->estride[i] = (u8)p->u.i;
  }
  t->interleave = (u8)p[0].u.i; t->swizzle = (u8)p[1].u.i; t->oob = (u8)p[3].u.i;
  if (t->interleave) return encode_error("interleaved layouts are not simulated");
  if (t->swizzle > 3) return encode_error(format("swizzle mode %d is not simulated", t->swizzle));
  u32 inner = t->box[0] * bytes, span = t->swizzle == 3 ? 128 : t->swizzle == 2 ? 64 : t->swizzle == 1 ? 32 : 0;
  if (inner % 16) return encode_error(format("the box's inner dimension has %u bytes; it is a multiple of 16", inner));
  if (span && inner > span) return encode_error(format("the box's inner dimension has %u bytes, more than the swizzle's %u", inner, span));
  if (span && inner != span) return encode_error(format("a box of %u inner bytes under a %u-byte swizzle is not simulated", inner, span));
  if (t->oob && (kind < 6 )) return encode_error("NaN fill of an integer type");
  return 0;
}
}  // namespace tsim

using namespace tsim;
extern "C" {
// The host function calls these by name, as it calls TVM's own.
int tsim_ffi_encode(void*, const FFIAny* args, int32_t n, FFIAny* result) __asm__("tsim_ffi_encode");
int tsim_ffi_encode(void*, const FFIAny* args, int32_t n, FFIAny* result) {
  result->type_index = 0; result->pad = 0; result->u.i = 0;
  std::string dtype;
  const FFIAny& d = args[1];
  if (d.type_index == 8) dtype = (const char*)d.u.p;                 // kTVMFFIRawStr
  else if (d.type_index == 11) { char b[8] = {0}; memcpy(b, &d.u, 7); dtype = b; }   // kTVMFFISmallStr
  else if (d.type_index == 65) { struct S { char head[24]; const char* data; size_t size; }; const S* s = (const S*)d.u.p; dtype.assign(s->data, s->size); }
  else return encode_error(format("an element type of FFI type %d", d.type_index));
  return encode(args, n, dtype);
}
void tsim_begin(u64 seed, int checks, int strict_warp, u32 max_shared, u32 max_threads, double timeout) {
  M.opt.seed = seed; M.opt.checks = checks != 0; M.opt.strict_warp = strict_warp != 0; M.opt.max_shared = max_shared; M.opt.max_threads = max_threads; M.opt.timeout = timeout;
  M.failed = false; M.fault.clear(); M.output.clear(); M.kinds.clear();
  memset(&M.counters, 0, sizeof M.counters);
}
void* tsim_reserve(u64 bytes);
void tsim_add_segment(void* p, u64 n, u32 granule, int undefined, const char* name) {
  Segment* s = new Segment(); s->lo = (u8*)p; s->hi = s->lo + n; s->granule = granule ? granule : 1; s->undefined = undefined != 0; s->name = name;
  M.segments.push_back(s);
}
const char* tsim_fault() { return M.failed ? M.fault.c_str() : nullptr; }
const char* tsim_output() { return M.output.c_str(); }
const u64* tsim_counters() { return M.counters.v; }
const char* tsim_kinds() {
  static std::string s; s.clear();
  for (auto& k : M.kinds) s += k.first + "\t" + std::to_string(k.second) + "\n";
  return s.c_str();
}
}
