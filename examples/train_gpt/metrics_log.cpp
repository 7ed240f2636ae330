#include "metrics_log.h"

#include <nlohmann/json.hpp>
#include <stdexcept>

namespace train_gpt {

MetricsLog::MetricsLog(const std::filesystem::path& path) : path_(path), file_(path, std::ios::trunc) {
  if (!file_) throw std::runtime_error("--out: " + path_.string() + " cannot be written");
}

void MetricsLog::write(const StepReport& report) {
  nlohmann::ordered_json line = {{"step", report.step},
                                 {"loss", report.loss},
                                 {"tokens_per_s", report.tokens_per_s},
                                 {"lr", report.lr},
                                 {"grad_norm", report.grad_norm}};
  if (report.val_loss) line["val_loss"] = *report.val_loss;
  file_ << line.dump() << std::endl;
  if (!file_) throw std::runtime_error("--out: a line could not be written to " + path_.string());
}

}  // namespace train_gpt
