// The C++ half of bench/cpu_adam.py. Usage: adam_turns THREADS. Reads an optimizer's name (host or fused) from each
// line of input, runs one step of it (AdamW) on 16 Mi fp32 elements, and prints "MS CPU_MS": wall and processor time.
#include <torch/torch.h>

#include <chrono>
#include <cstdio>
#include <iostream>
#include <string>

#include <tessera/tessera.h>
#include "number_argument.h"
#include "plan/calibrate/processor_time.h"

namespace {

constexpr int64_t kNumel = 16 << 20;

template <class Optimizer>
struct Stepped {
  at::Tensor parameter = torch::zeros({kNumel}).set_requires_grad(true);
  Optimizer optimizer{std::vector<at::Tensor>{parameter}, torch::optim::AdamWOptions(1e-3).weight_decay(0.1)};
  Stepped() { parameter.mutable_grad() = torch::full({kNumel}, 0.01); }
  void step() {
    const double processor_began_s = tessera::internal::process_processor_s();
    const auto began = std::chrono::steady_clock::now();
    optimizer.step();
    const double ms = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - began).count();
    std::printf("%.3f %.3f\n", ms, (tessera::internal::process_processor_s() - processor_began_s) * 1e3);
    std::fflush(stdout);
  }
};

}  // namespace

int main(int argc, char** argv) {
  at::set_num_threads(number_argument(argc, argv, 1, at::get_num_threads()));
  Stepped<tessera::HostAdamW> host;
  Stepped<tessera::AdamW> fused;
  for (std::string line; std::getline(std::cin, line);) {
    if (line == "host") {
      host.step();
    } else if (line == "fused") {
      fused.step();
    } else {
      std::fprintf(stderr, "adam_turns: '%s', expected host or fused\n", line.c_str());
      return 2;
    }
  }
}
