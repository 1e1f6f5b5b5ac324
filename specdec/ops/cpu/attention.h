// Attention of a few positions over a cache of keys and values, for `rows.cpp`.
//
// A position sees the slots that its row has committed, and of the scratch slots after them those that it may. A score
// is a sum over the numbers of a head, one after the other. The output is a sum over the slots that are seen, in their
// order. So a result has the same bits whether a position is decoded alone or in a tree.
//
// Keys are turned, so that a vector holds one number of as many keys, and a score needs no sum over a vector. To turn
// them costs as much as the scores of two or three queries. All positions of a row share what was turned.

#pragma once

#include "operators.h"

namespace attention {

constexpr int64_t REGISTERS = LANES == 16 ? 24 : 10; // for the sums of values of the queries that are taken at once
constexpr int64_t SIDE = 2, KEYS = SIDE * LANES; // keys that are turned at once: two vectors, as a sum waits for itself
constexpr int64_t MANY = LANES == 16 ? 8 : 4; // queries that are taken at once at most
constexpr int64_t QUERIES = 32; // of one key head that are worth the same turned keys
constexpr int64_t SHARE = 1 << 14; // multiplications that are worth a thread

// The slots that a position sees: those before `committed`, and those listed.
struct Seen {
  int64_t committed;
  std::vector<int64_t> scratch;

  int64_t count() const { return committed + static_cast<int64_t>(scratch.size()); }
};

// LANES keys [dim], `row` apart, of which those behind number `last` count as that one -> [dim,KEYS]. Of the keys that
// are turned next a few are fetched at a time: all at once would wait for the memory.
template <bool WHOLE>
void turn(const float* keys, int64_t row, int64_t last, int64_t dim, float* turned) {
  for (int64_t d = 0; d < dim; d += 4) {
    const int64_t next = KEYS + d % 16 * LANES / 16;
#pragma GCC unroll 4
    for (int64_t i = 0; i < LANES / 4; i++)
      __builtin_prefetch(keys + std::min(next + i, last) * row + d / 16 * 16);
    Floats quad[4];
#pragma GCC unroll 4
    for (int64_t i = 0; i < 4; i++)
      quad[i] = quads([&](int64_t j) { return keys + (WHOLE ? i + 4 * j : std::min(i + 4 * j, last)) * row + d; });
    turn_quads(quad);
#pragma GCC unroll 4
    for (int64_t i = 0; i < 4; i++) store(turned + (d + i) * KEYS, quad[i]);
  }
}

// Keys [dim] of KEYS slots, of which `count` are in use -> [dim,KEYS].
inline void turn_keys(const float* keys, int64_t row, int64_t count, int64_t dim, float* turned) {
  for (int64_t side = 0; side < std::min(KEYS, count); side += LANES) {
    const auto some = count - side >= LANES ? turn<true> : turn<false>;
    some(keys + side * row, row, count - side - 1, dim, turned + side);
  }
}

// Scores of Q queries [Q,dim] with turned keys, into [Q,..] whose rows lie `stride` apart.
template <int Q>
void score(const float* queries, int64_t dim, const float* turned, float* scores, int64_t stride) {
  Floats sums[Q][SIDE] = {};
  for (int64_t d = 0; d < dim; d++, turned += KEYS) {
    Floats keys[SIDE];
#pragma GCC unroll 2
    for (int s = 0; s < SIDE; s++) keys[s] = load(turned + s * LANES);
#pragma GCC unroll 8
    for (int q = 0; q < Q; q++) {
      const Floats query = spread(queries[q * dim + d]);
#pragma GCC unroll 2
      for (int s = 0; s < SIDE; s++) sums[q][s] += keys[s] * query;
    }
  }
#pragma GCC unroll 8
  for (int q = 0; q < Q; q++)
#pragma GCC unroll 2
    for (int s = 0; s < SIDE; s++) store(scores + q * stride + s * LANES, sums[q][s]);
}

// Values of V vectors of the first `count` slots, `row` apart, times the weights of Q queries, whose rows lie `stride`
// apart -> [Q,V*LANES].
template <int V, int Q>
void weigh(const float* values, int64_t row, int64_t count, const float* weights, int64_t stride, float* out) {
  Floats sums[Q][V] = {};
  for (int64_t i = 0; i < count; i++) {
    const float *value = values + i * row, *next = values + std::min(i + KEYS, count - 1) * row;
#pragma GCC unroll 16
    for (int v = 0; v < V; v++) {
      if (v * LANES % 16 == 0) __builtin_prefetch(next + v * LANES);
      const Floats part = load(value + v * LANES);
#pragma GCC unroll 8
      for (int q = 0; q < Q; q++) sums[q][v] += part * weights[q * stride + i];
    }
  }
#pragma GCC unroll 8
  for (int q = 0; q < Q; q++)
#pragma GCC unroll 16
    for (int v = 0; v < V; v++) store(out + (q * V + v) * LANES, sums[q][v]);
}

// And those of the scratch slots that one query sees, all times `share`, into `out`.
template <int V>
void weigh_rest(const float* values, int64_t row, const Seen& seen, const float* weights, float share, float* sum,
                float* out) {
  Floats sums[V];
#pragma GCC unroll 16
  for (int v = 0; v < V; v++) sums[v] = load(sum + v * LANES);
  for (size_t i = 0; i < seen.scratch.size(); i++) {
    const float *value = values + seen.scratch[i] * row, weight = weights[seen.committed + i];
#pragma GCC unroll 16
    for (int v = 0; v < V; v++) sums[v] += load(value + v * LANES) * weight;
  }
#pragma GCC unroll 16
  for (int v = 0; v < V; v++) store(out + v * LANES, sums[v] * share);
}

// Weights of the slots that a query sees, from its scores of all slots, in their place, but for their sum -> 1 / that.
inline float weights_of(const Seen& seen, float* scores) {
  const int64_t count = seen.count(), whole = (count + LANES - 1) / LANES * LANES;
  for (int64_t i = seen.committed; i < count; i++) scores[i] = scores[seen.scratch[i - seen.committed]];
  std::fill(scores + count, scores + whole, -std::numeric_limits<float>::infinity());
  Floats most = load(scores), total = {};
  for (int64_t i = LANES; i < whole; i += LANES) most = larger(most, load(scores + i));
  const float largest = largest_of(most);
  for (int64_t i = 0; i < whole; i += LANES) {
    const Floats weight = exponential(load(scores + i) - largest);
    store(scores + i, weight);
    total += weight;
  }
  return 1 / sum_of(total);
}

// One key head of one row's cache: slots [slots,dim], `row` apart.
struct Head {
  const float *keys, *values;
  int64_t row, slots, dim;
};

// What a thread writes to in between, of so many queries and slots.
struct Room {
  int64_t stride; // of a query's scores
  std::vector<float> queries, turned, scores, sums;

