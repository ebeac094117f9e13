// A made-up accelerator: memory of the CPU behind torch's key PrivateUse1, with CUDA's rules about devices.
//
// Operators run CPU kernels over the same memory, so their bits are the CPU's. Tensors of two devices raise as on CUDA.
// Launches, waits for the device, copies and bytes are counted. Float32 products are rounded to TF32 where torch's
// switches for CUDA allow it. Two devices exist.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <atomic>
#include <map>
#include <unordered_map>
#include <unordered_set>

namespace {

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::DispatchKey;
using c10::Storage;
using Optional = std::optional<Tensor>;
using Ints = at::IntArrayRef;

constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr DeviceIndex kDevices = 2;
thread_local DeviceIndex current = 0;
thread_local std::array<c10::StreamId, kDevices> streams{};  // the present one of each device
std::atomic<c10::StreamId> made_streams{0};

Device indexed(Device device) { return device.has_index() ? device : Device(kType, current); }

// Counters ------------------------------------------------------------------------------------------------------------

std::atomic<int64_t> launches{0}, by_default{0}, waits{0}, copies_in{0}, bytes_in{0}, bytes_out{0}, held{0}, peak{0};
PyObject* waited = nullptr;                // a Python function, called with the operator that waits
std::unordered_set<std::string> not_on_cuda;  // operators with a kernel for CPUs and none for CUDA

void hold(int64_t bytes) {
  const auto now = held += bytes;
  auto most = peak.load();
  while (now > most && !peak.compare_exchange_weak(most, now)) {}
}

void wait(const std::string& what) {
  waits++;
  if (!waited) return;
  pybind11::gil_scoped_acquire gil;
  PyObject* result = PyObject_CallFunction(waited, "s", what.c_str());
  if (!result) throw pybind11::error_already_set();
  Py_DECREF(result);
}

// Memory and generators -----------------------------------------------------------------------------------------------

struct Block {
  void* memory;
  int64_t bytes;
};

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* memory = nullptr;
    TORCH_CHECK(!bytes || !posix_memalign(&memory, 512, bytes), "the made-up device is out of memory");
    hold(bytes);
    auto release = [](void* context) {
      auto* block = static_cast<Block*>(context);
      hold(-block->bytes);
      std::free(block->memory);
      delete block;
    };
    return {memory, new Block{memory, static_cast<int64_t>(bytes)}, release, Device(kType, current)};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};
Allocator allocator;
REGISTER_ALLOCATOR(kType, &allocator)

struct Generator final : c10::GeneratorImpl {
  at::Generator cpu = at::detail::createCPUGenerator(c10::default_rng_seed_val);
  explicit Generator(DeviceIndex index)
      : GeneratorImpl(Device(kType, index), c10::DispatchKeySet(DispatchKey::PrivateUse1)) {}
  void set_current_seed(uint64_t seed) override { cpu.set_current_seed(seed); }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "the made-up device has no offsets"); }
  uint64_t get_offset() const override { TORCH_CHECK(false, "the made-up device has no offsets"); }
  uint64_t current_seed() const override { return cpu.current_seed(); }
  uint64_t seed() override { return cpu.seed(); }
  void set_state(const c10::TensorImpl& state) override { cpu.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return cpu.unsafeGetGeneratorImpl()->get_state(); }
  static c10::DeviceType device_type() { return kType; }
  Generator* clone_impl() const override {
    auto* copy = new Generator(device().index());
    copy->cpu = cpu.clone();
    return copy;
  }
};

const at::Generator& generator_of(DeviceIndex index) {
  static const std::vector<at::Generator> all{at::make_generator<Generator>(DeviceIndex{0}),
                                              at::make_generator<Generator>(DeviceIndex{1})};
  return all.at(index < 0 ? current : index);
}

