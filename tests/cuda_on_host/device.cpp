// A `cuda` device for the CPU build of torch: memory is the host's, kernels are the CPU's.
//
// README.md says what it catches. Registered are: the device guard (devices, streams, events), the hooks (what torch asks
// about CUDA), two allocators, and one kernel for all operations, which calls the CPU's over the same bytes.
#include "order.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/AllocatorConfig.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <fcntl.h>
#include <unistd.h>

#include <chrono>
#include <list>
#include <mutex>
#include <set>
#include <thread>

namespace cuda_on_host {
namespace {

using at::Tensor;
using c10::DataPtr;
using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Storage;
using c10::Stream;
using c10::StreamId;

constexpr int kMostDevices = 64;
constexpr int64_t kMemory = 80LL << 30;

thread_local DeviceIndex device_of_thread = 0;
thread_local std::array<StreamId, kMostDevices> stream_of_thread{};

// Guards all that follows. Recursive, since dropping a tensor while it is held gives memory back.
std::recursive_mutex mutex;
using Lock = std::lock_guard<std::recursive_mutex>;

std::array<int64_t, kMostDevices> in_use{}, most{}, total{};
int64_t pinned = 0;
std::map<std::string, int64_t> host_wait_counts;
bool waits_are_forbidden = false;
std::set<int> devices_with_context;
std::function<void()> finish_communication;

struct Fault {
  double seconds_per_byte;
  bool is_wrong;
};
std::map<std::pair<int, std::string>, Fault> faults;  // by device and operation

// ---- the order of operations

struct Access {
  Step step;
  int64_t low, high;  // bytes from the start of the storage
  bool writes;
  std::string operation;
};

struct StreamState {
  Stream stream;
  Clock clock;
  std::vector<Access> of_freed;  // what other streams may still do to memory that was given back to this one
};
std::vector<StreamState> streams;
Clock host_clock;
StreamId last_stream = 0;

int index_of(Stream stream) {
  for (size_t i = 0; i < streams.size(); i++)
    if (streams[i].stream == stream) return i;
  streams.push_back({stream, {}, {}});
  return streams.size() - 1;
}

int64_t& at_stream(Clock& clock, int stream) {
  if ((int)clock.size() <= stream) clock.resize(stream + 1, 0);
  return clock[stream];
}

bool is_over(Step step, const Clock& clock) { return step.stream < (int)clock.size() && step.at <= clock[step.stream]; }

void join(Clock& clock, const Clock& other) {
  for (size_t i = 0; i < other.size(); i++) at_stream(clock, i) = std::max(at_stream(clock, i), other[i]);
}

std::string name_of(int stream) {
  auto s = streams[stream].stream;
  return s.id() == 0 ? c10::str("the default stream of ", s.device()) : c10::str("stream ", s.id(), " of ", s.device());
}

struct Event {
  Clock clock;
  Device device{DeviceType::CPU};
  std::chrono::steady_clock::time_point time;
};

// ---- memory

thread_local std::string operation_of_thread = "an allocation";

struct Block {  // what a storage on the device owns
  Storage bytes;
  int64_t size;
  std::string made_by;
  Device device;
  int home;  // the stream it was allocated on; freed memory is given out again on this stream without any wait
  std::vector<Access> accesses;
  std::set<int> recorded;
};
std::set<Block*> blocks;

// What is allocated on a device, by the operation that has made it.
std::string listed(int device) {
  std::map<std::pair<std::string, int64_t>, int64_t> counts;
  for (const auto* block : blocks) if (block->device.index() == device) counts[{block->made_by, block->size}]++;
  std::vector<std::pair<int64_t, std::string>> lines;
  for (const auto& [what, count] : counts) lines.emplace_back(count * what.second, c10::str(count, " × ", what.second, " of ", what.first));
  std::sort(lines.rbegin(), lines.rend());
  std::string text;
  for (const auto& [bytes, line] : lines) text += "\n  " + line;
  return text;
}

void release(void* context) {
  auto* block = (Block*)context;
  Lock lock(mutex);
  in_use[block->device.index()] -= block->size;
  blocks.erase(block);
  auto& home = streams[block->home];
  for (auto access : block->accesses) {
    if (access.step.stream == block->home || is_over(access.step, home.clock) || block->recorded.count(access.step.stream)) continue;
    access.operation += " (before it was freed without record_stream)";
    home.of_freed.push_back(access);
  }
  delete block;
}

DataPtr own(Storage bytes, Device device) {
  Lock lock(mutex);
  make_context(device.index());
  const auto size = (int64_t)bytes.nbytes();
  auto& now = in_use[device.index()];
  TORCH_CHECK_WITH(OutOfMemoryError, now + size <= memory(device.index()), "CUDA out of memory. Tried to allocate ", size, " bytes for ", operation_of_thread,
                   ". ", device, " has ", memory(device.index()), ", of which are in use ", now, ":", listed(device.index()));
  now += size;
  most[device.index()] = std::max(most[device.index()], now);
  const int home = index_of(current_stream(device.index()));
  auto* block = new Block{bytes, size, operation_of_thread, device, home, {}, {}};
  blocks.insert(block);
  // What was launched on this stream before may still use the memory, which its earlier owner has given back.
  block->accesses.push_back({{home, at_stream(streams[home].clock, home)}, 0, size, true, "its allocation"});
  auto& freed = streams[home].of_freed;
  std::erase_if(freed, [&](const Access& access) { return is_over(access.step, streams[home].clock) || is_over(access.step, host_clock); });
  for (auto access : freed) block->accesses.push_back({access.step, 0, size, true, access.operation});
  return {bytes.mutable_data(), block, &release, device};
}

Block* block_of(const DataPtr& data) { return data.get_deleter() == &release ? (Block*)data.get_context() : nullptr; }

struct DeviceAllocator final : c10::Allocator {
  DataPtr allocate(size_t size) override {
    auto data = c10::GetAllocator(DeviceType::CPU)->allocate(size);
    return own(Storage(Storage::use_byte_size_t(), size, std::move(data), nullptr, false), Device(DeviceType::CUDA, device_of_thread));
  }
  void copy_data(void* to, const void* from, size_t size) const override { memcpy(to, from, size); }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
};
DeviceAllocator device_allocator;
REGISTER_ALLOCATOR(DeviceType::CUDA, &device_allocator);

std::map<char*, size_t> pinned_blocks;

struct PinnedAllocator final : c10::Allocator {
  DataPtr allocate(size_t size) override {
    Lock lock(mutex);
    size_t rounded = size;
    if (size <= c10::CachingAllocator::AcceleratorAllocatorConfig::pinned_max_round_threshold())  // as CachingHostAllocator
      for (rounded = 1; rounded < size;) rounded <<= 1;
    pinned += rounded;
    auto* start = (char*)malloc(std::max<size_t>(size, 1));
    pinned_blocks[start] = std::max<size_t>(size, 1);
    return {start, start, &give_back, Device(DeviceType::CPU)};
  }
  static void give_back(void* start) {
    Lock lock(mutex);
    pinned_blocks.erase((char*)start);
    free(start);
  }
  void copy_data(void* to, const void* from, size_t size) const override { memcpy(to, from, size); }
};
PinnedAllocator pinned_allocator;

bool is_pinned(const void* pointer) {
  Lock lock(mutex);
  auto next = pinned_blocks.upper_bound((char*)pointer);
  if (next == pinned_blocks.begin()) return false;
  auto& [start, size] = *--next;
  return pointer < start + size;
}

// ---- copies that the host has not waited for

struct Pending {
  Step step;
  Tensor host_side, value;
  bool to_host;
};
std::list<Pending> pending;

bool same_bytes(const Tensor& a, const Tensor& b) {
  const auto x = a.contiguous(), y = b.contiguous();
  return memcmp(x.const_data_ptr(), y.const_data_ptr(), x.nbytes()) == 0;
}

void finish(const Pending& copy) {
  if (copy.to_host) {
    copy.host_side.copy_(copy.value);
    return;
  }
  TORCH_CHECK(same_bytes(copy.host_side, copy.value),
              "pinned memory was overwritten by the host before a non-blocking copy from it to the device was over: ",
              "wait for an event recorded after the copy");
}

void finish_where(const std::function<bool(const Pending&)>& is_due) {
  for (auto it = pending.begin(); it != pending.end();) {
    if (!is_due(*it)) {
      ++it;
      continue;
    }
    const auto copy = *it;
    it = pending.erase(it);
    finish(copy);
  }
}

void advance_host(const Clock& clock) {
  join(host_clock, clock);
  finish_where([](const Pending& copy) { return is_over(copy.step, host_clock); });
}

// A copy on `stream` that touches the same pinned memory comes after those that its stream has waited for.
void settle(const Tensor& host_side, int stream) {
  finish_where([&](const Pending& copy) {
    if (!copy.host_side.is_alias_of(host_side)) return false;
    TORCH_CHECK(copy.step.stream == stream || is_over(copy.step, streams[stream].clock),
                "two copies use the same pinned memory, on ", name_of(copy.step.stream), " and on ", name_of(stream),
                ", and neither waits for the other");
    return true;
  });
}

void poison(const Tensor& tensor, const Tensor& value) {
  if (tensor.is_floating_point()) tensor.fill_(std::numeric_limits<double>::quiet_NaN());
  else if (tensor.scalar_type() == at::kBool) tensor.copy_(value.logical_not());
  else tensor.copy_(value.bitwise_not());
}

// ---- devices, streams, events

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr DeviceType static_type = DeviceType::CUDA;
  Guard() = default;
  explicit Guard(DeviceType) {}
  DeviceType type() const override { return DeviceType::CUDA; }
  Device getDevice() const override { return Device(DeviceType::CUDA, device_of_thread); }
  Device exchangeDevice(Device device) const override {
    const auto before = getDevice();
    if (device.has_index() && device != before) set_device(device.index());
    return before;
  }
  // As c10::cuda::MaybeSetDevice: no context is made until something is done there. Autograd starts a thread a device.
  void setDevice(Device device) const override {
    TORCH_CHECK(device.index() < devices(), "CUDA error: invalid device ordinal");
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.has_index()) device_of_thread = device.index();
  }
  DeviceIndex deviceCount() const noexcept override { return devices(); }

