// The operators of the CPU: products of a few rows with a weight, which read the weight once, and what uses them.
// `native.py` compiles this file for the processor at hand, and `native.serves` says when its operators are used.
//
// A round multiplies 1 to 60 rows with every weight. Of one row the time is that of reading the weight, and of several
// it should be the same, as long as there is less arithmetic than reading. So a tile of outputs keeps all of its sums in
// registers, for all rows, while the weight streams by. A bf16 value is the upper half of an fp32 one: a shift and a mask
// widen two of them. Where torch's precision of fp32 products is "medium", and the processor multiplies bf16, rows are
// rounded to bf16 first. That is half of the arithmetic.
//
// A sum is taken over the inputs one after the other, whatever the number of rows. So a row's result has the same bits
// whatever rows are beside it.

#include "amx.h"
#include "attention.h"
#include "int8.h"
#include "norm_rope.h"
#include "tokens.h"
#include "operators.h"

#include <ATen/Context.h>
#include <torch/library.h>

namespace {

constexpr int64_t UNIT = 64; // outputs that are divided among threads together
constexpr int64_t BESIDE = 2; // vectors of outputs that lie side by side in the packed weight
constexpr int64_t GROUP = BESIDE * LANES, BLOCKS = UNIT / LANES; // outputs so, and vectors of outputs of a unit
constexpr int64_t MANY = LANES == 16 ? 12 : 6; // rows that are multiplied at once
constexpr int64_t AHEAD = 8192; // bytes that are fetched before they are needed
constexpr int64_t SHARE = 1 << 16; // bytes of weight that are worth a thread

// Rows as they are, for the kinds of weight below.
struct Exact {
  using Number = float;
  const float* x;

  Exact(const float* x, int64_t, int64_t) : x(x) {}
  static Floats spread(Number x) { return ::spread(x); }
  static Floats plus_product(Floats sum, Floats weights, Floats input) { return sum + weights * input; }
};

// A packed weight is a row of vectors, each of one output a lane. In bf16 it holds two inputs of each, the later one in
// the upper half.
struct Bf16 {
  using Vector = Words;
  using Inputs = Exact;
  static constexpr int INPUTS = 2, NUMBERS = 2; // inputs of a vector, and numbers of a row that they are
  static Floats part(Vector pairs, int which) {
    return reinterpret_cast<Floats>(which == 0 ? pairs << 16 : pairs & 0xffff0000u);
  }
};

struct Fp32 {
  using Vector = Floats;
  using Inputs = Exact;
  static constexpr int INPUTS = 1, NUMBERS = 1;
  static Floats part(Vector values, int) { return values; }
};

#ifdef __AVX512BF16__
// Rows rounded to bf16, by the thread that multiplies them, for an instruction that multiplies pairs of bf16 and adds
// them up in fp32.
struct RoundedRows {
  using Number = uint32_t; // a pair
  std::vector<uint32_t> pairs;
  const uint32_t* x;