// Devices -------------------------------------------------------------------------------------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  Guard() = default;
  explicit Guard(c10::DeviceType) {}
  c10::DeviceType type() const override { return kType; }
  Device getDevice() const override { return Device(kType, current); }
  Device exchangeDevice(Device device) const override {
    const auto before = getDevice();
    setDevice(device);
    return before;
  }
  void setDevice(Device device) const override {
    TORCH_CHECK(device.index() < kDevices, "invalid device ordinal");
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0) current = device.index();
  }
  c10::Stream of(Device device, c10::StreamId id) const { return c10::Stream(c10::Stream::UNSAFE, device, id); }
  c10::Stream getStream(Device device) const override { return of(indexed(device), streams[indexed(device).index()]); }
  c10::Stream getDefaultStream(Device device) const override { return of(indexed(device), 0); }
  c10::Stream getNewStream(Device device, int) const override { return of(indexed(device), ++made_streams); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return of(stream.device(), std::exchange(streams[stream.device_index()], stream.id()));
  }
  DeviceIndex deviceCount() const noexcept override { return kDevices; }
  void record(void**, const c10::Stream&, DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(DeviceIndex) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return kDevices; }
  DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(DeviceIndex index) const override { Guard().setDevice(Device(kType, index)); }
  DeviceIndex exchangeDevice(DeviceIndex index) const override {
    return Guard().exchangeDevice(Device(kType, index)).index();
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override { return exchangeDevice(index); }
  const at::Generator& getDefaultGenerator(DeviceIndex index) const override { return generator_of(index); }
  at::Generator getNewGenerator(DeviceIndex index) const override {
    return at::make_generator<Generator>(index < 0 ? current : index);
  }
  Device getDeviceFromPtr(void*) const override { return Device(kType, current); }
};

// Tensors of the CPU over the memory of tensors of the device, and back ------------------------------------------------

// The memory of a storage for another device; the context keeps it. Memory that the CPU made counts.
c10::DataPtr memory_for(const Storage& storage, Device device, bool counts) {
  auto* keep = new std::pair<Storage, int64_t>(storage, counts ? storage.nbytes() : 0);
  hold(keep->second);
  auto release = [](void* kept) {
    auto* pair = static_cast<std::pair<Storage, int64_t>*>(kept);
    hold(-pair->second);
    delete pair;
  };
  return {storage.mutable_data(), keep, release, device};
}

Storage over(const Storage& storage, Device device, bool counts) {
  c10::Allocator* maker = device.is_cpu() ? c10::GetCPUAllocator() : &allocator;
  return Storage(Storage::use_byte_size_t(), storage.nbytes(), memory_for(storage, device, counts), maker,
                 /*resizable=*/true);
}

Tensor laid_as(const Tensor& like, Storage storage, DispatchKey key) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  made._set_neg(like.is_neg());
  made._set_conj(like.is_conj());
  return made;
}

// The twins of one call: a tensor has the same twin each time, and tensors that share storage have twins that do.
class Twins {
 public:
  explicit Twins(Device device) : device_(device) {}

  Tensor on_cpu(const Tensor& x) {
    if (!x.defined() || x.device().type() != kType) return x;
    auto& pair = pairs_[x.unsafeGetTensorImpl()];
    if (!pair.second.defined()) {
      auto* key = x.storage().unsafeGetStorageImpl();
      auto storage = storages_.find(key);
      if (storage == storages_.end()) {
        storage = storages_.emplace(key, over(x.storage(), Device(c10::kCPU), false)).first;
        storages_.emplace(storage->second.unsafeGetStorageImpl(), x.storage());
      }
      pair = {x, laid_as(x, storage->second, DispatchKey::CPU)};
    }
    return pair.second;
  }

  Tensor on_device(const Tensor& x) {
    if (!x.defined() || !x.device().is_cpu() || !x.has_storage()) return x;
    for (auto& [impl, pair] : pairs_)
      if (pair.second.is_same(x)) return pair.first;
    auto* key = x.storage().unsafeGetStorageImpl();
    auto storage = storages_.find(key);
    if (storage == storages_.end()) storage = storages_.emplace(key, over(x.storage(), device_, true)).first;
    return laid_as(x, storage->second, DispatchKey::PrivateUse1);
  }

  // An operator may have given a twin new memory or another shape, as for `out=`.
  void take_over() {
    for (auto& [impl, pair] : pairs_) {
      auto& [x, twin] = pair;
      if (twin.storage().nbytes() && twin.storage().data() != x.storage().data()) {
        const auto bytes = twin.storage().nbytes();
        x.storage().set_data_ptr_noswap(memory_for(twin.storage(), x.device(), true));
        x.storage().set_nbytes(bytes);
      }
      if (twin.sizes() != x.sizes() || twin.strides() != x.strides())
        impl->set_sizes_and_strides(twin.sizes(), twin.strides(), twin.storage_offset());
    }
  }

