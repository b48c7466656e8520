// A device of type CUDA (of a plugin's type, with -DPLUGIN) whose memory is that of the host. Kernels are those of the
// CPU, on the same bytes; allocation, streams, the current device and pinned memory are counted here. Work is done at
// once, in the order of the calls.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pybind11/pybind11.h>
#include <torch/library.h>

#include <cstring>
#include <mutex>
#include <unordered_map>
#include <unordered_set>

namespace {

#ifdef PLUGIN
constexpr auto kType = c10::kPrivateUse1;
constexpr auto kKey = c10::DispatchKey::PrivateUse1;
#define FAKE PrivateUse1
#else
constexpr auto kType = c10::kCUDA;
constexpr auto kKey = c10::DispatchKey::CUDA;
#define FAKE CUDA
#endif

constexpr int kDevices = 2;

struct Memory {
  int64_t total = int64_t{1} << 40, allocated = 0, peak = 0, reserved = 0, allocations = 0, fails_at = 0, bytes_copied = 0;
};

std::mutex mutex;
Memory memories[kDevices];
std::unordered_map<void*, std::pair<int, int64_t>> blocks;
std::unordered_map<void*, int64_t> pinned;
thread_local c10::DeviceIndex current = 0;

void release(void* pointer) {
  if (!pointer) return;
  std::lock_guard<std::mutex> lock(mutex);
  auto found = blocks.find(pointer);
  memories[found->second.first].allocated -= found->second.second;
  blocks.erase(found);
  std::free(pointer);
}

void unpin(void* pointer) {
  if (!pointer) return;
  std::lock_guard<std::mutex> lock(mutex);
  pinned.erase(pointer);
  std::free(pointer);
}

void* aligned(size_t bytes) { return std::aligned_alloc(512, (bytes + 511) / 512 * 512); }

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    c10::Device device(kType, current);
    if (!bytes) return {nullptr, nullptr, &release, device};
    std::lock_guard<std::mutex> lock(mutex);
    auto& memory = memories[current];
    memory.allocations += 1;
    bool full = memory.allocated + int64_t(bytes) > memory.total || memory.allocations == memory.fails_at;
    TORCH_CHECK_WITH(OutOfMemoryError, !full, "CUDA out of memory. Tried to allocate ", bytes, " bytes.");
    memory.allocated += bytes;
    memory.peak = std::max(memory.peak, memory.allocated);
    memory.reserved = std::max(memory.reserved, memory.allocated);
    void* pointer = aligned(bytes);
    blocks[pointer] = {current, int64_t(bytes)};
    return {pointer, pointer, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t count) const override { default_copy_data(to, from, count); }
};

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* pointer = bytes ? aligned(bytes) : nullptr;
    std::lock_guard<std::mutex> lock(mutex);
    if (pointer) pinned[pointer] = bytes;
    return {pointer, pointer, &unpin, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, std::size_t count) const override { default_copy_data(to, from, count); }
};

DeviceAllocator device_allocator;
PinnedAllocator pinned_allocator;
c10::AllocatorRegisterer<kType> registered_allocator(&device_allocator);

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = kType;
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {kType, current}; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < kDevices, "CUDA error: invalid device ordinal");
    if (device.index() >= 0) current = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current = device.index(); }
  c10::Stream getStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    static std::atomic<int> number{0};
    return c10::Stream(c10::Stream::UNSAFE, device, ++number);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override { return getStream(stream.device()); }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    *event = this->mark();
  }
  void block(void*, const c10::Stream&) const override {}
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}

 private:
  static void* mark() {
    static int anything;
    return &anything;
  }
};

C10_REGISTER_GUARD_IMPL(FAKE, Guard);

const at::Generator& generator_of(c10::DeviceIndex index) {
  static at::Generator generators[kDevices] = {at::detail::createCPUGenerator(), at::detail::createCPUGenerator()};
  return generators[index < 0 ? current : index];
}

