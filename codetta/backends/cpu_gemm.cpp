// The main loop of every program, compiled once for each element type (-DELEMENT=float, bf16 or f16).
//
//   C[m, n] = sum over k of A[m, k] * B[n, k], accumulated in fp32 over the whole of K, in registers
//
// B is packed into strips of NR columns, as 32-bit words [k][lane]: one fp32 each, or two bf16 where the processor multiplies
// those. So is A, in strips of MR rows, unless its words can be read where they are. A block of rows x one panel of columns
// is made in L1 or L2 and handed to the epilogue. Few rows are not worth packing: there B is read in place, row by row
// (K adjacent) or as a stream (N adjacent).
// How the work is divided among threads changes no bit of the result.
#include <stdlib.h>
#ifdef _OPENMP
#include <omp.h>
#endif
#if defined(__linux__)
#include <sys/mman.h>
#endif
#include "cpu_sixteen.h"

typedef ELEMENT T;

#ifdef CODETTA_AVX512
enum { NV = 2, MR = 14, DOT_ROWS = 4, DOT_COLS = 4 };
#define PREFETCH(p) _mm_prefetch((const char*)(p), _MM_HINT_T0)
#else
enum { NV = 1, MR = 6, DOT_ROWS = 2, DOT_COLS = 2 };
#define PREFETCH(p) __builtin_prefetch((const char*)(p))
#endif
enum { NR = 16 * NV };
#if defined(__AVX512BF16__) && defined(CODETTA_AVX512)
template <class E> struct PerWord { enum { value = 1 }; };
template <> struct PerWord<bf16> { enum { value = 2 }; };
#else
template <class E> struct PerWord { enum { value = 1 }; };
#endif
enum { PER_WORD = PerWord<T>::value };

static inline i64 least(i64 x, i64 y) { return x < y ? x : y; }
static inline i64 up(i64 x, i64 to) { return (x + to - 1) / to; }
static inline i64 words(i64 k) { return up(k, PER_WORD); }

// ---- words: 16 of them, multiplied and added -------------------------------------------------------------------------

#ifdef CODETTA_AVX512
typedef __m512i Words;
INLINE Words words_at(const float* p, i64 n) { return n >= 16 ? _mm512_loadu_si512(p) : _mm512_maskz_loadu_epi32((__mmask16)((1u << n) - 1), p); }
INLINE __m256i halves_at(const void* p, i64 n) { return n >= 16 ? _mm256_loadu_si256((const __m256i*)p) : _mm256_maskz_loadu_epi16((__mmask16)((1u << n) - 1), p); }
INLINE Words words_at(const f16* p, i64 n) { return _mm512_castps_si512(_mm512_cvtph_ps(halves_at(p, n))); }
#if defined(__AVX512BF16__)
INLINE Words words_at(const bf16* p, i64 n) { return n >= 32 ? _mm512_loadu_si512(p) : _mm512_maskz_loadu_epi16((__mmask32)((1ull << n) - 1), p); }
#else
INLINE Words words_at(const bf16* p, i64 n) { return _mm512_slli_epi32(_mm512_cvtepu16_epi32(halves_at(p, n)), 16); }
#endif
template <int P> struct Multiply { INLINE V add(V c, Words a, Words b) { return _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), c); } };
#if defined(__AVX512BF16__)
template <> struct Multiply<2> { INLINE V add(V c, Words a, Words b) { return _mm512_dpbf16_ps(c, (__m512bh)a, (__m512bh)b); } };
#endif
INLINE Words same_word(uint32_t w) { return _mm512_set1_epi32((int)w); }
INLINE Words packed_words(const uint32_t* p) { return _mm512_load_si512(p); }
template <class E> INLINE Words any_order_at(const E* p, i64 n) { return words_at(p, n); }
#else
typedef Sixteen Words;
template <class E> INLINE Words words_at(const E* p, i64 n) { return sixteen_at(p, n); }
// Words whose order is all the same, as long as the other side has it, too: of bf16 even ones first, one instruction for each part.
template <class E> INLINE Words any_order_at(const E* p, i64 n) { return words_at(p, n); }
#ifdef __AVX__
INLINE Words any_order_at(const bf16* p, i64 n) {
  if (n < 16) return words_at(p, n);
  PartBits pairs;
  memcpy(&pairs, p, sizeof pairs);
  return {bits<Part>(pairs << 16), bits<Part>(pairs & 0xffff0000u)};
}
#endif
template <int P> struct Multiply { INLINE Sixteen add(Sixteen c, const Words& a, const Words& b) { return plus_product(c, a, b); } };
INLINE Words same_word(uint32_t word) { return sixteen_times(bits<float>(word)); }
INLINE Words packed_words(const uint32_t* p) { return words_at((const float*)p, 16); }
INLINE Words words_across(const T* p, const T*, i64 n) { return words_at(p, n); }
#endif