  Stream getStream(Device device) const override { return current_stream(device.has_index() ? device.index() : device_of_thread); }
  Stream getDefaultStream(Device device) const override { return Stream(Stream::DEFAULT, device); }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return new_stream(device.index()); }
  Stream getNewStream(Device device, int) const override { return new_stream(device.index()); }
  Stream exchangeStream(Stream stream) const override {
    const auto before = getStream(stream.device());
    stream_of_thread[stream.device_index()] = stream.id();
    return before;
  }
  bool queryStream(const Stream& stream) const override {
    Lock lock(mutex);
    advance_host(seen_by(stream));
    return true;
  }
  void synchronizeStream(const Stream& stream) const override { host_waits(seen_by(stream), "stream"); }
  void synchronizeDevice(const DeviceIndex device) const override { device_waits(device < 0 ? device_of_thread : device); }

  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new Event;
    *(Event*)*event = {seen_by(stream), stream.device(), std::chrono::steady_clock::now()};
  }
  void block(void* event, const Stream& stream) const override {
    if (event) stream_waits(stream, ((Event*)event)->clock);
  }
  bool queryEvent(void* event) const override {
    Lock lock(mutex);
    if (event) advance_host(((Event*)event)->clock);
    return true;
  }
  void synchronizeEvent(void* event) const override {
    if (!event) return;
    make_context(device_of_thread);  // a call of the CUDA runtime makes a context on the device of its thread
    host_waits(((Event*)event)->clock, "event");
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete (Event*)event; }
  double elapsedTime(void* first, void* second, const DeviceIndex) const override {
    return std::chrono::duration<double, std::milli>(((Event*)second)->time - ((Event*)first)->time).count();
  }
  void recordDataPtrOnStream(const DataPtr& data, const Stream& stream) const override {
    Lock lock(mutex);
    if (auto* block = block_of(data)) block->recorded.insert(index_of(stream));
  }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard);

