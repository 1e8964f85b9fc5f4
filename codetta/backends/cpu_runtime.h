// What generated epilogues are written in: vectors of 16 lanes, their loads and stores, and functions of them.
//
// V is 16 floats, I 16 whole numbers, B 16 truth values (all bits set, or none). They are GCC vector extensions, so that one
// text serves every machine; AVX-512 gets instructions of its own where the compiler would not find them. Loads and stores
// of tensors take the number of lanes that exist: nothing outside a tensor is ever touched. NaN wins in maxima and minima,
// as in PyTorch.
#pragma once
#include <stdint.h>
#include <string.h>
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define CODETTA_AVX512 1
#endif
#if defined(__AVX__)
#include <immintrin.h>
#endif

typedef int64_t i64;
typedef float V __attribute__((vector_size(64)));
typedef int32_t B __attribute__((vector_size(64)));
typedef uint32_t U __attribute__((vector_size(64)));
typedef int64_t I __attribute__((vector_size(128)));
typedef uint64_t W __attribute__((vector_size(128)));
typedef float Eight __attribute__((vector_size(32)));  // what a register holds where V is two of them

struct bf16 { uint16_t bits; };
struct f16 { uint16_t bits; };
struct fp8 { uint8_t bits; };  // e4m3, without infinities

#define INLINED inline __attribute__((always_inline))
#define INLINE static INLINED

// ---- the plan of a program: what the main loop must know about it ----------------------------------------------------

// A block of rows x cols of the product, as the main loop hands it to an epilogue.
struct Place {
  i64 row, rows;         // first row (counted through the batch) and how many
  i64 col, cols;         // of each strip
  i64 panel, panels;     // which panel of columns this is
  i64 row_tile;          // which tile of rows, within the batch entry
  i64 batch;
  bool first;            // the first block of its tile of rows
  const float* acc[16];  // the strips
  i64 ld;                // from row to row of a strip
  char* room;            // scratch memory of this thread
  const float* stats;    // finished reductions, one row of all rows each
};
// A strip's column j is column (j / run) * block + index * run + j % run of its product.
struct Strip { i64 product, index, run, block; };
struct Segment {
  i64 cols, panel;       // columns of a strip, and how many of them make a panel
  i64 count;
  const Strip* strips;
  i64 room;              // bytes of scratch memory
  void (*epilogue)(const Place&, const i64* args);
};
struct Plan {
  i64 count;
  const Segment* segments;
  i64 row_block;         // rows that an epilogue must see together; 0: any number
  i64 row_tile;          // rows of a partial of column reductions
  i64 stats;             // how many finished reductions there are
  void (*finish)(const i64* args, i64 m0, i64 m1, float* stats);
};
// A call's arguments: these, then those of each B, then what the program's epilogues read. Sizes and layouts that no epilogue
// looks at are among them, so that programs which differ in nothing else share a library. Transposed: k is not the dense side.
enum { ROWS, ROWS_PER_BATCH, BATCH, ROWS_PER_SAMPLE, THREADS, DEPTH, A_POINTER, A_STEP, A_TRANSPOSED, FIRST_B };
enum { B_POINTER, B_STEP, B_BATCH_STEP, B_TRANSPOSED, B_ARGUMENTS };

// ---- lanes -----------------------------------------------------------------------------------------------------------

