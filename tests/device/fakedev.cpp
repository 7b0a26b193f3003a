// A PrivateUse1 device whose memory is the CPU's, for tests of what differs on an accelerator.
//
// Every operator runs as the CPU's kernel on aliases of the tensors, so its numbers are the CPU's.
// What is the device's own: the backward pass runs in its threads, tensors of two devices do not
// mix, memory has a limit, draws take from its generators, and each wait of the host is counted.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/_efficientzerotensor.h>
#include <ATen/ops/_local_scalar_dense_cpu_dispatch.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/dot.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/vdot.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <pthread.h>

#include <atomic>
#include <cstring>
#include <mutex>
#include <string>
#include <unordered_set>

namespace at::autocast {  // of ATen/autocast_mode.h, which includes every operator
TORCH_API at::Tensor cached_cast(at::ScalarType to, const at::Tensor& arg, c10::DeviceType device);
TORCH_API at::ScalarType get_autocast_dtype(at::DeviceType device);
}  // namespace at::autocast

namespace {

using torch::jit::Stack;
constexpr auto kFake = c10::DeviceType::PrivateUse1;
constexpr c10::DeviceIndex kDevices = 2;
const c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

thread_local c10::DeviceIndex current = 0;

std::atomic<int64_t> waits{0}, sent{0}, live{0}, peak{0}, limit{0}, emptied{0}, lost{0};
std::atomic<bool> forbidden{false}, forked{false};

// The host waits here until a real device has done all that was asked of it.
void wait_for_device(const std::string& why) {
  ++waits;
  TORCH_CHECK(!forbidden.load(), "the host waits for the device: ", why);
}

// ---- memory

struct Memory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    // A child has none of the device's threads, and would wait for them for good: CUDA refuses it too.
    TORCH_CHECK(!forked.load(), "Cannot re-initialize fakedev in a forked process. Use the 'spawn' start method");
    if (!bytes) return {nullptr, nullptr, nullptr, c10::Device(kFake, current)};
    const auto all = live.load() + int64_t(bytes);
    if (limit.load() && all > limit.load())
      TORCH_CHECK_WITH(OutOfMemoryError, false, "fakedev out of memory. Tried to allocate ", bytes, " bytes");
    auto* block = static_cast<char*>(std::malloc(bytes + 64));
    *reinterpret_cast<int64_t*>(block) = int64_t(bytes);
    live += int64_t(bytes);
    if (all > peak.load()) peak = all;
    return {block + 64, block, &release, c10::Device(kFake, current)};
  }
  static void release(void* block) {
    live -= *static_cast<int64_t*>(block);
    std::free(block);
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override { ++emptied; }
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override { return {}; }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override { peak = live.load(); }
};
Memory memory;
REGISTER_ALLOCATOR(kFake, &memory);

// ---- devices, streams and generators

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kFake; }
  c10::Device getDevice() const override { return {kFake, current}; }
  c10::Device exchangeDevice(c10::Device d) const override {
    auto was = getDevice();
    current = d.index();
    return was;
  }
  void setDevice(c10::Device d) const override { current = d.index(); }
  void uncheckedSetDevice(c10::Device d) const noexcept override { current = d.index(); }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  c10::Stream getStream(c10::Device d) const override { return c10::Stream(c10::Stream::DEFAULT, d); }
  c10::Stream getDefaultStream(c10::Device d) const override { return getStream(d); }
  c10::Stream getNewStream(c10::Device d, int) const override { return getStream(d); }
  c10::Stream exchangeStream(c10::Stream s) const override { return getStream(s.device()); }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override { wait_for_device("a stream"); }
  void record(void**, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, c10::DeviceIndex) const noexcept override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// A generator of the CPU's under the device's name: kernels of the CPU refuse any other.