// ---- random numbers: the CPU's generator, one a device

struct Generator final : c10::GeneratorImpl {
  at::Generator cpu;
  Generator(DeviceIndex device, at::Generator of_cpu)
      : GeneratorImpl(Device(DeviceType::CUDA, device), c10::DispatchKeySet(c10::DispatchKey::CUDA)), cpu(std::move(of_cpu)) {}
  void set_current_seed(uint64_t seed) override { cpu.set_current_seed(seed); }
  uint64_t current_seed() const override { return cpu.current_seed(); }
  uint64_t seed() override { return cpu.seed(); }
  void set_offset(uint64_t) override {}
  uint64_t get_offset() const override { return 0; }
  void set_state(const c10::TensorImpl& state) override { cpu.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return cpu.unsafeGetGeneratorImpl()->get_state(); }
  Generator* clone_impl() const override { return new Generator(device().index(), cpu.clone()); }
};

const at::Generator& generator_of(int device) {
  static std::vector<at::Generator> all = [] {
    std::vector<at::Generator> made;
    for (int i = 0; i < devices(); i++) made.push_back(at::make_generator<Generator>(i, at::detail::createCPUGenerator()));
    return made;
  }();
  return all.at(device < 0 ? device_of_thread : device);
}

at::Generator cpu_twin(const at::Generator& generator) { return ((Generator*)generator.unsafeGetGeneratorImpl())->cpu; }

