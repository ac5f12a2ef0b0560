// A CUDA "run time" for torch builds without CUDA: one device, streams and events that do nothing. It lets fake tensors
// live on "cuda" and autograd run over them; no kernel and no allocator exists. To be loaded before torch is imported,
// which remembers the hooks it finds.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>

namespace {
using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;

std::atomic<int64_t> next_id{1};
thread_local int64_t current = 0;

Stream stream(int64_t id) {
  return Stream(Stream::UNSAFE, Device(DeviceType::CUDA, 0), id);
}

struct Guard final : public c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device) const override { return getDevice(); }
  Device getDevice() const override { return Device(DeviceType::CUDA, 0); }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device) const override { return stream(current); }
  Stream getDefaultStream(Device) const override { return stream(0); }
  Stream getStreamFromGlobalPool(Device, bool) const override { return stream(next_id++); }
  Stream getNewStream(Device, int) const override { return stream(next_id++); }
  Stream exchangeStream(Stream s) const override {
    auto old = stream(current);
    current = s.id();
    return old;
  }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void** event, const Stream&, const DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = reinterpret_cast<void*>(static_cast<intptr_t>(next_id++));
  }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const Stream&) const override {}
};

struct Hooks final : public at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  int getNumGPUs() const override { return 1; }
};
} // namespace

namespace at {
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, Hooks)
}

extern "C" int install() {
  if (c10::impl::hasDeviceGuardImpl(DeviceType::CUDA)) return 0;
  c10::impl::registerDeviceGuard(DeviceType::CUDA, new Guard());
  return at::detail::getCUDAHooks().hasCUDA() ? 1 : 0;
}