struct Draws final : c10::GeneratorImpl {
  explicit Draws(c10::DeviceIndex i, uint64_t seed = c10::default_rng_seed_val)
      : c10::GeneratorImpl(c10::Device(kFake, i), kKeys), cpu(at::detail::createCPUGenerator(seed)) {}
  void set_current_seed(uint64_t seed) override { cpu.set_current_seed(seed); }
  uint64_t current_seed() const override { return cpu.current_seed(); }
  uint64_t seed() override { return cpu.seed(); }
  void set_offset(uint64_t offset) override { cpu.set_offset(offset); }
  uint64_t get_offset() const override { return cpu.get_offset(); }
  void set_state(const c10::TensorImpl& state) override { impl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return impl()->get_state(); }
  c10::GeneratorImpl* clone_impl() const override {
    auto* other = new Draws(device_.index());
    other->cpu = cpu.clone();
    return other;
  }
  c10::GeneratorImpl* impl() const { return cpu.unsafeGetGeneratorImpl(); }
  at::Generator cpu;
};

const at::Generator& default_generator(c10::DeviceIndex i) {
  static const at::Generator all[kDevices] = {at::make_generator<Draws>(0), at::make_generator<Draws>(1)};
  return all[i < 0 ? current : i];
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  void init() const override {}
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(c10::DeviceIndex i) const override { current = i; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex i) const override { return std::exchange(current, i); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex i) const override {
    return i < 0 ? current : std::exchange(current, i);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex i) const override { return default_generator(i); }
  at::Generator getNewGenerator(c10::DeviceIndex i) const override {
    return at::make_generator<Draws>(i < 0 ? current : i);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto fresh = memory.allocate(bytes);
    if (auto kept = std::min(bytes, storage.nbytes())) std::memcpy(fresh.get(), storage.data(), kept);
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(fresh));
    storage.set_nbytes(bytes);
  }
};
const bool has_hooks = [] {
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  pthread_atfork(nullptr, nullptr, [] { forked = true; });
  return true;
}();

// ---- tensors, and their aliases for the CPU's kernels

bool is_fake(const at::Tensor& t) { return t.defined() && t.device().type() == kFake; }

// The same memory as a tensor of the CPU's. It can grow, which `take_over` makes good.
at::Tensor alias_on_cpu(const at::Tensor& t) {
  if (!is_fake(t)) return t;
  at::Tensor out;
  if (t._is_zerotensor()) {
    out = at::detail::empty_strided_cpu(t.sizes(), t.strides(), t.scalar_type());
    std::memset(out.mutable_data_ptr(), 0, out.storage().nbytes());
    return out;
  }
  const auto& storage = t.storage();
  auto* kept = new c10::Storage(storage);
  auto release = [](void* p) { delete static_cast<c10::Storage*>(p); };
  c10::DataPtr data(storage.mutable_data(), kept, release, c10::kCPU);
  c10::Storage whole(c10::Storage::use_byte_size_t{}, storage.nbytes(), std::move(data), c10::GetAllocator(c10::kCPU), true);
  out = at::detail::make_tensor<c10::TensorImpl>(
      std::move(whole), c10::DispatchKeySet(c10::DispatchKey::CPU), t.dtype());
  out.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  out._set_conj(t.is_conj());
  out._set_neg(t.is_neg());
  return out;
}

at::Tensor make_fake(at::IntArrayRef size, at::IntArrayRef stride, caffe2::TypeMeta dtype, c10::Device device) {
  c10::DeviceGuard there(device);
  return at::detail::empty_strided_generic(size, stride, &memory, kKeys, c10::typeMetaToScalarType(dtype));
}

struct Argument {
  at::Tensor fake, cpu;
};

// A result of a kernel of the CPU's as a tensor of the device's: an argument, a view of one, a copy.
at::Tensor back_on_device(const at::Tensor& r, const std::vector<Argument>& args, c10::Device device) {
  if (!r.defined() || r.device().type() != c10::kCPU) return r;
  for (const auto& a : args)
    if (a.cpu.is_same(r)) return a.fake;
  for (const auto& a : args)
    if (a.cpu.has_storage() && r.has_storage() && a.cpu.storage().is_alias_of(r.storage()) && r.storage().nbytes()) {
      const auto keys = a.fake.key_set() - c10::DispatchKeySet(c10::DispatchKey::Conjugate) -
                        c10::DispatchKeySet(c10::DispatchKey::Negative);
      auto view = at::detail::make_tensor<c10::TensorImpl>(
          c10::TensorImpl::VIEW, c10::Storage(a.fake.storage()), keys, r.dtype());
      view.unsafeGetTensorImpl()->set_sizes_and_strides(r.sizes(), r.strides(), r.storage_offset());
      view._set_conj(r.is_conj());
      view._set_neg(r.is_neg());
      return view;
    }
  auto out = make_fake(r.sizes(), r.strides(), r.dtype(), device);
  if (const auto bytes = out.storage().nbytes()) std::memcpy(out.mutable_data_ptr(), r.const_data_ptr(), bytes);
  out._set_conj(r.is_conj());
  out._set_neg(r.is_neg());
  return out;
}

