#include "report.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <system_error>

namespace train_gpt {

namespace {

bool has_number(const nlohmann::json& values, const char* name) {
  return values.contains(name) && values[name].is_number();
}

// Returns whether `values` is a line of MetricsLog: a step or an event.
bool is_line(const nlohmann::json& values) {
  return values.is_object() && values.contains("step") && values["step"].is_number_integer() &&
         (has_number(values, "loss") || values.contains("event"));
}

}  // namespace

MetricsLog::MetricsLog(const std::filesystem::path& path, int64_t kept_steps) : path_(path) {
  std::error_code ignored;
  const auto status = std::filesystem::status(path, ignored);
  if (exists(status) && !is_regular_file(status))  // opening a pipe would block
    throw std::runtime_error("--out: " + path_.string() + " is not a regular file; remove it");
  std::uintmax_t read_bytes = 0, kept_bytes = 0;
  bool is_complete = true;  // whether the last kept line ends with a new line
  std::ifstream before(path);
  for (std::string line; std::getline(before, line);) {
    read_bytes += line.size() + (before.eof() ? 0 : 1);
    const auto values = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (!is_line(values)) continue;             // a damaged line stays in the file only if a kept line follows it
    if (values["step"] > kept_steps) continue;  // a later step, or a damaged number
    is_complete = !before.eof();
    kept_bytes = read_bytes;
    if (!has_number(values, "loss")) continue;
    kept_.push_back({.step = values["step"], .loss = values["loss"]});
    if (has_number(values, "val_loss")) kept_.back().val_loss = values["val_loss"].get<double>();
  }
  // Truncates the file instead of rewriting the kept lines, so that a kill at any moment loses none of them.
  if (std::error_code none; std::filesystem::file_size(path, none) > kept_bytes && !none)
    std::filesystem::resize_file(path, kept_bytes);
  file_.open(path, std::ios::app);
  if (!is_complete) file_ << '\n';
  file_ << std::flush;
  if (!file_) throw std::runtime_error("--out: " + path_.string() + " cannot be written");
}

void MetricsLog::write(const StepReport& report) {
  nlohmann::ordered_json line = {{"step", report.step},
                                 {"loss", report.loss},
                                 {"tokens_per_s", report.tokens_per_s},
                                 {"lr", report.lr},
                                 {"grad_norm", report.grad_norm}};
  if (report.val_loss) line["val_loss"] = *report.val_loss;
  write_line(line.dump());
}

void MetricsLog::write(const ElasticEvent& event) {
  using Kind = ElasticEvent::Kind;
  const char* name = event.kind == Kind::kLost ? "lost" : event.kind == Kind::kJoined ? "joined" : "resumed";
  nlohmann::ordered_json line = {{"event", name}, {"step", event.step}};
  if (event.kind != Kind::kResumed) line["ranks"] = event.kind == Kind::kLost ? event.change.lost : event.change.joined;
  line["world"] = event.world;
  if (event.kind == Kind::kResumed)
    line["seconds"] = event.change.seconds;
  else
    line["world_before"] = event.change.world_before;
  if (event.kind == Kind::kLost) line["reason"] = event.change.reason;
  write_line(line.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace));
}

void MetricsLog::write_line(const std::string& line) {
  file_ << line << std::endl;
  if (!file_) throw std::runtime_error("--out: a line could not be written to " + path_.string());
}

namespace {

constexpr double kWidth = 800, kHeight = 480;
constexpr double kLeft = 64, kRight = 24, kTop = 52, kBottom = 56;
constexpr double kWantedTicks = 6;
constexpr size_t kMaxCurvePoints = 1000;  // more than kWidth: no pixel loses detail

constexpr const char* kTrainColour = "#2b6cb0";
constexpr const char* kValidationColour = "#c05621";
constexpr const char* kUnigramColour = "#4a5568";

// Returns the distance between ticks: 1, 2 or 5 times a power of ten.
double tick_distance(double range) {
  const double rough = range / kWantedTicks;
  const double power = std::pow(10.0, std::floor(std::log10(rough)));
  for (const double factor : {1.0, 2.0, 5.0}) {
    if (factor * power >= rough) return factor * power;
  }
  return 10.0 * power;
}

std::vector<double> ticks_between(double low, double high, double distance) {
  std::vector<double> ticks;
  for (double i = std::ceil(low / distance - 1e-9); i * distance <= high + 1e-9 * distance; ++i) {
    ticks.push_back(i * distance);
  }
  return ticks;
}

// Maps steps and losses to pixels.
struct Axes {
  double first_step = 0, last_step = 1, low = 0, high = 1, loss_distance = 1;

