// Attention of a few queries over a cache: softmax(scale * Q K' + mask) V, of fp32, bf16 or fp16, computed in fp32.
//
// The queries that share a head of keys are taken together, so that keys and values are read once for all of them. Only the
// positions from the first to the last that one of them sees are read. They are taken in spans, counted from the first, which
// threads share; the spans' parts are joined in the order of the context. No division of work changes a bit of the result.
#include <stdlib.h>
#ifdef _OPENMP
#include <omp.h>
#endif
#include "cpu_sixteen.h"

enum { SPAN = 512, STEP = 16 };        // positions of a part, and of a step: one for each lane
enum { MOST_ROWS = 64, MOST_COLS = 256 };  // as cpu_attention.py has them
enum Kind { NONE, TRUTH, FLOAT, BF16, F16 };

struct Tensor { char* at; i64 sample, head, row, col; };  // strides in bytes
struct Call {
  Tensor query, key, value, mask, out;
  i64 batch, groups, shared, length, context, depth, width, element, kind, threads;
  double scale;
};
struct Extent { i64 first, last; };

static inline i64 least(i64 x, i64 y) { return x < y ? x : y; }
static inline i64 up(i64 x, i64 to) { return (x + to - 1) / to; }

// ---- masks -----------------------------------------------------------------------------------------------------------

static const char* mask_row(const Call& call, i64 sample, i64 head, i64 time) {
  return call.mask.at + sample * call.mask.sample + head * call.mask.head + time * call.mask.row;
}
template <class T> INLINE V numbers(const char* p, i64 step, int n) {
  if (step == sizeof(T)) return get<V>((const T*)p, n);
  T t[STEP] = {};
  for (int i = 0; i < n; i++) t[i] = *(const T*)(p + i * step);
  return get<V>(t, STEP);
}
// What is added to the scores of n positions: minus infinity where they are not seen at all.
static V added(i64 kind, const char* p, i64 step, int n) {
  switch (kind) {
    case TRUTH: return where(numbers<uint8_t>(p, step, n) != all<V>(0.f), all<V>(0.f), all<V>(-__builtin_inff()));
    case FLOAT: return numbers<float>(p, step, n);
    case BF16: return numbers<bf16>(p, step, n);
    default: return numbers<f16>(p, step, n);
  }
}
static bool any_seen(const Call& call, i64 sample, i64 group, i64 at, int n) {
  // Where heads see the same, one stands for all.
  for (i64 h = 0; h < (call.mask.head ? call.shared : 1); h++)
    for (i64 t = 0; t < (call.mask.row ? call.length : 1); t++) {
      const V x = added(call.kind, mask_row(call, sample, group * call.shared + h, t) + at * call.mask.col, call.mask.col, n);
      for (int i = 0; i < n; i++) if (x[i] != -__builtin_inff()) return true;
    }
  return false;
}
// From the first step in which some query sees something to behind the last.
static Extent extent(const Call& call, i64 sample, i64 group) {
  Extent e = {0, call.context};
  if (call.kind == NONE) return e;
  while (e.first < e.last && !any_seen(call, sample, group, e.first, lanes(e.last - e.first))) e.first += STEP;
  while (e.first < e.last) {
    const i64 begin = e.first + (e.last - 1 - e.first) / STEP * STEP;
    if (any_seen(call, sample, group, begin, lanes(e.last - begin))) break;
    e.last = begin;
  }
  // Within the outermost steps, position by position: what lies beyond may be no number.
  while (e.first < e.last && !any_seen(call, sample, group, e.first, 1)) e.first++;
  while (e.first < e.last && !any_seen(call, sample, group, e.last - 1, 1)) e.last--;
  return e;
}

// ---- one part --------------------------------------------------------------------------------------------------------

