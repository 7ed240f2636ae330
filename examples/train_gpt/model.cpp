#include "model.h"

#include <tessera/model/model_shards.h>
#include <tessera/optim/ema.h>
#include <tessera/optim/sharded_grad_scaler.h>
#include <tessera/quantize_linears.h>

#include <limits>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <utility>

#include "examples/common/precision.h"

namespace train_gpt {
namespace {

using examples::Mixed;

// Helpers for optimizers: options, parameter groups and memory.

constexpr double kBeta1 = 0.9, kBeta2 = 0.95;  // GPT-3's

struct Hyperparameters {
  double lr, weight_decay;
  int64_t warmup;  // in steps; used only by schedule-free AdamW, whose learning rate has no external schedule
};

// Returns the options of --optimizer: for AdamW with GPT-3's betas, for others with the values of their papers.
template <class Options>
Options options_from(const Hyperparameters& hyper);
template <>
torch::optim::AdamWOptions options_from(const Hyperparameters& hyper) {
  return torch::optim::AdamWOptions(hyper.lr).betas({kBeta1, kBeta2}).weight_decay(hyper.weight_decay);
}
template <>
torch::optim::SGDOptions options_from(const Hyperparameters& hyper) {
  return torch::optim::SGDOptions(hyper.lr).momentum(kBeta1).weight_decay(hyper.weight_decay);
}
template <>
tessera::LionOptions options_from(const Hyperparameters& hyper) {
  return tessera::LionOptions(hyper.lr).weight_decay(hyper.weight_decay);
}
template <>
tessera::AdafactorOptions options_from(const Hyperparameters& hyper) {
  return tessera::AdafactorOptions(hyper.lr).weight_decay(hyper.weight_decay);
}
// Scales Muon's steps to the size of AdamW's, so that one --lr fits all parameters.
template <>
tessera::MuonOptions options_from(const Hyperparameters& hyper) {
  return tessera::MuonOptions(hyper.lr).weight_decay(hyper.weight_decay).match_rms_adamw(true).bfloat16(false);
}
template <>
tessera::AdamW8bitOptions options_from(const Hyperparameters& hyper) {
  return tessera::AdamW8bitOptions(hyper.lr).beta1(kBeta1).beta2(kBeta2).weight_decay(hyper.weight_decay);
}
template <>
tessera::ScheduleFreeOptions options_from(const Hyperparameters& hyper) {
  return tessera::ScheduleFreeOptions(hyper.lr)
      .beta1(kBeta1)
      .beta2(kBeta2)
      .weight_decay(hyper.weight_decay)
      .warmup_steps(hyper.warmup);
}

using Parameters = torch::OrderedDict<std::string, at::Tensor>;  // by name
using Groups = std::vector<torch::optim::OptimizerParamGroup>;

// Returns two groups of trained parameters: those in `matrices` with weight decay, and biases and norms without it.
template <class Options>
Groups groups_of(const Parameters& parameters, const std::set<std::string>& matrices, const Options& options) {
  std::vector<at::Tensor> decayed, plain;
  for (const auto& item : parameters) {
    if (item.value().requires_grad()) (matrices.contains(item.key()) ? decayed : plain).push_back(item.value());
  }
  Groups groups;
  groups.emplace_back(std::move(decayed), std::make_unique<Options>(options));
  groups.emplace_back(std::move(plain), std::make_unique<Options>(Options(options).weight_decay(0.0)));
  return groups;
}

// Returns three groups: the blocks' matrices (Muon), the other matrices (AdamW), and the rest (AdamW without decay).
Groups groups_of(const Parameters& parameters, const std::set<std::string>& matrices,
                 const tessera::MuonOptions& options) {
  std::vector<at::Tensor> hidden, others, plain;
  for (const auto& item : parameters) {
    if (!item.value().requires_grad()) continue;
    if (!matrices.contains(item.key())) {
      plain.push_back(item.value());
    } else {
      (item.key().starts_with("blocks.") ? hidden : others).push_back(item.value());
    }
  }
  const auto adamw = tessera::MuonOptions(options).use_muon(false);
  Groups groups;
  groups.emplace_back(std::move(hidden), std::make_unique<tessera::MuonOptions>(options));
  groups.emplace_back(std::move(others), std::make_unique<tessera::MuonOptions>(adamw));
  groups.emplace_back(std::move(plain),
                      std::make_unique<tessera::MuonOptions>(tessera::MuonOptions(adamw).weight_decay(0.0)));
  return groups;
}

// Returns the bytes of this rank's optimizer state, which is empty before the first step.
int64_t state_bytes(torch::optim::Optimizer& optimizer) {
  int64_t bytes = 0;
  for (const auto& [parameter, state] : optimizer.state())
    for (const auto& [name, tensor] : tessera::read_state(*state).tensors)
      bytes += static_cast<int64_t>(tensor.nbytes());
  return bytes;
}

// Implementations of Trainable: one process, a ZeRO stage over ranks, and a decorator that adds an average.

// Adapts an unsharded model to ModelShards, for functions that load and save.
class WholeModel final : public tessera::ModelShards {
 public:
  WholeModel(Gpt model, std::shared_ptr<tessera::Communicator> comm)
      : model_(std::move(model)), comm_(std::move(comm)) {}