  explicit Axes(const LossCurves& curves) {
    low = high = curves.unigram_loss;
    for (const auto* curve : {&curves.train, &curves.validation}) {
      for (const auto& point : *curve) {
        low = std::min(low, point.loss);
        high = std::max(high, point.loss);
        last_step = std::max(last_step, point.step);
      }
    }
    loss_distance = tick_distance(std::max(high - low, 1e-3));
    low = loss_distance * std::floor(low / loss_distance);
    high = std::max(low + loss_distance, loss_distance * std::ceil(high / loss_distance));
  }

  double x(double step) const {
    return kLeft + (kWidth - kLeft - kRight) * (step - first_step) / (last_step - first_step);
  }
  double y(double loss) const { return kTop + (kHeight - kTop - kBottom) * (high - loss) / (high - low); }
};

// Returns the exponential moving averages over about a twentieth of the points, at most 20. The window starts small, so
// that the average does not lag at the start, where the loss falls fastest.
std::vector<LossPoint> smoothed(const std::vector<LossPoint>& points) {
  const double window = std::clamp(static_cast<double>(points.size()) / 20.0, 1.0, 20.0);
  std::vector<LossPoint> result;
  double mean = 0.0;
  for (size_t i = 0; i < points.size(); ++i) {
    const double weight = 1.0 / std::min(window, 1.0 + 0.2 * static_cast<double>(i));
    mean += weight * (points[i].loss - mean);
    result.push_back({points[i].step, mean});
  }
  return result;
}

std::vector<LossPoint> thinned(const std::vector<LossPoint>& points) {
  const size_t stride = (points.size() + kMaxCurvePoints - 1) / kMaxCurvePoints;
  std::vector<LossPoint> result;
  for (size_t i = 0; i < points.size(); ++i) {
    if (i % stride == 0 || i + 1 == points.size()) result.push_back(points[i]);
  }
  return result;
}

class Picture {
 public:
  explicit Picture(const Axes& axes) : axes_(axes) {
    svg_ << "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 " << kWidth << " " << kHeight << "\" width=\""
         << kWidth << "\" height=\"" << kHeight << "\" font-family=\"DejaVu Sans, Helvetica, Arial, sans-serif\" "
         << "font-size=\"13\" fill=\"#1a202c\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n";
  }

  void text(double x, double y, const std::string& content, const char* attributes) {
    svg_ << "<text x=\"" << fixed(x, 1) << "\" y=\"" << fixed(y, 1) << "\" " << attributes << ">" << content
         << "</text>\n";
  }

  void line(double x1, double y1, double x2, double y2, const std::string& attributes) {
    svg_ << "<line x1=\"" << fixed(x1, 1) << "\" y1=\"" << fixed(y1, 1) << "\" x2=\"" << fixed(x2, 1) << "\" y2=\""
         << fixed(y2, 1) << "\" " << attributes << "/>\n";
  }

  void curve(const std::vector<LossPoint>& points, const char* colour, double width, double opacity) {
    svg_ << "<polyline fill=\"none\" stroke-linejoin=\"round\" stroke=\"" << colour << "\" stroke-width=\"" << width
         << "\" stroke-opacity=\"" << opacity << "\" points=\"";
    for (const auto& point : points) {
      svg_ << fixed(axes_.x(point.step), 1) << "," << fixed(axes_.y(point.loss), 1) << " ";
    }
    svg_ << "\"/>\n";
  }

  void dots(const std::vector<LossPoint>& points, const char* colour) {
    for (const auto& point : points) {
      svg_ << "<circle r=\"3.5\" cx=\"" << fixed(axes_.x(point.step), 1) << "\" cy=\"" << fixed(axes_.y(point.loss), 1)
           << "\" fill=\"" << colour << "\"/>\n";
    }
  }