INLINE int lanes(i64 left) { return left < 16 ? (int)left : 16; }
template <class X> struct Lane;
template <> struct Lane<V> { typedef float type; };
template <> struct Lane<Eight> { typedef float type; };
template <> struct Lane<B> { typedef int32_t type; };
template <> struct Lane<I> { typedef i64 type; };
template <class X> INLINE X all(typename Lane<X>::type x) { return x - X{}; }
INLINE B counted() { return B{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }
// A distance to compare with `counted()`: whatever lies outside of the lanes lies just outside.
INLINE B near(i64 distance) { return all<B>((int32_t)(distance < -1 ? -1 : distance > 16 ? 16 : distance)); }
INLINE I counted_from(i64 first) { return __builtin_convertvector(counted(), I) + first; }
template <class X, class Y> INLINE X bits(Y y) { static_assert(sizeof(X) == sizeof(Y), ""); X x; memcpy(&x, &y, sizeof x); return x; }
INLINE V where(B c, V x, V y) { return c ? x : y; }
INLINE V number(V x) { return x; }
INLINE V number(I x) { return __builtin_convertvector(x, V); }
INLINE V number(B x) { return where(x, all<V>(1.f), all<V>(0.f)); }
INLINE I whole(I x) { return x; }
INLINE I whole(V x) { return __builtin_convertvector(x, I); }
INLINE I whole(B x) { return -__builtin_convertvector(x, I); }
INLINE B truth(B x) { return x; }
INLINE B truth(V x) { return x != all<V>(0.f); }
INLINE B truth(I x) { return __builtin_convertvector(x != all<I>(0), B); }
INLINE B is_nan(V x) { return x != x; }

// ---- conversions: exact to fp32, rounded to nearest even from it -----------------------------------------------------

typedef uint16_t U16 __attribute__((vector_size(32)));
typedef uint8_t U8 __attribute__((vector_size(16)));
typedef int8_t S8 __attribute__((vector_size(16)));
typedef double D __attribute__((vector_size(128)));

INLINE V from_bf16(U u) { return bits<V>(u << 16); }
INLINE U to_bf16(V x) {
  const U u = bits<U>(x);
  return (U)(is_nan(x) ? (B)(U{} + 0x7fc0u) : (B)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16));
}
INLINE V from_f16(U u) {
  // Exponent and fraction move into place; a multiplication corrects the bias and makes subnormal numbers normal.
  const U magnitude = (u & 0x7fffu) << 13, sign = (u & 0x8000u) << 16;
  const V scaled = bits<V>(magnitude) * all<V>(0x1p112f);
  const U wide = (U)((B)(magnitude >= (U{} + 0x0f800000u)) ? (B)(magnitude | 0x7f800000u) : bits<B>(scaled));
  return bits<V>(wide | sign);
}
INLINE U to_f16(V x) {
  const U u = bits<U>(x), sign = (u >> 16) & 0x8000u, magnitude = u & 0x7fffffffu;
  // Below 2^-14 numbers are multiples of 2^-24: adding 0.5 leaves that multiple, rounded, in the low bits.
  const U small = bits<U>(bits<V>(magnitude) + all<V>(0.5f)) - 0x3f000000u;
  const U normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  B r = (B)(magnitude < (U{} + 0x38800000u)) ? (B)small : (B)normal;
  r = (B)(magnitude >= (U{} + 0x477ff000u)) ? B{} + 0x7c00 : r;
  r = (B)(magnitude > (U{} + 0x7f800000u)) ? B{} + 0x7e00 : r;
  return (U)r | sign;
}
INLINE V from_fp8(U u) {
  const U magnitude = u & 0x7fu;
  const V small = __builtin_convertvector((B)magnitude, V) * all<V>(0x1p-9f);
  const V normal = bits<V>((magnitude << 20) + (120u << 23));
  V x = where((B)(magnitude < (U{} + 8u)), small, normal);
  x = where((B)(magnitude == (U{} + 0x7fu)), all<V>(__builtin_nanf("")), x);
  return bits<V>(bits<U>(x) | ((u & 0x80u) << 24));
}
INLINE V saturated(V x, float limit) {
  x = where(x > all<V>(limit), all<V>(limit), x);
  return where(x < all<V>(-limit), all<V>(-limit), x);
}
INLINE U to_fp8(V x) {
  const V y = saturated(x, 448.f);
  const U u = bits<U>(y), magnitude = u & 0x7fffffffu;
  const U small = bits<U>(bits<V>(magnitude) + all<V>(0x1p14f)) - 0x46800000u;  // multiples of 2^-9
  const U normal = (magnitude - (120u << 23) + 0x7ffffu + ((magnitude >> 20) & 1u)) >> 20;
  B r = (B)(magnitude < (U{} + (121u << 23))) ? (B)small : (B)normal;
  r = is_nan(y) ? B{} + 0x7f : r;
  return (U)r | ((u >> 24) & 0x80u);
}

