// Products of a few rows with a weight in bf16, in fp32, which read the weight once. `native.py` compiles this file for
// the processor at hand, and `cpu_linear.py` says when it is used.
//
// A round multiplies 1 to 60 rows with every weight. Of one row the time is that of reading the weight, and of several
// it should be the same, as long as there is less arithmetic than reading. So a tile of outputs keeps all of its sums in
// registers, for all rows, while the weight streams by. A bf16 value is the upper half of an fp32 one: a shift and a mask
// widen two of them.
//
// A sum is taken over the inputs one after the other, whatever the number of rows. So a row's result has the same bits
// whatever rows are beside it.

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

namespace {

using at::Tensor;

constexpr int64_t LANES = 16; // of a vector
constexpr int64_t BLOCKS = 4; // vectors of outputs that lie side by side in the packed weight
constexpr int64_t GROUP = LANES * BLOCKS;
constexpr int64_t FEW = 6, MANY = 8; // rows whose sums of 4 and of 2 blocks fit the 32 registers
constexpr int64_t AHEAD = 2048; // bytes that are fetched before they are needed
constexpr int64_t SHARE = 1 << 16; // bytes of weight that are worth a thread

using Sums = float __attribute__((vector_size(64)));
using Pairs = uint32_t __attribute__((vector_size(64))); // of an input and, in the upper half, the next, for 16 outputs

// R rows of x [R,size] times B of the blocks at `weight`, into y [R,..].
template <int R, int B>
void multiply(const float* x, int64_t size, const Pairs* weight, float* y, int64_t stride) {
  Sums sums[R][B] = {};
  for (int64_t i = 0; i < size; i += 2, weight += BLOCKS) {
#pragma GCC unroll 4
    for (int b = 0; b < B; b++) {
      __builtin_prefetch(reinterpret_cast<const char*>(weight + b) + AHEAD);
      const Pairs pairs = weight[b];
      const Sums even = reinterpret_cast<Sums>(pairs << 16), odd = reinterpret_cast<Sums>(pairs & 0xffff0000u);
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

// x [R,in] fp32, weight [groups, in / 2, 64, 2] bf16 as `cpu_linear` packs it, `size` outputs -> [R,size].
Tensor bf16_linear(const Tensor& x, const Tensor& weight, int64_t size) {
  const int64_t rows = x.size(0), in = x.size(1), groups = weight.size(0);
  TORCH_CHECK(weight.size(1) * 2 == in && size <= groups * GROUP, "the weight was packed for other sizes");
  const Tensor inputs = x.contiguous();
  Tensor out = at::empty({rows, size}, x.options());
  const float* from = inputs.const_data_ptr<float>();
  float* to = out.mutable_data_ptr<float>();
  const auto* packed = static_cast<const Pairs*>(weight.const_data_ptr());
  // More rows are multiplied in parts, of which all but the first find the group's weight in the cache.
  const int64_t most = rows <= MANY ? MANY : FEW, parts = (rows + most - 1) / most;
  at::parallel_for(0, groups, std::max<int64_t>(1, SHARE / (in * GROUP * 2)), [&](int64_t first, int64_t last) {
    float aside[MANY * GROUP]; // for the last group, which may go beyond the outputs
    for (int64_t g = first; g < last; g++) {
      const int64_t width = std::min(GROUP, size - g * GROUP);
      const bool whole = width == GROUP;
      for (int64_t part = 0, row = 0; part < parts; part++) {
        const int64_t count = (rows - row + parts - part - 1) / (parts - part);
        float* place = to + row * size + g * GROUP;
        PRODUCTS[count - 1](
            from + row * in, in, packed + g * (in / 2) * BLOCKS, whole ? place : aside, whole ? size : GROUP);
        for (int64_t r = 0; !whole && r < count; r++) std::copy_n(aside + r * GROUP, width, place + r * size);
        row += count;
      }
    }
  });
  return out;
}

} // namespace

TORCH_LIBRARY(specdec_rows, m) {
  m.def("bf16_linear(Tensor x, Tensor weight, int size) -> Tensor");
}

TORCH_LIBRARY_IMPL(specdec_rows, CPU, m) {
  m.impl("bf16_linear", &bf16_linear);
}