// What a kernel has made of an argument that it writes to: another shape, or other memory.
void take_over(const Argument& a) {
  if (a.fake.sizes().equals(a.cpu.sizes()) && a.fake.strides().equals(a.cpu.strides()) &&
      a.fake.storage().data() == a.cpu.storage().data())
    return;
  auto* impl = a.fake.unsafeGetTensorImpl();
  const auto bytes = a.cpu.storage().nbytes();
  if (a.fake.storage().data() != a.cpu.storage().data()) {
    if (bytes > a.fake.storage().nbytes()) Hooks().resizePrivateUse1Bytes(a.fake.storage(), bytes);
    if (bytes) std::memcpy(a.fake.storage().mutable_data(), a.cpu.storage().data(), bytes);
  }
  impl->set_sizes_and_strides(a.cpu.sizes(), a.cpu.strides(), a.cpu.storage_offset());
}

// ---- what a real device refuses, and where the host waits for it

// CUDA's kernels take tensors of one device, and numbers of the CPU's beside them.
struct Places {
  c10::optional<c10::Device> fake, numbers, other;
  void see(const at::Tensor& t) {
    if (!t.defined()) return;
    const auto d = t.device();
    if (d.type() == kFake && !fake) fake = d;
    else if (d.type() == kFake && d != *fake) other = d;
    else if (d.type() != kFake && d.type() != c10::DeviceType::Meta) (t.dim() ? other : numbers) = d;
  }
};
const std::unordered_set<std::string> kTakesOfBoth = {  // lengths and sizes are the CPU's on any device
    "aten::_pack_padded_sequence", "aten::_pad_packed_sequence", "aten::_ctc_loss", "aten::_ctc_loss_backward"};
const std::unordered_set<std::string> kWaits = {  // the size or the result is a number that the host needs
    "aten::nonzero", "aten::masked_select", "aten::equal", "aten::_unique", "aten::_unique2", "aten::unique_dim",
    "aten::unique_consecutive", "aten::unique_dim_consecutive", "aten::bincount", "aten::histc"};

bool is_mask(const at::Tensor& t) {
  return t.defined() && (t.scalar_type() == at::kBool || t.scalar_type() == at::kByte);
}

void count_waits(const std::string& name, at::ArrayRef<c10::IValue> args) {
  if (kWaits.count(name)) wait_for_device(name);
  if (name == "aten::repeat_interleave" && args.back().isNone()) wait_for_device(name);
  if (name != "aten::index" && name != "aten::index_put_" && name != "aten::_index_put_impl_" && name != "aten::index_put")
    return;
  for (const auto& e : args[1].toListRef()) {
    if (!e.isTensor()) continue;
    if (is_mask(e.toTensor())) return wait_for_device("an index by a mask");
    if (e.toTensor().defined() && e.toTensor().is_cpu()) ++sent;
  }
}

// ---- the kernel of every operator

std::mutex drawing;