// ---- packing ---------------------------------------------------------------------------------------------------------

// The word of elements k and on of a lane, k_step apart.
static inline uint32_t word_of(const T* p, i64 k_step, i64 left) {
  if (PER_WORD == 2) {
    uint16_t pair[2] = {0, 0};
    memcpy(&pair[0], p, 2);
    if (left > 1) memcpy(&pair[1], p + k_step, 2);
    return bits<uint32_t>(pair[0] | (uint32_t)pair[1] << 16);
  }
  const float x = get<V>(p, 1)[0];
  return bits<uint32_t>(x);
}

#ifdef CODETTA_AVX512
INLINE void transpose(__m512i r[16]) {
  __m512i t[16];
  for (int i = 0; i < 8; i++) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 4; i++) {
    r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
  for (int j = 0; j < 4; j++) {
    t[j] = _mm512_shuffle_i32x4(r[j], r[4 + j], 0x88);
    t[4 + j] = _mm512_shuffle_i32x4(r[j], r[4 + j], 0xdd);
    t[8 + j] = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0x88);
    t[12 + j] = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0xdd);
  }
  for (int j = 0; j < 4; j++) {
    r[j] = _mm512_shuffle_i32x4(t[j], t[8 + j], 0x88);
    r[8 + j] = _mm512_shuffle_i32x4(t[j], t[8 + j], 0xdd);
    r[4 + j] = _mm512_shuffle_i32x4(t[4 + j], t[12 + j], 0x88);
    r[12 + j] = _mm512_shuffle_i32x4(t[4 + j], t[12 + j], 0xdd);
  }
}
// Lanes whose elements are adjacent in k: 16 x 16 words at a time are transposed in registers.
template <int WIDTH> static void pack_by_lane(const T* const* lane, i64 count, i64 k, uint32_t* __restrict to) {
  const i64 all_words = words(k);
  for (i64 c0 = 0; c0 < WIDTH; c0 += 16) {
    const i64 here = count - c0 < 0 ? 0 : least(count - c0, 16);
    const __mmask16 kept = (__mmask16)((1u << least(WIDTH - c0, 16)) - 1);
    for (i64 w = 0; w < all_words; w += 16) {
      __m512i r[16];
      const i64 left = k - w * PER_WORD;
      if (here == 16 && left >= 16 * PER_WORD) {
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) {
          const T* p = lane[c0 + i] + w * PER_WORD;
          PREFETCH((const char*)p + 256);
          r[i] = words_at(p, 64);
        }
      } else {
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) r[i] = i < here ? words_at(lane[c0 + i] + w * PER_WORD, left) : _mm512_setzero_si512();
      }
      transpose(r);
      const i64 rows = least(all_words - w, 16);
#pragma GCC unroll 16
      for (int i = 0; i < 16; i++)
        if (i < rows) _mm512_mask_storeu_epi32(to + (w + i) * WIDTH + c0, kept, r[i]);
    }
  }
}
INLINE Words words_across(const float* p, const float*, i64 n) { return words_at(p, n); }
INLINE Words words_across(const f16* p, const f16*, i64 n) { return words_at(p, n); }
INLINE Words words_across(const bf16* p, const bf16* next, i64 n) {
  if (PER_WORD == 1) return words_at(p, n);
  const __m512i low = _mm512_cvtepu16_epi32(halves_at(p, n));
  return next ? _mm512_or_si512(low, _mm512_slli_epi32(_mm512_cvtepu16_epi32(halves_at(next, n)), 16)) : low;
}
// Lanes that are adjacent to one another.
template <int WIDTH> static void pack_across(const T* from, i64 k_step, i64 count, i64 k, uint32_t* __restrict to) {
  const i64 all_words = words(k);
  for (i64 w = 0; w < all_words; w++) {
    for (int q = 0; q < PER_WORD; q++)
      for (i64 byte = 0; byte < WIDTH * (i64)sizeof(T); byte += 64) PREFETCH((const char*)(from + ((w + 16) * PER_WORD + q) * k_step) + byte);
    for (i64 c0 = 0; c0 < WIDTH; c0 += 16) {
      const i64 here = count - c0 < 0 ? 0 : least(count - c0, 16);
      const T* p = from + w * PER_WORD * k_step + c0;
      const Words r = here ? words_across(p, PER_WORD == 2 && w * 2 + 1 < k ? p + k_step : nullptr, here) : _mm512_setzero_si512();
      _mm512_mask_storeu_epi32(to + w * WIDTH + c0, (__mmask16)((1u << least(WIDTH - c0, 16)) - 1), r);
    }
  }
}
#else
// The rows of a square become its columns: halves are zipped as often as the side can be halved.
INLINE void transpose(Part r[PART]) {
  for (int side = 1; side < PART; side *= 2) {
    Part t[PART];
#pragma GCC unroll 8
    for (int i = 0; i < PART / 2; i++) {
#ifdef __AVX__
      t[2 * i] = __builtin_shufflevector(r[i], r[i + PART / 2], 0, 8, 1, 9, 2, 10, 3, 11);
      t[2 * i + 1] = __builtin_shufflevector(r[i], r[i + PART / 2], 4, 12, 5, 13, 6, 14, 7, 15);
#else
      t[2 * i] = __builtin_shufflevector(r[i], r[i + PART / 2], 0, 4, 1, 5);
      t[2 * i + 1] = __builtin_shufflevector(r[i], r[i + PART / 2], 2, 6, 3, 7);
#endif
    }
#pragma GCC unroll 8
    for (int i = 0; i < PART; i++) r[i] = t[i];
  }
}
// Lanes whose elements are adjacent in k.
template <int WIDTH> static void pack_by_lane(const T* const* lane, i64 count, i64 k, uint32_t* __restrict to) {
  for (i64 c0 = 0; c0 < WIDTH; c0 += PART)
    for (i64 w = 0; w < k; w += PART) {
      Part r[PART];
      const i64 deep = least(k - w, PART);
#pragma GCC unroll 8
      for (int i = 0; i < PART; i++) {
        T t[PART] = {};
        const T* p = c0 + i < count ? lane[c0 + i] + w : t;
        if (deep < PART && c0 + i < count) memcpy(t, p, deep * sizeof(T)), p = t;
        if (c0 + i < count) PREFETCH((const char*)p + 256);
        r[i] = part_at(p);
      }
      transpose(r);
#pragma GCC unroll 8
      for (int i = 0; i < PART; i++)
        if (i < deep) memcpy(to + (w + i) * WIDTH + c0, &r[i], 4 * least(PART, WIDTH - c0));
    }
}
// Lanes that are adjacent to one another.
template <int WIDTH> static void pack_across(const T* from, i64 k_step, i64 count, i64 k, uint32_t* __restrict to) {
  for (i64 w = 0; w < k; w++)
    for (i64 c0 = 0; c0 < WIDTH; c0 += 16) {
      const i64 here = count - c0 < 0 ? 0 : least(count - c0, 16);
      const Words r = here ? words_at(from + w * k_step + c0, here) : Words{};
      memcpy(to + w * WIDTH + c0, &r, 4 * least(WIDTH - c0, 16));
    }
}
#endif

