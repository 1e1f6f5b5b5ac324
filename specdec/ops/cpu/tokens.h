// What rounds do except for the forward, for `rows.cpp`: the likeliest token, the walk down a tree, the move of its path.

#pragma once

#include "operators.h"

namespace tokens {

constexpr int64_t SHARE = 1 << 14; // logits that are worth a thread

// Where the first of the largest of x [size] is; of numbers that are none, the last place.
inline int64_t largest_at(const float* x, int64_t size) {
  const int64_t whole = size / LANES * LANES;
  Floats most = spread(-INFINITY);
  for (int64_t i = 0; i < whole; i += LANES) most = larger(most, load(x + i));
  float largest = largest_of(most);
  for (int64_t i = whole; i < size; i++) largest = std::max(largest, x[i]);
  return std::min(std::find(x, x + size, largest) - x, size - 1);
}

// x [...,size] fp32 -> where the first of the largest is, [...].
inline Tensor largest(const Tensor& x) {
  const Tensor rows = x.contiguous();
  const int64_t size = rows.size(-1), count = rows.numel() / size;
  Tensor places = at::empty(rows.sizes().slice(0, rows.dim() - 1), rows.options().dtype(at::kLong));
  const float* from = floats(rows);
  int64_t* place = places.mutable_data_ptr<int64_t>();
  each_row(count, size, SHARE, [&](int64_t r) { place[r] = largest_at(from + r * size, size); });
  return places;
}

// logits [...,size] fp32 -> the log-probability of the likeliest token and that, the first of equals: [...,1] both.
inline std::tuple<Tensor, Tensor> likeliest(const Tensor& logits) {
  const Tensor rows = logits.contiguous();
  const int64_t size = rows.size(-1), count = rows.numel() / size, whole = size / LANES * LANES;
  auto shape = rows.sizes().vec();
  shape.back() = 1;
  Tensor logp = at::empty(shape, rows.options()), ids = at::empty(shape, rows.options().dtype(at::kLong));
  const float* from = floats(rows);
  float* score = floats(logp);
  int64_t* id = ids.mutable_data_ptr<int64_t>();
  each_row(count, size, SHARE, [&](int64_t r) {
    const float* x = from + r * size;
    id[r] = largest_at(x, size);
    const float most = x[id[r]];
    Floats total = {};
    for (int64_t i = 0; i < whole; i += LANES) total += exponential(load(x + i) - most);
    float sum = sum_of(total);
    for (int64_t i = whole; i < size; i++) sum += std::exp(x[i] - most);
    score[r] = -std::log(sum);
  });
  return {logp, ids};
}

// Where the tokens that the target drew behind each node lead: tokens, parents and drawn [B,N] of trees of which no node is
// deeper than `steps` -> path and emitted tokens [B,P], n [B], as in `Verdict`.
inline std::tuple<Tensor, Tensor, Tensor> follow(const Tensor& nodes, const Tensor& parents, const Tensor& drawn,
                                                 int64_t steps) {
  const int64_t batch = nodes.size(0), count = nodes.size(1);
  Tensor path = at::zeros({batch, steps + 1}, nodes.options()), n = at::empty({batch}, nodes.options());
  Tensor emitted = at::empty({batch, steps + 1}, nodes.options());
  const auto node = nodes.accessor<int64_t, 2>(), parent = parents.accessor<int64_t, 2>();
  const auto draw = drawn.accessor<int64_t, 2>();
  auto at = path.accessor<int64_t, 2>(), out = emitted.accessor<int64_t, 2>();
  for (int64_t b = 0; b < batch; b++) {
    int64_t deep = 0; // nodes come breadth first, and of siblings one at most carries what was drawn
    for (int64_t i = 1; i < count; i++)
      if (parent[b][i] == at[b][deep] && node[b][i] == draw[b][at[b][deep]] && deep < steps) at[b][++deep] = i;
    for (int64_t k = 0; k <= steps; k++) out[b][k] = draw[b][at[b][k]];
    n.mutable_data_ptr<int64_t>()[b] = deep + 1;
  }
  return {path, n, emitted};
}

// The accepted nodes of the last forward follow what is committed, in all layers: `memory` [2,R,S,K,Dh] each, of which the
// rows from the first on are in use. Slot lens+path[k] of a row goes to lens+k, for k below n; lens, n [B], path [B,P].
inline void commit(at::TensorList memory, const Tensor& lens, const Tensor& path, const Tensor& n) {
  const int64_t batch = path.size(0), slots = memory[0].size(2);
  const auto from = path.accessor<int64_t, 2>();
  const int64_t *length = lens.const_data_ptr<int64_t>(), *count = n.const_data_ptr<int64_t>();
  for (const Tensor& layer : memory) {
    TORCH_CHECK(layer.is_contiguous(), "a layer's cache lies in pieces");
    const int64_t row = layer.stride(2) * layer.element_size(), rows = layer.size(1);
    char* bytes = static_cast<char*>(layer.mutable_data_ptr());
    for (int64_t side = 0; side < 2; side++)
      for (int64_t b = 0; b < batch; b++) {
        char* first = bytes + ((side * rows + b) * slots + length[b]) * row;
        for (int64_t k = 1; k < count[b]; k++) // nodes of a path rise, so none is overwritten before it moves
          if (from[b][k] != k) std::memcpy(first + k * row, first + from[b][k] * row, row);
      }
  }
}

} // namespace tokens