void run_on_cpu(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  const auto& formal = schema.arguments();
  const auto first = stack->size() - formal.size();
  const auto& name = schema.name();
  const bool draws = op.hasTag(at::Tag::nondeterministic_seeded);
  count_waits(name, at::ArrayRef<c10::IValue>(*stack).slice(first));

  Places places;
  std::vector<Argument> args;
  std::vector<size_t> written;
  bool has_generator = false;
  auto to_cpu = [&](const at::Tensor& t, bool writes) -> at::Tensor {
    if (!is_fake(t)) return t;
    // What is given twice is one tensor for the kernel too: what it reads is not resized.
    size_t i = 0;
    while (i < args.size() && !args[i].fake.is_same(t)) ++i;
    if (i == args.size()) args.push_back({t, alias_on_cpu(t)});
    if (writes) written.push_back(i);
    return args[i].cpu;
  };
  std::optional<c10::Device> asked;
  for (size_t i = 0; i < formal.size(); ++i) {
    auto& v = (*stack)[first + i];
    const bool writes = formal[i].alias_info() && formal[i].alias_info()->isWrite();
    if (v.isTensor()) {
      places.see(v.toTensor());
      v = to_cpu(v.toTensor(), writes);
    } else if (v.isTensorList()) {
      auto list = v.toTensorVector();
      for (auto& t : list) {
        places.see(t);
        t = to_cpu(t, writes);
      }
      v = c10::IValue(std::move(list));
    } else if (v.isOptionalTensorList()) {  // indices, which may be the CPU's
      c10::List<std::optional<at::Tensor>> list;
      for (std::optional<at::Tensor> t : v.toOptionalTensorList()) {
        if (t && t->defined() && !t->is_cpu()) places.see(*t);
        list.push_back(t ? std::optional<at::Tensor>(to_cpu(*t, false)) : std::nullopt);
      }
      v = std::move(list);
    } else if (v.isDevice()) {
      if (v.toDevice().type() == kFake) asked = v.toDevice();
      v = c10::Device(c10::kCPU);
    } else if (formal[i].name() == "generator") {
      has_generator = true;
    }
  }
  if (places.fake && places.other && !kTakesOfBoth.count(name))
    TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, ",
                *places.fake, " and ", *places.other, "! (when checking an argument of ", name, ")");
  auto device = asked ? *asked : places.fake ? *places.fake : c10::Device(kFake, current);
  if (device.index() < 0) device = c10::Device(kFake, current);

  const auto cpu = c10::DispatchKeySet(c10::DispatchKey::CPU);
  std::unique_lock<std::mutex> lock;
  if (has_generator) {
    for (size_t i = 0; i < formal.size(); ++i) {
      if (formal[i].name() != "generator") continue;
      auto& v = (*stack)[first + i];
      auto g = v.isNone() ? default_generator(device.index()) : v.toGenerator();
      TORCH_CHECK(g.device().type() == kFake, "Expected a 'fakedev' device type for generator but found '",
                  g.device().type(), "'");
      v = static_cast<Draws*>(g.unsafeGetGeneratorImpl())->cpu;
    }
    op.redispatchBoxed(cpu, stack);
  } else if (draws) {  // from the default generator: the device's stands in its place
    lock = std::unique_lock<std::mutex>(drawing);
    auto mine = default_generator(device.index());
    auto theirs = at::detail::getDefaultCPUGenerator();
    const auto was = theirs.get_state();
    theirs.set_state(mine.get_state());
    try {
      op.redispatchBoxed(cpu, stack);
    } catch (...) {
      theirs.set_state(was);
      throw;
    }
    mine.set_state(theirs.get_state());
    theirs.set_state(was);
  } else {
    op.redispatchBoxed(cpu, stack);
  }

  for (auto i : written) take_over(args[i]);
  const auto results = schema.returns().size();
  for (auto i = stack->size() - results; i < stack->size(); ++i) {
    auto& v = (*stack)[i];
    if (v.isTensor()) {
      v = back_on_device(v.toTensor(), args, device);
    } else if (v.isTensorList()) {
      auto list = v.toTensorVector();
      for (auto& t : list) t = back_on_device(t, args, device);
      v = c10::IValue(std::move(list));
    }
  }
}