// A kernel without an argument for a generator (native_dropout) draws from the CPU's default one: it has the device's
// state while such a kernel runs.
struct LentState {
  at::Generator mine, cpu = at::detail::getDefaultCPUGenerator();
  Tensor before;
  explicit LentState(int device) : mine(cpu_twin(generator_of(device))), before(cpu.get_state()) { cpu.set_state(mine.get_state()); }
  ~LentState() {
    mine.set_state(cpu.get_state());
    cpu.set_state(before);
  }
};

// ---- what torch asks about CUDA

struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasCUDART() const override { return true; }
  int getNumGPUs() const override { return devices(); }
  DeviceIndex deviceCount() const override { return devices(); }
  DeviceIndex current_device() const override { return device_of_thread; }
  DeviceIndex getCurrentDevice() const override { return device_of_thread; }
  void setCurrentDevice(DeviceIndex device) const override { set_device(device); }
  DeviceIndex exchangeDevice(DeviceIndex device) const override { return Guard().exchangeDevice(Device(DeviceType::CUDA, device)).index(); }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    const auto before = device_of_thread;
    if (device >= 0) device_of_thread = device;
    return before;
  }
  bool hasPrimaryContext(DeviceIndex device) const override {
    Lock lock(mutex);
    return devices_with_context.count(device);
  }
  c10::Allocator* getCUDADeviceAllocator() const override { return &device_allocator; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  const at::Generator& getDefaultGenerator(DeviceIndex device) const override { return generator_of(device); }
  at::Generator getNewGenerator(DeviceIndex device) const override {
    return at::make_generator<Generator>(device < 0 ? device_of_thread : device, at::detail::createCPUGenerator());
  }
  void deviceSynchronize(DeviceIndex device) const override { device_waits(device); }
};
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks);

// ---- operations

void drop_alias(void* storage) { delete (Storage*)storage; }

Tensor on_device(Storage storage, const Tensor& like) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CUDA), like.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return made;
}

Storage owned_storage(const Tensor& result, Device device) {
  const auto& bytes = result.storage();
  return Storage(Storage::use_byte_size_t(), bytes.nbytes(), own(bytes, device), &device_allocator, true);
}

// Operands may be on the host too: indices, and the sides of a copy.
const std::set<std::string> kMixed = {"aten::index", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index",
                                      "aten::is_set_to"};

// Only shape and type of their operands are read, and nothing is written.
const std::set<std::string> kReadNothing = {"aten::empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty", "aten::new_empty_strided", "aten::is_set_to",
                                            "aten::resize_", "aten::resize_as_", "aten::_resize_output_", "aten::set_data"};