 private:
  Device device_;
  std::unordered_map<c10::TensorImpl*, std::pair<Tensor, Tensor>> pairs_;
  std::unordered_map<c10::StorageImpl*, Storage> storages_;  // both ways
};

// CUDA's rules --------------------------------------------------------------------------------------------------------

using Names = const std::unordered_set<std::string>;
// Operators of TensorIterator, which take tensors of the CPU without axes.
Names takes_numbers{
    "add", "sub", "rsub", "mul", "div", "true_divide", "floor_divide", "remainder", "fmod", "pow", "maximum", "minimum",
    "fmax", "fmin", "atan2", "eq", "ne", "lt", "le", "gt", "ge", "bitwise_and", "bitwise_or", "bitwise_xor",
    "bitwise_left_shift", "bitwise_right_shift", "__lshift__", "__rshift__", "logical_and", "logical_or", "logical_xor",
    "copysign", "hypot", "nextafter", "logaddexp", "xlogy", "clamp_min", "clamp_max", "where", "addcmul", "addcdiv",
    "lerp", "masked_fill", "index_fill", "ldexp", "mse_loss", "smooth_l1_loss", "huber_loss", "threshold_backward"};
Names takes_indices{"index", "index_put", "_index_put_impl", "_unsafe_index", "_unsafe_index_put"};
// Operators whose results have shapes that depend on values, and those that give Python a bool.
Names sees_values{"nonzero", "masked_select", "equal", "bincount", "_unique2", "unique_dim", "unique_consecutive",
                  "repeat_interleave", "_linalg_check_errors", "is_nonzero", "multinomial"};
