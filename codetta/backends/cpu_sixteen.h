// Sixteen numbers in registers: the vector V where a register is that wide, else parts of it. GCC keeps a vector that is wider than a
// register in memory, which the loops that everything waits for cannot afford; epilogues can.
#pragma once
#include "cpu_runtime.h"

#ifdef CODETTA_AVX512
typedef V Sixteen;
template <class E> INLINE Sixteen sixteen_at(const E* p, i64 n) { return get<V>(p, lanes(n)); }
INLINE void keep_sixteen(float* p, Sixteen x) { put(p, x, 16); }
INLINE Sixteen sixteen_times(float x) { return all<V>(x); }
INLINE Sixteen plus(Sixteen x, Sixteen y) { return x + y; }
INLINE Sixteen plus_product(Sixteen sum, Sixteen x, Sixteen y) { return _mm512_fmadd_ps(x, y, sum); }
#else
#ifdef __AVX__
enum { PART = 8 };
#else
enum { PART = 4 };
#endif
enum { PARTS = 16 / PART };
typedef float Part __attribute__((vector_size(4 * PART)));
typedef uint32_t PartBits __attribute__((vector_size(4 * PART)));
typedef uint16_t PartHalves __attribute__((vector_size(2 * PART)));
struct Sixteen { Part part[PARTS]; };

INLINE Part part_at(const float* p) { Part x; memcpy(&x, p, sizeof x); return x; }
INLINE Part part_at(const bf16* p) {
  PartHalves x;
  memcpy(&x, p, sizeof x);
  return bits<Part>(__builtin_convertvector(x, PartBits) << 16);
}
INLINE Part part_at(const f16* p) {
#if defined(__F16C__) && defined(__AVX__)
  return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
  const V x = get<V>(p, PART);
  return part_at((const float*)&x);
#endif
}
template <class E> INLINE Sixteen sixteen_at(const E* p, i64 n) {
  E those[16];
  if (n < 16) {
    memset(those, 0, sizeof those);
    memcpy(those, p, n * sizeof(E));
    p = those;
  }
  Sixteen x;
#pragma GCC unroll 4
  for (int i = 0; i < PARTS; i++) x.part[i] = part_at(p + i * PART);
  return x;
}
INLINE void keep_sixteen(float* p, const Sixteen& x) { memcpy(p, &x, sizeof x); }
INLINE Sixteen sixteen_times(float number) {
  Sixteen x;
#pragma GCC unroll 4
  for (int i = 0; i < PARTS; i++) x.part[i] = number - Part{};
  return x;
}
INLINE Sixteen plus(Sixteen x, const Sixteen& y) {
#pragma GCC unroll 4
  for (int i = 0; i < PARTS; i++) x.part[i] += y.part[i];
  return x;
}
INLINE Sixteen plus_product(Sixteen sum, const Sixteen& x, const Sixteen& y) {
#pragma GCC unroll 4
  for (int i = 0; i < PARTS; i++) sum.part[i] += x.part[i] * y.part[i];
  return sum;
}
INLINE float sum_of(const Sixteen& x) { V all_parts; memcpy(&all_parts, &x, sizeof x); return sum_of(all_parts); }
#endif