// Pack `count` lanes (the rest is zero) into words [k][WIDTH]; elements of a lane are k_step apart.
template <int WIDTH> static void pack(const T* const* lane, i64 k_step, bool side_by_side, i64 count, i64 k, uint32_t* to) {
  if (k_step == 1) return pack_by_lane<WIDTH>(lane, count, k, to);
  if (side_by_side) return pack_across<WIDTH>(lane[0], k_step, count, k, to);
  for (i64 w = 0; w < words(k); w++)
    for (i64 c = 0; c < WIDTH; c++) to[w * WIDTH + c] = c < count ? word_of(lane[c] + w * PER_WORD * k_step, k_step, k - w * PER_WORD) : 0;
}

// ---- the block in registers ------------------------------------------------------------------------------------------

// Products of fp32 are summed in stretches, and those added up: the error of one long sum would be twice that of the library
// PyTorch uses. Half types round their results far more coarsely, and take all of K in one go.
enum { STRETCH = sizeof(T) == 4 ? 256 : 1 << 30 };

// The words of a strip of A: packed, or in place, `step` bytes from row to row.
struct Rows {
  const char* at;
  i64 step;
};
// Whether elements that follow one another in memory make a word.
enum { WORDS_IN_MEMORY = sizeof(T) * PER_WORD == 4 };