// Kernels of torch whose result has a size or a value that the host must know (aten/src/ATen/native/cuda).
const std::set<std::string> kHostWaits = {"aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::equal",
                                          "aten::masked_select", "aten::_unique", "aten::_unique2", "aten::unique_dim",
                                          "aten::unique_consecutive", "aten::bincount"};

bool host_must_wait(const std::string& name, const std::string& overload, const std::vector<c10::IValue>& operands) {
  if (kHostWaits.count(name)) return true;
  if (name == "aten::repeat_interleave") return overload == "Tensor" && operands.at(1).isNone();
  if (!kMixed.count(name) || operands.size() < 2 || !operands[1].isOptionalTensorList()) return false;
  for (const std::optional<Tensor>& index : operands[1].toOptionalTensorList())  // masks become indices; lists are copied
    if (index && index->defined() && (index->is_cpu() || index->scalar_type() == at::kBool || index->scalar_type() == at::kByte)) return true;
  return false;
}

template <class F>
void each_tensor(const c10::IValue& value, F&& f) {
  auto call = [&](const Tensor& tensor) { if (tensor.defined()) f(tensor); };
  if (value.isTensor()) call(value.toTensor());
  else if (value.isTensorList()) for (const Tensor& tensor : value.toTensorVector()) call(tensor);
  else if (value.isOptionalTensorList()) for (const std::optional<Tensor>& tensor : value.toOptionalTensorList()) if (tensor) call(*tensor);
}

template <class F>
c10::IValue with_tensors(const c10::IValue& value, F&& f) {
  if (value.isTensor()) return f(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> made;
    for (const Tensor& tensor : value.toTensorVector()) made.push_back(f(tensor));
    return made;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> made;
    for (const std::optional<Tensor>& tensor : value.toOptionalTensorList()) made.push_back(tensor ? std::optional<Tensor>(f(*tensor)) : std::nullopt);
    return made;
  }
  return value;
}

Device common_device(const std::vector<c10::IValue>& operands, const std::string& name, bool is_mixed) {
  std::optional<Device> device;
  auto disagree = [&](Device other) {
    TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, ", *device, " and ", other, "! (", name, ")");
  };
  for (const auto& value : operands) each_tensor(value, [&](const Tensor& tensor) {
    if (!tensor.is_cuda()) return;
    if (device && *device != tensor.device()) disagree(tensor.device());
    device = tensor.device();
  });
  if (device && !is_mixed) for (const auto& value : operands) each_tensor(value, [&](const Tensor& tensor) {
    if (!tensor.is_cuda() && tensor.dim() > 0) disagree(tensor.device());
  });
  if (!device) for (const auto& value : operands) if (value.isDevice() && value.toDevice().is_cuda() && value.toDevice().has_index()) device = value.toDevice();
  return device.value_or(Device(DeviceType::CUDA, device_of_thread));
}

