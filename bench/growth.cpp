// Prints the CPU times of checkpoint functions and of a step for growing numbers of parameters, to find costs that grow
// faster than linearly. Each line should have about twice the times of the previous line. "disk step" is the first step
// of HostAdamW on parameters on a disk, which makes the state. All data fit into the buffers.
//
//   build/release/bench/growth [FILE.pt2 ...]
//
// The model has parameters of 16 elements under FullyShardedDataParallel with AdamW, on one rank. Its files are in
// out/growth. Then prints the time of load_exported() for each archive (bench/exported_parameters.py FILE.pt2 NUMBER).
// Targets: for 40,000 tensors, 4 s to save and load, and 0.3 s to read a header; for 4,000 tensors, 0.1 s for a step of
// torch::optim::AdamW ("step").
#include <torch/torch.h>

#include <cstdio>
#include <ctime>
#include <filesystem>
#include <functional>
#include <string>

#include <tessera/exported.h>
#include <tessera/tessera.h>
#include "checkpoint/format/entries.h"
#include "checkpoint/format/safetensors_header.h"

namespace {

namespace fs = std::filesystem;

constexpr int kWidth = 16;
const fs::path kFolder = "out/growth";

double seconds_of(const std::function<void()>& work) {
  const std::clock_t began = std::clock();
  work();
  return static_cast<double>(std::clock() - began) / CLOCKS_PER_SEC;
}

struct ManyImpl : torch::nn::Module {
  explicit ManyImpl(int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      const std::string number = std::to_string(i);
      register_parameter("weight" + number, torch::full({kWidth}, 0.5));
      if (i % 10 == 0) register_buffer("buffer" + number, torch::full({kWidth}, 0.5));
    }
  }
};
TORCH_MODULE(Many);

double first_step_on_disk(int64_t count, const std::shared_ptr<tessera::Communicator>& comm) {
  fs::create_directories(kFolder);
  tessera::FullyShardedDataParallel fsdp(
      Many(count), comm,
      {.offload = {
           .params = true, .grads = true, .directory = kFolder.string(), .disk_buffer_bytes = int64_t{1} << 30}});
  tessera::HostAdamW optimizer(fsdp.parameters());
  for (at::Tensor& parameter : fsdp.parameters()) parameter.mutable_grad() = torch::ones({parameter.numel()});
  return seconds_of([&] { optimizer.step(); });
}

void measure(int64_t count, const std::shared_ptr<tessera::Communicator>& comm) {
  tessera::FullyShardedDataParallel fsdp(Many(count), comm);
  tessera::AdamW optimizer(fsdp.parameters());
  for (at::Tensor& parameter : fsdp.parameters()) parameter.mutable_grad() = torch::ones_like(parameter);
  optimizer.step();
  torch::optim::AdamW of_torch(fsdp.parameters());
  of_torch.step();
  const double step = seconds_of([&] { of_torch.step(); });
  const fs::path folder = kFolder / "checkpoint", file = kFolder / "full.safetensors";
  fs::remove_all(kFolder);
  const double save = seconds_of([&] { tessera::save_checkpoint(folder, fsdp, optimizer); });
  const double load = seconds_of([&] { tessera::load_checkpoint(folder, fsdp, optimizer); });
  const double save_full = seconds_of([&] { tessera::save_full(file, fsdp); });
  const double load_full = seconds_of([&] { tessera::load_full(file, fsdp); });
  const double header =
      seconds_of([&] { tessera::internal::read_safetensors_header(*tessera::internal::open_file(file)); });
  const double disk_step = first_step_on_disk(count, comm);
  fs::remove_all(kFolder);
  std::printf("%10ld %8.3f %8.3f %10.3f %10.3f %8.3f %8.3f %9.3f\n", static_cast<long>(count), save, load, save_full,
              load_full, header, step, disk_step);
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  tessera::run_ranks(1, [](const std::shared_ptr<tessera::Communicator>& comm) {
    std::printf("%10s %8s %8s %10s %10s %8s %8s %9s  (seconds)\n", "parameters", "save", "load", "save_full",
                "load_full", "header", "step", "disk step");
    for (int64_t count = 2500; count <= 40000; count *= 2) measure(count, comm);
  });
  for (int i = 1; i < argc; ++i)
    std::printf("load_exported %s: %.3f s\n", argv[i], seconds_of([&] { tessera::load_exported(argv[i]); }));
}