#ifdef CODETTA_AVX512
INLINE __mmask16 lane_mask(int n) { return (__mmask16)(0xffffu >> (16 - n)); }
INLINE V rounded(V x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE V floored(V x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }
INLINE V square_root(V x) { return _mm512_sqrt_ps(x); }
INLINE V fma_of(V x, V y, V z) { return _mm512_fmadd_ps(x, y, z); }
INLINE V magnitude(V x) { return _mm512_abs_ps(x); }
INLINE V scaled_by_power(V x, V n) { return _mm512_scalef_ps(x, n); }
// The processor's maximum returns its second argument where one is NaN: a number that is not NaN comes first.
INLINE V at_least(float low, V x) { return _mm512_max_ps(all<V>(low), x); }
INLINE V at_most(float high, V x) { return _mm512_min_ps(all<V>(high), x); }
INLINE V maximum(V x, V y) { return _mm512_mask_mov_ps(_mm512_max_ps(x, y), _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), x); }
INLINE V minimum(V x, V y) { return _mm512_mask_mov_ps(_mm512_min_ps(x, y), _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), x); }
INLINE float sum_of(V x) { return _mm512_reduce_add_ps(x); }
INLINE float max_of(V x) { return _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q) ? __builtin_nanf("") : _mm512_reduce_max_ps(x); }
#else
#ifdef __AVX__
template <class F> INLINE V each_half(V x, F f) {
  Eight halves[2];
  memcpy(halves, &x, sizeof x);
  halves[0] = f(halves[0]);
  halves[1] = f(halves[1]);
  memcpy(&x, halves, sizeof x);
  return x;
}
INLINE Eight rounded(Eight x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE V rounded(V x) { return each_half(x, [](Eight v) { return rounded(v); }); }
INLINE V floored(V x) { return each_half(x, [](Eight v) { return (Eight)_mm256_floor_ps(v); }); }
INLINE V square_root(V x) { return each_half(x, [](Eight v) { return (Eight)_mm256_sqrt_ps(v); }); }
#else
template <class F> INLINE V each_lane(V x, F f) { V y; for (int i = 0; i < 16; i++) y[i] = f(x[i]); return y; }
INLINE V rounded(V x) { return each_lane(x, [](float v) { return __builtin_nearbyintf(v); }); }
INLINE V floored(V x) { return each_lane(x, [](float v) { return __builtin_floorf(v); }); }
INLINE V square_root(V x) { return each_lane(x, [](float v) { return __builtin_sqrtf(v); }); }
#endif
template <class X> INLINE X fma_of(X x, X y, X z) { return x * y + z; }
INLINE V magnitude(V x) { return bits<V>(bits<U>(x) & 0x7fffffffu); }
template <class X> INLINE X scaled_by_power(X x, X n) {  // in two steps: 2^n itself may be too small or too large
  typedef decltype(x < x) Whole;
  const Whole all_of_it = __builtin_convertvector(n != n ? X{} : n, Whole), half = all_of_it >> 1;
  return x * bits<X>((half + 127) << 23) * bits<X>((all_of_it - half + 127) << 23);
}
template <class X> INLINE X at_least(float low, X x) { return x < all<X>(low) ? all<X>(low) : x; }
template <class X> INLINE X at_most(float high, X x) { return x > all<X>(high) ? all<X>(high) : x; }
INLINE V maximum(V x, V y) { return where(is_nan(x) | (x > y), x, y); }
INLINE V minimum(V x, V y) { return where(is_nan(x) | (x < y), x, y); }
// Halves of halves: lane i and lane i + 8 first.
template <class F> INLINE float folded(V x, F f) {
  typedef float Four __attribute__((vector_size(16)));
  Eight e[2];
  Four q[2];
  memcpy(e, &x, sizeof e);
  e[0] = f(e[0], e[1]);
  memcpy(q, e, sizeof q);
  q[0] = f(q[0], q[1]);
  q[0] = f(q[0], __builtin_shufflevector(q[0], q[0], 2, 3, 2, 3));
  return f(q[0], __builtin_shufflevector(q[0], q[0], 1, 1, 1, 1))[0];
}
INLINE float sum_of(V x) { return folded(x, [](auto a, auto b) { return a + b; }); }
INLINE float max_of(V x) { return folded(x, [](auto a, auto b) { return (a != a) | (a > b) ? a : b; }); }
#endif
INLINE I maximum(I x, I y) { return x > y ? x : y; }
INLINE I minimum(I x, I y) { return x < y ? x : y; }
INLINE I magnitude(I x) { return x < all<I>(0) ? -x : x; }

// ---- loads and stores of n lanes -------------------------------------------------------------------------------------

template <class E, class T> INLINE E some(const T* p, int n) {
  E e = {};
  if (n == 16) memcpy(&e, p, sizeof e); else memcpy(&e, p, n * sizeof(T));
  return e;
}
template <class T, class E> INLINE void keep(T* p, E e, int n) {
  if (n == 16) memcpy(p, &e, sizeof e); else memcpy(p, &e, n * sizeof(T));
}
template <class X> struct Get;
template <> struct Get<V> {
#ifdef CODETTA_AVX512
  INLINE V from(const float* p, int n) { return _mm512_maskz_loadu_ps(lane_mask(n), p); }
  INLINE V from(const bf16* p, int n) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lane_mask(n), p)), 16)); }
  INLINE V from(const f16* p, int n) { return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(lane_mask(n), p)); }
