// Functions of vectors: exponentials and their kin, random numbers, reductions, and reductions finished as they are loaded.
// Included by cpu_runtime.h. Errors are one to two units in the last place; infinities, zeros and NaN come out as in PyTorch.
#pragma once

template <class X> INLINE X exponential_of(X x) {
  x = at_most(89.f, at_least(-104.f, x));
  const X n = rounded(x * all<X>(1.44269504f));
  X r = fma_of(n, all<X>(-0.693145752f), x);
  r = fma_of(n, all<X>(-1.42860677e-6f), r);
  X p = all<X>(1.37805939e-3f);
  p = fma_of(p, r, all<X>(8.37312452e-3f));
  p = fma_of(p, r, all<X>(4.16695364e-2f));
  p = fma_of(p, r, all<X>(1.66664720e-1f));
  p = fma_of(p, r, all<X>(4.99999851e-1f));
  p = fma_of(p, r, all<X>(1.f));
  p = fma_of(p, r, all<X>(1.f));
  return scaled_by_power(p, n);
}
#if defined(__AVX__) && !defined(CODETTA_AVX512)
INLINE V exponential(V x) { return each_half(x, [](Eight v) { return exponential_of(v); }); }
#else
INLINE V exponential(V x) { return exponential_of(x); }
#endif
INLINE V logarithm(V x) {
  const B tiny = x < all<V>(0x1p-126f);
  const V scaled = where(tiny, x * all<V>(0x1p23f), x);
  const U u = bits<U>(scaled);
  V m = bits<V>((u & 0x7fffffu) | 0x3f800000u);
  V e = __builtin_convertvector((B)(u >> 23) - 127, V) - where(tiny, all<V>(23.f), all<V>(0.f));
  const B large = m > all<V>(1.41421356f);
  m = where(large, m * all<V>(0.5f), m);
  e = where(large, e + all<V>(1.f), e);
  const V f = m - all<V>(1.f), z = f * f;
  V p = all<V>(7.0376836292e-2f);
  p = fma_of(p, f, all<V>(-1.1514610310e-1f));
  p = fma_of(p, f, all<V>(1.1676998740e-1f));
  p = fma_of(p, f, all<V>(-1.2420140846e-1f));
  p = fma_of(p, f, all<V>(1.4249322787e-1f));
  p = fma_of(p, f, all<V>(-1.6668057665e-1f));
  p = fma_of(p, f, all<V>(2.0000714765e-1f));
  p = fma_of(p, f, all<V>(-2.4999993993e-1f));
  p = fma_of(p, f, all<V>(3.3333331174e-1f));
  p = fma_of(e, all<V>(-2.12194440e-4f), p * f * z) - z * all<V>(0.5f);
  V r = fma_of(e, all<V>(0.693359375f), f + p);
  r = where(x == all<V>(0.f), all<V>(-__builtin_inff()), r);
  r = where(x < all<V>(0.f), all<V>(__builtin_nanf("")), r);
  return where(x < all<V>(__builtin_inff()), r, x);  // infinity and NaN stay what they are
}
INLINE V reciprocal_root(V x) { return all<V>(1.f) / square_root(x); }
INLINE V sigmoid(V x) { return all<V>(1.f) / (all<V>(1.f) + exponential(-x)); }
INLINE V tangent(V x0) {
  const V x = at_most(7.90531110763549805f, at_least(-7.90531110763549805f, x0)), s = x * x;
  V p = all<V>(-2.76076847742355e-16f);
  p = fma_of(p, s, all<V>(2.00018790482477e-13f));
  p = fma_of(p, s, all<V>(-8.60467152213735e-11f));
  p = fma_of(p, s, all<V>(5.12229709037114e-08f));
  p = fma_of(p, s, all<V>(1.48572235717979e-05f));
  p = fma_of(p, s, all<V>(6.37261928875436e-04f));
  p = fma_of(p, s, all<V>(4.89352455891786e-03f)) * x;
  V q = all<V>(1.19825839466702e-06f);
  q = fma_of(q, s, all<V>(1.18534705686654e-04f));
  q = fma_of(q, s, all<V>(2.26843463243900e-03f));
  q = fma_of(q, s, all<V>(4.89352518554385e-03f));
  const V ax = magnitude(x0), one = bits<V>((bits<U>(x0) & 0x80000000u) | 0x3f800000u);
  return where(ax > all<V>(9.f), one, where(ax < all<V>(4e-4f), x0, p / q));
}
INLINE V error_function(V a) {
  const V t = magnitude(a), s = a * a, tc = at_most(10.f, t), sc = at_most(100.f, s);
  V r = fma_of(all<V>(-1.72853470e-5f), tc, all<V>(3.83197126e-4f));
  r = fma_of(r, sc, fma_of(all<V>(-3.88396438e-3f), tc, all<V>(2.42546219e-2f)));
  r = fma_of(r, tc, all<V>(-1.06777877e-1f));
  r = fma_of(r, tc, all<V>(-6.34846687e-1f));
  r = fma_of(r, tc, all<V>(-1.28717512e-1f));
  r = all<V>(1.f) - exponential(fma_of(r, tc, -tc));
  r = bits<V>((bits<U>(r) & 0x7fffffffu) | (bits<U>(a) & 0x80000000u));
  V q = all<V>(-5.96761703e-4f);
  q = fma_of(q, s, all<V>(4.99119423e-3f));
  q = fma_of(q, s, all<V>(-2.67681349e-2f));
  q = fma_of(q, s, all<V>(1.12819925e-1f));
  q = fma_of(q, s, all<V>(-3.76125336e-1f));
  q = fma_of(q, s, all<V>(1.28379166e-1f));
  return where(t > all<V>(0.927734375f), r, fma_of(q, a, a));
}
// exp(-x²) times a polynomial in 1 / (1 + 0.33 |x|), and 2 minus that for negative numbers; right to 1e-7 (1 + x²).
INLINE V error_complement(V x) {
  const V s = magnitude(x), t = all<V>(1.f) / fma_of(all<V>(0.33f), s, all<V>(1.f));
  V p = all<V>(-0.135343248f);
  p = fma_of(p, t, all<V>(0.4602271f));
  p = fma_of(p, t, all<V>(-0.351132597f));
  p = fma_of(p, t, all<V>(0.408484256f));
  p = fma_of(p, t, all<V>(0.0472290442f));
  p = fma_of(p, t, all<V>(0.201221293f));
  p = fma_of(p, t, all<V>(0.182956371f));
  p = fma_of(p, t, all<V>(0.186357774f));
  const V tail = p * t * exponential(-(s * s));
  return where(x < all<V>(0.f), all<V>(2.f) - tail, tail);
}