void run(const c10::OperatorHandle& operation, torch::jit::Stack* stack) {
  const auto& schema = operation.schema();
  const auto& name = schema.name();
  const auto count = schema.arguments().size(), begin = stack->size() - count;
  const std::vector<c10::IValue> operands(stack->begin() + begin, stack->end());
  const auto device = common_device(operands, name, kMixed.count(name));
  const auto stream = current_stream(device.index());

  const auto* first_alias = schema.returns().empty() ? nullptr : schema.returns()[0].alias_info();
  const bool is_view = first_alias && !first_alias->isWrite();
  const auto now = is_view ? Step{} : step(stream, name);
  operation_of_thread = name;
  if (!is_view && !kReadNothing.count(name)) for (size_t i = 0; i < count; i++) {
    const auto* alias = schema.arguments()[i].alias_info();
    each_tensor(operands[i], [&](const Tensor& tensor) { use(tensor, alias && alias->isWrite(), now, name); });
  }
  if (host_must_wait(name, schema.overload_name(), operands)) host_waits(seen_by(stream), name);

  std::vector<std::pair<Tensor, Tensor>> twins;  // on the device, on the host
  bool has_generator = false;
  for (size_t i = 0; i < count; i++) {
    auto& value = (*stack)[begin + i];
    value = with_tensors(value, [&](const Tensor& tensor) {
      if (!tensor.defined() || !tensor.is_cuda()) return tensor;
      twins.emplace_back(tensor, host(tensor));
      return twins.back().second;
    });
    if (value.isDevice() && value.toDevice().is_cuda()) value = Device(DeviceType::CPU);
    if (schema.arguments()[i].name() == "generator") {
      has_generator = true;
      if (value.isGenerator() && value.toGenerator().device().is_cuda()) value = cpu_twin(value.toGenerator());
      else if (value.isNone()) value = cpu_twin(generator_of(device.index()));
    }
  }
  {
    std::optional<LentState> lent;
    if (!has_generator && operation.hasTag(at::Tag::nondeterministic_seeded)) lent.emplace(device.index());
    operation.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }
  for (auto& [tensor, twin] : twins) {  // resized
    if (twin.storage().data() == tensor.storage().data() && twin.sizes().equals(tensor.sizes()) && twin.strides().equals(tensor.strides())) continue;
    if (twin.storage().data() != tensor.storage().data()) tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(owned_storage(twin, tensor.device()));
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(twin.sizes(), twin.strides(), twin.storage_offset());
  }
  auto up = [&](const Tensor& result) -> Tensor {
    if (!result.defined() || result.is_cuda()) return result;
    for (auto& [tensor, twin] : twins) if (twin.is_same(result)) return tensor;
    for (auto& [tensor, twin] : twins) if (result.storage().data() && result.storage().data() == tensor.storage().data()) return on_device(tensor.storage(), result);
    auto made = on_device(owned_storage(result, device), result);
    if (!is_view && !kReadNothing.count(name)) use(made, true, now, name);
    return made;
  };
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); i++) (*stack)[i] = with_tensors((*stack)[i], up);
  if (!schema.returns().empty() && stack->back().isTensor()) suffer(device.index(), name, stack->back().toTensor());
}
TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run>()); }

// Which kernel of attention a GPU takes (sdp_utils.cpp): Flash for half types without a mask; the memory-efficient one
// for others, which does not share keys between heads; else the one that writes its probabilities. `torch_cuda.py` has them.
int64_t attention_kernel(const Tensor& query, const Tensor& key, const Tensor&, const std::optional<Tensor>& mask, double, bool, std::optional<double>, bool) {
  if (!mask && query.scalar_type() != at::kFloat) return 1;
  return query.size(1) == key.size(1) ? 2 : 0;
}
const bool is_chosen = (at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&attention_kernel), true);

Tensor& copy_(Tensor& self, const Tensor& from, bool non_blocking) {
  static const std::string name = "aten::copy_";
  if (self.is_same(from)) return self;
  const auto device = from.is_cuda() ? from.device() : self.device();
  const auto stream = current_stream(device.index());
  const auto now = step(stream, name);
  if (self.is_cuda() && from.is_cuda() && self.device() != from.device()) {  // as torch: each side waits for the other
    const auto other = current_stream(self.device().index());
    stream_waits(stream, seen_by(other));
    stream_waits(other, seen_by(stream));
    make_context(self.device().index());
  }
  use(from, false, now, name);
  use(self, true, now, name);
  const auto& on_host = self.is_cpu() ? self : from;
  if (!on_host.is_cpu()) {
    host(self).copy_(host(from));
    return self;
  }
  std::unique_lock lock(mutex);
  if (on_host.numel() && is_pinned(on_host.storage().data())) settle(on_host, now.stream);
  if (!non_blocking || !on_host.numel() || !is_pinned(on_host.storage().data())) {
    // Memory that is not pinned is copied to the device through a buffer of the driver, at once.
    if (!(non_blocking && self.is_cuda())) host_waits(seen_by(stream), self.is_cpu() ? "copy to the host" : "blocking copy to the device");
    lock.unlock();  // the copy may need Python's lock, and a thread that holds it may wait for this one
    host(self).copy_(host(from));
    return self;
  }
  if (self.is_cpu()) {
    auto value = host(from).to(self.scalar_type(), false, true).expand_as(self).clone();
    poison(self, value);
    pending.push_back({now, self.detach(), value, true});
  } else {
    host(self).copy_(from);
    pending.push_back({now, from.detach(), from.detach().clone(), false});
  }
  return self;
}