template <int ROWS_, bool IN_PLACE, bool FIRST>
__attribute__((noinline)) static void multiply_stretch(i64 n, Rows a, const uint32_t* __restrict b, float* __restrict c, i64 ld) {
  Sixteen acc[ROWS_][NV];
#pragma GCC unroll 16
  for (int i = 0; i < ROWS_; i++)
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) acc[i][v] = Sixteen{};
  // In place, an address and the step reach five rows. There are no registers for an address of every row, which is what the
  // compiler would make of it: the empty asm keeps it from that.
  const i64 step = a.step, step3 = 3 * step;
  const char *p0 = a.at, *p1 = p0 + 5 * step, *p2 = p0 + 10 * step;
  for (i64 k = 0; k < n; k++) {
    Words bv[NV];
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) {
      bv[v] = packed_words(b + 16 * v);
      PREFETCH(b + NR * 8 + 16 * v);
    }
#pragma GCC unroll 16
    for (int i = 0; i < ROWS_; i++) {
      const char* const p = IN_PLACE ? (i < 5 ? p0 : i < 10 ? p1 : p2) + (i % 5 == 3 ? step3 : i % 5 * step) : p0 + 4 * i;
      uint32_t word;
      memcpy(&word, p, 4);
#pragma GCC unroll 4
      for (int v = 0; v < NV; v++) acc[i][v] = Multiply<PER_WORD>::add(acc[i][v], same_word(word), bv[v]);
    }
    p0 += IN_PLACE ? 4 : 4 * MR;
    if (IN_PLACE) {
      p1 += 4;
      p2 += 4;
      asm("" : "+r"(p0), "+r"(p1), "+r"(p2));
    }
    b += NR;
  }
#pragma GCC unroll 16
  for (int i = 0; i < ROWS_; i++)
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) {
      float* const to = c + i * ld + 16 * v;
      keep_sixteen(to, FIRST ? acc[i][v] : plus(acc[i][v], sixteen_at(to, 16)));
    }
}
// The first `rows` of up to ROWS_ rows; no other is read.
template <int ROWS_, bool IN_PLACE> static void multiply(i64 rows, i64 n, Rows a, const uint32_t* b, float* c, i64 ld) {
  if (rows < ROWS_) return multiply<(ROWS_ > 1 ? ROWS_ - 1 : 1), IN_PLACE>(rows, n, a, b, c, ld);
  multiply_stretch<ROWS_, IN_PLACE, true>(least(n, STRETCH), a, b, c, ld);
  for (i64 k = STRETCH; k < n; k += STRETCH) {
    const Rows rest = {a.at + k * (IN_PLACE ? 4 : 4 * MR), a.step};
    multiply_stretch<ROWS_, IN_PLACE, false>(least(n - k, STRETCH), rest, b + k * NR, c, ld);
  }
}

// ---- few rows: B read in place ---------------------------------------------------------------------------------------

// Both operands adjacent in k: dot products of R rows and C columns, each one sum: a row's result is the same in any company.
template <int R, int C, int AHEAD> __attribute__((noinline)) static void dot_block(i64 k, const T* __restrict a, i64 a_step, const T* __restrict b, i64 b_step, float* __restrict c, i64 ld) {
  const int step = 16 * PER_WORD;
  Sixteen acc[R][C];
#pragma GCC unroll 16
  for (int i = 0; i < R; i++)
#pragma GCC unroll 16
    for (int j = 0; j < C; j++) acc[i][j] = Sixteen{};
  i64 at = 0;
  for (; at + step <= k; at += step) {
    Words av[R];
#pragma GCC unroll 16
    for (int i = 0; i < R; i++) av[i] = any_order_at(a + i * a_step + at, 64);
#pragma GCC unroll 16
    for (int j = 0; j < C; j++) {
      const T* p = b + j * b_step + at;
      if (AHEAD) PREFETCH((const char*)p + AHEAD);
      const Words bv = any_order_at(p, 64);
#pragma GCC unroll 16
      for (int i = 0; i < R; i++) acc[i][j] = Multiply<PER_WORD>::add(acc[i][j], av[i], bv);
    }
  }
  if (at < k)
    for (int j = 0; j < C; j++) {
      const Words bv = words_at(b + j * b_step + at, k - at);
      for (int i = 0; i < R; i++) acc[i][j] = Multiply<PER_WORD>::add(acc[i][j], words_at(a + i * a_step + at, k - at), bv);
    }
#pragma GCC unroll 16
  for (int i = 0; i < R; i++)
#pragma GCC unroll 16
    for (int j = 0; j < C; j++) c[i * ld + j] = sum_of(acc[i][j]);
}
// How B is best read was measured (Zen 4, 2 threads, 2026-11-16, GB/s; a plain read makes 41 of small pages, 56 of large ones):
//   one row of 4 KB     one column at a time 46, four 33 (of large pages 59 and 38): memory likes one stream that goes straight on
//   one row of 32 KB    one column at a time 34, four 47: A is evicted from L1 by B, and read again for every column
//   four rows and more  four columns, 16 sums: the more is computed with what was read, the better
// Asking for what comes next helps only where four columns meet one row.
enum { STRAIGHT_BYTES = 8 << 10, AHEAD_BYTES = 1024 };