  const std::shared_ptr<tessera::Communicator>& comm() const override { return comm_; }
  torch::OrderedDict<std::string, at::Tensor> named_buffers() const override { return model_->named_buffers(); }

  std::vector<tessera::NamedShard> named_shards() const override {
    std::vector<tessera::NamedShard> shards;
    for (const auto& item : model_->named_parameters())
      shards.push_back({.fqn = item.key(),
                        .aliases = {},
                        .sizes = item.value().sizes().vec(),
                        .strides = item.value().strides().vec(),
                        .held = {0, item.value().numel()},
                        .tensor = item.value()});
    return shards;
  }

 private:
  Gpt model_;
  std::shared_ptr<tessera::Communicator> comm_;
};

// Implements --wrapper local: trains in one process without a wrapper.
template <class Optimizer, class Options>
class LocalModel final : public Trainable {
 public:
  LocalModel(Gpt model, const Options& options, Mixed mixed, std::shared_ptr<tessera::Communicator> comm)
      : model_(std::move(model)),
        mixed_(std::move(mixed)),
        shards_(model_, std::move(comm)),
        optimizer_(groups_of(model_->named_parameters(), matrix_names(*model_), options), options) {}

  at::Tensor forward(const at::Tensor& tokens) override {
    return mixed_.compute([&] { return model_->forward(tokens); });
  }
  at::Tensor add_gradients(const Batch& batch, double scale, bool /*last_of_step*/) override {
    const auto loss = mixed_.compute([&] { return language_model_loss(model_->forward(batch.inputs), batch.targets); });
    mixed_.backward(loss * scale);
    return loss.detach();
  }
  double clip_grad_norm(double max_norm) override {
    mixed_.before_clipping(optimizer_);
    return torch::nn::utils::clip_grad_norm_(model_->parameters(), max_norm);
  }
  void step() override { mixed_.step(optimizer_); }
  tessera::ShardedGradScaler* scaler() override { return mixed_.scaler(); }
  void zero_grad() override { model_->zero_grad(); }
  torch::optim::Optimizer& optimizer() override { return optimizer_; }
  tessera::ModelShards& shards() override { return shards_; }
  NamedTensors full_state() override { return model_->named_parameters(); }
  std::string describe() const override { return "one process, nothing sharded"; }

  std::optional<tessera::ScopeExit> averaged() override {
    auto* averages = dynamic_cast<tessera::Averages*>(static_cast<torch::optim::Optimizer*>(&optimizer_));
    return averages != nullptr ? std::optional<tessera::ScopeExit>(averages->swap_in_averages()) : std::nullopt;
  }

  MemoryUse memory() const override {
    MemoryUse memory;
    for (const auto& parameter : model_->parameters()) {
      memory.parameter_bytes += static_cast<int64_t>(parameter.nbytes());
      if (parameter.grad().defined()) memory.grad_bytes += static_cast<int64_t>(parameter.grad().nbytes());
    }
    memory.optimizer_bytes = state_bytes(optimizer_);
    return memory;
  }