void foreach_copy_(at::TensorList self, at::TensorList from, bool non_blocking) {
  for (size_t i = 0; i < self.size(); i++) Tensor(self[i]).copy_(from[i], non_blocking);
}

Tensor& set_all(Tensor& self, Storage storage, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  TORCH_CHECK(storage.device() == self.device(), "set_: storage of ", storage.device(), " for a tensor of ", self.device());
  std::vector<int64_t> strides(stride.begin(), stride.end());
  if (strides.empty()) {
    strides.resize(size.size());
    int64_t next = 1;
    for (int i = (int)size.size() - 1; i >= 0; next *= std::max<int64_t>(size[i--], 1)) strides[i] = next;
  }
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(storage);
  self.unsafeGetTensorImpl()->set_sizes_and_strides(size, strides, offset);
  return self;
}
Tensor& set_tensor(Tensor& self, const Tensor& other) { return set_all(self, other.storage(), other.storage_offset(), other.sizes(), other.strides()); }
Tensor& set_storage(Tensor& self, Storage storage) { return set_all(self, storage, 0, {(int64_t)(storage.nbytes() / self.itemsize())}, {}); }
Tensor& set_nothing(Tensor& self) { return set_tensor(self, at::empty({0}, self.options())); }
void record_stream(Tensor& self, Stream stream) { Guard().recordDataPtrOnStream(self.storage().data_ptr(), stream); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("copy_", copy_);
  m.impl("_foreach_copy_", foreach_copy_);
  m.impl("set_.source_Storage_storage_offset", set_all);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_", set_nothing);
  m.impl("record_stream", record_stream);
  // torch would compose these for a device without a kernel of its own, and keep tensors between the steps.
  for (const auto* name : {"silu_backward", "mish_backward", "native_layer_norm"}) m.impl(name, torch::CppFunction::makeFromBoxedFunction<&run>());
}

}  // namespace

int devices() {
  static const int count = [] {
    const auto* value = getenv("CUDA_ON_HOST_DEVICES");
    return value ? atoi(value) : 8;
  }();
  return count;
}
int current_device() { return device_of_thread; }
void set_device(int index) {
  TORCH_CHECK(0 <= index && index < devices(), "CUDA error: invalid device ordinal");
  make_context(index);
  device_of_thread = index;
}
Stream current_stream(int device) { return Stream(Stream::UNSAFE, Device(DeviceType::CUDA, device), stream_of_thread[device]); }
void set_stream(int device, int64_t id) { stream_of_thread[device] = id; }
Stream new_stream(int device) {
  Lock lock(mutex);
  return Stream(Stream::UNSAFE, Device(DeviceType::CUDA, device < 0 ? device_of_thread : device), ++last_stream);
}

Step step(Stream stream, const std::string& operation) {
  Lock lock(mutex);
  const int index = index_of(stream);
  auto& clock = streams[index].clock;
  join(clock, host_clock);  // launched after the host has waited for these
  return {index, ++at_stream(clock, index)};
}

void use(const Tensor& tensor, bool writes, Step now, const std::string& operation) {
  if (!tensor.is_cuda() || !tensor.has_storage() || !tensor.numel()) return;
  Lock lock(mutex);
  auto* block = block_of(tensor.storage().data_ptr());
  if (!block) return;
  if (writes && block->made_by.starts_with("aten::empty")) block->made_by = operation;
  int64_t low = tensor.storage_offset(), high = low + 1;
  for (int64_t i = 0; i < tensor.dim(); i++) high += (tensor.size(i) - 1) * tensor.stride(i);
  low *= tensor.itemsize(), high *= tensor.itemsize();
  const auto& seen = streams[now.stream].clock;
  for (const auto& before : block->accesses) {
    if (before.step.stream == now.stream || is_over(before.step, seen) || before.high <= low || high <= before.low) continue;
    if (!before.writes && !writes) continue;
    TORCH_CHECK(false, "race: ", operation, " on ", name_of(now.stream), writes ? " writes" : " reads", " memory that ", before.operation,
                " on ", name_of(before.step.stream), before.writes ? " writes" : " reads", ", and nothing makes it wait");
  }
  std::erase_if(block->accesses, [&](const Access& before) {
    return low <= before.low && before.high <= high && (writes || (!before.writes && before.step.stream == now.stream));
  });
  block->accesses.push_back({now, low, high, writes, operation});
}