  // There is room for a whole vector at the end.
  RoundedRows(const float* from, int64_t count, int64_t in) : pairs((count * in + LANES) / 2), x(pairs.data()) {
    const int64_t size = count * in;
    auto to = reinterpret_cast<uint16_t*>(pairs.data());
    for (int64_t i = 0; i < size; i += LANES) {
      const __m512 numbers = _mm512_maskz_loadu_ps((1u << std::min(LANES, size - i)) - 1, from + i);
      _mm256_storeu_si256((__m256i*)(to + i), (__m256i)_mm512_cvtneps_pbh(numbers));
    }
  }
  static __m512i spread(Number pair) { return _mm512_set1_epi32(pair); }
  static Floats plus_product(Floats sum, Words weights, __m512i input) {
    return _mm512_dpbf16_ps(sum, (__m512bh)weights, (__m512bh)input);
  }
};

struct Rounded : Bf16 {
  using Inputs = RoundedRows;
  static constexpr int NUMBERS = 1;
  static Words part(Vector pairs, int) { return pairs; }
};
#endif

// Blocks of outputs whose sums fit the registers for so many rows: there are 32 with AVX-512, and else 16, where below 8
// sums a product waits for the one before.
constexpr int64_t width_for(int64_t rows) {
  if (LANES == 16) return BESIDE;
  return rows == 1 ? 8 : rows == 2 ? 4 : 2;
}

// Block b of a unit, whose groups lie `apart`.
template <class Vector>
inline const Vector* block(const Vector* unit, int64_t apart, int64_t b) {
  return unit + b / BESIDE * apart + b % BESIDE;
}

// R rows of x [R,size] times the blocks from `weight` on, as many as fit, into y [R,..]. What lies `later` bytes further
// on, if that is not 0, is fetched meanwhile, for another time.
template <class Kind, int R>
void multiply(const typename Kind::Inputs::Number* x, int64_t size, const typename Kind::Vector* weight, int64_t apart,
              float* y, int64_t stride, int64_t later) {
  using Inputs = typename Kind::Inputs;
  // With little arithmetic loads run ahead by themselves, and with much of it there is time. In between what is fetched
  // goes into the second cache, which waits for more lines at a time than the first.
  constexpr int B = width_for(R), WORK = R * Kind::NUMBERS, CACHE = WORK > 2 && WORK <= 12 ? 2 : 3;
  Floats sums[R][B] = {};
  for (int64_t i = 0; i < size; i += Kind::NUMBERS, weight += BESIDE) {
#pragma GCC unroll 8
    for (int b = 0; b < B; b++) // a line each
      if (b * LANES % 16 == 0) {
        const char* line = reinterpret_cast<const char*>(block(weight, apart, b));
        __builtin_prefetch(line + AHEAD, 0, CACHE);
        if (later) __builtin_prefetch(line + later, 0, 2);
      }
#pragma GCC unroll 2
    for (int which = 0; which < Kind::NUMBERS; which++) {
      decltype(Kind::part(*weight, 0)) weights[B];
#pragma GCC unroll 8
      for (int b = 0; b < B; b++) weights[b] = Kind::part(*block(weight, apart, b), which);
#pragma GCC unroll 12
      for (int r = 0; r < R; r++) { // a number is spread and used up before the next one: it holds one register only
        const auto input = Inputs::spread(x[r * size + i + which]);
#pragma GCC unroll 8
        for (int b = 0; b < B; b++) sums[r][b] = Inputs::plus_product(sums[r][b], weights[b], input);
      }
    }
  }
  for (int r = 0; r < R; r++) std::memcpy(y + r * stride, sums[r], sizeof(sums[r]));
}

template <class Kind>
constexpr auto PRODUCTS = by_number<MANY>([]<int R>() { return &multiply<Kind, R>; });

// Rows [count,in], as a thread multiplies them.
template <class Kind>
struct Rows {
  const int64_t count, in;
  const typename Kind::Inputs inputs;

  Rows(const float* x, int64_t count, int64_t in) : count(count), in(in), inputs(x, count, in) {}

