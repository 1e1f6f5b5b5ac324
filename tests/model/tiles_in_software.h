// The functions of specdec/model/tiles.h for processors without AMX: included before `rows.cpp` they take its place, and
// `amx.h` runs everywhere. A product is made in the order that Intel describes (TDPBF16PS), and tiles of shapes that the
// processor would refuse end the process.

#define SPECDEC_TILES_IN_SOFTWARE

#include "../../specdec/model/tiles.h"

#include <immintrin.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace amx {

struct alignas(LINE) Tile {
  float sums[16][16] = {}; // or, as bits, pairs of bf16
  int bytes = 0, rows = 0;
};

inline thread_local Tile tiles[8];

inline Tile& tile(int which) {
  if (which < 0 || which > 7 || tiles[which].rows == 0) {
    std::fprintf(stderr, "tile %d is used, and has no shape\n", which);
    std::abort();
  }
  return tiles[which];
}

inline bool allowed() {
  return true;
}

inline void release() {
  for (Tile& tile : tiles) tile = {};
}

inline void configure(const Shape& shape) {
  release();
  for (int t = 0; t < 8; t++) tiles[t].bytes = shape.bytes[t], tiles[t].rows = shape.rows[t];
}

template <int Which>
inline void load_tile(const void* from) {
  Tile& into = tile(Which);
  for (int r = 0; r < into.rows; r++) std::memcpy(into.sums[r], static_cast<const char*>(from) + r * LINE, into.bytes);
}

template <int Which>
inline void store_tile(void* to) {
  const Tile& from = tile(Which);
  for (int r = 0; r < from.rows; r++) std::memcpy(static_cast<char*>(to) + r * LINE, from.sums[r], from.bytes);
}

template <int Which>
inline void clear_tile() {
  std::memset(tile(Which).sums, 0, sizeof tile(Which).sums);
}

// The two numbers of bf16 that lie side by side there, in fp32.
inline void widen(const float* pair, float& even, float& odd) {
  uint32_t bits;
  std::memcpy(&bits, pair, 4);
  const uint32_t low = bits << 16, high = bits & 0xFFFF0000u;
  std::memcpy(&even, &low, 4);
  std::memcpy(&odd, &high, 4);
}

// Of even and odd inputs there is a sum each, and they are added last. What is subnormal counts as zero.
template <int Sum, int Rows, int Weights>
inline void add_product() {
  Tile &sum = tile(Sum), &rows = tile(Rows), &weights = tile(Weights);
  if (rows.rows != sum.rows || weights.bytes != sum.bytes || rows.bytes != 4 * weights.rows) {
    std::fprintf(stderr, "tiles %d, %d and %d do not fit each other\n", Sum, Rows, Weights);
    std::abort();
  }
  const unsigned before = _mm_getcsr();
  _mm_setcsr(before | _MM_FLUSH_ZERO_ON | _MM_DENORMALS_ZERO_ON);
  for (int m = 0; m < sum.rows; m++) {
    float even[16] = {}, odd[16] = {};
    for (int k = 0; k < weights.rows; k++) {
      float x[2], w[2];
      widen(&rows.sums[m][k], x[0], x[1]);
      for (int n = 0; n < sum.bytes / 4; n++) {
        widen(&weights.sums[k][n], w[0], w[1]);
        even[n] = std::fma(x[0], w[0], even[n]);
        odd[n] = std::fma(x[1], w[1], odd[n]);
      }
    }
    for (int n = 0; n < sum.bytes / 4; n++) sum.sums[m][n] += even[n] + odd[n];
  }
  _mm_setcsr(before);
}

} // namespace amx