#ifdef CODETTA_AVX512
enum { AT_ONCE = STEP };
// Sixteen vectors -> the vector of their sums.
INLINE V sums_of(V* x) {
#define HALF(n, ...) for (int i = 0; i < n; i++) x[i] = __builtin_shufflevector(x[i], x[i + n], __VA_ARGS__)
#pragma GCC unroll 8
  HALF(8, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) + __builtin_shufflevector(x[i], x[i + 8], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
#pragma GCC unroll 8
  HALF(4, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) + __builtin_shufflevector(x[i], x[i + 4], 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
#pragma GCC unroll 8
  HALF(2, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) + __builtin_shufflevector(x[i], x[i + 2], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
#pragma GCC unroll 8
  HALF(1, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) + __builtin_shufflevector(x[i], x[i + 1], 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
#undef HALF
  return x[0];
}
#else
enum { AT_ONCE = 4 };  // as many sums as registers hold
#ifdef __AVX__
INLINE Eight neighbours_added(Eight x, Eight y) {
  return __builtin_shufflevector(x, y, 0, 2, 8, 10, 4, 6, 12, 14) + __builtin_shufflevector(x, y, 1, 3, 9, 11, 5, 7, 13, 15);
}
INLINE void sums_of(const Sixteen* x, float* to) {
  Eight halves[AT_ONCE];
#pragma GCC unroll 4
  for (int p = 0; p < AT_ONCE; p++) halves[p] = x[p].part[0] + x[p].part[1];
  const Eight pairs = neighbours_added(neighbours_added(halves[0], halves[1]), neighbours_added(halves[2], halves[3]));
  const auto four = __builtin_shufflevector(pairs, pairs, 0, 1, 2, 3) + __builtin_shufflevector(pairs, pairs, 4, 5, 6, 7);
  memcpy(to, &four, sizeof four);
}
#else
INLINE void sums_of(const Sixteen* x, float* to) {
  for (int p = 0; p < AT_ONCE; p++) to[p] = sum_of(x[p]);
}
#endif
#endif
// A query's products with STEP keys.
template <class E> INLINE V scores_of(const float* q, const E* k, i64 k_step, i64 deep) {
  Sixteen sums[AT_ONCE];
  alignas(64) float scores[STEP];
  for (int first = 0; first < STEP; first += AT_ONCE) {
#pragma GCC unroll 16
    for (int p = 0; p < AT_ONCE; p++) sums[p] = Sixteen{};
    for (i64 c = 0; c < deep; c += 16) {
      const Sixteen x = sixteen_at(q + c, 16);
#pragma GCC unroll 16
      for (int p = 0; p < AT_ONCE; p++) sums[p] = plus_product(sums[p], x, sixteen_at(k + (first + p) * k_step + c, 16));
    }
#ifdef CODETTA_AVX512
    return sums_of(sums);
#else
    sums_of(sums, scores + first);
#endif
  }
  return get<V>(scores, STEP);
}
// n rows of `cols` elements as fp32, in rows of whole vectors; rows up to STEP are filled with zeros.
template <class T> static void widen(const char* from, i64 step, i64 n, i64 cols, float* to, i64 ld, i64 rows) {
  for (i64 r = 0; r < rows; r++)
    for (i64 c = 0; c < ld; c += 16) put(to + r * ld + c, r < n ? get<V>((const T*)(from + r * step) + c, lanes(cols - c)) : V{}, 16);
}
// One query's part so far: the largest score, the sum of exponentials, and values weighted by those.
struct Row { float* top; float* total; float* mixed; };

// A query meets STEP positions, whose rows of keys and values are `k_step` and `v_step` elements apart and have whole vectors.
template <class E> static void meet(const float* q, const E* k, i64 k_step, i64 deep, const E* v, i64 v_step, i64 wide, V scale, V hidden, Row row) {
  // Not a sum alone: what is hidden may be no number.
  const V scores = where(hidden == all<V>(-__builtin_inff()), hidden, scores_of(q, k, k_step, deep) * scale + hidden);
  const float before = *row.top, here = max_of(scores), top = before != before || before > here ? before : here;
  // Where nothing was seen yet, there is nothing to take away; mostly the largest score stays what it was.
  const float base = top == -__builtin_inff() ? 0.f : top;
  const float kept = before == top ? 1.f : exponential(all<V>(before - base))[0];
  const V now = exponential(scores - all<V>(base));
  alignas(64) float weights[STEP];
  put(weights, now, STEP);
  *row.top = top;
  *row.total = *row.total * kept + sum_of(now);
  for (i64 c = 0; c < wide; c += 16) {
    Sixteen sum = plus_product(Sixteen{}, sixteen_at(row.mixed + c, 16), sixteen_times(kept));
#pragma GCC unroll 16
    for (int p = 0; p < STEP; p++) sum = plus_product(sum, sixteen_times(weights[p]), sixteen_at(v + p * v_step + c, 16));
    keep_sixteen(row.mixed + c, sum);
  }
}
// Positions begin to end of one head of keys.
template <class T> static void part(const Call& call, i64 sample, i64 group, i64 begin, i64 end, float* tops, float* totals, float* mixed) {
  const i64 rows = call.shared * call.length, deep = up(call.depth, 16) * 16, wide = up(call.width, 16) * 16;
  alignas(64) float q[MOST_ROWS * MOST_COLS], k[STEP * MOST_COLS], v[STEP * MOST_COLS];
  for (i64 r = 0; r < rows; r++) {
    const i64 head = group * call.shared + r / call.length, time = r % call.length;
    widen<T>(call.query.at + sample * call.query.sample + head * call.query.head + time * call.query.row, 0, 1, call.depth, q + r * deep, deep, 1);
    tops[r] = -__builtin_inff();
    totals[r] = 0;
    for (i64 c = 0; c < wide; c += 16) put(mixed + r * wide + c, V{}, 16);
  }
  const char* const keys = call.key.at + sample * call.key.sample + group * call.key.head;
  const char* const values = call.value.at + sample * call.value.sample + group * call.value.head;
  // What is read once, or is fp32 already, is read where it is.
  const bool in_place = deep == call.depth && wide == call.width && (rows == 1 || call.element == FLOAT);
  const V scale = all<V>((float)call.scale);
  for (i64 at = begin; at < end; at += STEP) {
    const int n = lanes(end - at);
    const char* const here_k = keys + at * call.key.row;
    const char* const here_v = values + at * call.value.row;
    const bool widens = !in_place || n < STEP;
    if (widens) {
      widen<T>(here_k, call.key.row, n, call.depth, k, deep, STEP);
      widen<T>(here_v, call.value.row, n, call.width, v, wide, STEP);
    }
    const V there = where(counted() < all<B>(n), all<V>(0.f), all<V>(-__builtin_inff()));
    const char* last_mask = nullptr;
    V hidden = there;
    for (i64 r = 0; r < rows; r++) {
      if (call.kind != NONE) {
        const char* const mask = mask_row(call, sample, group * call.shared + r / call.length, r % call.length);
        if (mask != last_mask) hidden = there + added(call.kind, mask + at * call.mask.col, call.mask.col, n);
        last_mask = mask;
      }
      const Row row = {tops + r, totals + r, mixed + r * wide};
      if (widens)
        meet(q + r * deep, k, deep, deep, v, wide, wide, scale, hidden, row);
      else
        meet(q + r * deep, (const T*)here_k, call.key.row / (i64)sizeof(T), deep, (const T*)here_v, call.value.row / (i64)sizeof(T), wide, scale, hidden, row);
    }
  }
}
// The parts of one row, in the order of the context.
template <class T> static void join(const Call& call, i64 sample, i64 head, i64 time, i64 parts, i64 rows, const float* tops, const float* totals, const float* mixed) {
  const i64 wide = up(call.width, 16) * 16;
  V top = all<V>(-__builtin_inff());
  for (i64 s = 0; s < parts; s++) top = maximum(top, all<V>(tops[s * rows]));
  const V base = where(top == all<V>(-__builtin_inff()), all<V>(0.f), top);
  V total = V{};
  for (i64 s = 0; s < parts; s++) total = total + exponential(all<V>(tops[s * rows]) - base) * all<V>(totals[s * rows]);
  total = where(total == all<V>(0.f), all<V>(1.f), total);  // who sees nothing gets zeros
  T* const to = (T*)(call.out.at + sample * call.out.sample + head * call.out.head + time * call.out.row);
  for (i64 c = 0; c < call.width; c += 16) {
    V sum = V{};
    for (i64 s = 0; s < parts; s++) sum = sum + exponential(all<V>(tops[s * rows]) - base) * get<V>(mixed + s * rows * wide + c, 16);
    put(to + c, sum / total, lanes(call.width - c));
  }
}

// ---- all of it -------------------------------------------------------------------------------------------------------

template <class T> static int attend(const Call& call) {
  const i64 pairs = call.batch * call.groups, rows = call.shared * call.length, wide = up(call.width, 16) * 16;
  const i64 spans = up(call.context, SPAN), parts = pairs * spans;
  void* memory = nullptr;
  if (posix_memalign(&memory, 64, parts * rows * (wide + 2) * sizeof(float) + pairs * sizeof(Extent))) return 1;
  float* const mixed = (float*)memory;
  float* const tops = mixed + parts * rows * wide;
  float* const totals = tops + parts * rows;
  Extent* const extents = (Extent*)(totals + parts * rows);
#pragma omp parallel num_threads(call.threads)
  {
#pragma omp for schedule(static)
    for (i64 pair = 0; pair < pairs; pair++) extents[pair] = extent(call, pair / call.groups, pair % call.groups);
#pragma omp for schedule(dynamic, 1)
    for (i64 job = 0; job < parts; job++) {
      const i64 pair = job / spans, begin = extents[pair].first + job % spans * SPAN, end = least(begin + SPAN, extents[pair].last);
      if (begin < end) part<T>(call, pair / call.groups, pair % call.groups, begin, end, tops + job * rows, totals + job * rows, mixed + job * rows * wide);
    }
#pragma omp for schedule(static)
    for (i64 job = 0; job < pairs * rows; job++) {
      const i64 pair = job / rows, r = job % rows, first = pair * spans * rows + r, group = pair % call.groups;
      const i64 used = up(extents[pair].last - extents[pair].first, SPAN);
      join<T>(call, pair / call.groups, group * call.shared + r / call.length, r % call.length, used, rows, tops + first, totals + first, mixed + first * wide);
    }
  }
  free(memory);
  return 0;
}

// 0, or what went wrong: 1 no memory.
extern "C" __attribute__((visibility("default"))) int codetta_attend(const Call* call) {
  return call->element == FLOAT ? attend<float>(*call) : call->element == BF16 ? attend<bf16>(*call) : attend<f16>(*call);
}
