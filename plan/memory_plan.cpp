#include "tessera/plan/memory_plan.h"

#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/zeros.h>

#include <charconv>
#include <cmath>
#include <iomanip>
#include <map>
#include <sstream>
#include <stdexcept>
#include <tuple>

#include "tessera/flat/deferred.h"
#include "tessera/optim/fused_optimizers.h"
#include "tessera/plan/dry_run.h"
#include "tessera/zero/zero.h"

namespace tessera {
namespace {

ZeroOptions zero_options(const TrainingChoice& choice) {
  ZeroOptions options{.stage = choice.stage};
  options.fsdp.auto_wrap = wrap_modules<DecoderBlockImpl>();
  options.fsdp.reshard_after_forward = choice.reshard_after_forward;
  if (choice.bf16) {
    options.fsdp.mixed_precision.param_dtype = at::kBFloat16;
    options.fsdp.mixed_precision.reduce_dtype = at::kFloat;
  }
  return options;
}

double gib(int64_t bytes) { return static_cast<double>(bytes) / static_cast<double>(int64_t{1} << 30); }

}  // namespace

std::vector<TrainingChoice> training_choices() {
  std::vector<TrainingChoice> choices;
  for (const bool checkpointed : {false, true}) {
    for (const int stage : {0, 1, 2}) choices.push_back({.stage = stage, .checkpointed = checkpointed});
    for (const bool bf16 : {false, true})
      for (const bool reshard : {false, true}) choices.push_back({3, reshard, bf16, checkpointed});
  }
  return choices;
}

RunRecord record_of(const DecoderOptions& model, const TrainingChoice& choice, int world_size) {
  return dry_run(
      [&](std::shared_ptr<Communicator> comm) {
        const auto build = [&] { return Decoder(model, choice.checkpointed); };
        return zero<AdamW>(choice.stage == 3 ? deferred(build) : build(), torch::optim::AdamWOptions(1e-3),
                           std::move(comm), zero_options(choice));
      },
      [&](auto& training) {
        const at::Tensor tokens = at::zeros({model.batch, model.sequence}, at::kLong);
        training.optimizer().zero_grad();
        at::cross_entropy_loss(training(tokens), tokens.flatten()).backward();
        training.clip_grad_norm_(1.0);
        training.step();
      },
      {.world_size = world_size});
}

PlannedTraining plan_training(const DecoderOptions& model, const TrainingChoice& choice, int world_size,
                              const MachineSpeed* speed) {
  const RunRecord record = record_of(model, choice, world_size);
  PlannedTraining planned{choice, record.peak, record.collective_bytes(2), record.flop,
                          model.batch * model.sequence * world_size};
  if (speed != nullptr) {
    planned.time = predict_step(record, *speed);
    planned.time->intervals = {};  // a plan compares totals
  }
  return planned;
}

int recommended(const std::vector<PlannedTraining>& plans, int64_t memory_bytes) {
  int best = -1;
  const auto cost = [&](int index) {
    const PlannedTraining& plan = plans[static_cast<size_t>(index)];
    return std::tuple(plan.time ? plan.time->total_s : 0, plan.choice.checkpointed, plan.collective_bytes,
                      plan.peak.tensors());
  };
  for (int i = 0; i < static_cast<int>(plans.size()); ++i) {
    const auto peak = static_cast<double>(plans[static_cast<size_t>(i)].peak.tensors());
    if (peak > kUsable * static_cast<double>(memory_bytes)) continue;
    if (best < 0 || cost(i) < cost(best)) best = i;
  }
  return best;
}

std::string options_text(const TrainingChoice& choice) {
  std::string text = "tessera::ZeroOptions{.stage = " + std::to_string(choice.stage);
  if (choice.stage == 3) {
    text += ", .fsdp = {.auto_wrap = tessera::wrap_modules<BlockImpl>()";
    if (!choice.reshard_after_forward) text += ", .reshard_after_forward = false";
    if (choice.bf16) text += ", .mixed_precision = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat}";
    text += "}";
  }
  return text + "}" + (choice.checkpointed ? " and tessera::checkpointed(block, x) for each block" : "");
}

std::string plan_text(const std::vector<PlannedTraining>& plans, int world_size, int64_t memory_bytes) {
  constexpr MemoryKind kColumns[] = {MemoryKind::kParameters, MemoryKind::kGathered,  MemoryKind::kBuckets,
                                     MemoryKind::kGradients,  MemoryKind::kOptimizer, MemoryKind::kActivations,
                                     MemoryKind::kTemporaries};
  std::ostringstream text;
  text << std::fixed << std::setprecision(1) << "GiB at the peak of a step on each of " << world_size << " ranks, of "
       << gib(memory_bytes) << "\n\nstage reshard dtype recompute";
  for (const MemoryKind kind : kColumns) text << std::setw(12) << name_of(kind);
  const bool has_times = !plans.empty() && plans[0].time.has_value();
  text << "       peak  exchanged" << (has_times ? "    step ms exposed ms   tokens/s" : "") << "  fits\n";
  const int best = recommended(plans, memory_bytes);
  for (size_t i = 0; i < plans.size(); ++i) {
    const PlannedTraining& plan = plans[i];
    text << std::setw(5) << plan.choice.stage << std::setw(8)
         << (plan.choice.stage < 3               ? "-"
             : plan.choice.reshard_after_forward ? "yes"
                                                 : "no")
         << std::setw(6) << (plan.choice.bf16 ? "bf16" : "fp32") << std::setw(10)
         << (plan.choice.checkpointed ? "yes" : "no");
    for (const MemoryKind kind : kColumns) text << std::setw(12) << gib(plan.peak[kind]);
    const int64_t peak = plan.peak.tensors();
    const bool has_room = static_cast<double>(peak) <= kUsable * static_cast<double>(memory_bytes);
    text << std::setw(11) << gib(peak) << std::setw(11) << gib(plan.collective_bytes);
    if (plan.time)
      text << std::setw(11) << plan.time->total_s * 1e3 << std::setw(11) << plan.time->exposed_s * 1e3
           << std::setprecision(0) << std::setw(11) << static_cast<double>(plan.tokens) / plan.time->total_s
           << std::setprecision(1);
    text << "  "
         << (static_cast<int>(i) == best ? "recommended"
             : has_room                  ? "yes"
             : peak <= memory_bytes      ? "barely"
                                         : "no")
         << "\n";
  }
  if (best >= 0) {
    text << "\n" << options_text(plans[static_cast<size_t>(best)].choice) << "\n";
  } else {
    text << "\nNone fits with a tenth to spare: take more ranks, a smaller batch or sequence, or CpuOffload.\n";
  }
  return text.str();
}

int64_t bytes_of_text(const std::string& text) {
  static const std::map<std::string, double> units = {{"", 1},         {"B", 1},       {"KB", 1e3},     {"MB", 1e6},
                                                      {"GB", 1e9},     {"TB", 1e12},   {"KiB", 1024.0}, {"MiB", 0x1p20},
                                                      {"GiB", 0x1p30}, {"TiB", 0x1p40}};
  double number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  const auto unit = units.find(std::string(end, text.data() + text.size()));
  if (error != std::errc() || unit == units.end() || !(number > 0) || number * unit->second > 0x1p62)
    throw std::invalid_argument("memory '" + text + "', expected a number of bytes with a unit, as 80GiB");
  return static_cast<int64_t>(number * unit->second);
}

}  // namespace tessera
