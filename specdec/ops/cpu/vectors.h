// Vectors of floats, for `rows.cpp`: 16 with AVX-512, 8 with AVX2 and FMA.

#pragma once

#include <immintrin.h>

#include <array>
#include <cstdint>
#include <utility>

#ifdef __AVX512F__
#define WIDE(name) _mm512_##name // an intrinsic over a whole vector
constexpr int64_t LANES = 16;
using Doubles = __m512d;
#else
#define WIDE(name) _mm256_##name
constexpr int64_t LANES = 8;
using Doubles = __m256d;
#endif

using Floats = float __attribute__((vector_size(LANES * 4)));
using Words = uint32_t __attribute__((vector_size(LANES * 4)));

inline Floats load(const float* from) { return WIDE(loadu_ps)(from); }
inline Floats spread(float x) { return WIDE(set1_ps)(x); }
inline void store(float* to, Floats x) { WIDE(storeu_ps)(to, x); }
inline Floats larger(Floats x, Floats y) { return WIDE(max_ps)(x, y); }
inline Floats smaller(Floats x, Floats y) { return WIDE(min_ps)(x, y); }

// Four vectors of quads: number j of quad i of each becomes number i of quad j, for the quads at one place.
inline void turn_quads(Floats (&x)[4]) {
  const Doubles a = (Doubles)WIDE(unpacklo_ps)(x[0], x[1]), b = (Doubles)WIDE(unpackhi_ps)(x[0], x[1]);
  const Doubles c = (Doubles)WIDE(unpacklo_ps)(x[2], x[3]), d = (Doubles)WIDE(unpackhi_ps)(x[2], x[3]);
  x[0] = (Floats)WIDE(unpacklo_pd)(a, c), x[1] = (Floats)WIDE(unpackhi_pd)(a, c);
  x[2] = (Floats)WIDE(unpacklo_pd)(b, d), x[3] = (Floats)WIDE(unpackhi_pd)(b, d);
}

#ifdef __AVX512F__

inline float sum_of(Floats x) { return _mm512_reduce_add_ps(x); }
inline float largest_of(Floats x) { return _mm512_reduce_max_ps(x); }
inline Floats rounded(Floats x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

// x times 2^power, of whole powers from -126 to 127.
inline Floats scaled(Floats x, Floats power) { return _mm512_scalef_ps(x, power); }

// x where y is at least `least`, and 0 elsewhere.
inline Floats kept_from(Floats x, Floats y, float least) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(y, spread(least), _CMP_GE_OQ), x);
}

// Four numbers each from at(0), at(1), .. side by side.
template <class At>
inline Floats quads(At at) {
  const Floats first = _mm512_castps128_ps512(_mm_loadu_ps(at(0)));
  const Floats second = _mm512_mask_broadcast_f32x4(first, 0x00F0, _mm_loadu_ps(at(1)));
  const Floats third = _mm512_mask_broadcast_f32x4(second, 0x0F00, _mm_loadu_ps(at(2)));
  return _mm512_mask_broadcast_f32x4(third, 0xF000, _mm_loadu_ps(at(3)));
}

#else

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

inline Floats rounded(Floats x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

inline Floats scaled(Floats x, Floats power) {
  const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(power), _mm256_set1_epi32(127));
  return x * _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
}

inline Floats kept_from(Floats x, Floats y, float least) {
  return _mm256_and_ps(_mm256_cmp_ps(y, spread(least), _CMP_GE_OQ), x);
}

template <class At>
inline Floats quads(At at) {
  return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(at(0))), _mm_loadu_ps(at(1)), 1);
}

#endif

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

// The results of make<1>(), .., make<N>(): functions by a number that must be known when they are compiled.
template <size_t N, class Make>
constexpr auto by_number(Make make) {
  return [&]<size_t... I>(std::index_sequence<I...>) {
    return std::array{make.template operator()<int(I) + 1>()...};
  }(std::make_index_sequence<N>());
}
