#include "tests/support/accelerator/gpus.h"

#include <ATen/Context.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <map>
#include <mutex>

#include "tests/support/accelerator/accelerator.h"
#include "tests/support/accelerator/streams.h"

namespace tessera::accelerator {
using namespace internal;
namespace {

constexpr int kMostGpus = 64;
std::array<std::atomic<int64_t>, kMostGpus> host_waits{};

template <class Function>
Function* next_function(const char* name) {
  return reinterpret_cast<Function*>(::dlsym(RTLD_NEXT, name));
}

void count_host_wait() {
  static auto* const get_device = next_function<int(int*)>("cudaGetDevice");
  int device = 0;
  if (get_device != nullptr && get_device(&device) == 0 && device < kMostGpus) ++host_waits[device];
}

// Counts the bytes of CUDA's page-locked allocator.
class CountedPages final : public PageLockedAllocator {
 public:
  explicit CountedPages(PageLockedAllocator& pages) : pages_(pages) {}
  void* allocate(size_t bytes) override {
    void* const memory = pages_.allocate(bytes);
    std::lock_guard lock(mutex_);
    sizes_[memory] = bytes;
    bytes_ += static_cast<int64_t>(bytes);
    return memory;
  }
  void free(void* memory) noexcept override {
    {
      std::lock_guard lock(mutex_);
      bytes_ -= static_cast<int64_t>(sizes_[memory]);
      sizes_.erase(memory);
    }
    pages_.free(memory);
  }
  int64_t bytes() {
    std::lock_guard lock(mutex_);
    return bytes_;
  }

 private:
  PageLockedAllocator& pages_;
  std::mutex mutex_;
  std::map<void*, size_t> sizes_;
  int64_t bytes_ = 0;
};

CountedPages& counted_pages() {
  static auto* const pages = new CountedPages(*gpus()->page_locked);  // never freed: tensors may outlive all statics
  return *pages;
}

const GpuSupport* load() {
  const char* const path = std::getenv("TESSERA_TEST_GPU");
  if (path == nullptr) return nullptr;
  ::setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8", /*overwrite=*/0);  // makes cuBLAS reproducible
  // Binds symbols lazily, because libraries that no test calls may be missing.
  void* const library = ::dlopen(path, RTLD_LAZY | RTLD_GLOBAL);
  auto* const give = library == nullptr
                         ? nullptr
                         : reinterpret_cast<decltype(&tessera_gpu_support)>(::dlsym(library, "tessera_gpu_support"));
  if (give == nullptr) {
    std::fprintf(stderr, "TESSERA_TEST_GPU: %s\n", ::dlerror());
    std::_Exit(1);
  }
  static GpuSupport support;
  give(&support);
  return &support;
}

}  // namespace

const GpuSupport* gpus() {
  static const GpuSupport* const loaded = load();
  return loaded;
}

void prepare_gpus() {
  static const bool prepared = [] {
    set_page_locked_allocator(&counted_pages());
    at::Context& context = at::globalContext();
    context.setAllowTF32CuDNN(false);
    context.setAllowTF32CuBLAS(false);
    context.setDeterministicCuDNN(true);
    context.setBenchmarkCuDNN(false);
    return true;
  }();
  TORCH_CHECK(prepared);
}

void synchronize_gpus() {
  const c10::impl::VirtualGuardImpl guard(at::kCUDA);
  for (int device = 0; device < device_count(); ++device)
    guard.synchronizeDevice(static_cast<c10::DeviceIndex>(device));
}

int64_t host_waits_of_gpu(int device) { return host_waits.at(device); }
void reset_host_waits_of_gpus() {
  for (auto& count : host_waits) count = 0;
}
int64_t page_locked_bytes_of_gpus() { return counted_pages().bytes(); }

bool on_gpus() { return gpus() != nullptr; }

int device_count() { return on_gpus() ? c10::impl::VirtualGuardImpl(at::kCUDA).deviceCount() : kDevices; }

void skip(const std::string& why) {
  const auto* const test = testing::UnitTest::GetInstance()->current_test_info();
  std::cout << "skipped: " << test->test_suite_name() << "." << test->name() << ": " << why << std::endl;
  [&] { GTEST_SKIP() << why; }();
  throw testing::AssertionException({testing::TestPartResult::kSkip, __FILE__, __LINE__, why.c_str()});
}

void needs_devices(int count) {
  TORCH_CHECK(on_gpus() || count <= kDevices, "the simulated accelerator has ", kDevices, " devices, not ", count);
  if (count > device_count())
    skip("needs " + std::to_string(count) + " GPUs, and there are " + std::to_string(device_count()));
}

void needs_simulation(const std::string& why) {
  if (on_gpus()) skip("needs the simulated accelerator: " + why);
}

}  // namespace tessera::accelerator

// These functions replace those of CUDA, because a program's symbols have priority. They count every host wait, except
// waits inside NCCL and cuBLAS. (A cudaStream_t and a cudaEvent_t are pointers, and a cudaError_t is an int.)
extern "C" {
int cudaStreamSynchronize(void* stream) {
  static auto* const next = tessera::accelerator::next_function<int(void*)>("cudaStreamSynchronize");
  tessera::accelerator::count_host_wait();
  return next(stream);
}
int cudaEventSynchronize(void* event) {
  static auto* const next = tessera::accelerator::next_function<int(void*)>("cudaEventSynchronize");
  tessera::accelerator::count_host_wait();
  return next(event);
}
int cudaDeviceSynchronize() {
  static auto* const next = tessera::accelerator::next_function<int()>("cudaDeviceSynchronize");
  tessera::accelerator::count_host_wait();
  return next();
}
}
