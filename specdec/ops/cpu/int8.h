// Products of a few rows with a weight that was rounded to 8 bits, for `rows.cpp`.
//
// A row is rounded to 16 bits of its own range, or to as many as let no sum overflow: of 512 inputs to 16, of 8192 to 12.
// Sums are those of integers, so a row's result has the same bits whatever rows are beside it, and on any processor.
// Nearly all of what is lost is lost in the weight.

#pragma once

#include "operators.h"

namespace int8 {

constexpr int64_t WIDTH = 64; // outputs that lie side by side in the weight
constexpr int64_t SCALES = 2; // pairs of inputs that give way to the scales of the outputs, behind the others
constexpr int64_t BLOCKS = WIDTH / LANES;
constexpr int64_t MANY = LANES == 16 ? 6 : 4; // rows that are multiplied at once
constexpr int64_t AHEAD = 8192; // bytes that are fetched before they are needed

using Sums = int32_t __attribute__((vector_size(LANES * 4)));
using Whole = decltype(WIDE(set1_epi32)(0)); // what intrinsics take them for

inline Sums widened(const int8_t* pairs) { // two inputs a lane, of 16 bits each
#ifdef __AVX512F__
  return (Sums)_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)pairs));
#else
  return (Sums)_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)pairs));
#endif
}

inline Sums plus_products(Sums sums, Sums weights, int32_t inputs) {
#ifdef __AVX512VNNI__
  return (Sums)_mm512_dpwssd_epi32((Whole)sums, (Whole)weights, _mm512_set1_epi32(inputs));
#else
  return sums + (Sums)WIDE(madd_epi16)((Whole)weights, WIDE(set1_epi32)(inputs));
#endif
}

constexpr int64_t SIDE = LANES == 16 ? BLOCKS : BLOCKS / 4; // blocks whose sums fit the registers for MANY rows

// R rows of pairs x [R,pairs] times SIDE blocks of the weight, scaled, into y [R,..].
template <int R>
void multiply(const int32_t* x, const float* scales, int64_t pairs, const int8_t* weight, const float* by, float* y,
              int64_t stride) {
  Sums sums[R][SIDE] = {};
  for (int64_t i = 0; i < pairs; i++, weight += 2 * WIDTH) {
    for (int64_t line = 0; line < 2 * SIDE * LANES; line += 64) __builtin_prefetch(weight + AHEAD + line);
#pragma GCC unroll 4
    for (int b = 0; b < SIDE; b++) {
      const Sums weights = widened(weight + b * 2 * LANES);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) sums[r][b] = plus_products(sums[r][b], weights, x[r * pairs + i]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int b = 0; b < SIDE; b++)
      store(y + r * stride + b * LANES, WIDE(cvtepi32_ps)((Whole)sums[r][b]) * load(by + b * LANES) * scales[r]);
}

// Rows x [count,in] of fp32, rounded by the thread that multiplies them; `in` is even.
class Rows {
  const int64_t count_, pairs_;
  std::vector<int32_t> pairs_of_; // [count,pairs]
  std::vector<float> scales_;

public:
  Rows(const float* x, int64_t count, int64_t in) : count_(count), pairs_(in / 2), pairs_of_(count * pairs_), scales_(count) {
    const float range = std::min<int64_t>(32767, ((int64_t(1) << 31) - 1) / (127 * in));
    int16_t* to = reinterpret_cast<int16_t*>(pairs_of_.data());
    for (int64_t r = 0; r < count; r++, x += in, to += in) {
      float largest = 0;
      for (int64_t i = 0; i < in; i++) largest = std::max(largest, std::abs(x[i]));
      const float up = largest > 0 ? range / largest : 0;
      for (int64_t i = 0; i < in; i++) to[i] = static_cast<int16_t>(std::nearbyint(x[i] * up));
      scales_[r] = largest / range;
    }
  }

  // Times the WIDTH outputs at `weight`, into y.
  void multiply(const int8_t* weight, float* y, int64_t stride) const {
    static constexpr auto PRODUCTS = by_number<MANY>([]<int R>() { return &int8::multiply<R>; });
    const float* by = reinterpret_cast<const float*>(weight + pairs_ * 2 * WIDTH);
    for (int64_t first = 0; first < count_; first += MANY) {
      const int64_t rows = std::min(MANY, count_ - first);
      const auto some = PRODUCTS[rows - 1];
      for (int64_t b = 0; b < BLOCKS; b += SIDE)
        some(pairs_of_.data() + first * pairs_, scales_.data() + first, pairs_, weight + b * 2 * LANES, by + b * LANES,
             y + first * stride + b * LANES, stride);
    }
  }
};

} // namespace int8
