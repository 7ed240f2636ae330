#include "progress.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <optional>
#include <ostream>
#include <string>
#include <utility>

#include "format.h"

namespace train_gpt {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kLogLines = 20;  // over the run, where there is no terminal
constexpr auto kRedrawEvery = std::chrono::milliseconds(100);
constexpr size_t kMaxBarColumns = 40;
constexpr double kSmoothedSteps = 10.0;  // in what is shown; the files hold the raw numbers

// What both ways of showing it know: smoothed figures, the last validation, the time left.
class Figures {
 public:
  explicit Figures(int64_t steps) : steps_(steps) {}

  void update(const StepReport& report) {
    // The first step of this process, which may go on with a run, also warms everything up: the clock starts after it.
    if (++seen_ == 1) started_ = Clock::now();
    const double weight = 1.0 / std::clamp(static_cast<double>(seen_) / 2.0, 1.0, kSmoothedSteps);
    loss_ += weight * (report.loss - loss_);
    tokens_per_s_ += weight * (report.tokens_per_s - tokens_per_s_);
    if (report.val_loss) val_loss_ = report.val_loss;
    report_ = report;
  }

  double fraction() const { return static_cast<double>(report_.step) / static_cast<double>(steps_); }

  std::string step() const {
    const auto total = std::to_string(steps_);
    return "step " + right(std::to_string(report_.step), total.size()) + "/" + total;
  }

  std::string loss() const {
    return "loss " + fixed(loss_, 3) + (val_loss_ ? "  validation " + fixed(*val_loss_, 3) : "");
  }

  std::string speed() const { return brief(tokens_per_s_) + " tokens/s"; }

  // Counts the time of validations, unlike speed().
  std::string time_left() const {
    if (seen_ < 2) return "";
    const double elapsed_s = std::chrono::duration<double>(Clock::now() - started_).count();
    const auto remaining = static_cast<double>(steps_ - report_.step);
    return duration(elapsed_s / static_cast<double>(seen_ - 1) * remaining) + " left";
  }

  std::string memory() const {
    const auto& memory = report_.memory;
    return "MiB/rank: params " + mib(memory.parameter_bytes) + ", gathered " + mib(memory.peak_gathered_bytes) +
           ", optimizer " + mib(memory.optimizer_bytes);
  }

  const StepReport& report() const { return report_; }
  int64_t steps() const { return steps_; }

 private:
  int64_t steps_;
  StepReport report_;
  int64_t seen_ = 0;
  double loss_ = 0.0, tokens_per_s_ = 0.0;
  std::optional<double> val_loss_;
  Clock::time_point started_;
};

class LineProgress final : public Progress {
 public:
  LineProgress(std::ostream& out, int64_t steps) : out_(out), figures_(steps) {}

  void show(const StepReport& report) override {
    figures_.update(report);
    if (report.waits) out_ << figures_.step() << "  " << report.waits->text() << std::endl;
    const int64_t interval = (figures_.steps() + kLogLines - 1) / kLogLines;
    const bool last = report.step == figures_.steps();
    if (!std::exchange(is_first_, false) && !last && report.step % interval != 0 && !report.val_loss) return;
    out_ << figures_.step() << "  " << figures_.loss() << "  " << figures_.speed();
    if (const auto left = figures_.time_left(); !left.empty()) out_ << "  " << left;
    out_ << "  " << figures_.memory() << std::endl;
  }

  void finish() override {}

 private:
  std::ostream& out_;
  Figures figures_;
  bool is_first_ = true;
};

size_t terminal_columns() {
  winsize size{};
  if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_col == 0) return 80;
  return size.ws_col;
}

std::string bar(double fraction, size_t columns) {
  const auto filled = static_cast<size_t>(std::llround(fraction * static_cast<double>(columns)));
  std::string text = "\x1b[32m";
  for (size_t i = 0; i < filled; ++i) text += "━";
  text += "\x1b[90m";
  for (size_t i = filled; i < columns; ++i) text += "─";
  return text + "\x1b[0m";
}

class TerminalProgress final : public Progress {
 public:
  TerminalProgress(std::ostream& out, int64_t steps) : out_(out), figures_(steps) {}

  void show(const StepReport& report) override {
    figures_.update(report);
    if (report.waits && report.waits->waited_for()) {  // a line that stays, above those that are drawn again
      finish();
      out_ << figures_.step() << "  " << report.waits->text() << "\n";
    }
    const auto now = Clock::now();
    if (report.step != figures_.steps() && now - drawn_ < kRedrawEvery) return;
    draw();
    drawn_ = now;
  }

  void finish() override {
    if (lines_drawn_) out_ << "\n" << std::flush;
    lines_drawn_ = false;
  }

 private:
  // Leaves the cursor at the end of the second line, so that anything else that is written stands
  // below. The last column stays free: terminals differ in what happens after it.
  void draw() {
    const size_t columns = terminal_columns() - 1;
    const auto before = figures_.step() + " ";
    const auto after = right(fixed(100.0 * figures_.fraction(), 0), 4) + "%  " + figures_.time_left();
    const auto fixed_columns = columns_of(before) + columns_of(after) + 6;  // room for hours left
    const auto bar_columns = columns > fixed_columns ? std::min(columns - fixed_columns, kMaxBarColumns) : 0;
    if (lines_drawn_) out_ << "\x1b[1A\r";
    out_ << "\x1b[K" << before << bar(figures_.fraction(), bar_columns) << cut(after, columns - columns_of(before))
         << "\n\x1b[K" << cut(figures_.loss() + "  " + figures_.speed() + "  " + figures_.memory(), columns)
         << std::flush;
    lines_drawn_ = true;
  }

  std::ostream& out_;
  Figures figures_;
  Clock::time_point drawn_;
  bool lines_drawn_ = false;
};

}  // namespace

std::unique_ptr<Progress> make_progress(std::ostream& out, bool terminal, int64_t steps) {
  if (terminal) return std::make_unique<TerminalProgress>(out, steps);
  return std::make_unique<LineProgress>(out, steps);
}

bool standard_output_is_terminal() { return isatty(STDOUT_FILENO) == 1; }

}  // namespace train_gpt
