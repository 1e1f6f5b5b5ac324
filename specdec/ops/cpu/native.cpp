// Products with packed weights as operators over plain tensors. `native.py` says why, compiles this file and loads it.
//
// A handle is a tensor whose memory is a strong reference to what is packed: it lives as long as the handle does.

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/quantized/PackedParams.h>
#include <ATen/ops/from_blob.h>
#include <torch/library.h>

namespace {

using at::Tensor;
using PackedWeight = c10::intrusive_ptr<LinearPackedParamsBase>;

template <typename Held>
Tensor hold(const Held& held) {
  return at::from_blob(new Held(held), {1}, [](void* memory) { delete static_cast<Held*>(memory); }, at::kLong);
}

template <typename Held>
const Held& held_by(const Tensor& handle) {
  return *static_cast<const Held*>(handle.const_data_ptr());
}

// `size`, the columns of the result, is for those who cannot look behind the handle.
Tensor fbgemm_linear(const Tensor& x, const Tensor& handle, bool fewer_bits, int64_t /*size*/) {
  return held_by<PackedWeight>(handle)->apply_dynamic(x, fewer_bits);
}

Tensor onednn_linear(const Tensor& x, const Tensor& handle, const std::optional<Tensor>& bias, int64_t /*size*/) {
  using Scalars = c10::List<std::optional<at::Scalar>>;
  using Text = std::string_view;
  using Product = Tensor(const Tensor&, const Tensor&, const std::optional<Tensor>&, Text, Scalars, std::optional<Text>);
  static const auto product =
      c10::Dispatcher::singleton().findSchemaOrThrow("mkldnn::_linear_pointwise", "").typed<Product>();
  return product.call(x, held_by<Tensor>(handle), bias, "none", Scalars(), "");
}

}  // namespace

#define CPU(function) torch::dispatch(c10::DispatchKey::CPU, function)

TORCH_LIBRARY(specdec, m) {
  m.def("hold_fbgemm(__torch__.torch.classes.quantized.LinearPackedParamsBase weight) -> Tensor", &hold<PackedWeight>);
  m.def("hold_onednn(Tensor weight) -> Tensor", &hold<Tensor>);
  m.def("fbgemm_linear(Tensor x, Tensor handle, bool fewer_bits, int size) -> Tensor", CPU(&fbgemm_linear));
  m.def("onednn_linear(Tensor x, Tensor handle, Tensor? bias, int size) -> Tensor", CPU(&onednn_linear));
}