// Uniform [0, 1) with 24 random bits from the counter (row, col) and a 32-bit key: Philox 2x32, 7 rounds.
INLINE V uniform(I seed, I row, I col) {
  U low = __builtin_convertvector((W)col, U), high = __builtin_convertvector((W)row, U), key = __builtin_convertvector((W)seed, U);
  for (int round = 0; round < 7; round++) {
    const W product = __builtin_convertvector(low, W) * 0xD256D193ull;
    low = __builtin_convertvector(product >> 32, U) ^ key ^ high;
    high = __builtin_convertvector(product, U);
    key += 0x9E3779B9u;
  }
  return __builtin_convertvector((B)(low >> 8), V) * all<V>(0x1p-24f);
}

// ---- reductions over n adjacent numbers, in an order of their own ----------------------------------------------------

INLINE V only(V x, int n, float fill) { return where(counted() < n, x, all<V>(fill)); }
template <class T> INLINE V sum_over(V total, const T* p, i64 n) {
  for (i64 j = 0; j < n; j += 16) total += get<V>(p + j, lanes(n - j));
  return total;
}
template <class T> INLINE V max_over(V top, const T* p, i64 n) {
  for (i64 j = 0; j < n; j += 16) top = maximum(top, only(get<V>(p + j, lanes(n - j)), lanes(n - j), -__builtin_inff()));
  return top;
}
template <class T> INLINE V squares_over(V total, const T* p, i64 n, float mean) {
  for (i64 j = 0; j < n; j += 16) {
    const V d = only(get<V>(p + j, lanes(n - j)) - all<V>(mean), lanes(n - j), 0.f);
    total += d * d;
  }
  return total;
}
template <class T> INLINE V exponentials_over(V total, const T* p, i64 n, float shift) {
  for (i64 j = 0; j < n; j += 16) total += only(exponential(get<V>(p + j, lanes(n - j)) - all<V>(shift)), lanes(n - j), 0.f);
  return total;
}
// A row of -inf has no finite maximum to subtract: its exponentials are 0, and so is their sum.
INLINE float finite_or_zero(float x) { return x - x == 0.f ? x : 0.f; }
INLINE V finite_or_zero(V x) { return where(x - x == all<V>(0.f), x, all<V>(0.f)); }

template <class T> static float group_sum(const T* p, i64 step, i64 rows, i64 cols) {
  V total = all<V>(0.f);
  for (i64 r = 0; r < rows; r++) total = sum_over(total, p + r * step, cols);
  return sum_of(total);
}
template <class T> static float group_max(const T* p, i64 step, i64 rows, i64 cols) {
  V top = all<V>(-__builtin_inff());
  for (i64 r = 0; r < rows; r++) top = max_over(top, p + r * step, cols);
  return max_of(top);
}

// ---- tile partials (fields, tiles, rows) of a reduction, finished for n rows from p on -------------------------------

template <class T> INLINE V finish_sum(const T* p, i64 tiles, i64 rows, int n) {
  V total = all<V>(0.f);
  for (i64 t = 0; t < tiles; t++) total += get<V>(p + t * rows, n);
  return total;
}
template <class T> INLINE V finish_max(const T* p, i64 tiles, i64 rows, int n) {
  V top = all<V>(-__builtin_inff());
  for (i64 t = 0; t < tiles; t++) top = maximum(top, get<V>(p + t * rows, n));
  return top;
}
template <class T> INLINE V finish_lse(const T* p, i64 tiles, i64 rows, int n) {
  const V shift = finite_or_zero(finish_max(p, tiles, rows, n));
  V total = all<V>(0.f);
  for (i64 t = 0; t < tiles; t++) {
    const V sum = get<V>(p + (tiles + t) * rows, n);
    total += where(sum > all<V>(0.f), sum * exponential(get<V>(p + t * rows, n) - shift), sum);
  }
  return shift + logarithm(total);
}
INLINE float count_of(i64 t, i64 width, i64 total) { return (float)(total - t * width < width ? total - t * width : width); }
template <class T> INLINE V finish_mean(const T* p, i64 tiles, i64 rows, int n, i64 width, i64 total) {
  V mean = all<V>(0.f);
  for (i64 t = 0; t < tiles; t++) mean += get<V>(p + t * rows, n) * all<V>(count_of(t, width, total));
  return mean / all<V>((float)total);
}
template <class T> INLINE V finish_var(const T* p, i64 tiles, i64 rows, int n, i64 width, i64 total) {
  const V mean = finish_mean(p, tiles, rows, n, width, total);
  V m2 = all<V>(0.f);
  for (i64 t = 0; t < tiles; t++) {
    const V d = get<V>(p + t * rows, n) - mean;
    m2 += get<V>(p + (tiles + t) * rows, n) + all<V>(count_of(t, width, total)) * d * d;
  }
  return m2 / all<V>((float)total);
}
