// Measures a step on GPUs, for tools/gpu_check.sh: gpu_step [ranks] [layers] [width]. The model is a chain of Linear
// layers, a unit each, in bf16, under FSDP with and without offload. Rank 0 prints milliseconds a step and device
// memory. Then captures a part of the model that is not sharded as a CUDA graph, while the group's threads run. The
// replay must give the same result, or the program fails.
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/torch.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <vector>

#include <tessera/tessera.h>

namespace {

constexpr int kWarmUp = 5, kSteps = 20;
constexpr int64_t kRows = 2048;
constexpr double kMiB = 1 << 20;

struct Shape {
  int layers;
  int64_t width;
};

double milliseconds_since(std::chrono::steady_clock::time_point began) {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - began).count();
}

struct Measured {
  double step_ms;
  double forward_ms, backward_ms, clip_ms, optimizer_ms;  // with a wait after each phase, unlike a whole step
  tessera::MemoryReport memory;
};

Measured measure(const Shape& shape, const std::shared_ptr<tessera::Communicator>& comm, bool offloads) {
  torch::nn::Sequential net;
  for (int i = 0; i < shape.layers; ++i) net->push_back(torch::nn::Linear(shape.width, shape.width));
  net->to(comm->device());
  tessera::FsdpOptions options;
  options.auto_wrap = tessera::wrap_modules<torch::nn::LinearImpl>();
  options.mixed_precision = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat};
  options.offload = {.params = offloads, .grads = offloads};
  tessera::FullyShardedDataParallel fsdp(net, comm, options);
  const torch::optim::AdamWOptions adam(1e-4);
  tessera::AdamW on_device(fsdp.parameters(), adam);
  tessera::HostAdamW on_host(fsdp.parameters(), adam);
  torch::optim::Optimizer& optimizer =
      offloads ? static_cast<torch::optim::Optimizer&>(on_host) : static_cast<torch::optim::Optimizer&>(on_device);
  const at::Tensor x = torch::randn({kRows, shape.width}, comm->device());
  at::Tensor loss;
  auto forward = [&] {
    optimizer.zero_grad();
    loss = fsdp(x).square().mean();
  };
  auto backward = [&] { loss.backward(); };
  auto clip = [&] { fsdp.clip_grad_norm_on_device_(1.0); };
  auto step = [&] { optimizer.step(); };
  auto run_steps = [&](int count, auto... parts) {
    for (int i = 0; i < count; ++i) (parts(), ...);
  };
  auto waited_for = [&](auto part, double* total_ms) {
    return [&comm, part, total_ms] {
      const auto began = std::chrono::steady_clock::now();
      part();
      comm->barrier();  // blocks the host
      *total_ms += milliseconds_since(began) / kSteps;
    };
  };
  run_steps(kWarmUp, forward, backward, clip, step);
  comm->barrier();
  const auto began = std::chrono::steady_clock::now();
  run_steps(kSteps, forward, backward, clip, step);
  comm->barrier();
  Measured measured{.step_ms = milliseconds_since(began) / kSteps};
  run_steps(kSteps, waited_for(forward, &measured.forward_ms), waited_for(backward, &measured.backward_ms),
            waited_for(clip, &measured.clip_ms), waited_for(step, &measured.optimizer_ms));
  measured.memory = fsdp.memory();
  return measured;
}

template <class Call>
double milliseconds_each(const c10::cuda::CUDAStream& stream, Call call) {
  stream.synchronize();
  const auto began = std::chrono::steady_clock::now();
  for (int i = 0; i < kSteps; ++i) call();
  stream.synchronize();
  return milliseconds_since(began) / kSteps;
}

// Captures forward and backward of modules between two gathers. The mode is thread-local, because the group's threads
// query events during the capture.
bool replays_what_it_computes(const Shape& shape, at::Device device) {
  constexpr int kLayers = 8;
  torch::nn::Sequential part;
  for (int i = 0; i < kLayers; ++i) {
    part->push_back(torch::nn::Linear(shape.width, shape.width));
    part->push_back(torch::nn::Tanh());
  }
  part->to(device, at::kBFloat16);
  const at::Tensor x = torch::randn({kRows, shape.width}, at::TensorOptions().dtype(at::kBFloat16).device(device));
  const std::vector<at::Tensor> parameters = part->parameters();
  auto compute = [&] { return torch::autograd::grad({part->forward(x).square().mean()}, parameters); };

  const c10::cuda::CUDAStream stream = c10::cuda::getStreamFromPool(/*isHighPriority=*/false, device.index());
  c10::cuda::device_synchronize();  // x and the parameters were made on another stream
  const c10::cuda::CUDAStreamGuard on(stream);
  for (int i = 0; i < kWarmUp; ++i) compute();  // libraries allocate their workspaces
  stream.synchronize();
  at::cuda::CUDAGraph graph;
  graph.capture_begin({0, 0}, cudaStreamCaptureModeThreadLocal);
  const std::vector<at::Tensor> captured = compute();
  graph.capture_end();

  x.normal_();  // must differ from the values at the capture
  const std::vector<at::Tensor> expected = compute();
  for (const at::Tensor& gradient : captured) gradient.fill_(std::numeric_limits<double>::quiet_NaN());
  graph.replay();
  bool is_equal = true;
  for (size_t i = 0; i < captured.size(); ++i) is_equal = is_equal && torch::equal(captured[i], expected[i]);
  std::printf("%d x Linear(%lld) and tanh, bf16, forward and backward: %.2f ms, replayed as a CUDA graph %.2f ms, %s\n",
              kLayers, static_cast<long long>(shape.width), milliseconds_each(stream, compute),
              milliseconds_each(stream, [&] { graph.replay(); }), is_equal ? "equal" : "NOT EQUAL");
  return is_equal;
}

}  // namespace

int main(int argc, char** argv) {
  const int ranks = argc > 1 ? std::atoi(argv[1]) : 1;
  const Shape shape{argc > 2 ? std::atoi(argv[2]) : 24, argc > 3 ? std::atoi(argv[3]) : 4096};
  tessera::InitOptions options;
  options.device = at::kCUDA;
  bool replays = true;
  tessera::run_ranks(
      ranks,
      [&](std::shared_ptr<tessera::Communicator> comm) {
        for (const bool offloads : {false, true}) {
          const Measured measured = measure(shape, comm, offloads);
          if (comm->rank() == 0)
            std::printf(
                "%d ranks, %d x Linear(%lld), bf16%s: %.2f ms a step (waited for, forward %.2f, backward %.2f, "
                "clipping %.2f, optimizer %.2f); shards %.0f MiB, gathered at most %.0f\n",
                ranks, shape.layers, static_cast<long long>(shape.width), offloads ? ", offload" : "", measured.step_ms,
                measured.forward_ms, measured.backward_ms, measured.clip_ms, measured.optimizer_ms,
                static_cast<double>(measured.memory.shard_bytes) / kMiB,
                static_cast<double>(measured.memory.peak_gathered_bytes) / kMiB);
        }
        if (comm->rank() == 0) replays = replays_what_it_computes(shape, comm->device());
        comm->barrier();
      },
      options);
  return replays ? 0 : 1;
}