 private:
  Gpt model_;
  Mixed mixed_;
  WholeModel shards_;
  mutable Optimizer optimizer_;
};

// The reason why steps occur before Trainable::step(), and the maximum norm of gradients in such steps.
struct EarlySteps {
  enum Kind { kNone, kInBackward, kCaptured } kind = kNone;
  double largest_norm = std::numeric_limits<double>::infinity();
};

// Implements --wrapper ddp, oss, sdp and fsdp: the ZeRO stage in `zero`. In stage 3, each block is a unit.
template <class Optimizer, class Options>
class DistributedModel final : public Trainable {
 public:
  // Sets `zero.groups` and `zero.fsdp.auto_wrap`. The caller sets the other options.
  DistributedModel(Gpt model, const Options& options, Mixed mixed, std::shared_ptr<tessera::Communicator> comm,
                   tessera::ZeroOptions zero, EarlySteps early)
      : mixed_(std::move(mixed)),
        units_(model->options().layers + 1),
        zero_(model, options, std::move(comm), completed(std::move(zero), model, options)) {
    if (early.kind == EarlySteps::kNone) return;
    if (mixed_.scaler() != nullptr)
      throw std::invalid_argument(
          "--step-in-backward and --capture with --dtype fp16, whose scaler may skip a step after backward; use bf16 "
          "or fp32");
    if (early.kind == EarlySteps::kInBackward)
      in_backward_.emplace(dynamic_cast<tessera::FullyShardedModule&>(zero_.wrapper()),
                           dynamic_cast<tessera::PartialStep&>(zero_.optimizer()),
                           tessera::StepInBackwardOptions{.max_norm = early.largest_norm, .speculative = true});
    else
      captured_.emplace(
          zero_.wrapper(), zero_.optimizer(), [this](const auto& in) { return loss_of(in[0], in[1]); },
          early.largest_norm);
  }

  at::Tensor forward(const at::Tensor& tokens) override {
    return mixed_.compute([&] { return zero_(tokens); });
  }
  at::Tensor add_gradients(const Batch& batch, double scale, bool last_of_step) override {
    if (captured_) return (*captured_)({batch.inputs, batch.targets});
    std::optional<tessera::ScopeExit> without_reduction;
    if (!last_of_step) without_reduction.emplace(zero_.no_sync());
    const auto loss = loss_of(batch.inputs, batch.targets);
    mixed_.backward(loss * scale);
    return loss.detach();
  }
  double clip_grad_norm(double max_norm) override {
    if (in_backward_) return in_backward_->finish().value();
    if (captured_) return captured_->norm();
    mixed_.before_clipping(zero_.optimizer());
    return zero_.clip_grad_norm_(max_norm);
  }
  void step() override {
    if (!steps_early()) mixed_.step(zero_.optimizer());
  }
  bool steps_early() const override { return in_backward_ || captured_; }
  std::optional<double> suggested_device_fraction() const override {
    return in_backward_ ? std::optional(in_backward_->suggested_device_fraction()) : std::nullopt;
  }
  tessera::ShardedGradScaler* scaler() override { return mixed_.scaler(); }
  void zero_grad() override { zero_.zero_grad(); }
  torch::optim::Optimizer& optimizer() override { return zero_.optimizer(); }
  tessera::ModelShards& shards() override { return zero_; }
  NamedTensors full_state() override { return zero_.full_state_dict(); }

  std::optional<tessera::ScopeExit> averaged() override {
    auto* averages = dynamic_cast<tessera::Averages*>(&zero_.optimizer());
    return averages != nullptr && averages->keeps_averages()
               ? std::optional<tessera::ScopeExit>(averages->swap_in_averages())
               : std::nullopt;
  }

  MemoryUse memory() const override {
    const auto report = zero_.memory();
    return {.parameter_bytes = report.shard_bytes,
            .grad_bytes = report.grad_bytes,
            .optimizer_bytes = state_bytes(zero_.optimizer()),
            .peak_gathered_bytes = report.peak_gathered_bytes,
            .peak_bucket_bytes = report.peak_bucket_bytes};
  }

  std::string describe() const override {
    const int ranks = zero_.comm()->size();
    const std::string over = std::to_string(ranks) + (ranks == 1 ? " rank" : " ranks");
    switch (zero_.stage()) {
      case 0:
        return "ddp: the whole state on each of " + over;
      case 1:
        return "oss: optimizer state split over " + over;
      case 2:
        return "sdp: optimizer state and gradients split over " + over;
      default:
        return "fsdp: " + std::to_string(units_) + " units, each split over " + over;
    }
  }

 private:
  at::Tensor loss_of(const at::Tensor& inputs, const at::Tensor& targets) {
    return mixed_.compute([&] { return language_model_loss(zero_(inputs), targets); });
  }
  static tessera::ZeroOptions completed(tessera::ZeroOptions zero, const Gpt& model, const Options& options) {
    zero.groups = [matrices = matrix_names(*model), options](const tessera::ZeroOptions::Parameters& parameters) {
      return groups_of(parameters, matrices, options);
    };
    zero.fsdp.auto_wrap = tessera::wrap_modules<BlockImpl>();
    return zero;
  }

