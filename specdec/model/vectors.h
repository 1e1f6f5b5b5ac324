// Vectors of floats, for `rows.cpp`: 16 with AVX-512, 8 with AVX2 and FMA.

#pragma once

#include <immintrin.h>

#include <cstdint>

#ifdef __AVX512F__

constexpr int64_t LANES = 16;

using Floats = float __attribute__((vector_size(64)));
using Words = uint32_t __attribute__((vector_size(64)));

inline Floats load(const float* from) {
  return _mm512_loadu_ps(from);
}

inline Floats spread(float x) {
  return _mm512_set1_ps(x);
}

inline void store(float* to, Floats x) {
  _mm512_storeu_ps(to, x);
}

inline Floats larger(Floats x, Floats y) {
  return _mm512_max_ps(x, y);
}

inline float sum_of(Floats x) {
  return _mm512_reduce_add_ps(x);
}

inline float largest_of(Floats x) {
  return _mm512_reduce_max_ps(x);
}

inline Floats rounded(Floats x) {
  return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

// x times 2^power, of whole powers from -126 to 127.
inline Floats scaled(Floats x, Floats power) {
  return _mm512_scalef_ps(x, power);
}

// x where y is at least `least`, and 0 elsewhere.
inline Floats kept_from(Floats x, Floats y, float least) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(y, spread(least), _CMP_GE_OQ), x);
}

// Runs of RUN numbers of x and y in pairs: x gets the first of each of its pairs and of y's in turn, y the second ones.
template <int RUN>
inline void exchange(Floats& x, Floats& y) {
  const Floats a = x, b = y;
  if constexpr (RUN == 1) {
    x = _mm512_mask_moveldup_ps(a, 0xAAAA, b);
    y = _mm512_mask_movehdup_ps(b, 0x5555, a);
  } else if constexpr (RUN == 2) {
    x = (Floats)_mm512_unpacklo_pd((__m512d)a, (__m512d)b);
    y = (Floats)_mm512_unpackhi_pd((__m512d)a, (__m512d)b);
  } else if constexpr (RUN == 4) {
    x = _mm512_mask_shuffle_f32x4(a, 0xF0F0, b, b, _MM_SHUFFLE(2, 0, 0, 0));
    y = _mm512_mask_shuffle_f32x4(b, 0x0F0F, a, a, _MM_SHUFFLE(0, 3, 0, 1));
  } else {
    x = _mm512_shuffle_f32x4(a, b, _MM_SHUFFLE(1, 0, 1, 0));
    y = _mm512_shuffle_f32x4(a, b, _MM_SHUFFLE(3, 2, 3, 2));
  }
}

#else

constexpr int64_t LANES = 8;

using Floats = float __attribute__((vector_size(32)));
using Words = uint32_t __attribute__((vector_size(32)));

inline Floats load(const float* from) {
  return _mm256_loadu_ps(from);
}

inline Floats spread(float x) {
  return _mm256_set1_ps(x);
}

inline void store(float* to, Floats x) {
  _mm256_storeu_ps(to, x);
}

inline Floats larger(Floats x, Floats y) {
  return _mm256_max_ps(x, y);
}

inline float sum_of(Floats x) {
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

inline float largest_of(Floats x) {
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

inline Floats rounded(Floats x) {
  return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

inline Floats scaled(Floats x, Floats power) {
  const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(power), _mm256_set1_epi32(127));
  return x * _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
}

inline Floats kept_from(Floats x, Floats y, float least) {
  return _mm256_and_ps(_mm256_cmp_ps(y, spread(least), _CMP_GE_OQ), x);
}

template <int RUN>
inline void exchange(Floats& x, Floats& y) {
  const Floats a = x, b = y;
  if constexpr (RUN == 1) {
    x = _mm256_blend_ps(a, _mm256_moveldup_ps(b), 0xAA);
    y = _mm256_blend_ps(_mm256_movehdup_ps(a), b, 0xAA);
  } else if constexpr (RUN == 2) {
    x = (Floats)_mm256_unpacklo_pd((__m256d)a, (__m256d)b);
    y = (Floats)_mm256_unpackhi_pd((__m256d)a, (__m256d)b);
  } else {
    x = _mm256_permute2f128_ps(a, b, 0x20);
    y = _mm256_permute2f128_ps(a, b, 0x31);
  }
}

#endif

// Row i, number j becomes row j, number i.
template <int RUN = 1>
inline void transpose(Floats (&rows)[LANES]) {
#pragma GCC unroll 16
  for (int64_t i = 0; i < LANES; i++)
    if (!(i & RUN)) exchange<RUN>(rows[i], rows[i + RUN]);
  if constexpr (2 * RUN < LANES) transpose<2 * RUN>(rows);
}

// e^x to 2 units in the last place, for x of at most 88; 0 below -87. The polynomial is that of Cephes' expf.
inline Floats exponential(Floats x) {
  const Floats kept = larger(x, spread(-87.0f));
  const Floats whole = rounded(kept * 1.44269504f);
  const Floats rest = kept - whole * 0.693359375f + whole * 2.12194440e-4f;
  Floats sum = rest * 1.9875691500e-4f + 1.3981999507e-3f;
  sum = sum * rest + 8.3334519073e-3f;
  sum = sum * rest + 4.1665795894e-2f;
  sum = sum * rest + 1.6666665459e-1f;
  sum = sum * rest + 5.0000001201e-1f;
  sum = sum * rest * rest + rest + 1.0f;
  return kept_from(scaled(sum, whole), x, -87.0f);
}
