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

constexpr int64_t BLOCKS = 4; // vectors of outputs that lie side by side in the packed weight
constexpr int64_t GROUP = LANES * BLOCKS;
constexpr int64_t FEW = 6, MANY = 8; // rows whose sums of 4 and of 2 blocks fit the 32 registers
constexpr int64_t AHEAD = 2048; // bytes that are fetched before they are needed
constexpr int64_t SHARE = 1 << 16; // bytes of weight that are worth a thread

using Pairs = Words; // of an input and, in the upper half, the next, for 16 outputs

// R rows of x [R,size] times B of the blocks at `weight`, into y [R,..].
template <int R, int B>
void multiply(const float* x, int64_t size, const Pairs* weight, float* y, int64_t stride) {
  Floats sums[R][B] = {};
  for (int64_t i = 0; i < size; i += 2, weight += BLOCKS) {
#pragma GCC unroll 4
    for (int b = 0; b < B; b++) {
      __builtin_prefetch(reinterpret_cast<const char*>(weight + b) + AHEAD);
      const Pairs pairs = weight[b];
      const Floats even = reinterpret_cast<Floats>(pairs << 16), odd = reinterpret_cast<Floats>(pairs & 0xffff0000u);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) sums[r][b] += even * x[r * size + i];
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) sums[r][b] += odd * x[r * size + i + 1];
    }
  }
  for (int r = 0; r < R; r++) std::memcpy(y + r * stride, sums[r], sizeof(sums[r]));
}

template <int R>
void multiply_group(const float* x, int64_t size, const Pairs* weight, float* y, int64_t stride) {
  if constexpr (R <= FEW) {
    multiply<R, BLOCKS>(x, size, weight, y, stride);
  } else {
    multiply<R, BLOCKS / 2>(x, size, weight, y, stride);
    multiply<R, BLOCKS / 2>(x, size, weight + BLOCKS / 2, y + GROUP / 2, stride);
  }
}

using Product = void (*)(const float*, int64_t, const Pairs*, float*, int64_t);

template <size_t... R>
constexpr std::array<Product, MANY> products(std::index_sequence<R...>) {
  return {multiply_group<R + 1>...};
}

constexpr auto PRODUCTS = products(std::make_index_sequence<MANY>());

// x [rows,in] times the group of outputs at `weight`, into y. More rows than the registers hold are multiplied in parts,
// of which all but the first find the weight in the cache.
void multiply_rows(const float* x, int64_t rows, int64_t in, const Pairs* weight, float* y, int64_t stride) {
  const int64_t most = rows <= MANY ? MANY : FEW;
  for (int64_t parts = (rows + most - 1) / most; parts; parts--) {
    const int64_t count = (rows + parts - 1) / parts;
    PRODUCTS[count - 1](x, in, weight, y, stride);
    rows -= count, x += count * in, y += count * stride;
  }
}

// The groups of a packed weight [groups, in / 2, 64, 2], and how many of them are worth a thread.
struct Packed {
  const Pairs* at;
  int64_t groups, in, grain;

  explicit Packed(const Tensor& weight)
      : at(static_cast<const Pairs*>(weight.const_data_ptr())), groups(weight.size(0)), in(weight.size(1) * 2),
        grain(std::max<int64_t>(1, SHARE / (in * GROUP * 2))) {}
  const Pairs* group(int64_t g) const {
    return at + g * (in / 2) * BLOCKS;
  }
};

// x [rows,in] times a weight of `size` outputs -> y [rows,size].
void multiply_all(const float* x, int64_t rows, const Packed& weight, int64_t size, float* y) {
  at::parallel_for(0, weight.groups, weight.grain, [&](int64_t first, int64_t last) {
    std::vector<float> aside; // for the last group, which may go beyond the outputs
    for (int64_t g = first; g < last; g++) {
      const int64_t width = std::min(GROUP, size - g * GROUP);
      float* place = y + g * GROUP;
      if (width == GROUP) {
        multiply_rows(x, rows, weight.in, weight.group(g), place, size);
        continue;
      }
      aside.resize(rows * GROUP);
      multiply_rows(x, rows, weight.in, weight.group(g), aside.data(), GROUP);
      for (int64_t r = 0; r < rows; r++) std::copy_n(aside.data() + r * GROUP, width, place + r * size);
    }
  });
}

void check(const Tensor& x, const Tensor& weight, int64_t size) {
  TORCH_CHECK(weight.size(1) * 2 == x.size(1) && size <= weight.size(0) * GROUP, "the weight was packed for other sizes");
}

// x [R,in] fp32, weight [groups, in / 2, 64, 2] bf16 as `cpu_linear` packs it, `size` outputs -> [R,size].
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
  const int64_t rows = x.size(0), inner = down.size(1) * 2, groups = gate_up.size(0) / 2;
  check(x, gate_up, 2 * inner);
  TORCH_CHECK(inner == groups * GROUP && size <= down.size(0) * GROUP, "the weights were packed for other sizes");
  const Tensor inputs = x.contiguous();
  const float* from = inputs.const_data_ptr<float>();
  Tensor between = at::empty({rows, inner}, x.options()), out = at::empty({rows, size}, x.options());
  float* acts = between.mutable_data_ptr<float>();
  const Packed weight(gate_up);
  at::parallel_for(0, groups, (weight.grain + 1) / 2, [&](int64_t first, int64_t last) {
    std::vector<float> gates(rows * GROUP);
    for (int64_t g = first; g < last; g++) {
      float* place = acts + g * GROUP;
      multiply_rows(from, rows, weight.in, weight.group(g), gates.data(), GROUP);
      multiply_rows(from, rows, weight.in, weight.group(groups + g), place, inner);
      for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < GROUP; i += LANES) {
          const Floats gate = load(gates.data() + r * GROUP + i);
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
