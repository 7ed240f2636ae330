#include <tessera/plan/planned_model.h>

#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cctype>
#include <map>
#include <optional>
#include <tuple>
#include <utility>

#include <tessera/autocast.h>
#include <tessera/exported.h>
#include <tessera/optim/fused_optimizers.h>
#include <tessera/optim/host_adam.h>
#include <tessera/sharded_optimizer.h>
#include <tessera/visit_tensors.h>
#include "core/layout/deferred.h"
#include "core/runtime/require.h"

namespace tessera {
using namespace internal;
namespace {

// Makes a dry run of a training with the options of `choice`. make() returns the module. forward(training) returns a
// tuple of the loss, and of the tensors that must stay alive until backward has ended.
template <class Make, class Forward>
PlannedRun run_choice(const TrainingChoice& choice, const DryRunOptions& where, const WrapPolicy& units, Make make,
                      Forward forward) {
  PlannedRun result;
  const auto run = [&]<class Optimizer>(std::type_identity<Optimizer>) {
    return dry_run(
        [&](std::shared_ptr<Communicator> comm) {
          return zero<Optimizer>(make(), torch::optim::AdamWOptions(1e-3), std::move(comm),
                                 zero_options(choice, units));
        },
        [&](auto& training) {
          training.optimizer().zero_grad();
          {
            std::optional<Autocast> autocast;
            if (choice.bf16 && choice.stage < 3) autocast.emplace(at::kCPU, at::kBFloat16);
            const auto results = forward(training);
            autocast.reset();
            std::get<0>(results).backward();
          }
          training.clip_grad_norm_(1.0);
          training.step();
          if (const auto* sharded = dynamic_cast<const ShardedOptimizer*>(&training.optimizer()))
            result.owned_bytes = sharded->owned_bytes();
        },
        where);
  };
  result.record = choice.offload ? run(std::type_identity<HostAdamW>()) : run(std::type_identity<AdamW>());
  return result;
}

class PlannedDecoder : public PlannedModel {
 public:
  explicit PlannedDecoder(const DecoderOptions& options) : options_(options) {}

  PlannedRun run_as(const TrainingChoice& choice, const DryRunOptions& where) const override {
    const auto build = [&] { return Decoder(options_, choice.checkpointed); };
    const WrapPolicy units = choice.units == UnitChoice::kLayers    ? wrap_modules<DecoderBlockImpl>()
                             : choice.units == UnitChoice::kLinears ? wrap_modules<torch::nn::LinearImpl>()
                                                                    : WrapPolicy();
    return run_choice(
        choice, where, units, [&] { return choice.stage == 3 ? deferred(build) : build(); },
        [&](auto& training) {
          const at::Tensor tokens = at::zeros({options_.batch, options_.sequence}, at::kLong);
          const at::Tensor logits = training(tokens);
          return std::tuple(at::cross_entropy_loss(logits, tokens.flatten()), logits, tokens);
        });
  }

  int64_t tokens_of_rank() const override { return options_.batch * options_.sequence; }
  std::string description() const override {
    return options_.left_out.empty() ? "" : "Planned without " + options_.left_out + ", which takes more.";
  }
  std::string policy_text(UnitChoice units) const override {
    if (units == UnitChoice::kWhole) return "";
    return units == UnitChoice::kLayers ? "tessera::wrap_modules<BlockImpl>()"
                                        : "tessera::wrap_modules<torch::nn::LinearImpl>()";
  }