template <int C, int AHEAD> static void dot_columns(i64 rows, i64 k, const T* a, i64 a_step, const T* b, i64 b_step, float* c, i64 ld) {
  if (rows == 1) return dot_block<1, C, AHEAD>(k, a, a_step, b, b_step, c, ld);
  i64 r = 0;
  for (; r + DOT_ROWS <= rows; r += DOT_ROWS) dot_block<DOT_ROWS, C, 0>(k, a + r * a_step, a_step, b, b_step, c + r * ld, ld);
  if (DOT_ROWS > 2)
    for (; r + 2 <= rows; r += 2) dot_block<2, C, 0>(k, a + r * a_step, a_step, b, b_step, c + r * ld, ld);
  for (; r < rows; r++) dot_block<1, C, 0>(k, a + r * a_step, a_step, b, b_step, c + r * ld, ld);
}
// All rows meet the columns at hand before others are read: B comes from memory once.
static void dot_rows(i64 rows, i64 k, const T* a, i64 a_step, const T* b, i64 b_step, i64 cols, float* c, i64 ld) {
  i64 j = 0;
  if (rows * k * (i64)sizeof(T) > STRAIGHT_BYTES)
    for (; j + DOT_COLS <= cols; j += DOT_COLS) dot_columns<DOT_COLS, AHEAD_BYTES>(rows, k, a, a_step, b + j * b_step, b_step, c + j, ld);
  for (; j < cols; j++) dot_columns<1, 0>(rows, k, a, a_step, b + j * b_step, b_step, c + j, ld);
}

// B adjacent in n: eight words of k at a time are added to a block of fp32 that stays near. B is read once, whatever the rows.
// a: words, adjacent in k.
static void stream_rows(i64 rows, i64 k, const uint32_t* __restrict a, const T* __restrict b, i64 b_step, i64 cols, float* __restrict c, i64 ld) {
  enum { DEEP = 8 };
  const i64 all_words = words(k);
  for (i64 at = 0; at < all_words; at += DEEP)
    for (i64 j = 0; j < cols; j += 16) {
      const int n = lanes(cols - j);
      Words bv[DEEP];
#pragma GCC unroll 8
      for (int q = 0; q < DEEP; q++) {
        const i64 from = (at + q) * PER_WORD;
        const T* p = b + from * b_step + j;
        if (sizeof(T) == 4) PREFETCH(p + DEEP * b_step);
        bv[q] = from < k ? words_across(p, from + 1 < k ? p + b_step : nullptr, n) : Words{};
      }
      const i64 deep = least(DEEP, all_words - at);
      for (i64 i = 0; i < rows; i++) {
        const uint32_t* const av = a + i * all_words + at;
        Sixteen x = Sixteen{};
        if (deep == DEEP) {
#pragma GCC unroll 8
          for (int q = 0; q < DEEP; q++) x = Multiply<PER_WORD>::add(x, same_word(av[q]), bv[q]);
        } else
          for (int q = 0; q < deep; q++) x = Multiply<PER_WORD>::add(x, same_word(av[q]), bv[q]);
        keep_sixteen(c + i * ld + j, at ? plus(x, sixteen_at(c + i * ld + j, 16)) : x);
      }
    }
}

#include "cpu_drive.h"