#else
  INLINE V from(const float* p, int n) { return some<V>(p, n); }
  INLINE V from(const bf16* p, int n) { return from_bf16(__builtin_convertvector(some<U16>(p, n), U)); }
  INLINE V from(const f16* p, int n) { return from_f16(__builtin_convertvector(some<U16>(p, n), U)); }
#endif
  INLINE V from(const double* p, int n) { return __builtin_convertvector(some<D>(p, n), V); }
  INLINE V from(const fp8* p, int n) { return from_fp8(__builtin_convertvector(some<U8>(p, n), U)); }
  INLINE V from(const int8_t* p, int n) { return __builtin_convertvector(some<S8>(p, n), V); }
  INLINE V from(const uint8_t* p, int n) { return __builtin_convertvector(some<U8>(p, n), V); }
  INLINE V from(const int32_t* p, int n) { return __builtin_convertvector(some<B>(p, n), V); }
  INLINE V from(const i64* p, int n) { return __builtin_convertvector(some<I>(p, n), V); }
};
template <> struct Get<I> {
  INLINE I from(const i64* p, int n) { return some<I>(p, n); }
  INLINE I from(const int32_t* p, int n) { return __builtin_convertvector(some<B>(p, n), I); }
};
template <> struct Get<B> {
  INLINE B from(const int32_t* p, int n) { return some<B>(p, n); }
};
template <class X, class T> INLINE X get(const T* p, int n) { return Get<X>::from(p, n); }
template <class X, class T> INLINE X get_one(const T* p) { return all<X>(Get<X>::from(p, 1)[0]); }

