// Captures a part of a model that is not sharded as a CUDA graph, while the group's threads run. The replay must give
// the same result, or the program fails. Prints milliseconds with and without the graph.
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

struct Shape {
  int layers;
  int64_t width;
};

double milliseconds_since(std::chrono::steady_clock::time_point began) {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - began).count();
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
  torch::nn::Sequential part;
  for (int i = 0; i < shape.layers; ++i) {
    part->push_back(torch::nn::Linear(shape.width, shape.width));
    part->push_back(torch::nn::Tanh());
  }
  part->to(device, at::kBFloat16);
  const at::Tensor x = torch::randn({kRows, shape.width}, at::TensorOptions().dtype(at::kBFloat16).device(device));
  const std::vector<at::Tensor> parameters = part->parameters();
  auto compute = [&] { return torch::autograd::grad({part->forward(x).square().mean()}, parameters); };

  const c10::cuda::CUDAStream stream = c10::cuda::getStreamFromPool(/*isHighPriority=*/false, device.index());
  c10::cuda::device_synchronize();  // another stream has initialized x and the parameters
  const c10::cuda::CUDAStreamGuard on(stream);
  for (int i = 0; i < kWarmUp; ++i) compute();  // libraries allocate their workspaces before the capture
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
              shape.layers, static_cast<long long>(shape.width), milliseconds_each(stream, compute),
              milliseconds_each(stream, [&] { graph.replay(); }), is_equal ? "equal" : "NOT EQUAL");
  return is_equal;
}

}  // namespace

int main() {
  tessera::InitOptions options;
  options.device = at::kCUDA;
  bool replays = true;
  tessera::run_ranks(
      1,
      [&](std::shared_ptr<tessera::Communicator> comm) {
        replays = replays_what_it_computes({.layers = 8, .width = 512}, comm->device());
        comm->barrier();
      },
      options);
  return replays ? 0 : 1;
}
