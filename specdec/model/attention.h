// Attention of a few positions over a cache of keys and values, for `rows.cpp`.
//
// A position sees the slots that its row has committed, and of the scratch slots behind them those that it may. It takes
// them one after the other, in the order of the slots, and skips the others. So its result has the same bits whether it
// is decoded alone or in a tree, whatever is beside it.

#pragma once

#include "vectors.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <vector>

namespace attention {

using at::Tensor;

constexpr int64_t REGISTERS = LANES == 16 ? 24 : 10; // for the sums of the query heads that share a key head
constexpr int64_t SHARE = 1 << 17; // multiplications that are worth a thread

// The slots that a position sees: those before `committed`, and those listed.
struct Seen {
  int64_t committed;
  std::vector<int64_t> scratch;

  int64_t count() const {
    return committed + static_cast<int64_t>(scratch.size());
  }
  int64_t operator[](int64_t i) const {
    return i < committed ? i : scratch[i - committed];
  }
};

// G query heads of V vectors, side by side at q, over one key head; scores [G,stride] is room for what is in between.
template <int V, int G>
void attend_heads(const float* q, const float* keys, const float* values, int64_t row, const Seen& seen, float scale,
                  float* scores, int64_t stride, float* out) {
  Floats sums[G][V];
#pragma GCC unroll 8
  for (int g = 0; g < G; g++)
#pragma GCC unroll 16
    for (int v = 0; v < V; v++) sums[g][v] = load(q + (g * V + v) * LANES) * scale;
  const int64_t count = seen.count();
  for (int64_t i = 0; i < count; i++) {
    const float* key = keys + seen[i] * row;
    Floats dots[G] = {};
#pragma GCC unroll 16
    for (int v = 0; v < V; v++) {
      const Floats part = load(key + v * LANES);
#pragma GCC unroll 8
      for (int g = 0; g < G; g++) dots[g] += sums[g][v] * part;
    }
#pragma GCC unroll 8
    for (int g = 0; g < G; g++) scores[g * stride + i] = sum_of(dots[g]);
  }
  float shares[G];
  for (int g = 0; g < G; g++) {
    float* own = scores + g * stride;
    std::fill(own + count, own + stride, -std::numeric_limits<float>::infinity());
    Floats largest = load(own), total = {};
    for (int64_t i = LANES; i < stride; i += LANES) largest = larger(largest, load(own + i));
    const float most = largest_of(largest);
    for (int64_t i = 0; i < stride; i += LANES) {
      const Floats weight = exponential(load(own + i) - most);
      store(own + i, weight);
      total += weight;
    }
    shares[g] = 1 / sum_of(total);
  }
#pragma GCC unroll 8
  for (int g = 0; g < G; g++)
#pragma GCC unroll 16
    for (int v = 0; v < V; v++) sums[g][v] = Floats{};
  for (int64_t i = 0; i < count; i++) {
    const float* value = values + seen[i] * row;
#pragma GCC unroll 16
    for (int v = 0; v < V; v++) {
      const Floats part = load(value + v * LANES);
#pragma GCC unroll 8
      for (int g = 0; g < G; g++) sums[g][v] += part * scores[g * stride + i];
    }
  }
#pragma GCC unroll 8
  for (int g = 0; g < G; g++)
#pragma GCC unroll 16
    for (int v = 0; v < V; v++) store(out + (g * V + v) * LANES, sums[g][v] * shares[g]);
}

// As many of the heads at once as the registers hold.
template <int V, int G = std::clamp<int64_t>(REGISTERS / V, 1, 8)>
void attend_group(int64_t groups, const float* q, const float* keys, const float* values, int64_t row, const Seen& seen,
                  float scale, float* scores, int64_t stride, float* out) {
  constexpr int64_t STEP = G * V * LANES;
  for (; groups >= G; groups -= G, q += STEP, out += STEP)
    attend_heads<V, G>(q, keys, values, row, seen, scale, scores, stride, out);
  if constexpr (G > 1)
    if (groups) attend_group<V, G - 1>(groups, q, keys, values, row, seen, scale, scores, stride, out);
}

using Attend = void (*)(int64_t, const float*, const float*, const float*, int64_t, const Seen&, float, float*, int64_t,
                        float*);

inline Attend attend_of(int64_t dim) {
  switch (dim) {
    case 16: return attend_group<16 / LANES>;
    case 32: return attend_group<32 / LANES>;
    case 64: return attend_group<64 / LANES>;
    case 80: return attend_group<80 / LANES>;
    case 96: return attend_group<96 / LANES>;
    case 128: return attend_group<128 / LANES>;
    case 256: return attend_group<256 / LANES>;
    default: TORCH_CHECK(false, "there is no attention for heads of ", dim);
  }
}

// What position i of row b sees. The new positions are the last n of `nodes` scratch slots.
inline Seen seen_by(const int64_t* lens, const Tensor* ancestors, int64_t b, int64_t i, int64_t n, int64_t nodes,
                    int64_t slots) {
  const int64_t first = lens[b];
  Seen seen{std::min(first, slots), {}};
  for (int64_t j = 0; j < nodes && first + j < slots; j++) {
    const bool sees = ancestors ? ancestors->const_data_ptr<bool>()[b * ancestors->stride(0) + i * ancestors->stride(1) +
                                                                   j * ancestors->stride(2)]
                                : j <= nodes - n + i;
    if (sees) seen.scratch.push_back(first + j);
  }
  return seen;
}

// q [B,n,heads,Dh] over keys and values [B,K,S,Dh] of equal strides, all fp32, of which row b has lens[b] committed
// -> [B,n,heads*Dh]. ancestors [B,n,nodes] bool: the scratch slots that each sees; none: all up to itself.
inline Tensor tree_attention(const Tensor& q, const Tensor& keys, const Tensor& values, const Tensor& lens,
                             const std::optional<Tensor>& ancestors, int64_t nodes, double scale) {
  const int64_t batch = q.size(0), n = q.size(1), heads = q.size(2), dim = q.size(3), kv_heads = keys.size(1);
  const int64_t groups = heads / kv_heads, slots = keys.size(2), row = keys.stride(2);
  TORCH_CHECK(keys.strides() == values.strides() && keys.stride(3) == 1, "keys and values lie otherwise");
  const Tensor queries = q.contiguous();
  Tensor out = at::empty({batch, n, heads * dim}, q.options());
  const float *from = queries.const_data_ptr<float>(), *key = keys.const_data_ptr<float>();
  const float* value = values.const_data_ptr<float>();
  float* to = out.mutable_data_ptr<float>();
  const int64_t* length = lens.const_data_ptr<int64_t>();
  const Tensor* tree = ancestors ? &*ancestors : nullptr;
  const Attend attend = attend_of(dim);
  const int64_t longest = *std::max_element(length, length + batch) + nodes;
  const int64_t grain = std::max<int64_t>(1, SHARE / (2 * longest * groups * dim));
  at::parallel_for(0, batch * n * kv_heads, grain, [&](int64_t first, int64_t last) {
    std::vector<float> scores;
    for (int64_t task = first; task < last; task++) {
      const int64_t b = task / (n * kv_heads), i = task / kv_heads % n, k = task % kv_heads;
      const Seen seen = seen_by(length, tree, b, i, n, nodes, slots);
      const int64_t stride = std::max<int64_t>(LANES, (seen.count() + LANES - 1) / LANES * LANES);
      scores.resize(groups * stride);
      const int64_t place = ((b * n + i) * heads + k * groups) * dim, at = b * keys.stride(0) + k * keys.stride(1);
      attend(groups, from + place, key + at, value + at, row, seen, scale, scores.data(), stride, to + place);
    }
  });
  return out;
}

} // namespace attention