  Room(int64_t count, int64_t slots, int64_t dim)
      : stride((slots + KEYS - 1) / KEYS * KEYS), queries(count * dim), turned(KEYS * dim), scores(count * stride),
        sums(count * dim) {}
};

// What the queries of the room [positions,groups,dim] get, of which each position's see `seen` -> out, [groups,dim] of
// each position, `apart`.
template <int V>
void attend(const Head& head, const std::vector<Seen>& seen, int64_t groups, Room& room, float* out, int64_t apart) {
  static constexpr int64_t STEP = std::clamp<int64_t>(REGISTERS / V, 1, MANY);
  static constexpr auto SCORES = by_number<MANY>([]<int Q>() { return &score<Q>; });
  static constexpr auto WEIGHS = by_number<STEP>([]<int Q>() { return &weigh<V, Q>; });
  const int64_t count = seen.size() * groups, stride = room.stride, dim = head.dim;
  float *turned = room.turned.data(), *scores = room.scores.data(), *sums = room.sums.data();
  for (int64_t slot = 0; slot < head.slots; slot += KEYS) {
    turn_keys(head.keys + slot * head.row, head.row, head.slots - slot, dim, turned);
    for (int64_t q = 0; q < count; q += MANY)
      SCORES[std::min(MANY, count - q) - 1](&room.queries[q * dim], dim, turned, scores + q * stride + slot, stride);
  }
  float shares[MANY];
  for (int64_t first = 0; first < count; first += STEP) {
    const int64_t some = std::min(STEP, count - first);
    float* weights = scores + first * stride;
    for (int64_t q = 0; q < some; q++) shares[q] = weights_of(seen[(first + q) / groups], weights + q * stride);
    WEIGHS[some - 1](head.values, head.row, seen[0].committed, weights, stride, sums);
    for (int64_t q = 0; q < some; q++) {
      const int64_t i = (first + q) / groups, g = (first + q) % groups;
      weigh_rest<V>(head.values, head.row, seen[i], weights + q * stride, shares[q], sums + q * dim,
                    out + i * apart + g * dim);
    }
  }
}

inline auto attend_of(int64_t dim) -> decltype(&attend<1>) {
  switch (dim) {
    case 16: return attend<16 / LANES>;
    case 32: return attend<32 / LANES>;
    case 64: return attend<64 / LANES>;
    case 80: return attend<80 / LANES>;
    case 96: return attend<96 / LANES>;
    case 128: return attend<128 / LANES>;
    case 256: return attend<256 / LANES>;
    default: TORCH_CHECK(false, "there is no attention for heads of ", dim);
  }
}

// What position i of row b sees. The new positions are the last n of `nodes` scratch slots.
inline Seen seen_by(int64_t committed, const Tensor* ancestors, int64_t b, int64_t i, int64_t n, int64_t nodes,
                    int64_t slots) {
  Seen seen{std::min(committed, slots), {}};
  const bool* ancestor = nullptr;
  if (ancestors) ancestor = ancestors->const_data_ptr<bool>() + b * ancestors->stride(0) + i * ancestors->stride(1);
  const int64_t apart = ancestors ? ancestors->stride(2) : 0;
  for (int64_t j = 0; j < nodes && committed + j < slots; j++)
    if (ancestor ? ancestor[j * apart] : j <= nodes - n + i) seen.scratch.push_back(committed + j);
  return seen;
}

// q [B,n,heads,Dh] over keys and values [B,K,S,Dh] of equal strides, all fp32, of which row b has lens[b] committed
// -> [B,n,heads*Dh]. ancestors [B,n,nodes] bool: the scratch slots that each sees; none: all up to itself.
inline Tensor tree_attention(const Tensor& q, const Tensor& keys, const Tensor& values, const Tensor& lens,
                             const std::optional<Tensor>& ancestors, int64_t nodes, double scale) {
  const int64_t batch = q.size(0), n = q.size(1), heads = q.size(2), dim = q.size(3), kv_heads = keys.size(1);
  const int64_t groups = heads / kv_heads, slots = keys.size(2), width = heads * dim, row = keys.stride(2);
  TORCH_CHECK(keys.strides() == values.strides() && keys.stride(3) == 1, "keys and values lie otherwise");
  const Tensor queries = q.contiguous();
  Tensor out = at::empty({batch, n, width}, q.options());
  const float *from = floats(queries), *key = floats(keys), *value = floats(values);
  float* to = floats(out);
  const int64_t* length = lens.const_data_ptr<int64_t>();
  const Tensor* tree = ancestors ? &*ancestors : nullptr;
  const auto attend = attend_of(dim);
  const int64_t longest = std::min(*std::max_element(length, length + batch) + nodes, slots), part = groups * dim;
  const int64_t together = std::clamp<int64_t>(QUERIES / groups, 1, n), pieces = (n + together - 1) / together;
  const int64_t grain = std::max<int64_t>(1, SHARE / (2 * longest * part * together));
  at::parallel_for(0, batch * pieces * kv_heads, grain, [&](int64_t first, int64_t last) {
    Room room(together * groups, longest, dim);
    std::vector<Seen> seen;
    for (int64_t task = first; task < last; task++) {
      const int64_t b = task / kv_heads / pieces, i = task / kv_heads % pieces * together, k = task % kv_heads;
      const int64_t positions = std::min(together, n - i), place = (b * n + i) * width + k * part;
      if (k == 0 || task == first) {
        seen.clear();
        for (int64_t j = 0; j < positions; j++) seen.push_back(seen_by(length[b], tree, b, i + j, n, nodes, slots));
      }
      for (int64_t j = 0; j < positions; j++)
        for (int64_t d = 0; d < part; d++) room.queries[j * part + d] = from[place + j * width + d] * float(scale);
      const int64_t at = b * keys.stride(0) + k * keys.stride(1), used = std::min(length[b] + nodes, slots);
      attend({key + at, value + at, row, used, dim}, seen, groups, room, to + place, width);
    }
  });
  return out;
}

} // namespace attention