Names multiplies{"mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "vdot", "addbmm", "addr"};

std::string plain_name(const std::string& name) {  // "aten::add_.Tensor": "add"
  auto base = name.substr(0, name.find('.'));
  base = base.substr(base.find("::") == std::string::npos ? 0 : base.find("::") + 2);
  if (base.size() > 2 && base.back() == '_' && base[base.size() - 2] != '_') base.pop_back();
  return base;
}

struct Argument {
  Tensor tensor;
  const c10::Argument* declared;
};

void refuse_as_cuda(const std::string& name, const std::vector<Argument>& arguments, Device device) {
  const auto base = plain_name(name);
  for (auto& [tensor, declared] : arguments) {
    const bool written = declared->alias_info() && declared->alias_info()->isWrite();
    const bool number = tensor.device().is_cpu() && tensor.dim() == 0 && !written;
    const bool wrapped = number && tensor.unsafeGetTensorImpl()->is_wrapped_number();
    const bool index = tensor.device().is_cpu() && takes_indices.count(base) && declared->name() == "indices";
    const bool value = number && takes_indices.count(base) && declared->name() == "values";
    if (tensor.device() == device || wrapped || index || value || (number && takes_numbers.count(base))) continue;
    TORCH_CHECK(false, "Expected all tensors to be on the same device, but got ", declared->name(), " is on ",
                tensor.device(), ", different from other tensors on ", device, " (when checking argument in ", name, ")");
  }
  TORCH_CHECK(!not_on_cuda.count(name), "Could not run '", name, "' with arguments from the 'CUDA' backend");
  if (multiplies.count(base))
    for (auto& [tensor, declared] : arguments)
      TORCH_CHECK_NOT_IMPLEMENTED(!c10::isIntegralType(tensor.scalar_type(), true), "\"", base,
                                  "_cuda\" not implemented for '", tensor.scalar_type(), "'");
  if (base == "_int_mm")
    TORCH_CHECK(arguments[0].tensor.size(0) > 16 && arguments[0].tensor.size(1) % 8 == 0 &&
                    arguments[1].tensor.size(1) % 8 == 0,
                "_int_mm takes more than 16 rows, and multiples of 8");
}

// Operands of products in TF32: ten bits of mantissa, where torch's switches for CUDA allow them.
Tensor as_tf32(const Tensor& x, at::Float32Op op) {
  const auto allowed = at::globalContext().float32Precision(at::Float32Backend::CUDA, op);
  if (allowed != at::Float32Precision::TF32 || !x.defined() || x.scalar_type() != at::kFloat) return x;
  const auto dense = x.contiguous();
  return dense.view(at::kInt).add(0x1000).bitwise_and(~0x1FFF).view(at::kFloat);
}

// Every operator without a kernel of its own --------------------------------------------------------------------------

template <typename F>
void each_tensor(c10::IValue& value, F change) {
  if (value.isTensor()) {
    value = change(value.toTensor());
  } else if (value.isTensorList()) {
    auto list = value.toTensorVector();
    for (auto& x : list) x = change(x);
    value = std::move(list);
  } else if (value.isOptionalTensorList()) {
    c10::List<Optional> list;
    for (const auto& x : value.toOptionalTensorVector()) list.push_back(x ? Optional(change(*x)) : x);
    value = std::move(list);
  }
}

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& declared = op.schema().arguments();
  const auto name = c10::toString(op.operator_name()), base = plain_name(name);
  std::vector<Argument> arguments;
  std::optional<Device> device;
  for (size_t i = 0; i < declared.size(); i++) {
    auto& value = (*stack)[stack->size() - declared.size() + i];
    each_tensor(value, [&](const Tensor& x) {
      if (x.defined()) arguments.push_back({x, &declared[i]});
      if (x.defined() && x.device().type() == kType && !device) device = x.device();
      return x;
    });
    if (value.isDevice() && value.toDevice().type() == kType && !device) device = indexed(value.toDevice());
  }
  if (device) refuse_as_cuda(name, arguments, *device);
  const Device where = device.value_or(Device(kType, current));
  launches++;
  if (!streams[where.index()]) by_default++;
  if (sees_values.count(base)) wait(name);
  for (auto& [tensor, argument] : arguments)  // an index of the CPU is copied
    if (takes_indices.count(base) && argument->name() == "indices" && tensor.device().is_cpu()) wait(name);
  Twins twins(where);
  for (size_t i = 0; i < declared.size(); i++) {
    auto& value = (*stack)[stack->size() - declared.size() + i];
    const bool is_factor = multiplies.count(base) && declared[i].name() != "out" &&
                           !(declared[i].name() == "self" && base.find("add") != std::string::npos);
    each_tensor(value, [&](const Tensor& x) {
      at::AutoDispatchBelowADInplaceOrView below;
      return is_factor ? as_tf32(twins.on_cpu(x), at::Float32Op::MATMUL) : twins.on_cpu(x);
    });
    if (value.isDevice() && value.toDevice().type() == kType) value = Device(c10::kCPU);
    if (value.isGenerator() || (value.isNone() && declared[i].name() == "generator")) {
      const auto generator = value.isNone() ? generator_of(where.index()) : value.toGenerator();
      TORCH_CHECK(generator.device().type() == kType, "Expected a generator of the device but found ", generator.device());
      value = static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->cpu;
    }
  }
  // CUDA counts integers, a CPU floats alone.
  const auto counted = base == "histc" ? std::optional(arguments[0].tensor.scalar_type()) : std::nullopt;
  auto& first = (*stack)[stack->size() - declared.size()];
  if (counted) first = first.toTensor().to(at::promoteTypes(*counted, at::kFloat));
  op.redispatchBoxed(c10::DispatchKeySet(DispatchKey::CPU), stack);
  if (counted) stack->back() = stack->back().toTensor().to(*counted);
  twins.take_over();
  const auto results = op.schema().returns().size();
  for (auto i = stack->size() - results; i < stack->size(); i++)
    each_tensor((*stack)[i], [&](const Tensor& x) { return twins.on_device(x); });
}

// Kernels of its own --------------------------------------------------------------------------------------------------

using Type = std::optional<at::ScalarType>;
using Layout = std::optional<at::Layout>;
using Place = std::optional<Device>;
using Pinned = std::optional<bool>;
constexpr c10::DispatchKeySet kKeys(DispatchKey::PrivateUse1);