  // Times the unit of outputs at `weight`, into y. More rows than the registers hold are multiplied in parts, of which
  // all but the first find the weight in the cache. So these have the time to fetch the next unit.
  void multiply(const typename Kind::Vector* weight, float* y, int64_t stride) const {
    if (count == 0) return;
    const int64_t parts = (count + MANY - 1) / MANY, unit = in / Kind::INPUTS * BLOCKS * sizeof(*weight);
    const int64_t width = width_for((count + parts - 1) / parts), apart = in / Kind::INPUTS * BESIDE;
    const int64_t size = in / Kind::INPUTS * Kind::NUMBERS;
    for (int64_t b = 0; b < BLOCKS; b += width)
      for (int64_t part = 0; part < parts; part++) {
        const int64_t first = part * count / parts, some = (part + 1) * count / parts - first;
        PRODUCTS<Kind>[some - 1](inputs.x + first * size, size, block(weight, apart, b), apart,
                                 y + first * stride + b * LANES, stride, part ? unit : 0);
      }
  }
};

// Numbers of bf16 that a number of a row is at least split into, by torch's own setting for fp32 products on the CPU
// (`torch.set_float32_matmul_precision`): "highest" three, "high" two, "medium" one.
inline int64_t parts_of_rows() {
  switch (at::globalContext().float32Precision(at::Float32Backend::MKLDNN, at::Float32Op::MATMUL)) {
    case at::Float32Precision::BF16: return 1;
    case at::Float32Precision::TF32: return 2;
    default: return 3;
  }
}

#ifdef SPECDEC_AMX
// In bf16 too, but WIDTH outputs lie side by side: a tile of weights is one piece.
struct Tiled : Bf16 {};

template <>
struct Rows<Tiled> : amx::Rows {
  Rows(const float* x, int64_t count, int64_t in) : amx::Rows(x, count, in, parts_of_rows()) {}
  void multiply(const Tiled::Vector* weight, float* y, int64_t stride) const {
    amx::Rows::multiply(weight, UNIT, y, stride);
  }
};
#endif

struct Int8 { // two inputs of an output side by side, WIDTH outputs, and the outputs' scales behind all inputs
  struct Vector {
    int8_t pairs[2 * LANES];
  };
  static constexpr int INPUTS = 2;
};

template <>
struct Rows<Int8> : int8::Rows {
  using int8::Rows::Rows;
  void multiply(const Int8::Vector* weight, float* y, int64_t stride) const {
    int8::Rows::multiply(weight->pairs, y, stride);
  }
};

// Whether weights of so many inputs, `beside` of them side by side, are packed for AMX.
bool tiled(int64_t inputs, int64_t beside) {
#ifdef SPECDEC_AMX
  return beside == Bf16::INPUTS && inputs % amx::INPUTS == 0 && amx::allowed();
#else
  return false;
#endif
}

// How many outputs lie side by side in such a weight.
int64_t group(int64_t inputs, int64_t beside) { return tiled(inputs, beside) ? LANES : GROUP; }

int64_t inputs_of(const Tensor& weight) {
  const int64_t scales = weight.scalar_type() == at::kChar ? int8::SCALES : 0;
  return (weight.size(1) - scales) * weight.size(3);
}

// Outputs of a packed weight, those that fill up the last unit among them.
int64_t outputs_of(const Tensor& weight) { return weight.size(0) * weight.size(2); }

// The units of a packed weight [groups, in / INPUTS, group, INPUTS], and how many of them are worth a thread.
template <class Kind>
struct Packed {
  const typename Kind::Vector* at;
  int64_t units, in, apart, grain;

