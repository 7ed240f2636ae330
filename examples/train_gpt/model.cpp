#include "model.h"

#include <mutex>
#include <stdexcept>
#include <utility>

#include "adapters.h"
#include "distributed.h"
#include "local.h"
#include "optimizer.h"

namespace train_gpt {
namespace {

int stage_of(Wrapper wrapper) {
  switch (wrapper) {
    case Wrapper::kOss:
      return 1;
    case Wrapper::kSdp:
      return 2;
    case Wrapper::kFsdp:
      return 3;
    default:
      return 0;
  }
}

template <class Optimizer, class Options, class Offloaded = Optimizer>
std::unique_ptr<Trainable> wrap_as(Gpt model, const TrainOptions& options,
                                   std::shared_ptr<tessera::Communicator> comm) {
  const auto own = options_from<Options>({options.lr, options.weight_decay, options.warmup_steps()});
  if (options.wrapper == Wrapper::kLocal) {
    auto make = [&](const torch::nn::Module& module) {
      return std::make_unique<Optimizer>(groups_of(module.named_parameters(), matrix_names(module), own), own);
    };
    return std::make_unique<LocalModel>(std::move(model), make, comm);
  }
  tessera::ZeroOptions zero{.stage = stage_of(options.wrapper)};
  zero.fsdp.reshard_after_forward = options.reshard_after_forward;
  zero.fsdp.prefetch = options.prefetch;
  if (options.int8_wire) {
    zero.fsdp.wire = {tessera::WireFormat::kInt8Blocks, tessera::WireFormat::kInt8Blocks};
    zero.sdp.wire = tessera::WireFormat::kInt8Blocks;
  }
  if (options.offload == Offload::kNone)
    return std::make_unique<DistributedModel<Optimizer, Options>>(std::move(model), own, std::move(comm),
                                                                  std::move(zero));
  zero.fsdp.offload = {.params = true, .grads = true};
  zero.oss.offload = {.params = true, .grads = true};
  if (options.offload == Offload::kDisk) zero.fsdp.offload.directory = options.offload_directory.string();
  return std::make_unique<DistributedModel<Offloaded, Options>>(std::move(model), own, std::move(comm),
                                                                std::move(zero));
}

// From torch's generator, which ranks share that are threads of one process.
std::mutex drawing;
template <class Draw>
auto seeded(const TrainOptions& options, Draw draw) {
  const std::lock_guard lock(drawing);
  torch::manual_seed(static_cast<uint64_t>(options.seed));
  return draw();
}

}  // namespace

Gpt draw_model(const TrainOptions& options, at::Device device) {
  Gpt model = seeded(options, [&] { return Gpt(options.model); });
  model->to(device);
  return model;
}

void draw_adapters(Gpt& model, const TrainOptions& options) {
  seeded(options, [&] { add_adapters(model, options); });
}

std::unique_ptr<Trainable> wrap(Gpt model, const TrainOptions& options, std::shared_ptr<tessera::Communicator> comm) {
  using namespace tessera;
  switch (options.optimizer) {
    case OptimizerKind::kAdamW:
      return wrap_as<torch::optim::AdamW, torch::optim::AdamWOptions, HostAdamW>(model, options, comm);
    case OptimizerKind::kAdamW8bit:
      return wrap_as<AdamW8bit, AdamW8bitOptions>(model, options, comm);
    case OptimizerKind::kMuon:
      return wrap_as<Muon, MuonOptions>(model, options, comm);
    case OptimizerKind::kLion:
      return wrap_as<Lion, LionOptions>(model, options, comm);
    case OptimizerKind::kAdafactor:
      return wrap_as<Adafactor, AdafactorOptions>(model, options, comm);
    case OptimizerKind::kScheduleFree:
      return wrap_as<ScheduleFreeAdamW, ScheduleFreeOptions>(model, options, comm);
    case OptimizerKind::kLamb:
      return wrap_as<Lamb, torch::optim::AdamWOptions>(model, options, comm);
    case OptimizerKind::kSgd:
      return wrap_as<SGD, torch::optim::SGDOptions>(model, options, comm);
  }
  throw std::logic_error("an optimizer without a name");
}

}  // namespace train_gpt
