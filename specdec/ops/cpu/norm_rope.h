// What surrounds the products and attention, a call each, for `rows.cpp`: RMSNorm, the rotation of queries and keys.

#pragma once

#include "operators.h"

namespace norm_rope {

constexpr int64_t SHARE = 1 << 9; // values that are worth a thread

// x [size] -> its norm.
inline void norm_row(const float* x, const float* weight, float eps, int64_t size, float* out) {
  Floats squares = {};
  const int64_t whole = size / LANES * LANES;
  for (int64_t i = 0; i < whole; i += LANES) {
    const Floats part = load(x + i);
    squares += part * part;
  }
  float total = sum_of(squares);
  for (int64_t i = whole; i < size; i++) total += x[i] * x[i];
  const float scale = 1 / std::sqrt(total / size + eps);
  for (int64_t i = 0; i < size; i++) out[i] = x[i] * scale * weight[i];
}

// The rows of x [rows,size], and y added to them if there is one, into `sum` and their norms into `out`, whose rows lie
// `apart`. What a row gives does not depend on the others.
inline void norm_rows(const float* x, const float* y, const float* weight, float eps, int64_t rows, int64_t size,
                      float* sum, float* out, int64_t apart) {
  each_row(rows, size, SHARE, [&](int64_t r) {
    const float* from = x + r * size;
    if (y) {
      float* to = sum + r * size;
      for (int64_t i = 0; i < size; i++) to[i] = from[i] + y[r * size + i];
      from = to;
    }
    norm_row(from, weight, eps, size, out + r * apart);
  });
}

// x [...,size] fp32 -> x / sqrt(mean(x^2) + eps) * weight.
inline Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  const Tensor rows = x.contiguous();
  Tensor out = at::empty(x.sizes(), x.options());
  const int64_t size = weight.numel();
  TORCH_CHECK(x.size(-1) == size, "the norm is of another size");
  norm_rows(floats(rows), nullptr, floats(weight), eps, x.numel() / size, size, nullptr, floats(out), size);
  return out;
}

// x, y [...,size] fp32 -> x + y, and the norm of that.
inline std::tuple<Tensor, Tensor> add_norm(const Tensor& x, const Tensor& y, const Tensor& weight, double eps) {
  const Tensor rows = x.contiguous(), added = y.contiguous();
  Tensor sum = at::empty(x.sizes(), x.options()), out = at::empty(x.sizes(), x.options());
  const int64_t size = weight.numel();
  TORCH_CHECK(x.size(-1) == size && x.sizes() == y.sizes(), "the norm is of another size");
  norm_rows(floats(rows), floats(added), floats(weight), eps, x.numel() / size, size, floats(sum), floats(out), size);
  return {sum, out};
}

// x [...,H], y [...,G] fp32 -> the norms of both, side by side: [...,H+G].
inline Tensor norm_pair(const Tensor& x, const Tensor& y, const Tensor& x_weight, const Tensor& y_weight, double x_eps,
                        double y_eps) {
  const Tensor left = x.contiguous(), right = y.contiguous();
  const int64_t size = x_weight.numel(), beside = y_weight.numel(), rows = x.numel() / size;
  TORCH_CHECK(x.size(-1) == size && y.size(-1) == beside && y.numel() == rows * beside, "the norms are of other sizes");
  auto shape = x.sizes().vec();
  shape.back() = size + beside;
  Tensor out = at::empty(shape, x.options());
  float* to = floats(out);
  norm_rows(floats(left), nullptr, floats(x_weight), x_eps, rows, size, nullptr, to, size + beside);
  norm_rows(floats(right), nullptr, floats(y_weight), y_eps, rows, beside, nullptr, to + size, size + beside);
  return out;
}

// A head, times cos, and its halves exchanged times sin.
inline void turn(const float* head, const float* cos, const float* sin, int64_t dim, float* out) {
  const int64_t half = dim / 2;
  for (int64_t d = 0; d < half; d++) out[d] = head[d] * cos[d] + head[d + half] * sin[d];
  for (int64_t d = half; d < dim; d++) out[d] = head[d] * cos[d] + head[d - half] * sin[d];
}