  explicit Packed(const Tensor& weight)
      : at(static_cast<const typename Kind::Vector*>(weight.const_data_ptr())), units(outputs_of(weight) / UNIT),
        in(inputs_of(weight)), apart(weight.size(1) * BLOCKS),
        grain(std::max<int64_t>(1, SHARE / (apart * int64_t(sizeof(typename Kind::Vector))))) {}
  const typename Kind::Vector* unit(int64_t u) const { return at + u * apart; }
};

// body(kind) of how the weight is packed, and of how exact the product has to be.
template <class Body>
void with_kind(const Tensor& weight, Body body) {
  if (weight.scalar_type() == at::kFloat) return body(Fp32());
  if (weight.scalar_type() == at::kChar) return body(Int8());
#ifdef SPECDEC_AMX
  if (tiled(inputs_of(weight), weight.size(3))) return body(Tiled());
#endif
#ifdef __AVX512BF16__
  if (parts_of_rows() == 1) return body(Rounded());
#endif
  body(Bf16());
}

// x [rows,in] times a weight of `size` outputs -> y [rows,size].
template <class Kind>
void multiply_all(const float* x, int64_t rows, const Packed<Kind>& weight, int64_t size, float* y) {
  at::parallel_for(0, weight.units, weight.grain, [&](int64_t first, int64_t last) {
    const Rows<Kind> from(x, rows, weight.in);
    std::vector<float> aside; // for the last unit, which may go beyond the outputs
    for (int64_t u = first; u < last; u++) {
      const int64_t width = std::min(UNIT, size - u * UNIT);
      float* place = y + u * UNIT;
      if (width == UNIT) {
        from.multiply(weight.unit(u), place, size);
        continue;
      }
      aside.resize(rows * UNIT);
      from.multiply(weight.unit(u), aside.data(), UNIT);
      for (int64_t r = 0; r < rows; r++) std::copy_n(aside.data() + r * UNIT, width, place + r * size);
    }
  });
}

void check(const Tensor& x, const Tensor& weight, int64_t size) {
  const bool rounded = weight.scalar_type() == at::kChar;
  const int64_t side = rounded ? int8::WIDTH : group(inputs_of(weight), weight.size(3));
  const bool whole = outputs_of(weight) % UNIT == 0 && weight.size(2) == side;
  const bool known = rounded || weight.scalar_type() == (weight.size(3) == 1 ? at::kFloat : at::kBFloat16);
  TORCH_CHECK(whole && known && inputs_of(weight) == x.size(1) && size <= outputs_of(weight),
              "the weight was packed for other sizes");
}

// x [R,in] fp32, weight as `ops/linear.py` packs it, [groups, in / 2, group, 2] in bf16 or [groups, in, group, 1] in fp32,
// of `size` outputs -> [R,size].
Tensor linear(const Tensor& x, const Tensor& weight, int64_t size) {
  check(x, weight, size);
  const Tensor inputs = x.contiguous();
  Tensor out = at::empty({x.size(0), size}, x.options());
  with_kind(weight, [&]<class Kind>(Kind) {
    multiply_all(floats(inputs), x.size(0), Packed<Kind>(weight), size, floats(out));
  });
  return out;
}

// silu(gate(x)) * up(x) of x [rows,in], gate_up being the rows of gate and then as many of up -> acts [rows,inner].
template <class Kind>
void gated(const float* x, int64_t rows, const Packed<Kind>& gate_up, int64_t inner, float* acts) {
  const int64_t units = inner / UNIT;
  at::parallel_for(0, units, (gate_up.grain + 1) / 2, [&](int64_t first, int64_t last) {
    const Rows<Kind> from(x, rows, gate_up.in);
    std::vector<float> gates(rows * UNIT);
    for (int64_t u = first; u < last; u++) {
      float* place = acts + u * UNIT;
      from.multiply(gate_up.unit(u), gates.data(), UNIT);
      from.multiply(gate_up.unit(units + u), place, inner);
      for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < UNIT; i += LANES) {
          const Floats gate = load(gates.data() + r * UNIT + i);
          float* at = place + r * inner + i;
          store(at, gate / (1.0f + exponential(smaller(-gate, spread(88.0f)))) * load(at));
        }
    }
  });
}

// down(silu(gate(x)) * up(x)) of x [R,H] -> [R,size]. The weights are packed as for `linear`: gate_up the rows of gate and
// then as many of up, a multiple of 64.
Tensor mlp(const Tensor& x, const Tensor& gate_up, const Tensor& down, int64_t size) {
  const int64_t rows = x.size(0), inner = inputs_of(down);
  check(x, gate_up, 2 * inner);
  TORCH_CHECK(inner % UNIT == 0 && outputs_of(gate_up) == 2 * inner && size <= outputs_of(down),
              "the weights were packed for other sizes");
  const Tensor inputs = x.contiguous();
  Tensor between = at::empty({rows, inner}, x.options()), out = at::empty({rows, size}, x.options());
  float* acts = floats(between);
  with_kind(gate_up, [&]<class Kind>(Kind) { gated(floats(inputs), rows, Packed<Kind>(gate_up), inner, acts); });
  with_kind(down, [&]<class Kind>(Kind) { multiply_all(acts, rows, Packed<Kind>(down), size, floats(out)); });
  return out;
}

