// Products of a few rows with a weight in bf16, in fp32, which read the weight once; the gated MLP, made of two
// of them; attention of a few positions (attention.h), norms and rotations (norm_rope.h). `native.py` compiles this file
// for the processor at hand. `cpu_linear.py`, `cpu_attention.py` and `layers.py` say when it is used.
//
// A round multiplies 1 to 60 rows with every weight. Of one row the time is that of reading the weight, and of several
// it should be the same, as long as there is less arithmetic than reading. So a tile of outputs keeps all of its sums in
// registers, for all rows, while the weight streams by. A bf16 value is the upper half of an fp32 one: a shift and a mask
// widen two of them.
//
// A sum is taken over the inputs one after the other, whatever the number of rows. So a row's result has the same bits
// whatever rows are beside it.

#include "attention.h"
#include "norm_rope.h"
#include "vectors.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>
#include <vector>

namespace {

using at::Tensor;

constexpr int64_t UNIT = 64; // outputs that are divided among threads together
constexpr int64_t GROUP = LANES == 16 ? 64 : 16; // outputs that lie side by side in the packed weight
constexpr int64_t BLOCKS = UNIT / LANES, BESIDE = GROUP / LANES; // vectors of outputs of a unit, and of a group
constexpr int64_t MANY = LANES == 16 ? 8 : 6; // rows that are multiplied at once
constexpr int64_t PART = 6; // of more rows
constexpr int64_t AHEAD = 2048; // bytes that are fetched before they are needed
constexpr int64_t SHARE = 1 << 16; // bytes of weight that are worth a thread

using Pairs = Words; // of an input and, in the upper half, the next, for as many outputs as a vector holds

// Blocks of outputs whose sums fit the registers for so many rows: there are 32 with AVX-512, and else 16. Below 8 sums a
// product waits for the one before.
constexpr int64_t width_for(int64_t rows) {
  if (LANES == 16) return rows <= 6 ? 4 : 2;
  return rows == 1 ? 8 : rows == 2 ? 4 : 2;
}

// Block b of a unit, whose groups lie `apart`.
inline const Pairs* block(const Pairs* unit, int64_t apart, int64_t b) {
  return unit + b / BESIDE * apart + b % BESIDE;
}

// Every row's x[at], x [R,size], times the weights of B blocks, onto the sums. A number is spread over a vector and used
// up before the next one, so that it holds one register only.
template <int R, int B>
inline void add_products(const float* x, int64_t size, int64_t at, const Floats (&weights)[B], Floats (&sums)[R][B]) {
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) {
    const Floats input = spread(x[r * size + at]);
#pragma GCC unroll 8
    for (int b = 0; b < B; b++) sums[r][b] += weights[b] * input;
  }
}

// R rows of x [R,size] times the blocks from `weight` on, as many as fit, into y [R,..].
template <int R>
void multiply(const float* x, int64_t size, const Pairs* weight, int64_t apart, float* y, int64_t stride) {
  constexpr int B = width_for(R);
  Floats sums[R][B] = {}, weights[B];
  for (int64_t i = 0; i < size; i += 2, weight += BESIDE) {
#pragma GCC unroll 8
    for (int b = 0; b < B; b++) {
      const Pairs* pairs = block(weight, apart, b);
      if (b * LANES % 16 == 0) __builtin_prefetch(reinterpret_cast<const char*>(pairs) + AHEAD); // a line each
      weights[b] = reinterpret_cast<Floats>(*pairs << 16);
    }
    add_products(x, size, i, weights, sums);
#pragma GCC unroll 8
    for (int b = 0; b < B; b++) weights[b] = reinterpret_cast<Floats>(*block(weight, apart, b) & 0xffff0000u);
    add_products(x, size, i + 1, weights, sums);
  }
  for (int r = 0; r < R; r++) std::memcpy(y + r * stride, sums[r], sizeof(sums[r]));
}

using Product = void (*)(const float*, int64_t, const Pairs*, int64_t, float*, int64_t);

template <size_t... R>
constexpr std::array<Product, MANY> products(std::index_sequence<R...>) {
  return {multiply<R + 1>...};
}

constexpr auto PRODUCTS = products(std::make_index_sequence<MANY>());

// x [rows,in] times the unit of outputs at `weight`, into y. More rows than the registers hold are multiplied in parts,
// of which all but the first find the weight in the cache.
void multiply_rows(const float* x, int64_t rows, int64_t in, const Pairs* weight, float* y, int64_t stride) {
  if (rows == 0) return;
  const int64_t most = rows <= MANY ? MANY : PART, parts = (rows + most - 1) / most;
  const int64_t width = width_for((rows + parts - 1) / parts), apart = in / 2 * BESIDE;
  for (int64_t b = 0; b < BLOCKS; b += width)
    for (int64_t part = 0; part < parts; part++) {
      const int64_t first = part * rows / parts, count = (part + 1) * rows / parts - first;
      PRODUCTS[count - 1](x + first * in, in, block(weight, apart, b), apart, y + first * stride + b * LANES, stride);
    }
}

// The units of a packed weight [groups, in / 2, GROUP, 2], and how many of them are worth a thread.
struct Packed {
  const Pairs* at;
  int64_t units, in, grain;

