// RMSNorm and the rotation of queries and keys, a call each, for `rows.cpp`.

#pragma once

#include "vectors.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>
#include <tuple>

namespace norm_rope {

using at::Tensor;

constexpr int64_t SHARE = 1 << 15; // values that are worth a thread

// The rows of x [rows,size], and y added to them if there is one, into `sum` and their norms into `out`. What a row
// gives does not depend on the others.
inline void norm_rows(const float* x, const float* y, const float* weight, float eps, int64_t rows, int64_t size,
                      float* sum, float* out) {
  at::parallel_for(0, rows, std::max<int64_t>(1, SHARE / size), [&](int64_t first, int64_t last) {
    for (int64_t r = first; r < last; r++) {
      const float* from = x + r * size;
      if (y) {
        float* to = sum + r * size;
        for (int64_t i = 0; i < size; i++) to[i] = from[i] + y[r * size + i];
        from = to;
      }
      Floats squares = {};
      const int64_t whole = size / LANES * LANES;
      for (int64_t i = 0; i < whole; i += LANES) {
        const Floats part = load(from + i);
        squares += part * part;
      }
      float total = sum_of(squares);
      for (int64_t i = whole; i < size; i++) total += from[i] * from[i];
      const float scale = 1 / std::sqrt(total / size + eps);
      for (int64_t i = 0; i < size; i++) out[r * size + i] = from[i] * scale * weight[i];
    }
  });
}

// x [...,size] fp32 -> x / sqrt(mean(x^2) + eps) * weight.
inline Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  const Tensor rows = x.contiguous();
  Tensor out = at::empty(x.sizes(), x.options());
  const int64_t size = weight.numel();
  TORCH_CHECK(x.size(-1) == size, "the norm is of another size");
  norm_rows(rows.const_data_ptr<float>(), nullptr, weight.const_data_ptr<float>(), eps, x.numel() / size, size, nullptr,
            out.mutable_data_ptr<float>());
  return out;
}

// x, y [...,size] fp32 -> x + y, and the norm of that.
inline std::tuple<Tensor, Tensor> add_norm(const Tensor& x, const Tensor& y, const Tensor& weight, double eps) {
  const Tensor rows = x.contiguous(), added = y.contiguous();
  Tensor sum = at::empty(x.sizes(), x.options()), out = at::empty(x.sizes(), x.options());
  const int64_t size = weight.numel();
  TORCH_CHECK(x.size(-1) == size && x.sizes() == y.sizes(), "the norm is of another size");
  norm_rows(rows.const_data_ptr<float>(), added.const_data_ptr<float>(), weight.const_data_ptr<float>(), eps,
            x.numel() / size, size, sum.mutable_data_ptr<float>(), out.mutable_data_ptr<float>());
  return {sum, out};
}

// x [B,N,heads,Dh], each row's heads side by side, times cos [B,N,1,Dh], and its halves exchanged times sin: both fp32.
inline Tensor rotate(const Tensor& x, const Tensor& cos, const Tensor& sin) {
  const int64_t batch = x.size(0), n = x.size(1), heads = x.size(2), dim = x.size(3), half = dim / 2;
  TORCH_CHECK(x.stride(3) == 1 && cos.stride(3) == 1 && sin.stride(3) == 1, "a head lies in pieces");
  Tensor out = at::empty({batch, n, heads, dim}, x.options());
  const float *from = x.const_data_ptr<float>(), *c = cos.const_data_ptr<float>(), *s = sin.const_data_ptr<float>();
  float* to = out.mutable_data_ptr<float>();
  at::parallel_for(0, batch * n, std::max<int64_t>(1, SHARE / (heads * dim)), [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; row++) {
      const int64_t b = row / n, i = row % n;
      const float *cosine = c + b * cos.stride(0) + i * cos.stride(1), *sine = s + b * sin.stride(0) + i * sin.stride(1);
      for (int64_t h = 0; h < heads; h++) {
        const float* head = from + b * x.stride(0) + i * x.stride(1) + h * x.stride(2);
        float* place = to + (row * heads + h) * dim;
        for (int64_t d = 0; d < half; d++) place[d] = head[d] * cosine[d] + head[d + half] * sine[d];
        for (int64_t d = half; d < dim; d++) place[d] = head[d] * cosine[d] + head[d - half] * sine[d];
      }
    }
  });
  return out;
}

} // namespace norm_rope