  Mixed mixed_;
  int64_t units_;  // the blocks and the rest of the model
  mutable tessera::Zero<Gpt, Optimizer> zero_;
  std::optional<tessera::StepInBackward> in_backward_;  // with --step-in-backward
  std::optional<tessera::CapturedStep> captured_;       // with --capture
};

class WithEma final : public Trainable {
 public:
  WithEma(std::unique_ptr<Trainable> model, double decay)
      : model_(std::move(model)),
        options_{.decay = decay, .warmup = true},
        ema_(std::in_place, model_->shards(), options_) {}

  at::Tensor forward(const at::Tensor& tokens) override { return model_->forward(tokens); }
  at::Tensor add_gradients(const Batch& batch, double scale, bool last_of_step) override {
    return model_->add_gradients(batch, scale, last_of_step);
  }
  double clip_grad_norm(double max_norm) override { return model_->clip_grad_norm(max_norm); }
  void step() override {
    model_->step();
    ema_->update();
  }
  void zero_grad() override { model_->zero_grad(); }
  std::optional<tessera::ScopeExit> averaged() override { return ema_->swap_in(); }
  torch::optim::Optimizer& optimizer() override { return model_->optimizer(); }
  tessera::ShardedGradScaler* scaler() override { return model_->scaler(); }
  tessera::ModelShards& shards() override { return ema_->with_model(); }
  tessera::ModelShards& own_shards() override { return model_->shards(); }
  bool steps_early() const override { return model_->steps_early(); }
  std::optional<double> suggested_device_fraction() const override { return model_->suggested_device_fraction(); }
  void restart_average() override { ema_.emplace(model_->shards(), options_); }
  NamedTensors full_state() override { return model_->full_state(); }
  MemoryUse memory() const override { return model_->memory(); }
  std::string describe() const override { return model_->describe() + ", with the average of weights"; }

