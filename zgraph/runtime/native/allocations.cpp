// Counts the bytes that torch's CPU allocator holds, now and at most, by standing in front of it.
//
// What counts is the size of the block that malloc gave (at least what was asked for, by some bytes more), so that
// nothing has to be remembered of a block. Tensors from before `install` are not counted, but when they are freed
// neither: they still belong to the allocator behind.
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <malloc.h>
#include <pybind11/pybind11.h>

#include <atomic>

namespace {

std::atomic<int64_t> live{0}, most{0};
c10::Allocator* behind = nullptr;

void count(int64_t bytes) {
  const int64_t held = live.fetch_add(bytes) + bytes;
  for (int64_t seen = most; held > seen && !most.compare_exchange_weak(seen, held);) {
  }
}

void release(void* block) {
  if (block) count(-static_cast<int64_t>(malloc_usable_size(block)));
  behind->raw_deleter()(block);
}

struct Counting final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    c10::DataPtr given = behind->allocate(bytes);
    const c10::Device device = given.device();
    void* block = given.release_context();
    if (block) count(malloc_usable_size(block));
    return {block, block, &release, device};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }

  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("install", [] {
    if (behind) return;
    behind = c10::GetCPUAllocator();
    c10::SetCPUAllocator(new Counting, /*priority=*/100);
  });
  module.def("live", [] { return live.load(); }, "bytes held now");
  module.def("peak", [] { return most.load(); }, "the most bytes held since `reset_peak`");
  module.def("reset_peak", [] { most = live.load(); });
}
