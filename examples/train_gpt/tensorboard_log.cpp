#include "tensorboard_log.h"

#include <string>

namespace train_gpt {
namespace {

double in_mib(int64_t bytes) { return static_cast<double>(bytes) / (1 << 20); }

}  // namespace

void TensorboardLog::write(const StepReport& report) {
  const auto add = [&](const std::string& tag, double value) { events_.scalar(tag, value, report.step); };
  add("train/loss", report.loss);
  add("train/learning_rate", report.lr);
  add("train/grad_norm", report.grad_norm);
  add("train/tokens_per_s", report.tokens_per_s);
  if (report.val_loss) add("val/loss", *report.val_loss);
  const auto add_memory = [&](const MemoryUse& memory, const std::string& of) {
    add("memory/state_MiB" + of, in_mib(memory.parameter_bytes + memory.grad_bytes + memory.optimizer_bytes));
    add("memory/held_MiB" + of, in_mib(memory.held_bytes));
    add("memory/peak_MiB" + of, in_mib(memory.peak_held_bytes));
  };
  add_memory(report.memory, "");
  for (size_t rank = 0; rank < report.memory_by_rank.size(); ++rank)
    add_memory(report.memory_by_rank[rank], "_rank_" + std::to_string(rank));
  if (!report.waits) return;
  const auto& waits = *report.waits;
  for (size_t rank = 0; rank < waits.ranks.size(); ++rank)
    add("wait/percent_rank_" + std::to_string(rank), 100 * waits.ranks[rank].wait_s / waits.elapsed_s);
}

}  // namespace train_gpt