 private:
  std::unique_ptr<Trainable> model_;
  const tessera::EmaOptions options_;
  std::optional<tessera::Ema> ema_;  // always has a value
};

// Implements wrap() for one optimizer. `Offloaded` is the optimizer that is used with --offload.
template <class Optimizer, class Options, class Offloaded = Optimizer>
std::unique_ptr<Trainable> wrap_as(Gpt model, const TrainOptions& options,
                                   std::shared_ptr<tessera::Communicator> comm) {
  const auto own = options_from<Options>({options.lr, options.weight_decay, options.warmup_steps()});
  Mixed mixed(options.compute.precision_on(comm->device()), comm, options.wrapper != Wrapper::kFsdp);
  if (options.wrapper == Wrapper::kLocal)
    return std::make_unique<LocalModel<Optimizer, Options>>(std::move(model), own, std::move(mixed), std::move(comm));
  const int stage = static_cast<int>(options.wrapper) - static_cast<int>(Wrapper::kDdp);
  tessera::ZeroOptions zero{.stage = stage};
  zero.fsdp.reshard_after_forward = options.reshard_after_forward;
  zero.fsdp.prefetch = options.prefetch;
  zero.fsdp.mixed_precision = mixed.of_units();
  if (options.int8_wire) {
    zero.fsdp.wire = {tessera::WireFormat::kInt8Blocks, tessera::WireFormat::kInt8Blocks};
    zero.sdp.wire = tessera::WireFormat::kInt8Blocks;
  }
  EarlySteps early{.kind = options.capture            ? EarlySteps::kCaptured
                           : options.step_in_backward ? EarlySteps::kInBackward
                                                      : EarlySteps::kNone};
  if (options.clip > 0) early.largest_norm = options.clip;
  if (options.offload == Offload::kNone)
    return std::make_unique<DistributedModel<Optimizer, Options>>(std::move(model), own, std::move(mixed),
                                                                  std::move(comm), std::move(zero), early);
  zero.fsdp.offload = {.params = true, .grads = true, .device_fraction = options.device_fraction};
  zero.oss.offload = {.params = true, .grads = true};
  if (options.offload == Offload::kDisk) zero.fsdp.offload.directory = options.offload_directory.string();
  return std::make_unique<DistributedModel<Offloaded, Options>>(std::move(model), own, std::move(mixed),
                                                                std::move(comm), std::move(zero), early);
}

// Serializes draws, because ranks that are threads of one process share torch's generator.
std::mutex drawing;
template <class Draw>
auto seeded(const TrainOptions& options, Draw draw) {
  const std::lock_guard lock(drawing);
  torch::manual_seed(static_cast<uint64_t>(options.seed));
  return draw();
}

tessera::WeightFormat format_of(BaseFormat base) {
  switch (base) {
    case BaseFormat::kNf4:
      return tessera::WeightFormat::kNf4Double;
    case BaseFormat::kInt8:
      return tessera::WeightFormat::kInt8;
    default:
      return tessera::WeightFormat::kFull;
  }
}

// Returns a group of only this rank, to read or write a whole file on one rank. Collective.
std::shared_ptr<tessera::Communicator> alone(tessera::Communicator& comm) {
  return comm.split_by([](int rank) { return rank; });
}

}  // namespace

Gpt draw_model(const TrainOptions& options, at::Device device) {
  Gpt model = seeded(options, [&] { return Gpt(options.model); });
  model->to(device);
  return model;
}

std::unique_ptr<Trainable> wrap(Gpt model, const TrainOptions& options, std::shared_ptr<tessera::Communicator> comm) {
  using namespace tessera;
  switch (options.optimizer) {
    case OptimizerKind::kAdamW:  // on GPUs, not torch::optim::AdamW, which launches about ten kernels per parameter
      if (comm->device().is_cuda()) return wrap_as<AdamW, torch::optim::AdamWOptions, HostAdamW>(model, options, comm);
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

std::unique_ptr<Trainable> with_ema(std::unique_ptr<Trainable> model, double decay) {
  return std::make_unique<WithEma>(std::move(model), decay);
}

void load_base(Gpt& model, const TrainOptions& options, tessera::Communicator& comm) {
  WholeModel whole(model, alone(comm));
  import_gpt2(options.import_gpt2, whole, options.model);
}

void draw_adapters(Gpt& model, const TrainOptions& options) {
  // Alpha is twice the rank, as in QLoRA's examples. Like bitsandbytes in Python, does not quantize the head, because
  // its rounding errors would change the logits directly.
  const auto rank = static_cast<double>(options.lora_rank);
  const tessera::QuantizeOptions quantize{
      .format = format_of(options.base),
      .lora = {.rank = options.lora_rank, .alpha = 2.0 * rank},
      .which = tessera::wrap_if([](const std::string& fqn, const auto&) { return fqn.starts_with("blocks."); })};
  seeded(options, [&] { tessera::quantize_linears(*model, quantize); });
}

int64_t trained_numel(const Gpt& model) {
  int64_t numel = 0;
  for (const auto& parameter : model->parameters()) numel += parameter.requires_grad() ? parameter.numel() : 0;
  return numel;
}

void export_with_adapters(const std::filesystem::path& directory, Gpt& model, Trainable& trained,
                          tessera::Communicator& comm) {
  const torch::NoGradGuard no_grad;
  const auto state = tessera::dequantized_state(*model, trained.full_state());
  const auto own = alone(comm);
  if (comm.rank() == 0) {
    Gpt plain(model->options());
    for (auto& item : plain->named_parameters()) item.value().copy_(state[item.key()]);
    WholeModel whole(plain, own);
    export_gpt2(directory, whole, model->options());
  }
  comm.barrier("the export");
}

std::set<std::string> matrix_names(const torch::nn::Module& module) {
  std::set<std::string> names;
  for (const auto& item : module.named_parameters()) {
    if (item.value().dim() >= 2) names.insert(item.key());
  }
  return names;
}

std::vector<double> weight_decays(torch::optim::Optimizer& optimizer) {
  std::vector<double> decays;
  for (const auto& group : optimizer.param_groups())
    for (const auto& [name, value] : tessera::read_options(group.options()))
      if (name == "weight_decay") decays.push_back(std::get<double>(value));
  return decays;
}

void set_weight_decays(torch::optim::Optimizer& optimizer, const std::vector<double>& decays) {
  for (size_t i = 0; i < decays.size(); ++i)
    tessera::write_options(optimizer.param_groups().at(i).options(), {{"weight_decay", decays[i]}});
}

void set_learning_rate(torch::optim::Optimizer& optimizer, double lr) {
  for (auto& group : optimizer.param_groups()) group.options().set_lr(lr);
}

}  // namespace train_gpt
