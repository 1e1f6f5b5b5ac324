// Products of rows with a weight in bf16 by AMX, the matrix unit of some processors, for `rows.cpp`.
//
// AMX multiplies bf16 with bf16 and adds in fp32. An fp32 number is the sum of three of bf16, without a rest. So a row
// is split into three, each is multiplied, and the three sums are added: the product is as exact as one in fp32. A tile
// holds 16 such parts, so that one serves 5 rows, and three serve 16, while the weight is read once. Who asks for less
// exact products has rows split into two parts or one, and three tiles serve 24 or 48 rows.
//
// A number of a sum comes from its own row and column alone, and inputs are added in the same order for any number of
// rows. So here too a row's result has the same bits whatever rows are beside it. AMX takes numbers below 1.2e-38 for 0.

#pragma once

#include "vectors.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
#define SPECDEC_AMX

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <utility>

namespace amx {

constexpr int64_t LINE = 64; // bytes of a row of a tile

// What LDTILECFG reads: the size of every tile.
struct alignas(LINE) Shape {
  uint8_t palette = 1, start = 0, unused[14] = {};
  uint16_t bytes[16] = {}; // of a row
  uint8_t rows[16] = {};
};

// Whether this process may use the tiles. Linux gives them on demand, to all threads.
inline bool allowed() {
  constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
  static const bool yes = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
  return yes;
}

template <int Tile>
inline void load_tile(const void* from) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(LINE), "i"(Tile) : "memory");
}

template <int Tile>
inline void store_tile(void* to) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(LINE), "i"(Tile) : "memory");
}

template <int Tile>
inline void clear_tile() { asm volatile("tilezero %%tmm%c0" ::"i"(Tile)); }

template <int Sum, int Rows, int Weights>
inline void add_product() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sum), "i"(Rows), "i"(Weights));
}

constexpr int64_t HEIGHT = 16; // rows of a tile
constexpr int64_t WIDTH = 16; // outputs of a tile, which lie side by side in the weight
constexpr int64_t INPUTS = 32; // that are multiplied by a pair of tiles
constexpr int64_t TILES = 3; // for rows that are multiplied at once
constexpr int64_t AHEAD = 4096; // bytes that are fetched before they are needed

template <int... I, class Body>
inline void each(std::integer_sequence<int, I...>, Body body) { (body(std::integral_constant<int, I>()), ...); }

// body(0), body(1), ... of N numbers that are known when this is compiled, as those of tiles must be.
template <int N, class Body>
inline void each(Body body) { each(std::make_integer_sequence<int, N>(), body); }

// Rows x [count,in] of fp32, split by the thread that multiplies them: what another has written would first have to come
// from its cache. `in` is a multiple of INPUTS.
class Rows {
  struct alignas(LINE) Line {
    __m512bh inputs;
  };

  const int64_t parts_; // numbers of bf16 that an fp32 one is split into
  const int64_t count_, blocks_; // rows, and blocks of INPUTS
  const int64_t panels_, rows_; // panels of rows that are multiplied at once, and rows of each; the last may have fewer
  const int64_t tiles_, height_; // tiles of a panel, and rows of each: the first for sums, as many for x, one for weights
  Line* lines_; // [panels, blocks, tiles * height]: the parts of a row follow each other

  static int64_t ratio(int64_t x, int64_t y) { return y ? (x + y - 1) / y : 0; } // rounded upwards

  // Room of this thread, for the rows that it multiplies next.
  static Line* room(int64_t lines) {
    static thread_local std::unique_ptr<Line[]> room;
    static thread_local int64_t size = 0;
    if (lines > size) room.reset(new Line[size = lines]);
    return room.get();
  }

  void split(const float* x, Line* line) const {
    for (int64_t block = 0; block < blocks_; block++, x += INPUTS, line += tiles_ * height_) {
      __m512 low = _mm512_loadu_ps(x), high = _mm512_loadu_ps(x + 16);
      for (int64_t part = 0; part < parts_; part++) {
        line[part].inputs = _mm512_cvtne2ps_pbh(high, low);
        const auto words = (__m512i)line[part].inputs;
        low -= widened(_mm512_castsi512_si256(words));
        high -= widened(_mm512_extracti64x4_epi64(words, 1));
      }
    }
  }

  static __m512 widened(__m256i words) { return (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16); }

  // A tile of every block times that of weights, into the WIDTH outputs at y of so many rows.
  template <int N>
  void multiply_panel(const Line* lines, const char* weight, int64_t rows, float* y, int64_t stride) const {
    each<N>([](auto t) { clear_tile<t>(); });
    for (int64_t block = 0; block < blocks_; block++, lines += N * height_, weight += HEIGHT * LINE) {
      for (int64_t line = 0; line < HEIGHT; line++) __builtin_prefetch(weight + AHEAD + line * LINE);
      load_tile<2 * N>(weight);
      each<N>([&](auto t) {
        load_tile<N + t>(lines + t * height_);
        add_product<t, N + t, 2 * N>();
      });
    }
    alignas(LINE) float sums[TILES * HEIGHT][WIDTH];
    each<N>([&](auto t) { store_tile<t>(sums[t * height_]); });
    for (int64_t r = 0; r < rows; r++) {
      const float(*of)[WIDTH] = sums + r * parts_;
      Floats sum = load(of[parts_ - 1]); // of the smallest parts
      for (int64_t part = parts_ - 2; part >= 0; part--) sum = load(of[part]) + sum;
      store(y + r * stride, sum);
    }
  }

  void shape_tiles() const {
    Shape shape;
    for (int64_t tile = 0; tile <= 2 * tiles_; tile++) {
      shape.bytes[tile] = LINE;
      shape.rows[tile] = tile < 2 * tiles_ ? height_ : HEIGHT;
    }
    asm volatile("ldtilecfg %0" ::"m"(shape)); // GCC's intrinsic says that it reads 8 bytes of it
  }

public:
  Rows(const float* x, int64_t count, int64_t in, int64_t parts)
      : parts_(parts), count_(count), blocks_(in / INPUTS), panels_(ratio(count, TILES * HEIGHT / parts)),
        rows_(ratio(count, panels_)), tiles_(ratio(rows_ * parts, HEIGHT)), height_(ratio(rows_ * parts, tiles_)),
        lines_(room(panels_ * blocks_ * tiles_ * height_)) {
    for (int64_t r = 0; r < count; r++)
      split(x + r * in, lines_ + r / rows_ * blocks_ * tiles_ * height_ + r % rows_ * parts);
    if (count) shape_tiles();
  }
  Rows(const Rows&) = delete;
  ~Rows() { asm volatile("tilerelease"); }

  // Times `outputs` at `weight`, a multiple of WIDTH, into y.
  void multiply(const void* weight, int64_t outputs, float* y, int64_t stride) const {
    static constexpr auto PANELS = by_number<TILES>([]<int N>() { return &Rows::multiply_panel<N>; });
    for (int64_t p = 0; p < panels_; p++)
      for (int64_t at = 0; at < outputs; at += WIDTH)
        (this->*PANELS[tiles_ - 1])(lines_ + p * blocks_ * tiles_ * height_,
                                    static_cast<const char*>(weight) + at / WIDTH * blocks_ * HEIGHT * LINE,
                                    std::min(rows_, count_ - p * rows_), y + p * rows_ * stride + at, stride);
  }
};

} // namespace amx

#endif
