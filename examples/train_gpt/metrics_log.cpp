#include "metrics_log.h"

#include <nlohmann/json.hpp>
#include <stdexcept>

namespace train_gpt {

MetricsLog::MetricsLog(const std::filesystem::path& path, int64_t kept_steps) : path_(path) {
  std::string lines;
  if (kept_steps > 0) {
    std::ifstream before(path);
    for (std::string line; std::getline(before, line);) {
      const auto values = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
      if (!values.is_object() || values.value("step", kept_steps + 1) > kept_steps) break;  // cut by a kill, or later
      StepReport report{.step = values["step"], .loss = values["loss"]};
      if (values.contains("val_loss")) report.val_loss = values["val_loss"].get<double>();
      kept_.push_back(report);
      lines += line + "\n";
    }
  }
  file_.open(path, std::ios::trunc);
  file_ << lines << std::flush;
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
