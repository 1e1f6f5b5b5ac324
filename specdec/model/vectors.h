// Vectors of 16 floats, for `rows.cpp`.

#pragma once

#include <immintrin.h>

#include <cstdint>

constexpr int64_t LANES = 16;

using Floats = float __attribute__((vector_size(64)));
using Words = uint32_t __attribute__((vector_size(64)));

inline Floats load(const float* from) {
  return _mm512_loadu_ps(from);
}

inline void store(float* to, Floats x) {
  _mm512_storeu_ps(to, x);
}

// e^x to 2 units in the last place, for x of at most 88; 0 below -87. The polynomial is that of Cephes' expf.
inline Floats exponential(Floats x) {
  const Floats kept = _mm512_max_ps(x, _mm512_set1_ps(-87.0f));
  const Floats whole = _mm512_roundscale_ps(kept * 1.44269504f, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const Floats rest = kept - whole * 0.693359375f + whole * 2.12194440e-4f;
  Floats sum = rest * 1.9875691500e-4f + 1.3981999507e-3f;
  sum = sum * rest + 8.3334519073e-3f;
  sum = sum * rest + 4.1665795894e-2f;
  sum = sum * rest + 1.6666665459e-1f;
  sum = sum * rest + 5.0000001201e-1f;
  sum = sum * rest * rest + rest + 1.0f;
  const Floats result = _mm512_scalef_ps(sum, whole);
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.0f), _CMP_GE_OQ), result);
}
