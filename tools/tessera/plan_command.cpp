#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <limits>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <stdexcept>
#include <system_error>

#include <tessera/plan/timeline_page.h>
#include "commands.h"
#include "gpu_cards.h"
#include "plan/report/plan_search.h"
#include "plan/report/quantity_text.h"

using namespace tessera;
using namespace tessera::internal;

namespace {

constexpr int64_t kMostNumber = std::numeric_limits<int>::max();

std::unique_ptr<PlannedModel> model_of(const Arguments& arguments) {
  std::string model = arguments.model;
  std::error_code ignored;
  if (std::filesystem::is_directory(model, ignored)) model = std::filesystem::path(model) / "config.json";
  if (arguments.sequence) require_range("sequence", *arguments.sequence, 1, kMostNumber);
  if (arguments.batch) require_range("batch", *arguments.batch, 1, kMostNumber);
  const int64_t sequence = arguments.sequence.value_or(0);
  if (model.ends_with(".pt2")) return planned_archive(model, arguments.batch.value_or(0), sequence);
  if (model.ends_with(".json")) return planned_decoder(decoder_of_config(model, sequence, arguments.batch.value_or(1)));
  if (arguments.sequence || arguments.batch)
    throw std::invalid_argument("--sequence and --batch are for files; say '" + model + ",sequence=...,batch=...'");
  return planned_decoder(decoder_of(model));
}

nlohmann::json json_of(const PlannedTraining& plan, bool is_recommended) {
  static const std::map<UnitChoice, const char*> units = {
      {UnitChoice::kLayers, "layers"}, {UnitChoice::kLinears, "linears"}, {UnitChoice::kWhole, "whole"}};
  nlohmann::json result = {{"stage", plan.choice.stage},
                           {"reshard_after_forward", plan.choice.reshard_after_forward},
                           {"bf16", plan.choice.bf16},
                           {"checkpointed", plan.choice.checkpointed},
                           {"units", units.at(plan.choice.units)},
                           {"ranks_per_copy", plan.choice.ranks_per_copy},
                           {"ranks_per_secondary_copy", plan.choice.ranks_per_secondary_copy},
                           {"prefetch", plan.choice.prefetch},
                           {"offload", plan.choice.offload},
                           {"peak_bytes", plan.peak.tensors()},
                           {"host_bytes", plan.host_bytes},
                           {"copies_bytes", plan.copies_bytes},
                           {"rank", plan.rank},
                           {"collective_bytes", plan.collective_bytes},
                           {"between_hosts_bytes", plan.between_bytes},
                           {"flop", plan.flop},
                           {"recommended", is_recommended},
                           {"options", plan.options}};
  if (plan.time) {
    result["step_s"] = plan.time->total_s;
    result["compute_s"] = plan.time->compute_s;
    result["exposed_s"] = plan.time->exposed_s;
    result["communication_s"] = plan.time->communication_s;
    result["tokens_per_s"] = static_cast<double>(plan.tokens) / plan.time->total_s;
  }
  if (!plan.why_not.empty()) result["why_not"] = plan.why_not;
  for (size_t kind = 0; kind < kMemoryKinds; ++kind)
    if (plan.peak.bytes[kind] > 0) result["bytes"][name_of(static_cast<MemoryKind>(kind))] = plan.peak.bytes[kind];
  return result;
}

int64_t memory_bytes_of(const Arguments& arguments) {
  if (!arguments.memory.empty()) return parse_option("memory", arguments.memory, bytes_of_text);
  if (arguments.speed.gpu.empty())
    throw std::invalid_argument("--memory is missing, of each GPU, as 80GiB; or --gpu with the name of a card");
  return static_cast<int64_t>(gpu_card(arguments.speed.gpu).memory_bytes);
}

void write_page(const std::string& path, const std::string& page) {
  std::ofstream file(path, std::ios::binary);
  if (!file.write(page.data(), std::ssize(page)).flush())
    throw std::runtime_error("cannot write " + path + ": " + std::generic_category().message(errno));
}

// Maximum number of plans that are printed after a search.
constexpr size_t kShown = 20;

void draw(const Arguments& arguments, const PlannedModel& model, const PlannedTraining& plan, const Machines& machines,
          const std::string& notes) {
  const RunRecord record = model.run(plan.choice, machines.ranks, plan.rank, machines.ranks_sharing_memory()).record;
  const std::optional<StepTime> time = planned_time(record, plan.choice, machines);
  std::optional<MeasuredStep> measured;
  if (!arguments.measured.empty()) {
    if (!time)
      throw std::invalid_argument("--measured needs the time of the line that is drawn, which is not predicted");
    measured = measured_step(arguments.measured, plan.rank);
  }
  write_page(arguments.html, timeline_page(record, {.title = arguments.model + " on " + counted(machines.ranks, "rank"),
                                                    .options = plan.options,
                                                    .notes = notes,
                                                    .memory_bytes = machines.memory_bytes,
                                                    .time = time ? &*time : nullptr,
                                                    .measured_time = measured ? &*measured : nullptr}));
}

}  // namespace