#ifdef PLUGIN
struct Hooks final : at::PrivateUse1HooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(c10::DeviceIndex index) const override { current = index; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override { return generator_of(index); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
};

const bool registered = [] {
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  return true;
}();
#else
struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return kDevices; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex current_device() const override { return current; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(c10::DeviceIndex index) const override { current = index; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override { return generator_of(index); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  c10::Allocator* getCUDADeviceAllocator() const override { return &device_allocator; }
  bool isPinnedPtr(const void* data) const override {
    std::lock_guard<std::mutex> lock(mutex);
    for (auto& [start, size] : pinned)
      if (start <= data && data < static_cast<const char*>(start) + size) return true;
    return false;
  }
  void deviceSynchronize(c10::DeviceIndex) const override {}
};
#endif

}  // namespace

#ifndef PLUGIN
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
namespace {
REGISTER_CUDA_HOOKS(CUDAHooks);
}
#endif

namespace {

// The tensors of one call: each storage on a device is seen through a storage of the CPU on the same memory.
class Call {
 public:
  explicit Call(const std::string& name) : name_(name) {}

  void see(c10::Device device) {
    TORCH_CHECK(
        !device_ || device_->index() == device.index(),
        "Expected all tensors to be on the same device, but found at least two devices, ", *device_, " and ", device,
        "! (", name_, ")");
    device_ = device;
  }

  at::Tensor to_host(const at::Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    if (tensor.device().type() != kType) {
      host_ = host_ || (tensor.dim() > 0 && tensor.device().is_cpu());
      hosts_.insert(tensor.unsafeGetTensorImpl());
      return tensor;
    }
    if (name_ != "aten::copy_") see(tensor.device());
    else if (!device_) device_ = tensor.device();
    auto* key = tensor.storage().unsafeGetStorageImpl();
    auto& seen = seen_[key];
    if (!seen) {
      c10::Storage own = tensor.storage();
      auto data = c10::InefficientStdFunctionContext::makeDataPtr(
          tensor.storage().mutable_data(), [own](void*) {}, c10::Device(c10::kCPU));
      seen = c10::Storage(c10::Storage::use_byte_size_t(), own.nbytes(), std::move(data), c10::GetCPUAllocator(), true);
      owners_.emplace(seen.unsafeGetStorageImpl(), tensor.storage());
    }
    auto made = like(tensor, seen, c10::DispatchKey::CPU);
    tensors_.emplace(made.unsafeGetTensorImpl(), tensor);
    inputs_.push_back(made);
    return made;
  }

  at::Tensor to_device(const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.device().is_cpu() || !device_) return tensor;
    if (hosts_.count(tensor.unsafeGetTensorImpl())) return tensor;
    auto same = tensors_.find(tensor.unsafeGetTensorImpl());
    if (same != tensors_.end()) return same->second;
    auto owner = owners_.find(tensor.storage().unsafeGetStorageImpl());
    if (owner != owners_.end()) return like(tensor, owner->second, kKey);
    if (tensor.dim() == 0 && tensor.unsafeGetTensorImpl()->is_wrapped_number()) return tensor;
    auto& moved = moved_[tensor.storage().unsafeGetStorageImpl()];
    if (!moved) moved = on_device(tensor.storage());
    kept_.push_back(tensor);
    return like(tensor, moved, kKey);
  }

  // An operation may have given its results another shape, or more memory.
  void settle() {
    for (auto& input : inputs_) {
      auto& tensor = tensors_.at(input.unsafeGetTensorImpl());
      auto from = input.storage();
      auto to = tensor.storage();
      if (from.data() != to.data()) {
        auto made = on_device(from);
        to.set_data_ptr_noswap(made.unsafeGetStorageImpl()->set_data_ptr(c10::DataPtr()));
        to.set_nbytes(from.nbytes());
      }
      if (tensor.sizes() != input.sizes() || tensor.strides() != input.strides())
        tensor.unsafeGetTensorImpl()->set_sizes_and_strides(input.sizes(), input.strides(), input.storage_offset());
    }
  }

  bool mixed() const { return host_ && device_; }
  std::optional<c10::Device> device() const { return device_; }

 private:
  static at::Tensor like(const at::Tensor& tensor, const c10::Storage& storage, c10::DispatchKey key) {
    auto keys = c10::DispatchKeySet(key);  // a view of a tensor of inference mode is one, too, and no other is
    if (!tensor.is_inference()) keys = keys | c10::getAutogradRelatedKeySetFromBackend(c10::toBackendComponent(key));
    auto made = at::detail::make_tensor<c10::TensorImpl>(
        c10::TensorImpl::VIEW, c10::Storage(storage), keys, tensor.dtype());
    made.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
    return made;
  }

  c10::Storage on_device(const c10::Storage& storage) {
    c10::DeviceGuard guard(*device_);
    auto made = c10::Storage(c10::Storage::use_byte_size_t(), storage.nbytes(), &device_allocator, true);
    if (storage.nbytes()) std::memcpy(made.mutable_data(), storage.data(), storage.nbytes());
    return made;
  }

  std::string name_;
  std::optional<c10::Device> device_;
  bool host_ = false;
  std::unordered_set<c10::TensorImpl*> hosts_;
  std::unordered_map<c10::StorageImpl*, c10::Storage> seen_, moved_;
  std::unordered_map<c10::StorageImpl*, c10::Storage> owners_;
  std::unordered_map<c10::TensorImpl*, at::Tensor> tensors_;
  std::vector<at::Tensor> inputs_, kept_;
};

template <class F>
c10::IValue map_tensors(const c10::IValue& value, F change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> made;
    for (const at::Tensor& tensor : value.toTensorVector()) made.push_back(change(tensor));
    return made;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> made;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector())
      made.push_back(tensor ? std::optional<at::Tensor>(change(*tensor)) : std::nullopt);
    return made;
  }
  return value;
}