Tensor empty(Ints size, Type type, Layout, Place place, Pinned, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(indexed(place.value_or(Device(kType))));
  return at::detail::empty_generic(size, &allocator, kKeys, c10::dtype_or_default(type), format);
}
Tensor empty_strided(Ints size, Ints stride, Type type, Layout, Place place, Pinned) {
  c10::DeviceGuard guard(indexed(place.value_or(Device(kType))));
  return at::detail::empty_strided_generic(size, stride, &allocator, kKeys, c10::dtype_or_default(type));
}
Tensor as_strided(const Tensor& x, Ints size, Ints stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(x, size, stride, offset);
}
Tensor view(const Tensor& x, Ints size) { return at::native::view(x, size); }
Tensor reshape_alias(const Tensor& x, Ints size, Ints stride) { return at::native::_reshape_alias(x, size, stride); }
const Tensor& resize_(const Tensor& x, Ints size, std::optional<at::MemoryFormat> format) {
  return at::native::resize_(x, size, format);
}
Tensor& set_part(Tensor& x, Storage source, int64_t offset, Ints size, Ints stride) {
  return at::native::set_storage_cpu_(x, std::move(source), offset, size, stride);
}
Tensor& set_storage(Tensor& x, Storage source) {
  const auto n = static_cast<int64_t>(source.nbytes() / x.dtype().itemsize());
  return set_part(x, std::move(source), 0, {n}, {});
}
Tensor& set_tensor(Tensor& x, const Tensor& source) {
  return set_part(x, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}
Tensor& set_nothing(Tensor& x) {
  return set_part(x, Storage(Storage::use_byte_size_t(), 0, allocator.allocate(0), &allocator, true), 0, {0}, {});
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  const auto bytes = static_cast<int64_t>(from.numel() * from.element_size());
  if (to.device().is_cpu()) {
    bytes_out += bytes;
    wait("copy to the CPU");
  } else if (from.device().is_cpu()) {
    bytes_in += bytes;
    copies_in++;
    if (!non_blocking) wait("copy to the device");
  } else {
    launches++;
  }
  Twins twins(to.device());
  at::AutoDispatchBelowADInplaceOrView below;
  twins.on_cpu(to).copy_(twins.on_cpu(from));
  return to;
}
Tensor copy_and_resize(const Tensor& from, const Tensor& to) {
  if (to.sizes() != from.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}
at::Scalar item(const Tensor& x) {
  wait("item");
  at::AutoDispatchBelowADInplaceOrView below;
  return at::_local_scalar_dense(Twins(x.device()).on_cpu(x));
}

void refuse_other_devices(const Tensor& input, std::initializer_list<Tensor> others) {
  for (const Tensor& x : others)
    TORCH_CHECK(!x.defined() || x.device() == input.device(), "Expected all tensors to be on the same device, but got ",
                x.device(), " and ", input.device(), " (in a convolution)");
  TORCH_CHECK_NOT_IMPLEMENTED(at::isFloatingType(input.scalar_type()), "\"conv_cuda\" not implemented for '",
                              input.scalar_type(), "'");
}
Tensor convolution(const Tensor& input, const Tensor& weight, const Optional& bias, Ints stride, Ints padding,
                   Ints dilation, bool transposed, Ints output_padding, int64_t groups) {
  refuse_other_devices(input, {weight, bias.value_or(Tensor())});
  launches++;
  Twins twins(input.device());
  at::AutoDispatchBelowADInplaceOrView below;
  auto factor = [&](const Tensor& x) { return as_tf32(twins.on_cpu(x), at::Float32Op::CONV); };
  const auto added = bias && bias->defined() ? Optional(twins.on_cpu(*bias)) : std::nullopt;
  return twins.on_device(at::convolution(factor(input), factor(weight), added, stride, padding, dilation, transposed,
                                         output_padding, groups));
}
std::tuple<Tensor, Tensor, Tensor> convolution_backward(const Tensor& grad, const Tensor& input, const Tensor& weight,
                                                        Ints stride, Ints padding, Ints dilation, bool transposed,
                                                        Ints output_padding, int64_t groups, std::array<bool, 3> mask) {
  refuse_other_devices(input, {grad, weight});
  launches += 2;
  Twins twins(input.device());
  at::AutoDispatchBelowADInplaceOrView below;
  auto factor = [&](const Tensor& x) { return as_tf32(twins.on_cpu(x), at::Float32Op::CONV); };
  const int64_t channels = transposed ? weight.size(1) * groups : weight.size(0);
  const auto bias = mask[2] ? at::OptionalIntArrayRef({channels}) : at::OptionalIntArrayRef();
  auto [a, b, c] = at::convolution_backward(factor(grad), factor(input), factor(weight), bias, stride, padding, dilation,
                                            transposed, output_padding, groups, mask);
  return {twins.on_device(a), twins.on_device(b), twins.on_device(c)};
}

// The fused cell, in which torch runs an LSTM on accelerators.
std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& by_input, const Tensor& by_hidden, const Tensor& cell,
                                             const Optional& input_bias, const Optional& hidden_bias) {
  auto gates = by_input + by_hidden;
  for (const auto& bias : {input_bias, hidden_bias})
    if (bias && bias->defined()) gates = gates + *bias;
  const auto parts = gates.chunk(4, 1);
  const auto in = parts[0].sigmoid(), forget = parts[1].sigmoid(), fresh = parts[2].tanh(), out = parts[3].sigmoid();
  const auto next = forget * cell + in * fresh;
  return {out * next.tanh(), next, at::cat({in, forget, fresh, out}, 1)};
}
std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(const Optional& by_hidden, const Optional& by_cell,
                                                      const Tensor& cell, const Tensor& next, const Tensor& workspace,
                                                      bool has_bias) {
  const auto parts = workspace.chunk(4, 1);
  const auto &in = parts[0], &forget = parts[1], &fresh = parts[2], &out = parts[3];
  const auto bent = next.tanh();
  const auto hidden = by_hidden && by_hidden->defined() ? *by_hidden : at::zeros_like(next);
  auto d_next = hidden * out * (1 - bent * bent);
  if (by_cell && by_cell->defined()) d_next = d_next + *by_cell;
  auto gates = at::cat({d_next * fresh * in * (1 - in), d_next * cell * forget * (1 - forget),
                        d_next * in * (1 - fresh * fresh), hidden * bent * out * (1 - out)},
                       1);
  return {gates, d_next * forget, has_bias ? gates.sum(0) : Tensor()};
}

Names kernels{"view", "_reshape_alias", "as_strided", "set_", "_local_scalar_dense", "empty_strided", "resize_",
              "empty.memory_format", "set_.source_Storage", "set_.source_Storage_storage_offset", "set_.source_Tensor"};
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &as_strided);
  m.impl("view", &view);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("resize_", &resize_);
  m.impl("set_.source_Storage_storage_offset", &set_part);
  m.impl("set_.source_Storage", &set_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_", &set_nothing);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_and_resize);
  m.impl("_local_scalar_dense", &item);
  m.impl("convolution_overrideable", &convolution);
  m.impl("convolution_backward_overrideable", &convolution_backward);
  m.impl("_thnn_fused_lstm_cell", &lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", &lstm_cell_backward);
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>()); }
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

}  // namespace