int plan(const Arguments& arguments) {
  constexpr int kMostGpus = 1'000'000;  // a dry run takes time and memory for each rank
  require_range("gpus", arguments.gpus, 1, kMostGpus);
  if (arguments.copies) require_range("elastic", *arguments.copies, 0, kMostNumber);
  if (arguments.html.empty() && (arguments.draw || !arguments.measured.empty()))
    throw std::invalid_argument("--draw and --measured are of the page: --html is missing");
  Machines machines{.ranks = arguments.gpus, .memory_bytes = memory_bytes_of(arguments)};
  if (arguments.copies) machines.copies = *arguments.copies;
  if (!arguments.host_memory.empty())
    machines.host_memory_bytes = parse_option("host-memory", arguments.host_memory, bytes_of_text);
  const auto [speed, missing] = speed_of(arguments, machines);
  if (speed) machines.speed = &*speed;
  const auto model = model_of(arguments);
  std::vector<PlannedTraining> plans;
  std::string notes = model->description();
  if (!notes.empty()) notes += "\n\n";
  if (arguments.search) {
    const auto tried = search_plans(*model, machines);
    for (const int index : by_preference(tried, machines))
      if (plans.size() < kShown) plans.push_back(tried[static_cast<size_t>(index)]);
    notes += std::to_string(tried.size()) + " choices tried; these are the best.\n\n";
  } else {
    for (const TrainingChoice& choice : training_choices()) plans.push_back(plan_training(*model, choice, machines));
  }
  if (std::ranges::all_of(plans, [](const PlannedTraining& plan) { return !plan.why_not.empty(); }))
    throw std::runtime_error("no choice can be run: " + plans.at(0).why_not.substr(0, plans[0].why_not.find('\n')));
  notes += plan_text(plans, machines);
  if (!missing.empty())
    notes += "No times of steps, because these are not known: " + missing +
             ". --gpu NAME knows a card's, --speed FILE those that `tessera calibrate` measured.\n";
  if (arguments.draw && (*arguments.draw < 1 || *arguments.draw > std::ssize(plans)))
    throw std::invalid_argument("--draw is " + std::to_string(*arguments.draw) +
                                ", expected a line of the table, 1 to " + std::to_string(plans.size()));
  // The best plan; the one with the smallest peak if no plan fits.
  const int first = arguments.draw ? *arguments.draw - 1 : by_preference(plans, machines).front();
  if (!arguments.html.empty()) draw(arguments, *model, plans[static_cast<size_t>(first)], machines, notes);
  if (!arguments.json) {
    std::printf("%s", notes.c_str());
    return 0;
  }
  const int best = recommended(plans, machines);
  auto result = nlohmann::json::array();
  for (int i = 0; i < static_cast<int>(plans.size()); ++i)
    result.push_back(json_of(plans[static_cast<size_t>(i)], i == best));
  print_json(result);
  return 0;
}
