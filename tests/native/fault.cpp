// Deliberate faults, by which the sanitizers are seen to work; compiled only with them, see setup.py.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <limits>

namespace {

// A byte beyond the end of x.
int64_t fault_address(const torch::stable::Tensor& x) {
  const auto* bytes = static_cast<const volatile uint8_t*>(x.data_ptr());
  return bytes[x.numel() * x.element_size()];
}

// A sum that int64 does not hold.
int64_t fault_undefined(const torch::stable::Tensor& x) { return std::numeric_limits<int64_t>::max() + x.numel(); }

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(fakequant_cpu, m) {
  m.def("fault_address(Tensor x) -> int");
  m.def("fault_undefined(Tensor x) -> int");
}

STABLE_TORCH_LIBRARY_IMPL(fakequant_cpu, CPU, m) {
  m.impl("fault_address", TORCH_BOX(&fault_address));
  m.impl("fault_undefined", TORCH_BOX(&fault_undefined));
}