namespace at::autocast {
#define LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FULL(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define FULL_BY_TYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
  AT_FORALL_FP32(FULL)
  AT_FORALL_FP32_SET_OPT_DTYPE(FULL_BY_TYPE)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
  AT_FORALL_PROMOTE(PROMOTE)
}
}  // namespace at::autocast

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  m.def("current_device", [] { return static_cast<int>(current); });
  m.def("set_device", [](int index) { Guard().setDevice(Device(kType, static_cast<DeviceIndex>(index))); });
  m.def("generator", [](int index) { return generator_of(static_cast<DeviceIndex>(index)); });
  m.def("counts", [] {
    return std::map<std::string, int64_t>{{"launches", launches}, {"by_default", by_default}, {"waits", waits}, {"copies_in", copies_in},
                                          {"bytes_in", bytes_in}, {"bytes_out", bytes_out}, {"held", held}, {"peak", peak}};
  });
  m.def("start_counting", [](const pybind11::object& at_wait) {
    for (auto* counter : {&launches, &by_default, &waits, &copies_in, &bytes_in, &bytes_out}) *counter = 0;
    peak = held.load();
    Py_XDECREF(waited);
    waited = at_wait.is_none() ? nullptr : at_wait.inc_ref().ptr();
  });
  m.def("refuse", [](const std::vector<std::string>& names) { not_on_cuda = {names.begin(), names.end()}; });
  m.def("on_cpu", [](const Tensor& x) { return Twins(x.device()).on_cpu(x); }, "The same memory as a tensor of the CPU.");
  m.def("on_device", [](const Tensor& x, int index) {
    return Twins(Device(kType, static_cast<DeviceIndex>(index))).on_device(x);
  });
  m.def("run_whole", [](const std::vector<std::string>& names) {
    static torch::Library library(torch::Library::IMPL, "aten", DispatchKey::PrivateUse1, __FILE__, __LINE__);
    for (const auto& name : names)
      if (!kernels.count(name)) library.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
  }, "Operators that torch composes of others on accelerators: the CPU's kernel in place of that.");
  m.def("launched", [](int64_t times) { launches += times; });
}
