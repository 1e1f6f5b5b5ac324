// What the operators of `rows.cpp` share: the headers of torch, and loops over rows that threads divide.

#pragma once

#include "vectors.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

using at::Tensor;

inline const float* floats(const Tensor& x) { return x.const_data_ptr<float>(); }
inline float* floats(Tensor& x) { return x.mutable_data_ptr<float>(); }

// body(row) of `count` rows of `size` numbers, of which `share` are worth a thread.
template <class Body>
inline void each_row(int64_t count, int64_t size, int64_t share, Body body) {
  at::parallel_for(0, count, std::max<int64_t>(1, share / size), [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; row++) body(row);
  });
}