INLINE void put(i64* p, I x, int n) { keep(p, x, n); }
INLINE void put(int32_t* p, B x, int n) { keep(p, x, n); }
#ifdef CODETTA_AVX512
INLINE void put(float* p, V x, int n) { _mm512_mask_storeu_ps(p, lane_mask(n), x); }
INLINE void put(f16* p, V x, int n) { _mm256_mask_storeu_epi16(p, lane_mask(n), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)); }
INLINE void put(bf16* p, V x, int n) { _mm256_mask_storeu_epi16(p, lane_mask(n), _mm512_cvtepi32_epi16((__m512i)to_bf16(x))); }
#else
INLINE void put(float* p, V x, int n) { keep(p, x, n); }
INLINE void put(f16* p, V x, int n) { keep(p, __builtin_convertvector(to_f16(x), U16), n); }
INLINE void put(bf16* p, V x, int n) { keep(p, __builtin_convertvector(to_bf16(x), U16), n); }
#endif
INLINE void put(double* p, V x, int n) { keep(p, __builtin_convertvector(x, D), n); }
INLINE void put(fp8* p, V x, int n) { keep(p, __builtin_convertvector(to_fp8(x), U8), n); }
INLINE V to_int8(V x) { return where(is_nan(x), all<V>(0.f), rounded(saturated(x, 127.f))); }
INLINE void put(int8_t* p, V x, int n) { keep(p, __builtin_convertvector(__builtin_convertvector(to_int8(x), B), S8), n); }

// The value rounded to a type, still as fp32.
template <class T> INLINED V cast_to(V x);
template <> INLINED V cast_to<float>(V x) { return x; }
template <> INLINED V cast_to<double>(V x) { return x; }
template <> INLINED V cast_to<bf16>(V x) { return from_bf16(to_bf16(x)); }
template <> INLINED V cast_to<f16>(V x) { return from_f16(to_f16(x)); }
template <> INLINED V cast_to<fp8>(V x) { return from_fp8(to_fp8(x)); }
template <> INLINED V cast_to<int8_t>(V x) { return to_int8(x); }

// Elements at p[map(c)], p[map(c + 1)], ...: one load where they are adjacent. `dense`: within a run they are.
template <class X, class T, class Map> INLINE X get_by(const T* p, i64 c, int n, bool dense, Map map) {
  const i64 first = map(c);
  if (dense && map(c + n - 1) == first + n - 1) return get<X>(p + first, n);
  T t[16] = {};
  for (int i = 0; i < n; i++) t[i] = p[map(c + i)];
  return get<X>(t, 16);
}
template <class X, class T, class Map> INLINE void put_by(T* p, X x, i64 c, int n, bool dense, Map map) {
  const i64 first = map(c);
  if (dense && map(c + n - 1) == first + n - 1) return put(p + first, x, n);
  T t[16];
  put(t, x, 16);
  for (int i = 0; i < n; i++) p[map(c + i)] = t[i];
}
// The same where no vector crosses from one run into the next.
template <class X, class T, class Map> INLINE X get_run(const T* p, i64 c, int n, bool dense, Map map) {
  return dense ? get<X>(p + map(c), n) : get_by<X>(p, c, n, false, map);
}
template <class X, class T, class Map> INLINE void put_run(T* p, X x, i64 c, int n, bool dense, Map map) {
  if (dense) put(p + map(c), x, n); else put_by(p, x, c, n, false, map);
}
// Column c of a strip as a column of the whole.
INLINE i64 framed(i64 c, i64 index, i64 run, i64 block) { return c / run * block + index * run + c % run; }
template <class Map> INLINE I columns_from(i64 c, Map map) {
  I x;
  for (int i = 0; i < 16; i++) x[i] = map(c + i);
  return x;
}
// A row number of a table of `count` rows; negative ones count from the end.
INLINE i64 counted_back(i64 row, i64 count) { return row < 0 ? row + count : row; }
// Pairs of columns taken apart, and put together. These read up to 16 lanes beyond what they need.
#define EVENS 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30
#define ODDS 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31
#define ZIPPED 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
template <class X, class T> INLINE X get_even(const T* p) { return __builtin_shufflevector(get<X>(p, 16), get<X>(p + 16, 16), EVENS); }
template <class X, class T> INLINE X get_odd(const T* p) { return __builtin_shufflevector(get<X>(p, 16), get<X>(p + 16, 16), ODDS); }
template <class X, class T> INLINE X get_zipped(const T* p, const T* q) { return __builtin_shufflevector(get<X>(p, 16), get<X>(q, 16), ZIPPED); }

#include "cpu_math.h"
