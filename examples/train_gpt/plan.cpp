#include "plan.h"

#include <tessera/plan/dry_run.h>

#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "model.h"
#include "report.h"

namespace train_gpt {
namespace {

using tessera::MemoryKind;

constexpr int kMostRanks = 8;
constexpr size_t kColumns = 13;

std::unique_ptr<Trainable> make_trainable(const TrainOptions& options, std::shared_ptr<tessera::Communicator> comm) {
  Gpt model = draw_model(options, comm->device());
  if (options.lora_rank > 0) draw_adapters(model, options);
  auto wrapped = wrap(std::move(model), options, std::move(comm));
  if (options.ema > 0) return with_ema(std::move(wrapped), options.ema);
  return wrapped;
}

std::vector<int> planned_ranks(int world) {
  std::vector<int> ranks;
  for (int rank = 0; rank < world; ++rank)
    if (world <= kMostRanks || rank < kMostRanks - 1 || rank == world - 1) ranks.push_back(rank);
  return ranks;
}

}  // namespace

Rehearsal::Rehearsal(const Job& job, std::shared_ptr<tessera::Communicator> comm)
    : comm_(std::move(comm)),
      model_(make_trainable(job.options, comm_)),
      trainer_(job.options, job.corpus, *comm_, *model_) {}

void Rehearsal::step() {
  trainer_.train_step(steps_, [] {});
  if (++steps_ == kSteps) trainer_.validate();
}

tessera::RunRecord plan_of(const Job& job, int rank) {
  return tessera::dry_run([&](auto comm) { return std::make_unique<Rehearsal>(job, comm); },
                          [](std::unique_ptr<Rehearsal>& training) { training->step(); },
                          {.world_size = job.options.ranks.value_or(1), .rank = rank, .steps = Rehearsal::kSteps});
}

void print_plan(std::ostream& out, const Job& job) {
  const int world = job.options.ranks.value_or(1);
  const auto ranks = planned_ranks(world);
  std::vector<tessera::RunRecord> records;
  for (const int rank : ranks) records.push_back(plan_of(job, rank));
  std::vector<MemoryKind> kinds;
  bool uses_disk = false;
  for (const auto& record : records) uses_disk = uses_disk || record.most[MemoryKind::kDisk] > 0;
  for (size_t i = 0; i < tessera::kMemoryKinds; ++i) {
    const auto kind = static_cast<MemoryKind>(i);
    bool is_used = false;
    for (const auto& record : records) is_used = is_used || record.peak[kind] > 0;
    if (is_used && tessera::is_tensors(kind)) kinds.push_back(kind);
  }
  out << "MiB of tensors at the peak of a step, of " << name_of(job.options.wrapper) << " on " << world
      << (world == 1 ? " rank" : " ranks") << "; without kernels' scratch, files and the sample\n\n"
      << left("rank", 6);
  for (const auto kind : kinds) out << right(std::string(tessera::name_of(kind)), kColumns);
  out << right("peak", kColumns) << (uses_disk ? right("disk", kColumns) : "") << "\n";
  for (size_t i = 0; i < ranks.size(); ++i) {
    if (i > 0 && ranks[i] > ranks[i - 1] + 1) out << "...\n";
    out << left(std::to_string(ranks[i]), 6);
    for (const auto kind : kinds) out << right(mib(records[i].peak[kind]), kColumns);
    out << right(mib(records[i].peak_bytes()), kColumns)
        << (uses_disk ? right(mib(records[i].most[MemoryKind::kDisk]), kColumns) : "") << "\n";
  }
  out << "\nrank 0's peak is in " << records[0].peak_place() << "\n";
}

}  // namespace train_gpt
