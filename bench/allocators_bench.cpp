// Compares Tessera's memory cache with mimalloc, which the cache replaces, and with glibc. Three equal trainings, each
// with one allocator, take turns, one step each. The result is the ratio of median step times. Before that, each
// allocator runs alone in a child process, which reports its peak resident memory. Fails if losses are not bitwise
// equal.
#include <c10/core/CPUAllocator.h>
#include <mimalloc.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstdio>
#include <memory>
#include <new>
#include <vector>

#include "core/memory/memory_cache.h"
#include "median.h"
#include "number_argument.h"

namespace {

using namespace tessera;
using namespace tessera::internal;

enum class Which { kGlibc, kMimalloc, kCache };
constexpr std::array<const char*, 3> kNames = {"glibc", "mimalloc", "cache"};
Which chosen = Which::kGlibc;

void free_by_mimalloc(void* memory) { mi_free(memory); }

class Mimalloc final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    constexpr size_t kAlignment = 64;  // libtorch's alignment for CPUs
    void* const memory = bytes > 0 ? mi_malloc_aligned(bytes, kAlignment) : nullptr;
    if (memory == nullptr && bytes > 0) throw std::bad_alloc();
    return {memory, memory, &free_by_mimalloc, c10::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_by_mimalloc; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};

// Allocates from the allocator that `chosen` selects. Frees memory by the allocator that has allocated it.
class Chosen final : public c10::Allocator {
 public:
  explicit Chosen(c10::Allocator* cache) : cache_(cache) {}
  c10::DataPtr allocate(size_t bytes) override { return now().allocate(bytes); }
  // Returns a deleter that finds the allocator by the address, for kernels that keep only the pointer.
  c10::DeleterFnPtr raw_deleter() const override {
    return [](void* memory) {
      mi_is_in_heap_region(memory) ? mi_free(memory) : memory_cache_allocator()->raw_deleter()(memory);
    };
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }

 private:
  c10::Allocator& now() {
    return chosen == Which::kGlibc ? *c10::GetDefaultCPUAllocator()
                                   : (chosen == Which::kMimalloc ? mimalloc_ : *cache_);
  }
  Mimalloc mimalloc_;
  c10::Allocator* const cache_;
};

// Layers with the sizes of a transformer: weights of 4 MiB, activations of 2 to 8 MiB, temporary gradients.
struct ModelImpl : torch::nn::Module {
  ModelImpl() {
    for (int i = 0; i < 4; ++i) {
      expand->push_back(torch::nn::Linear(512, 2048));
      contract->push_back(torch::nn::Linear(2048, 512));
      norm->push_back(torch::nn::LayerNorm(torch::nn::LayerNormOptions({512})));
    }
    register_module("expand", expand);
    register_module("contract", contract);
    register_module("norm", norm);
  }
  at::Tensor forward(at::Tensor x) {
    for (size_t i = 0; i < expand->size(); ++i)
      x = x + contract->ptr<torch::nn::LinearImpl>(i)->forward(torch::gelu(
                  expand->ptr<torch::nn::LinearImpl>(i)->forward(norm->ptr<torch::nn::LayerNormImpl>(i)->forward(x))));
    return x;
  }
  torch::nn::ModuleList expand, contract, norm;
};
TORCH_MODULE(Model);

struct Training {
  Training() {
    torch::manual_seed(1);
    model = Model();
    optimizer = std::make_unique<torch::optim::SGD>(model->parameters(), 1e-3);
    x = torch::randn({256, 512});
  }
  double step() {
    optimizer->zero_grad();
    // Varies the length of batches, like that of sequences.
    const at::Tensor loss = model->forward(x.narrow(0, 0, 256 - 24 * (steps++ % 3))).square().mean();
    loss.backward();
    optimizer->step();
    return loss.item<double>();
  }
  Model model{nullptr};
  std::unique_ptr<torch::optim::SGD> optimizer;
  at::Tensor x;
  int steps = 0;
};

// Returns the peak resident memory of a child process that trains with one allocator.
double peak_mib(Which which) {
  int ends[2];
  if (::pipe(ends) != 0) return -1;
  const pid_t child = ::fork();
  if (child == 0) {
    chosen = which;
    at::set_num_threads(1);  // the parent's thread pool does not exist after fork
    Training training;
    for (int i = 0; i < 12; ++i) training.step();
    rusage usage{};
    ::getrusage(RUSAGE_SELF, &usage);
    const double mib = static_cast<double>(usage.ru_maxrss) / 1024;
    static_cast<void>(!::write(ends[1], &mib, sizeof(mib)));
    ::_exit(0);
  }
  ::close(ends[1]);
  double mib = -1;
  static_cast<void>(!::read(ends[0], &mib, sizeof(mib)));
  ::close(ends[0]);
  ::waitpid(child, nullptr, 0);
  return mib;
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = number_argument(argc, argv, 1, 40);
  start_caching_memory();
  static Chosen allocator(memory_cache_allocator());
  constexpr uint8_t kAnyPriority = 255;
  c10::SetCPUAllocator(&allocator, kAnyPriority);

  std::array<double, 3> peaks{};
  for (size_t i = 0; i < 3; ++i) peaks[i] = peak_mib(static_cast<Which>(i));  // forks before this process has threads

  at::set_num_threads(1);
  std::array<std::unique_ptr<Training>, 3> trainings;
  for (size_t i = 0; i < 3; ++i) {
    chosen = static_cast<Which>(i);
    trainings[i] = std::make_unique<Training>();
  }
  std::array<std::vector<double>, 3> ms;
  for (int round = 0; round < rounds + 3; ++round) {
    std::array<double, 3> losses{};
    for (size_t turn = 0; turn < 3; ++turn) {
      const size_t i = (turn + static_cast<size_t>(round)) % 3;
      chosen = static_cast<Which>(i);
      const auto began = std::chrono::steady_clock::now();
      losses[i] = trainings[i]->step();
      if (round >= 3)
        ms[i].push_back(std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - began).count());
    }
    if (losses[0] != losses[1] || losses[0] != losses[2]) {
      std::fprintf(stderr, "allocators_bench: losses differ in round %d\n", round);
      return 1;
    }
  }
  const double of_cache = median(ms[2]);
  std::printf("%-10s %14s %22s %22s\n", "allocator", "ms a step", "time, cache / this", "peak MiB of a process");
  for (size_t i = 0; i < 3; ++i)
    std::printf("%-10s %14.2f %22.3f %22.0f\n", kNames[i], median(ms[i]), of_cache / median(ms[i]), peaks[i]);
}