// x [B,N,heads,Dh], each row's heads side by side, times cos [B,N,1,Dh], and its halves exchanged times sin: both fp32.
inline Tensor rotate(const Tensor& x, const Tensor& cos, const Tensor& sin) {
  const int64_t batch = x.size(0), n = x.size(1), heads = x.size(2), dim = x.size(3);
  TORCH_CHECK(x.stride(3) == 1 && cos.stride(3) == 1 && sin.stride(3) == 1, "a head lies in pieces");
  Tensor out = at::empty({batch, n, heads, dim}, x.options());
  const float *from = floats(x), *c = floats(cos), *s = floats(sin);
  float* to = floats(out);
  each_row(batch * n, heads * dim, SHARE, [&](int64_t row) {
    const int64_t b = row / n, i = row % n;
    const float *cosine = c + b * cos.stride(0) + i * cos.stride(1), *sine = s + b * sin.stride(0) + i * sin.stride(1);
    for (int64_t h = 0; h < heads; h++) {
      const float* head = from + b * x.stride(0) + i * x.stride(1) + h * x.stride(2);
      turn(head, cosine, sine, dim, to + (row * heads + h) * dim);
    }
  });
  return out;
}

// Of rows [B*N,heads+2K,Dh] of queries, keys and values: the norms of queries and keys, if there are `gains` [2,Dh], and
// their rotation by cos and sin [B,N,1,Dh]. Keys and values go to the rows `slots` [B*N] of `keys` and `values`, [.,K*Dh]
// -> the queries [B,N,heads,Dh].
inline Tensor rope_write(const Tensor& rows, const Tensor& cos, const Tensor& sin, const Tensor& slots, Tensor& keys,
                         Tensor& values, const std::optional<Tensor>& gains, double eps) {
  const Tensor inputs = rows.contiguous(), places = slots.contiguous();
  const int64_t batch = cos.size(0), n = cos.size(1), all = inputs.size(1), dim = inputs.size(2), width = keys.size(1);
  const int64_t kv_heads = width / dim, heads = all - 2 * kv_heads;
  TORCH_CHECK(inputs.size(0) == batch * n && places.numel() == batch * n && heads > 0, "rows and places do not match");
  TORCH_CHECK(keys.is_contiguous() && values.is_contiguous() && cos.stride(3) == 1 && sin.stride(3) == 1,
              "a row of the cache lies in pieces");
  Tensor queries = at::empty({batch, n, heads, dim}, rows.options());
  const float *from = floats(inputs), *c = floats(cos), *s = floats(sin), *gain = gains ? floats(*gains) : nullptr;
  float *q = floats(queries), *k = floats(keys), *v = floats(values);
  const int64_t* slot = places.const_data_ptr<int64_t>();
  for (int64_t row = 0; row < batch * n; row++)
    TORCH_CHECK(slot[row] >= 0 && slot[row] < keys.size(0), "the cache has no slot ", slot[row]);
  at::parallel_for(0, batch * n, std::max<int64_t>(1, SHARE / (all * dim)), [&](int64_t first, int64_t last) {
    std::vector<float> normed(dim);
    for (int64_t row = first; row < last; row++) {
      const int64_t b = row / n, i = row % n;
      const float *cosine = c + b * cos.stride(0) + i * cos.stride(1), *sine = s + b * sin.stride(0) + i * sin.stride(1);
      for (int64_t h = 0; h < heads + kv_heads; h++) {
        const float* head = from + (row * all + h) * dim;
        if (gain) {
          norm_row(head, gain + (h < heads ? 0 : dim), eps, dim, normed.data());
          head = normed.data();
        }
        turn(head, cosine, sine, dim, h < heads ? q + (row * heads + h) * dim : k + slot[row] * width + (h - heads) * dim);
      }
      std::copy_n(from + (row * all + heads + kv_heads) * dim, width, v + slot[row] * width);
    }
  });
  return queries;
}

} // namespace norm_rope