  explicit Packed(const Tensor& weight)
      : at(static_cast<const Pairs*>(weight.const_data_ptr())), units(weight.size(0) * GROUP / UNIT),
        in(weight.size(1) * 2), grain(std::max<int64_t>(1, SHARE / (in * UNIT * 2))) {}
  const Pairs* unit(int64_t u) const {
    return at + u * (in / 2) * BLOCKS;
  }
};

// x [rows,in] times a weight of `size` outputs -> y [rows,size].
void multiply_all(const float* x, int64_t rows, const Packed& weight, int64_t size, float* y) {
  at::parallel_for(0, weight.units, weight.grain, [&](int64_t first, int64_t last) {
    std::vector<float> aside; // for the last unit, which may go beyond the outputs
    for (int64_t u = first; u < last; u++) {
      const int64_t width = std::min(UNIT, size - u * UNIT);
      float* place = y + u * UNIT;
      if (width == UNIT) {
        multiply_rows(x, rows, weight.in, weight.unit(u), place, size);
        continue;
      }
      aside.resize(rows * UNIT);
      multiply_rows(x, rows, weight.in, weight.unit(u), aside.data(), UNIT);
      for (int64_t r = 0; r < rows; r++) std::copy_n(aside.data() + r * UNIT, width, place + r * size);
    }
  });
}

void check(const Tensor& x, const Tensor& weight, int64_t size) {
  const bool whole = weight.size(0) * GROUP % UNIT == 0 && weight.size(2) == GROUP;
  TORCH_CHECK(whole && weight.size(1) * 2 == x.size(1) && size <= weight.size(0) * GROUP,
              "the weight was packed for other sizes");
}

// How many outputs lie side by side in a packed weight.
int64_t group() {
  return GROUP;
}

// x [R,in] fp32, weight [groups, in / 2, GROUP, 2] bf16 as `cpu_linear` packs it, `size` outputs -> [R,size].
Tensor bf16_linear(const Tensor& x, const Tensor& weight, int64_t size) {
  check(x, weight, size);
  const Tensor inputs = x.contiguous();
  Tensor out = at::empty({x.size(0), size}, x.options());
  multiply_all(inputs.const_data_ptr<float>(), x.size(0), Packed(weight), size, out.mutable_data_ptr<float>());
  return out;
}

// down(silu(gate(x)) * up(x)) of x [R,H] -> [R,size]. The weights are packed as for `bf16_linear`: gate_up the rows of
// gate and then as many of up, a multiple of 64.
Tensor bf16_mlp(const Tensor& x, const Tensor& gate_up, const Tensor& down, int64_t size) {
  const int64_t rows = x.size(0), inner = down.size(1) * 2, units = inner / UNIT;
  check(x, gate_up, 2 * inner);
  TORCH_CHECK(inner % UNIT == 0 && gate_up.size(0) * GROUP == 2 * inner && size <= down.size(0) * GROUP,
              "the weights were packed for other sizes");
  const Tensor inputs = x.contiguous();
  const float* from = inputs.const_data_ptr<float>();
  Tensor between = at::empty({rows, inner}, x.options()), out = at::empty({rows, size}, x.options());
  float* acts = between.mutable_data_ptr<float>();
  const Packed weight(gate_up);
  at::parallel_for(0, units, (weight.grain + 1) / 2, [&](int64_t first, int64_t last) {
    std::vector<float> gates(rows * UNIT);
    for (int64_t u = first; u < last; u++) {
      float* place = acts + u * UNIT;
      multiply_rows(from, rows, weight.in, weight.unit(u), gates.data(), UNIT);
      multiply_rows(from, rows, weight.in, weight.unit(units + u), place, inner);
      for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < UNIT; i += LANES) {
          const Floats gate = load(gates.data() + r * UNIT + i);
          float* at = place + r * inner + i;
          store(at, gate / (1.0f + exponential(-gate)) * load(at));
        }
    }
  });
  multiply_all(acts, rows, Packed(down), size, out.mutable_data_ptr<float>());
  return out;
}

} // namespace

TORCH_LIBRARY(specdec_rows, m) {
  m.def("group() -> int", &group);
  m.def("bf16_linear(Tensor x, Tensor weight, int size) -> Tensor");
  m.def("bf16_mlp(Tensor x, Tensor gate_up, Tensor down, int size) -> Tensor");
  m.def(
      "tree_attention(Tensor q, Tensor keys, Tensor values, Tensor lens, Tensor? ancestors, int nodes, float scale)"
      " -> Tensor");
  m.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor");
  m.def("add_norm(Tensor x, Tensor y, Tensor weight, float eps) -> (Tensor, Tensor)");
  m.def("rotate(Tensor x, Tensor cos, Tensor sin) -> Tensor");
}

TORCH_LIBRARY_IMPL(specdec_rows, CPU, m) {
  m.impl("bf16_linear", &bf16_linear);
  m.impl("bf16_mlp", &bf16_mlp);
  m.impl("tree_attention", &attention::tree_attention);
  m.impl("rms_norm", &norm_rope::rms_norm);
  m.impl("add_norm", &norm_rope::add_norm);
  m.impl("rotate", &norm_rope::rotate);
}