  std::string finish() {
    svg_ << "</svg>\n";
    return svg_.str();
  }

 private:
  const Axes& axes_;
  std::ostringstream svg_;
};

void draw_grid(Picture& picture, const Axes& axes) {
  const int digits = std::max(0, static_cast<int>(std::ceil(-std::log10(axes.loss_distance) - 1e-9)));
  for (const double loss : ticks_between(axes.low, axes.high, axes.loss_distance)) {
    picture.line(kLeft, axes.y(loss), kWidth - kRight, axes.y(loss), "stroke=\"#e2e8f0\"");
    picture.text(kLeft - 8, axes.y(loss) + 4.5, fixed(loss, digits), "text-anchor=\"end\"");
  }
  const double distance = std::max(1.0, tick_distance(axes.last_step));
  for (const double step : ticks_between(0, axes.last_step, distance)) {
    picture.line(axes.x(step), kHeight - kBottom, axes.x(step), kHeight - kBottom + 5, "stroke=\"#1a202c\"");
    picture.text(axes.x(step), kHeight - kBottom + 20, grouped(std::llround(step)), "text-anchor=\"middle\"");
  }
  picture.line(kLeft, kHeight - kBottom, kWidth - kRight, kHeight - kBottom, "stroke=\"#1a202c\"");
  picture.text((kLeft + kWidth - kRight) / 2, kHeight - 12, "optimizer step", "text-anchor=\"middle\"");
  picture.text(kLeft - 48, 24, "loss, nats a token", "text-anchor=\"start\"");
}

void draw_legend(Picture& picture, const LossCurves& curves) {
  const auto entry = [&](double x, const std::string& label, const std::string& stroke) {
    picture.line(x, 20, x + 24, 20, "stroke-width=\"2.5\" " + stroke);
    picture.text(x + 30, 24.5, label, "text-anchor=\"start\"");
  };
  const auto stroke = [](const char* colour) { return std::string("stroke=\"") + colour + "\""; };
  entry(230, "training " + fixed(smoothed(curves.train).back().loss, 2), stroke(kTrainColour));
  if (!curves.validation.empty()) {
    entry(395, "validation " + fixed(curves.validation.back().loss, 2), stroke(kValidationColour));
  }
  entry(575, "unigram model " + fixed(curves.unigram_loss, 2), stroke(kUnigramColour) + " stroke-dasharray=\"6 4\"");
}

}  // namespace

std::string draw_losses(const LossCurves& curves) {
  const Axes axes(curves);
  Picture picture(axes);
  draw_grid(picture, axes);
  picture.line(kLeft, axes.y(curves.unigram_loss), kWidth - kRight, axes.y(curves.unigram_loss),
               std::string("stroke=\"") + kUnigramColour + "\" stroke-width=\"1.5\" stroke-dasharray=\"6 4\"");
  picture.curve(thinned(curves.train), kTrainColour, 1, 0.3);
  picture.curve(thinned(smoothed(curves.train)), kTrainColour, 2, 1);
  picture.curve(curves.validation, kValidationColour, 2, 1);
  picture.dots(curves.validation, kValidationColour);
  draw_legend(picture, curves);
  return picture.finish();
}

void write_loss_plot(const std::filesystem::path& path, const LossCurves& curves) {
  std::ofstream file(path, std::ios::trunc);
  file << draw_losses(curves) << std::flush;
  if (!file) throw std::runtime_error("--out: " + path.string() + " cannot be written");
}

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

void TensorboardLog::write(const ElasticEvent& event) {
  using Kind = ElasticEvent::Kind;
  const auto add = [&](const char* tag, double value) { events_.scalar(tag, value, event.step); };
  add("elastic/world", event.world);
  if (event.kind == Kind::kLost) add("elastic/lost", static_cast<double>(event.change.lost.size()));
  if (event.kind == Kind::kJoined) add("elastic/joined", static_cast<double>(event.change.joined.size()));
  if (event.kind == Kind::kResumed) add("elastic/seconds_to_resume", event.change.seconds);
}

}  // namespace train_gpt