Clock seen_by(Stream stream) {
  Lock lock(mutex);
  return streams[index_of(stream)].clock;
}
void stream_waits(Stream stream, const Clock& clock) {
  Lock lock(mutex);
  join(streams[index_of(stream)].clock, clock);
}
void host_waits(const Clock& clock, const std::string& what) {
  Lock lock(mutex);
  TORCH_CHECK(!waits_are_forbidden, "the host waits for the device: ", what);
  host_wait_counts[what]++;
  advance_host(clock);
}
void device_waits(int device) {
  make_context(device);
  if (finish_communication) finish_communication();
  Lock lock(mutex);
  Clock all;
  for (const auto& state : streams) if (state.stream.device_index() == device) join(all, state.clock);
  host_waits(all, "device");
}
void before_device_wait(std::function<void()> finish) { finish_communication = std::move(finish); }

Tensor host(const Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) return tensor;
  const auto& storage = tensor.storage();
  Storage alias(Storage::use_byte_size_t(), storage.nbytes(),
                DataPtr(storage.mutable_data(), new Storage(storage), &drop_alias, Device(DeviceType::CPU)), c10::GetAllocator(DeviceType::CPU), true);
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(alias), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  return made;
}

void resize_storage(const Tensor& tensor, int64_t bytes) {
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  auto data = device_allocator.allocate(bytes);
  memcpy(data.get(), storage->data(), std::min<size_t>(bytes, storage->nbytes()));
  storage->set_data_ptr_noswap(std::move(data));
  storage->set_nbytes(bytes);
}

int64_t allocated(int device) { return in_use[device]; }
int64_t peak(int device) { return most[device]; }
void reset_peak(int device) { most[device] = in_use[device]; }
void set_memory(int device, int64_t bytes) { total.at(device) = bytes; }
int64_t memory(int device) { return total[device] ? total[device] : kMemory; }
int64_t pinned_bytes() { return pinned; }
std::map<std::string, int64_t> waits() {
  Lock lock(mutex);
  return host_wait_counts;
}
void forbid_waits(bool forbidden) { waits_are_forbidden = forbidden; }
std::vector<int> contexts() {
  Lock lock(mutex);
  return {devices_with_context.begin(), devices_with_context.end()};
}
void make_context(int device) {
  Lock lock(mutex);
  if (!devices_with_context.insert(device).second) return;
  const auto* folder = getenv("CUDA_ON_HOST_CONTEXTS");  // for tests of commands, whose processes may end in any way
  if (folder && *folder) close(creat(c10::str(folder, "/", getpid(), ".", device).c_str(), 0600));
}
at::Generator default_generator(int device) { return generator_of(device); }

void plant(int device, const std::string& operation, double seconds_per_byte, bool is_wrong) {
  Lock lock(mutex);
  faults[{device, operation}] = {seconds_per_byte, is_wrong};
}
void suffer(int device, const std::string& operation, const Tensor& tensor) {
  Fault fault;
  {
    Lock lock(mutex);
    const auto found = faults.find({device, operation});
    if (found == faults.end() || !tensor.defined() || !tensor.numel()) return;
    fault = found->second;
  }
  std::this_thread::sleep_for(std::chrono::duration<double>(fault.seconds_per_byte * tensor.nbytes()));
  if (fault.is_wrong) host(tensor).view({-1})[0].add_(1);
}

}  // namespace cuda_on_host
