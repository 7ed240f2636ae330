#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <system_error>

#include "commands.h"
#include "tessera/plan/memory_plan.h"
#include "tessera/plan/timeline_page.h"

using namespace tessera;

namespace {

DecoderOptions model_of(const Arguments& arguments) {
  if (arguments.model.ends_with(".json"))
    return decoder_of_config(arguments.model, arguments.sequence, arguments.batch);
  if (arguments.model.ends_with(".pt2"))
    throw std::invalid_argument("'" + arguments.model +
                                "': exported models are not planned by this command; use "
                                "dry_run() with load_exported()");
  if (arguments.sequence != 0 || arguments.batch != 1)
    throw std::invalid_argument("--sequence and --batch are for config.json; say '" + arguments.model +
                                ",sequence=...,batch=...'");
  return decoder_of(arguments.model);
}

nlohmann::json json_of(const PlannedTraining& plan, bool is_recommended) {
  nlohmann::json result = {{"stage", plan.choice.stage},
                           {"reshard_after_forward", plan.choice.reshard_after_forward},
                           {"bf16", plan.choice.bf16},
                           {"checkpointed", plan.choice.checkpointed},
                           {"peak_bytes", plan.peak.tensors()},
                           {"collective_bytes", plan.collective_bytes},
                           {"flop", plan.flop},
                           {"recommended", is_recommended},
                           {"options", options_text(plan.choice)}};
  if (plan.time) {
    result["step_s"] = plan.time->total_s;
    result["compute_s"] = plan.time->compute_s;
    result["exposed_s"] = plan.time->exposed_s;
    result["communication_s"] = plan.time->communication_s;
    result["tokens_per_s"] = static_cast<double>(plan.tokens) / plan.time->total_s;
  }
  for (size_t kind = 0; kind < kMemoryKinds; ++kind)
    if (plan.peak.bytes[kind] > 0) result["bytes"][name_of(static_cast<MemoryKind>(kind))] = plan.peak.bytes[kind];
  return result;
}

// The choice that a page is of: the recommended one, or else the one that takes least.
const PlannedTraining& shown(const std::vector<PlannedTraining>& plans, int64_t memory_bytes) {
  if (const int best = recommended(plans, memory_bytes); best >= 0) return plans[static_cast<size_t>(best)];
  return *std::min_element(plans.begin(), plans.end(), [](const PlannedTraining& a, const PlannedTraining& b) {
    return a.peak.tensors() < b.peak.tensors();
  });
}

void write_page(const std::string& path, const std::string& page) {
  std::ofstream file(path, std::ios::binary);
  if (!file.write(page.data(), std::ssize(page)).flush())
    throw std::runtime_error("cannot write " + path + ": " + std::generic_category().message(errno));
}

}  // namespace

int plan(const Arguments& arguments) {
  const DecoderOptions model = model_of(arguments);
  const int64_t memory_bytes = bytes_of_text(arguments.memory);
  if (arguments.gpus < 1)
    throw std::invalid_argument("--gpus is " + std::to_string(arguments.gpus) + ", expected 1 or more");
  std::vector<PlannedTraining> plans;
  const std::optional<MachineSpeed> speed = speed_of(arguments);
  for (const TrainingChoice& choice : training_choices())
    plans.push_back(plan_training(model, choice, arguments.gpus, speed ? &*speed : nullptr));
  if (!arguments.html.empty()) {
    const TrainingChoice& choice = shown(plans, memory_bytes).choice;
    const RunRecord record = record_of(model, choice, arguments.gpus);
    std::optional<StepTime> time;
    if (speed) time = predict_step(record, *speed);
    write_page(arguments.html,
               timeline_page(record, {.title = arguments.model + " on " + std::to_string(arguments.gpus) + " ranks",
                                      .options = options_text(choice),
                                      .notes = plan_text(plans, arguments.gpus, memory_bytes),
                                      .memory_bytes = memory_bytes,
                                      .time = time ? &*time : nullptr}));
  }
  if (!arguments.json) {
    std::printf("%s", plan_text(plans, arguments.gpus, memory_bytes).c_str());
    return 0;
  }
  const int best = recommended(plans, memory_bytes);
  auto result = nlohmann::json::array();
  for (int i = 0; i < static_cast<int>(plans.size()); ++i)
    result.push_back(json_of(plans[static_cast<size_t>(i)], i == best));
  std::printf("%s\n", result.dump(2).c_str());
  return 0;
}