// ---- operators whose kernel the CPU lacks, or that are about the device itself

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard there(c10::device_or_default(device));
  return at::detail::empty_generic(size, &memory, kKeys, c10::dtype_or_default(dtype), format);
}
at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  c10::DeviceGuard there(c10::device_or_default(device));
  return at::detail::empty_strided_generic(size, stride, &memory, kKeys, c10::dtype_or_default(dtype));
}
struct NoMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t) override { return {nullptr, nullptr, nullptr, c10::Device(kFake, current)}; }
  void copy_data(void*, const void*, size_t) const override {}
};
at::Tensor zerotensor(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                      std::optional<at::Device> device, std::optional<bool>) {
  static NoMemory none;
  c10::DeviceGuard there(c10::device_or_default(device));
  auto keys = kKeys | c10::DispatchKeySet(c10::DispatchKey::ZeroTensor);
  return at::detail::empty_generic(size, &none, keys, c10::dtype_or_default(dtype), std::nullopt);
}
at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (!is_fake(to) && from.numel()) wait_for_device("a copy to the host");
  if (!is_fake(from) && from.numel()) ++sent;
  auto target = alias_on_cpu(to);
  target.copy_(alias_on_cpu(from));
  return to;
}
at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}
at::Scalar item(const at::Tensor& self) {
  wait_for_device("item()");
  return at::cpu::_local_scalar_dense(alias_on_cpu(self));
}
const at::Tensor& resize(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  auto* impl = self.unsafeGetTensorImpl();
  if (impl->sizes().equals(C10_AS_INTARRAYREF_SLOW(size))) return self;
  impl->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size));
  const auto bytes = (impl->storage_offset() + impl->numel()) * self.itemsize();
  if (impl->numel() && self.storage().nbytes() < size_t(bytes)) Hooks().resizePrivateUse1Bytes(self.storage(), bytes);
  return self;
}
at::Tensor& set_storage(at::Tensor& self, at::Storage s, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  TORCH_CHECK(s.device().type() == kFake, "Attempted to set the storage of a tensor on device \"", self.device(),
              "\" to a storage on different device \"", s.device(), "\"");
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(s));
  if (stride.data()) impl->set_sizes_and_strides(size, stride, offset);
  else {
    impl->set_storage_offset(offset);
    impl->set_sizes_contiguous(size);
  }
  return self;
}
at::Tensor& set_whole(at::Tensor& self, at::Storage s) {
  const auto n = int64_t(s.nbytes() / self.itemsize());
  return set_storage(self, std::move(s), 0, {n}, {1});
}
at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}
at::Tensor& set_empty(at::Tensor& self) {
  c10::DeviceGuard there(self.device());
  c10::Storage none(c10::Storage::use_byte_size_t{}, 0, memory.allocate(0), &memory, true);
  return set_storage(self, std::move(none), 0, {0}, {1});
}

void same_device(const at::Tensor& a, const at::Tensor& b) {
  Places places;
  places.see(a);
  places.see(b);
  TORCH_CHECK(!places.other, "Expected all tensors to be on the same device, but found at least two devices, ",
              a.device(), " and ", b.device(), "!");
}
at::Tensor onto(const at::Tensor& t, c10::Device device) { return back_on_device(t, {}, device); }

at::Tensor convolution(const at::Tensor& x, const at::Tensor& w, const std::optional<at::Tensor>& b,
                       at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
                       at::IntArrayRef output_padding, int64_t groups) {
  same_device(x, w);
  auto bias = b && b->defined() ? std::optional<at::Tensor>(alias_on_cpu(*b)) : std::nullopt;
  return onto(at::convolution(alias_on_cpu(x), alias_on_cpu(w), bias, stride, padding, dilation, transposed,
                              output_padding, groups),
              x.device());
}
std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& g, const at::Tensor& x, const at::Tensor& w, at::IntArrayRef stride, at::IntArrayRef padding,
    at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding, int64_t groups,
    std::array<bool, 3> mask) {
  same_device(g, x);
  same_device(x, w);
  const int64_t outputs = w.size(transposed ? 1 : 0) * (transposed ? groups : 1);
  auto [a, b, c] = at::convolution_backward(alias_on_cpu(g), alias_on_cpu(x), alias_on_cpu(w), at::IntArrayRef(outputs),
                                            stride, padding, dilation, transposed, output_padding, groups, mask);
  return {onto(a, x.device()), onto(b, x.device()), onto(c, x.device())};
}

at::Tensor biased(const at::Tensor& gates, const std::optional<at::Tensor>& bias) {
  return bias && bias->defined() ? gates + alias_on_cpu(*bias) : gates;
}