// A decoder layer up to its MLP, where nothing is biased: residual [R,H], plus what attention makes of x [R,in], and the
// norm of that. The calls are those of this file, one after the other, and take the same arguments: weights packed as for
// `linear`, `flat_keys` and `flat_values` as `rope_write` stores them, `keys` and `values` the same memory as
// `tree_attention` reads it.
std::tuple<Tensor, Tensor> attend_add(const Tensor& residual, const Tensor& x, const Tensor& qkv, const Tensor& o,
                                      const Tensor& cos, const Tensor& sin, const Tensor& slots, Tensor& flat_keys,
                                      Tensor& flat_values, const Tensor& keys, const Tensor& values, const Tensor& lens,
                                      const std::optional<Tensor>& ancestors, int64_t nodes, double scale,
                                      const std::optional<Tensor>& gains, double gain_eps, const Tensor& weight,
                                      double eps) {
  const int64_t rows = x.size(0), dim = keys.size(3), width = inputs_of(o), all = width + 2 * keys.size(1) * dim;
  const Tensor heads = linear(x, qkv, all).view({rows, all / dim, dim});
  const Tensor q = norm_rope::rope_write(heads, cos, sin, slots, flat_keys, flat_values, gains, gain_eps);
  const Tensor seen = attention::tree_attention(q, keys, values, lens, ancestors, nodes, scale);
  return norm_rope::add_norm(residual, linear(seen.view({rows, width}), o, residual.size(1)), weight, eps);
}

// The rest of it: residual [R,H] plus what the MLP makes of x, and the norm of that.
std::tuple<Tensor, Tensor> mlp_add(const Tensor& residual, const Tensor& x, const Tensor& gate_up, const Tensor& down,
                                   const Tensor& weight, double eps) {
  return norm_rope::add_norm(residual, mlp(x, gate_up, down, residual.size(1)), weight, eps);
}

} // namespace

#define CPU(function) torch::dispatch(c10::DispatchKey::CPU, function)

TORCH_LIBRARY(specdec_rows, m) {
  m.def("tiled(int inputs, int beside) -> bool", &tiled);
  m.def("group(int inputs, int beside) -> int", &group);
  m.def("linear(Tensor x, Tensor weight, int size) -> Tensor", CPU(&linear));
  m.def("mlp(Tensor x, Tensor gate_up, Tensor down, int size) -> Tensor", CPU(&mlp));
  m.def("tree_attention(Tensor q, Tensor keys, Tensor values, Tensor lens, Tensor? ancestors, int nodes, float scale)"
        " -> Tensor", CPU(&attention::tree_attention));
  m.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor", CPU(&norm_rope::rms_norm));
  m.def("add_norm(Tensor x, Tensor y, Tensor weight, float eps) -> (Tensor, Tensor)", CPU(&norm_rope::add_norm));
  m.def("norm_pair(Tensor x, Tensor y, Tensor x_weight, Tensor y_weight, float x_eps, float y_eps) -> Tensor",
        CPU(&norm_rope::norm_pair));
  m.def("rotate(Tensor x, Tensor cos, Tensor sin) -> Tensor", CPU(&norm_rope::rotate));
  m.def("rope_write(Tensor rows, Tensor cos, Tensor sin, Tensor slots, Tensor(a!) keys, Tensor(b!) values, Tensor? gains,"
        " float eps) -> Tensor", CPU(&norm_rope::rope_write));
  m.def("attend_add(Tensor residual, Tensor x, Tensor qkv, Tensor o, Tensor cos, Tensor sin, Tensor slots,"
        " Tensor(a!) flat_keys, Tensor(b!) flat_values, Tensor keys, Tensor values, Tensor lens, Tensor? ancestors,"
        " int nodes, float scale, Tensor? gains, float gain_eps, Tensor weight, float eps) -> (Tensor, Tensor)",
        CPU(&attend_add));
  m.def("mlp_add(Tensor residual, Tensor x, Tensor gate_up, Tensor down, Tensor weight, float eps) -> (Tensor, Tensor)",
        CPU(&mlp_add));
  m.def("largest(Tensor x) -> Tensor", CPU(&tokens::largest));
  m.def("likeliest(Tensor logits) -> (Tensor, Tensor)", CPU(&tokens::likeliest));
  m.def("follow(Tensor tokens, Tensor parents, Tensor drawn, int steps) -> (Tensor, Tensor, Tensor)", CPU(&tokens::follow));
  m.def("commit(Tensor(a!)[] memory, Tensor lens, Tensor path, Tensor n) -> ()", CPU(&tokens::commit));
}
