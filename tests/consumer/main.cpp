// Trains a small model on two ranks, and checks that it has learned and that both ranks agree.

#include <tessera/elastic.h>
#include <tessera/exported.h>
#include <tessera/plan.h>
#include <tessera/tessera.h>
#include <torch/torch.h>

#include <chrono>
#include <cstdio>
#include <exception>

// The consumer has no build type, so tessera::tessera must define NDEBUG.
#ifndef NDEBUG
#error "libtorch's headers need NDEBUG"
#endif
// The guide's way to keep a program's own asserts.
#undef NDEBUG
#include <cassert>

namespace {

constexpr int kSteps = 60;

// Returns the mean of the ranks' losses.
double mean_loss(const at::Tensor& loss, tessera::Communicator& comm) {
  at::Tensor mean = loss.detach().clone();
  comm.all_reduce(mean, tessera::ReduceOp::kAverage, "the loss").wait();
  return mean.item<double>();
}

// The documentation's designated initializers, each of which leaves fields out: they must compile without a warning.
void name_options() {
  static_cast<void>(tessera::FsdpOptions{.mixed_precision = {.param_dtype = at::kBFloat16}, .hybrid = {}});
  static_cast<void>(tessera::FsdpOptions{.offload = {.params = true, .grads = true}});
  static_cast<void>(tessera::ZeroOptions{.stage = 3});
  static_cast<void>(tessera::DdpOptions{.bucket_bytes = 25 << 20});
  static_cast<void>(tessera::SdpOptions{.reduce_bucket_bytes = 32 << 20});
  static_cast<void>(tessera::OssOptions{.broadcast_dtype = at::kHalf});
  static_cast<void>(tessera::InitOptions{.timeout = std::chrono::minutes(1)});
  static_cast<void>(tessera::InitOptions{.process = {.cache_memory = false}});
  static_cast<void>(tessera::SummonOptions{.writeback = false, .rank0_only = true});
  static_cast<void>(tessera::StateDictOptions{.rank0_only = true});
  static_cast<void>(tessera::LoadOptions{.strict = false});
  static_cast<void>(tessera::DistributedSamplerOptions{.batch_numel = 8, .seed = 1});
  static_cast<void>(tessera::StepInBackwardOptions{.speculative = true});
  static_cast<void>(tessera::EmaOptions{.decay = 0.999});
  static_cast<void>(tessera::QuantizeOptions{.lora = {.rank = 16, .alpha = 32}});
  static_cast<void>(tessera::GradScalerOptions{.initial_scale = 8.0});
  static_cast<void>(tessera::FsdpOptions{.wire = {.parameters = tessera::WireFormat::kInt8Blocks}});
  static_cast<void>(tessera::GroupOptions{.backend = "mpi"});
  static_cast<void>(tessera::SaveOptions{.keep_last = 3});
  static_cast<void>(tessera::FullTensor{"weight", at::kFloat, {2, 3}});
  static_cast<void>(tessera::SaveFullOptions{.max_file_bytes = int64_t{1} << 30});
  static_cast<void>(tessera::FullTensor{.name = "weight", .shape = {3}});
  static_cast<void>(tessera::ActivationOffloadOptions{.host_limit_bytes = int64_t{1} << 30});
  static_cast<void>(tessera::EventWriter::Options{.flush_every = std::chrono::seconds(1)});
  static_cast<void>(tessera::ExportedOptions{.device = at::kCPU, .weights = "model.safetensors"});
  static_cast<void>(tessera::DryRunOptions{.world_size = 64, .rank = 17});
  static_cast<void>(tessera::DecoderOptions{.layers = 2});
  static_cast<void>(tessera::ElasticOptions{.copies = 2});
  static_cast<void>(tessera::MachineSpeed{.ranks_per_host = 8});
}

// Fits y = sin(3 x), each rank on half of the interval, and returns {first, last loss}.
std::pair<double, double> train(const std::shared_ptr<tessera::Communicator>& comm) {
  torch::nn::Sequential model(torch::nn::Linear(1, 32), torch::nn::Tanh(), torch::nn::Linear(32, 32), torch::nn::Tanh(),
                              torch::nn::Linear(32, 1));
  tessera::FullyShardedDataParallel fsdp(model, comm, {.auto_wrap = tessera::wrap_modules<torch::nn::LinearImpl>()});
  torch::optim::Adam optimizer(fsdp.parameters(), 1e-2);
  const at::Tensor x = torch::linspace(comm->rank() - 1.0, comm->rank(), 64).unsqueeze(1);
  double first = 0, last = 0;
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    const at::Tensor loss = torch::mse_loss(fsdp(x), torch::sin(3 * x));
    loss.backward();
    optimizer.step();
    last = mean_loss(loss, *comm);
    if (step == 0) first = last;
  }
  const auto memory = fsdp.memory();
  if (2 * memory.shard_bytes >= memory.unsharded_bytes + 512) throw std::runtime_error("nothing was sharded");
  return {first, last};
}

}  // namespace

int main() {
  bool asserts_are_on = false;
  assert(asserts_are_on = true);
  if (!asserts_are_on) return 1;
  name_options();
  try {
    bool learned = true;
    tessera::run_ranks(2, [&](std::shared_ptr<tessera::Communicator> comm) {
      const auto [first, last] = train(comm);
      if (comm->rank() != 0) return;
      learned = last < 0.25 * first;
      std::printf("consumer: loss %.4f -> %.4f\n", first, last);
    });
    return learned ? 0 : 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "consumer: %s\n", error.what());
    return 1;
  }
}