// As on CUDA, the workspace of an LSTM cell holds its four gates: input, forget, cell and output.
std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell(
    const at::Tensor& from_input, const at::Tensor& from_hidden, const at::Tensor& cx_,
    const std::optional<at::Tensor>& input_bias, const std::optional<at::Tensor>& hidden_bias) {
  same_device(from_input, from_hidden);
  auto cx = alias_on_cpu(cx_);
  auto gates = biased(alias_on_cpu(from_input), input_bias) + biased(alias_on_cpu(from_hidden), hidden_bias);
  auto parts = gates.chunk(4, 1);
  auto i = parts[0].sigmoid(), f = parts[1].sigmoid(), g = parts[2].tanh(), o = parts[3].sigmoid();
  auto cy = f * cx + i * g;
  auto hy = o * cy.tanh();
  const auto d = from_input.device();
  return {onto(hy, d), onto(cy, d), onto(at::cat({i, f, g, o}, 1), d)};
}
std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell_backward(
    const std::optional<at::Tensor>& grad_hy, const std::optional<at::Tensor>& grad_cy, const at::Tensor& cx_,
    const at::Tensor& cy_, const at::Tensor& workspace, bool has_bias) {
  const bool has_h = grad_hy && grad_hy->defined(), has_c = grad_cy && grad_cy->defined();
  if (!has_h && !has_c) return {};
  auto cx = alias_on_cpu(cx_), cy = alias_on_cpu(cy_);
  auto parts = alias_on_cpu(workspace).chunk(4, 1);
  auto i = parts[0], f = parts[1], g = parts[2], o = parts[3];
  auto tanh_c = cy.tanh();
  auto gc = has_c ? alias_on_cpu(*grad_cy) : cy * 0;
  auto gh = has_h ? alias_on_cpu(*grad_hy) : cy * 0;
  gc = gc + gh * o * (1 - tanh_c * tanh_c);
  auto gates = at::cat({gc * g * i * (1 - i), gc * cx * f * (1 - f), gc * i * (1 - g * g),
                        gh * tanh_c * o * (1 - o)}, 1);
  const auto d = cx_.device();
  return {onto(gates, d), onto(gc * f, d), has_bias ? onto(gates.sum(0), d) : at::Tensor()};
}

// Of a GRU cell: its reset, input and new gates, the hidden state and the hidden part of the new gate.
std::tuple<at::Tensor, at::Tensor> gru_cell(
    const at::Tensor& from_input, const at::Tensor& from_hidden, const at::Tensor& hx_,
    const std::optional<at::Tensor>& input_bias, const std::optional<at::Tensor>& hidden_bias) {
  same_device(from_input, from_hidden);
  auto hx = alias_on_cpu(hx_);
  auto a = biased(alias_on_cpu(from_input), input_bias).chunk(3, 1);
  auto b = biased(alias_on_cpu(from_hidden), hidden_bias).chunk(3, 1);
  auto r = (a[0] + b[0]).sigmoid(), i = (a[1] + b[1]).sigmoid();
  auto n = (a[2] + r * b[2]).tanh();
  const auto d = from_input.device();
  return {onto(n + i * (hx - n), d), onto(at::cat({r, i, n, hx, b[2]}, 1), d)};
}
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> gru_cell_backward(
    const at::Tensor& grad, const at::Tensor& workspace, bool has_bias) {
  auto g = alias_on_cpu(grad);
  auto parts = alias_on_cpu(workspace).chunk(5, 1);
  auto r = parts[0], i = parts[1], n = parts[2], hx = parts[3], hn = parts[4];
  auto gi = g * (hx - n) * i * (1 - i);
  auto gn = g * (1 - i) * (1 - n * n);
  auto gr = gn * hn * r * (1 - r);
  auto to_input = at::cat({gr, gi, gn}, 1), to_hidden = at::cat({gr, gi, gn * r}, 1);
  const auto d = grad.device();
  auto sum = [&](const at::Tensor& t) { return has_bias ? onto(t.sum(0), d) : at::Tensor(); };
  return {onto(to_input, d), onto(to_hidden, d), onto(g * i, d), sum(to_input), sum(to_hidden)};
}

// A kernel of CUDA's that asserts what is false ends the use of the device by the whole process. The host hears of it
// at some later call; here it is this one, and the device can be used on.
void hold(const at::Tensor& holds) {
  if (at::cpu::_local_scalar_dense(alias_on_cpu(holds)).to<bool>()) return;
  ++lost;
  TORCH_CHECK(false, "fakedev error: device-side assert triggered");
}
void assert_async(const at::Tensor& holds) { hold(holds); }
void assert_async_msg(const at::Tensor& holds, c10::string_view) { hold(holds); }

