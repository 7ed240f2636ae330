#include <tessera/plan/memory_plan.h>

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <functional>
#include <iomanip>
#include <map>
#include <numeric>
#include <sstream>
#include <string_view>
#include <tuple>

#include "core/runtime/require.h"
#include "plan/report/quantity_text.h"

namespace tessera {
using namespace internal;
namespace {

constexpr MemoryKind kColumns[] = {MemoryKind::kParameters,  MemoryKind::kGathered,  MemoryKind::kBuckets,
                                   MemoryKind::kGradients,   MemoryKind::kOptimizer, MemoryKind::kActivations,
                                   MemoryKind::kTemporaries, MemoryKind::kStaging};

double usable(int64_t bytes) { return kUsable * static_cast<double>(bytes); }

int64_t bytes_on_host(const PlannedTraining& plan, const Machines& machines) {
  return (plan.host_bytes + plan.copies_bytes) * machines.ranks_on_host();
}

bool fits_host(const PlannedTraining& plan, const Machines& machines) {
  return machines.host_memory_bytes == 0 ||
         static_cast<double>(bytes_on_host(plan, machines)) <= usable(machines.host_memory_bytes);
}

bool fits(const PlannedTraining& plan, const Machines& machines) {
  return plan.why_not.empty() && static_cast<double>(plan.peak.tensors()) <= usable(machines.memory_bytes) &&
         fits_host(plan, machines);
}

// Returns a sort key of a plan. The best plan has the smallest key. Plans with offload, whose time is unknown, follow
// all others, sorted by the other quantities.
auto cost_of(const PlannedTraining& plan) {
  const TrainingChoice &choice = plan.choice, usual;
  const int departures = (choice.units != usual.units ? 1 : 0) + (choice.prefetch != usual.prefetch ? 1 : 0) +
                         (choice.ranks_per_copy != usual.ranks_per_copy ? 1 : 0) +
                         (choice.ranks_per_secondary_copy != usual.ranks_per_secondary_copy ? 1 : 0) +
                         (choice.bf16 && choice.stage < 3 ? 1 : 0);
  return std::tuple(choice.offload, plan.time ? plan.time->total_s : 0, choice.checkpointed, plan.between_bytes,
                    plan.collective_bytes, departures, plan.peak.tensors());
}

// Returns the bytes at the peak of the device's memory. With offload, excludes tensors in host memory, such as the
// optimizer's state, and returns the bytes at the peak of the other tensors.
BytesByKind peak_on_device(const RunRecord& record, bool offload) {
  if (!offload) return record.peak;
  BytesByKind most;
  for (const RecordedOperator& each : record.operators) {
    BytesByKind live = each.live;
    live[MemoryKind::kHost] = live[MemoryKind::kOptimizer] = 0;
    if (live.tensors() > most.tensors()) most = live;
  }
  return most;
}

// Returns the bytes of a step's collectives between hosts. Excludes collectives within one host: those of a model copy
// that is inside a host, and all-gathers from a secondary copy.
int64_t between_hosts(const RunRecord& record, const TrainingChoice& choice, const Machines& machines) {
  if (machines.ranks <= machines.ranks_per_host) return 0;
  const int copy = choice.stage == 3 ? choice.ranks_per_copy : 0;
  const int secondary = choice.stage == 3 ? choice.ranks_per_secondary_copy : 0;
  const auto within = [&](int ranks) { return ranks > 0 && machines.ranks_per_host % ranks == 0; };
  const auto stays = [&](const RecordedCollective& each) {
    if (within(secondary) && each.ranks == secondary && each.operation == "all-gather") return true;
    return within(copy) && each.ranks == copy && (each.operation == "all-gather" || each.operation == "reduce-scatter");
  };
  int64_t bytes = 0;
  for (const RecordedCollective& each : record.collectives)
    if (each.step == 2 && !stays(each)) bytes += each.bytes;
  return bytes;
}

std::string decimal(double number, int digits) {
  std::ostringstream text;
  text << std::fixed << std::setprecision(digits) << number;
  return text.str();
}

using Row = std::vector<std::string>;

// Returns a text table. `plain`: default values by heading. Omits a column whose cells all have the default, or "-".
std::string table_of(std::vector<Row> rows, const std::map<std::string, std::string>& plain) {
  for (size_t column = rows[0].size(); column-- > 0;) {
    const auto usual = plain.find(rows[0][column]);
    if (usual == plain.end()) continue;
    if (std::any_of(rows.begin() + 1, rows.end(),
                    [&](const Row& row) { return row[column] != "-" && row[column] != usual->second; }))
      continue;
    for (Row& row : rows) row.erase(row.begin() + static_cast<int64_t>(column));
  }
  std::vector<size_t> widths(rows[0].size(), 0);
  for (const Row& row : rows)
    for (size_t column = 0; column < row.size(); ++column)
      widths[column] = std::max(widths[column], row[column].size());
  std::string text;
  for (const Row& row : rows) {
    for (size_t column = 0; column + 1 < row.size(); ++column)
      text += std::string(widths[column] - row[column].size(), ' ') + row[column] + "  ";
    text += row.back() + "\n";
  }
  return text;
}

std::array<int64_t, 5> totals_of(const PlannedTraining& plan) {
  return {plan.peak.tensors(), plan.host_bytes, plan.copies_bytes, plan.collective_bytes, plan.between_bytes};
}

// Returns the unit of a table. Ignores the size of the GPU's memory, in whose unit a small model's values would be 0.0.
ByteUnit unit_of(const std::vector<PlannedTraining>& plans) {
  int64_t most = 0;
  for (const PlannedTraining& plan : plans) most = std::max(most, std::ranges::max(totals_of(plan)));
  return unit_for(most);
}

Row row_of(const PlannedTraining& plan, const std::function<std::string(int64_t)>& text_of, std::string fits) {
  static const std::map<UnitChoice, std::string> unit_names = {
      {UnitChoice::kLayers, "layers"}, {UnitChoice::kLinears, "linears"}, {UnitChoice::kWhole, "whole"}};
  const TrainingChoice& choice = plan.choice;
  const auto of_fsdp = [&](const std::string& text) { return choice.stage < 3 ? "-" : text; };
  Row row = {std::to_string(choice.stage),
             of_fsdp(choice.reshard_after_forward ? "yes" : "no"),
             choice.bf16 ? "bf16" : "fp32",
             choice.checkpointed ? "yes" : "no",
             of_fsdp(unit_names.at(choice.units)),
             of_fsdp(choice.ranks_per_copy == 0 ? "all" : std::to_string(choice.ranks_per_copy)),
             of_fsdp(choice.ranks_per_secondary_copy == 0 ? "none" : std::to_string(choice.ranks_per_secondary_copy)),
             of_fsdp(std::to_string(choice.prefetch)),
             choice.offload ? "yes" : "no"};
  for (const MemoryKind kind : kColumns)
    row.push_back(text_of(plan.peak[kind] + (kind == MemoryKind::kGathered ? plan.peak[MemoryKind::kSecondary] : 0)));
  for (const int64_t bytes : totals_of(plan)) row.push_back(text_of(bytes));
  row.push_back(plan.time ? decimal(plan.time->total_s * 1e3, 1) : "-");
  row.push_back(plan.time ? decimal(plan.time->exposed_s * 1e3, 1) : "-");
  row.push_back(plan.time ? decimal(static_cast<double>(plan.tokens) / plan.time->total_s, 0) : "-");
  row.push_back(std::move(fits));
  return row;
}

// Returns notes on the plans: each reason why a choice cannot run, and the quantities that are unknown.
std::string notes_on(const std::vector<PlannedTraining>& plans, const Machines& machines, int best,
                     const std::function<std::string(int64_t)>& text_of) {
  std::string text;
  bool offloads = false;
  for (const PlannedTraining& plan : plans) {
    offloads = offloads || plan.choice.offload;
    if (plan.why_not.empty()) continue;
    const std::string note = "\nWhat cannot be run: " + plan.why_not.substr(0, plan.why_not.find('\n')) + "\n";
    if (text.find(note) == std::string::npos) text += note;
  }
  if (offloads && machines.speed != nullptr)
    text +=
        "\nWith offload the host's Adam and copies take time that is not predicted: no step, no tokens/s, and such a "
        "choice is recommended only where no other fits.\n";
  if (machines.copies)
    text += "\nCopies are in host memory: this rank's part and those of " +
            counted(std::min(*machines.copies, machines.ranks - 1), "other rank") +
            ", of two steps. After the loss of ranks, three steps, of larger parts.\n";
  if (best >= 0 && (plans[static_cast<size_t>(best)].choice.offload || machines.copies) &&
      machines.host_memory_bytes == 0)
    text += "\nWhether a host has room for " + text_of(bytes_on_host(plans[static_cast<size_t>(best)], machines)) +
            " " + unit_of(plans).name + " (" + counted(machines.ranks_on_host(), "rank") +
            ") is not known: --host-memory.\n";
  return text;
}

}  // namespace

int64_t copies_bytes(const RunRecord& record, const TrainingChoice& choice, int ranks, int copies) {
  const int64_t optimizer = record.end[MemoryKind::kOptimizer];
  // Offloaded parameters have no kind of their own in the record. Their size is half of the size of AdamW's state.
  const int64_t parameters = choice.offload ? optimizer / 2 : record.end[MemoryKind::kParameters];
  // The number of ranks that hold the same values. Each of them writes an equal part of these values.
  const int holders = choice.stage < 3 ? ranks : choice.ranks_per_copy > 0 ? ranks / choice.ranks_per_copy : 1;
  require(ranks >= 1 && copies >= 0 && holders >= 1, "copies_bytes: ", copies, " copies on ", ranks,
          " ranks, expected 0 or more copies, and ranks for a whole copy of the model");
  const int64_t own_parameters = parameters / holders;
  const int64_t own_optimizer = choice.stage == 1 || choice.stage == 2 ? optimizer : optimizer / holders;
  // The copies of two steps share the memory of frozen parameters. AdamW's state is twice the trained parameters' size.
  const int64_t own_trained = std::min(own_parameters, own_optimizer / 2);
  return (1 + std::min(copies, ranks - 1)) * (2 * own_optimizer + own_parameters + own_trained);
}

PlannedTraining plan_training(const PlannedModel& model, const TrainingChoice& choice, const Machines& machines) {
  PlannedTraining plan{choice, options_text(choice, model.policy_text(choice.units))};
  PlannedRun run;
  try {
    run = model.run(choice, machines.ranks, 0, machines.ranks_sharing_memory());
    const auto most = std::ranges::max_element(run.owned_bytes);
    if (most != run.owned_bytes.end() && *most > run.owned_bytes[0]) {
      plan.rank = static_cast<int>(most - run.owned_bytes.begin());
      run = model.run(choice, machines.ranks, plan.rank, machines.ranks_sharing_memory());
    }
  } catch (const c10::Error& error) {
    plan.why_not = error.what_without_backtrace();
    return plan;
  }
  const RunRecord& record = run.record;
  plan.peak = peak_on_device(record, choice.offload);
  if (choice.offload) plan.host_bytes = record.most[MemoryKind::kHost] + record.end[MemoryKind::kOptimizer];
  if (machines.copies) plan.copies_bytes = copies_bytes(record, choice, machines.ranks, *machines.copies);
  plan.collective_bytes = record.collective_bytes(2);
  plan.between_bytes = between_hosts(record, choice, machines);
  plan.flop = record.flop;
  plan.tokens = model.tokens_of_rank() * machines.ranks;
  plan.time = planned_time(record, choice, machines);
  if (plan.time) plan.time->intervals = {};  // frees the intervals, because plans compare only totals
  return plan;
}

std::optional<StepTime> planned_time(const RunRecord& record, const TrainingChoice& choice, const Machines& machines) {
  if (machines.speed == nullptr || choice.offload) return std::nullopt;
  MachineSpeed speed = *machines.speed;
  speed.ranks_per_host = machines.ranks_per_host;
  return predict_step(record, speed);
}

int recommended(const std::vector<PlannedTraining>& plans, const Machines& machines) {
  int best = -1;
  for (size_t i = 0; i < plans.size(); ++i)
    if (fits(plans[i], machines) && (best < 0 || cost_of(plans[i]) < cost_of(plans[static_cast<size_t>(best)])))
      best = static_cast<int>(i);
  return best;
}

std::vector<int> by_preference(const std::vector<PlannedTraining>& plans, const Machines& machines) {
  std::vector<int> order(plans.size());
  std::iota(order.begin(), order.end(), 0);
  const auto rank_of = [&](int index) {
    const PlannedTraining& plan = plans[static_cast<size_t>(index)];
    const bool has_room = fits(plan, machines);
    return std::tuple(!plan.why_not.empty(), !has_room, has_room ? 0 : plan.peak.tensors(), cost_of(plan));
  };
  std::ranges::stable_sort(order, [&](int a, int b) { return rank_of(a) < rank_of(b); });
  return order;
}

std::string plan_text(const std::vector<PlannedTraining>& plans, const Machines& machines) {
  const ByteUnit unit = unit_of(plans);
  const auto text_of = [&](int64_t bytes) { return decimal(static_cast<double>(bytes) / unit.bytes, 1); };
  const int best = recommended(plans, machines);
  std::vector<Row> rows = {
      {"stage", "reshard", "dtype", "recompute", "units", "a copy", "secondary", "prefetch", "offload"}};
  for (const MemoryKind kind : kColumns) rows[0].emplace_back(name_of(kind));
  rows[0].insert(rows[0].end(),
                 {"peak", "host", "copies", "exchanged", "between hosts", "step ms", "exposed ms", "tokens/s", "fits"});
  for (size_t i = 0; i < plans.size(); ++i) {
    const PlannedTraining& plan = plans[i];
    rows.push_back(row_of(plan, text_of,
                          static_cast<int>(i) == best                    ? "recommended"
                          : !plan.why_not.empty()                        ? "cannot be run"
                          : fits(plan, machines)                         ? "yes"
                          : !fits_host(plan, machines)                   ? "not the host"
                          : plan.peak.tensors() <= machines.memory_bytes ? "barely"
                                                                         : "no"));
  }
  const std::string notes = notes_on(plans, machines, best, text_of);
  const std::map<std::string, std::string> plain = {
      {"units", "layers"},  {"a copy", "all"},      {"secondary", "none"},
      {"prefetch", "1"},    {"offload", "no"},      {"staging", text_of(0)},
      {"host", text_of(0)}, {"copies", text_of(0)}, {"between hosts", text_of(0)},
      {"step ms", "-"},     {"exposed ms", "-"},    {"tokens/s", "-"}};
  return std::string(unit.name) + " at the peak of a step on " + (machines.ranks == 1 ? "" : "each of ") +
         counted(machines.ranks, "rank") + ", of " + text_of(machines.memory_bytes) + "\n\n" +
         table_of(std::move(rows), plain) + notes + "\n" +
         (best >= 0 ? plans[static_cast<size_t>(best)].options
                    : "None fits with a tenth to spare: take more ranks, a smaller batch or sequence, or --search.") +
         "\n";
}

int64_t bytes_of_text(const std::string& text) {
  static const std::map<std::string_view, double> units = {
      {"", 1},      {"B", 1},        {"KB", 1e3},     {"MB", 1e6},     {"GB", 1e9},
      {"TB", 1e12}, {"KiB", 0x1p10}, {"MiB", 0x1p20}, {"GiB", 0x1p30}, {"TiB", 0x1p40}};
  const auto bytes = quantity_of_text(text, units);
  require(bytes && *bytes >= 1 && *bytes <= 0x1p62, "'", text, "', expected a number of bytes with a unit, as 80GiB");
  return static_cast<int64_t>(*bytes);
}

}  // namespace tessera