 private:
  const DecoderOptions options_;
};

bool is_position(const std::string& name) {
  return !name.empty() && std::ranges::all_of(name, [](unsigned char c) { return std::isdigit(c) != 0; });
}

// Returns the classes of which the model has two or more layers: outermost modules with parameters and numeric names.
std::vector<std::string> repeated_classes(ExportedModule& model) {
  std::map<std::string, int> counts;
  std::string within = " ";
  for (const auto& item : model.named_modules("", /*include_self=*/false)) {
    const std::string& fqn = item.key();
    if (fqn.starts_with(within)) continue;
    if (!is_position(fqn.substr(fqn.rfind('.') + 1)) || item.value()->parameters().empty()) continue;
    ++counts[item.value()->name()];
    within = fqn + ".";
  }
  std::vector<std::string> classes;
  for (const auto& [name, count] : counts)
    if (count > 1) classes.push_back(name);
  return classes;
}

// Returns a loss that depends on the outputs, and its name. Throws std::invalid_argument if no output needs gradients.
std::pair<at::Tensor, std::string> loss_of_outputs(ExportedValue& outputs) {
  if (outputs.is_dict() && outputs.has("loss") && outputs["loss"].is_tensor())
    return {outputs["loss"].tensor(), "the output 'loss'"};
  std::vector<at::Tensor> tensors;
  visit_tensors(outputs, [&](at::Tensor& tensor) {
    if (tensor.is_floating_point() && tensor.requires_grad()) tensors.push_back(tensor);
  });
  const auto scalar = std::ranges::find_if(tensors, [](const auto& t) { return t.numel() == 1; });
  if (scalar != tensors.end()) return {scalar->sum(), "the first output that is a number"};
  require(!tensors.empty(), "the archive has no floating-point output that depends on parameters: nothing to train");
  return {tensors.front().sum(), "the sum of the first output"};
}

class PlannedArchive : public PlannedModel {
 public:
  PlannedArchive(std::filesystem::path archive, int64_t batch, int64_t sequence)
      : archive_(std::move(archive)), batch_(batch), sequence_(sequence) {
    std::string name;
    static_cast<void>(dry_run([&](auto) { return load(false); },
                              [&](std::shared_ptr<ExportedModule>& model) {
                                layers_ = repeated_classes(*model);
                                inputs_ = model->example_inputs(batch_, sequence_);
                                ExportedValue outputs = model->forward(inputs_);
                                name = loss_of_outputs(outputs).second;
                              }));
    for (const auto& [input, value] : inputs_.inputs()) {
      if (value.is_tensor() && tokens_ == 0 && value.tensor().dim() > 0)
        tokens_ = at::isIntegralType(value.tensor().scalar_type(), /*includeBool=*/false) ? value.tensor().numel()
                                                                                          : value.tensor().size(0);
      description_ += (description_.empty() ? "Inputs: " : ", ") + input;
      if (value.is_tensor()) description_ += " " + c10::str(value.tensor().sizes());
    }
    description_ += "; trained: " + name + ".";
  }

  PlannedRun run_as(const TrainingChoice& choice, const DryRunOptions& where) const override {
    const auto make = [&] {
      if (choice.stage == 3) return deferred([&] { return load(choice.checkpointed); });
      auto model = load(choice.checkpointed);
      // Replaces parameters by clones without values. This frees the memory that was used to read the archive.
      for (auto& parameter : model->parameters()) parameter.set_data(parameter.detach().clone());
      return model;
    };
    const WrapPolicy units = choice.units == UnitChoice::kLayers    ? layer_policy()
                             : choice.units == UnitChoice::kLinears ? wrap_classes({"Linear"})
                                                                    : WrapPolicy();
    return run_choice(choice, where, units, make, [&](auto& training) {
      ExportedValue outputs = training(inputs_);
      const at::Tensor loss = loss_of_outputs(outputs).first;
      return std::tuple(loss, std::move(outputs));
    });
  }

  int64_t tokens_of_rank() const override { return tokens_; }
  std::string policy_text(UnitChoice units) const override {
    if (units == UnitChoice::kWhole || (units == UnitChoice::kLayers && layers_.empty())) return "";
    std::string names = "\"Linear\"";
    if (units == UnitChoice::kLayers) {
      names.clear();
      for (const std::string& name : layers_) names += (names.empty() ? "\"" : ", \"") + name + "\"";
    }
    return "tessera::wrap_classes({" + names + "})";
  }
  std::string description() const override { return description_; }

 private:
  WrapPolicy layer_policy() const { return layers_.empty() ? WrapPolicy() : wrap_classes(layers_); }
  std::shared_ptr<ExportedModule> load(bool checkpointed) const {
    ExportedOptions options;
    options.init = [](const std::string&, at::Tensor& tensor) { tensor.zero_(); };  // used for exports without values
    if (checkpointed) options.checkpointed = layer_policy();
    return load_exported(archive_, options);
  }

  const std::filesystem::path archive_;
  const int64_t batch_, sequence_;
  std::vector<std::string> layers_;
  NamedInputs inputs_;
  std::string description_;
  int64_t tokens_ = 0;
};

}  // namespace

std::unique_ptr<PlannedModel> planned_decoder(const DecoderOptions& options) {
  return std::make_unique<PlannedDecoder>(options);
}

std::unique_ptr<PlannedModel> planned_archive(std::filesystem::path archive, int64_t batch, int64_t sequence) {
  return std::make_unique<PlannedArchive>(std::move(archive), batch, sequence);
}

}  // namespace tessera