// Torch makes a nested tensor of any device, and the first question to one of this device would end the process.
void refuse(const c10::OperatorHandle& op, Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, "fakedev has no nested tensors: ", op.schema().name());
}

// Torch's own kernels of these see to lazy zeros themselves, whatever the other factor holds.
at::Tensor without_zeros(const at::Tensor& a, const at::Tensor& b, at::Tensor (*product)(const at::Tensor&, const at::Tensor&)) {
  same_device(a, b);
  if (a._is_zerotensor() || b._is_zerotensor()) return at::_efficientzerotensor({}, a.options());
  return onto(product(alias_on_cpu(a), alias_on_cpu(b)), a.device());
}
at::Tensor dot(const at::Tensor& a, const at::Tensor& b) { return without_zeros(a, b, at::dot); }
at::Tensor vdot(const at::Tensor& a, const at::Tensor& b) { return without_zeros(a, b, at::vdot); }

// Under autocast, products are taken in the lower precision, as on CUDA.
void run_cast(const c10::OperatorHandle& op, Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard once(c10::DispatchKeySet(c10::DispatchKey::AutocastPrivateUse1));
  const auto dtype = at::autocast::get_autocast_dtype(kFake);
  for (auto i = stack->size() - op.schema().arguments().size(); i < stack->size(); ++i) {
    auto& v = (*stack)[i];
    if (v.isTensor() && v.toTensor().defined()) v = at::autocast::cached_cast(dtype, v.toTensor(), kFake);
  }
  op.callBoxed(stack);
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>()); }

// Structured operators have a kernel for devices without their own, which makes the result first and then asks for the
// form with `out`. A real device has its own kernels, as the CPU does.
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  auto& all = c10::Dispatcher::singleton();
  for (const auto& name : all.getAllOpNames()) {
    if (name.name.rfind("aten::", 0)) continue;
    const auto op = all.findSchema(name);
    if (op && op->hasKernelForDispatchKey(c10::DispatchKey::CPU) &&
        op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutogradNonFunctional))
      m.impl(toString(name).c_str(), torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
  }
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_efficientzerotensor", zerotensor);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", item);
  m.impl("resize_", resize);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Storage", set_whole);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_", set_empty);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
  for (const auto* name : {"_nested_tensor_from_tensor_list", "_nested_view_from_buffer", "_nested_from_padded"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&refuse>());
  // Torch's own of any device, but it calls a kernel that only its own devices have.
  m.impl("conj_physical_", torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
  m.impl("dot", dot);
  m.impl("vdot", vdot);
  m.impl("_assert_async", assert_async);
  m.impl("_assert_async.msg", assert_async_msg);
  m.impl("_thnn_fused_lstm_cell", lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward);
  m.impl("_thnn_fused_gru_cell", gru_cell);
  m.impl("_thnn_fused_gru_cell_backward", gru_cell_backward);
}

// A lazy conjugate is resolved by a copy, so the copy itself must take it as it is.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  for (const auto* name : {"mm", "bmm", "addmm", "baddbmm", "matmul", "linear", "conv1d", "conv2d"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_cast>());
}

TORCH_LIBRARY(fakedev, m) {
  m.def("waits() -> int", [] { return waits.load(); });
  m.def("sent() -> int", [] { return sent.load(); });
  m.def("forbid(bool on) -> bool", [](bool on) { return forbidden.exchange(on); });
  m.def("live() -> int", [] { return live.load(); });
  m.def("peak() -> int", [] { return peak.load(); });
  m.def("reset_peak() -> ()", [] { peak = live.load(); });
  m.def("limit(int bytes) -> ()", [](int64_t bytes) { limit = bytes; });
  m.def("emptied() -> int", [] { return emptied.load(); });
  m.def("lost() -> int", [] { return lost.load(); });
  m.def("current() -> int", [] { return int64_t(current); });
  m.def("set_current(int i) -> ()", [](int64_t i) { current = c10::DeviceIndex(i); });
  m.def("default_generator(int i) -> Generator?",
        [](int64_t i) { return std::optional<at::Generator>(default_generator(c10::DeviceIndex(i))); });
}