bool takes_both(const std::string& name) {
  static const std::unordered_set<std::string> names{
      "aten::copy_", "aten::index", "aten::_index_put_impl_", "aten::index_put_", "aten::index_put"};
  return names.count(name);
}

void on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  Call call(schema.name());
  const auto count = schema.arguments().size();
  auto arguments = torch::jit::last(stack, count);
  std::vector<c10::IValue> changed;
  for (const auto& argument : arguments) {
    if (argument.isDevice() && argument.toDevice().type() == kType) {
      auto device = argument.toDevice();
      call.see({kType, device.has_index() ? device.index() : current});
      changed.emplace_back(c10::Device(c10::kCPU));
    } else {
      changed.push_back(map_tensors(argument, [&](const at::Tensor& tensor) { return call.to_host(tensor); }));
    }
  }
  TORCH_CHECK(
      !call.mixed() || takes_both(schema.name()), "Expected all tensors to be on the same device, but found at least "
      "two devices, ", call.device().value_or(c10::Device(kType)), " and cpu! (", schema.name(), ")");
  torch::jit::drop(stack, count);
  for (auto& value : changed) stack->push_back(std::move(value));
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  call.settle();
  const auto results = schema.returns().size();
  std::vector<c10::IValue> found;
  for (const auto& result : torch::jit::last(stack, results))
    found.push_back(map_tensors(result, [&](const at::Tensor& tensor) { return call.to_device(tensor); }));
  torch::jit::drop(stack, results);
  for (auto& value : found) stack->push_back(std::move(value));
}

c10::Device or_current(std::optional<c10::Device> device) {
  return device && device->has_index() ? *device : c10::Device(kType, current);
}

at::Tensor empty(
    c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<c10::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(or_current(device));
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), &device_allocator, c10::DispatchKeySet(kKey),
      c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::SymIntArrayRef size, c10::SymIntArrayRef strides, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(or_current(device));
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(strides), &device_allocator,
      c10::DispatchKeySet(kKey), c10::dtype_or_default(dtype));
}

at::Tensor& set_storage(
    at::Tensor& self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef strides) {
  TORCH_CHECK(source.device() == self.device(), "set_: the storage is on ", source.device(), ", not ", self.device());
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  auto steps = strides.size() || !size.size() ? C10_AS_INTARRAYREF_SLOW(strides).vec() : std::vector<int64_t>();
  if (steps.empty() && sizes.size()) {
    steps.assign(sizes.size(), 1);
    for (int64_t at = int64_t(sizes.size()) - 2; at >= 0; --at) steps[at] = steps[at + 1] * sizes[at + 1];
  }
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(source);
  self.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, steps, offset.expect_int());
  return self;
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(source.storage());
  self.unsafeGetTensorImpl()->set_sizes_and_strides(source.sizes(), source.strides(), source.storage_offset());
  return self;
}

const at::Tensor& resize_(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(sizes);
  size_t needed = (impl->storage_offset() + impl->numel()) * self.element_size();
  auto storage = impl->storage();
  if (needed > storage.nbytes()) {
    c10::DeviceGuard guard(self.device());
    auto data = device_allocator.allocate(needed);
    if (storage.nbytes()) std::memcpy(data.get(), storage.data(), storage.nbytes());
    storage.set_data_ptr_noswap(std::move(data));
    storage.set_nbytes(needed);
  }
  return self;
}

TORCH_LIBRARY_IMPL(_, FAKE, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_host>()); }

TORCH_LIBRARY_IMPL(aten, FAKE, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("resize_", &resize_);
  m.impl("copy_", torch::CppFunction::makeFromBoxedFunction<&on_host>());
  m.impl("record_stream", [](at::Tensor&, at::Stream) {});
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("count", [] { return kDevices; });
  m.def("current", [] { return int(current); });
  m.def("set_current", [](int index) { Guard().setDevice({kType, c10::DeviceIndex(index)}); });
  m.def("set_total", [](int index, int64_t bytes) { memories[index].total = bytes; });
  m.def("fail_at", [](int index, int64_t n) { memories[index].fails_at = n ? memories[index].allocations + n : 0; });
  m.def("reset_peak", [](int index) { memories[index].peak = memories[index].allocated; });
  m.def("total", [](int index) { return memories[index].total; });
  m.def("allocated", [](int index) { return memories[index].allocated; });
  m.def("reserved", [](int index) { return memories[index].reserved; });
  m.def("empty_cache", [] { for (auto& memory : memories) memory.reserved = memory.allocated; });
  m.def("peak", [](int index) { return memories[index].peak; });
  m.def("allocations", [](int index) { return memories[index].allocations; });
  m.def("pinned", [] { int64_t sum = 0; for (auto& [_, size] : pinned) sum += size; return sum; });
}
