#include "report.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <optional>
#include <ostream>
#include <sstream>
#include <string>
#include <utility>

namespace train_gpt {
namespace {

bool continues_character(char byte) { return (static_cast<unsigned char>(byte) & 0xc0) == 0x80; }

// Returns the length of the UTF-8 character at `position`, or 0 if the bytes are not valid UTF-8.
size_t character_bytes(const std::string& text, size_t position) {
  const auto first = static_cast<unsigned char>(text[position]);
  size_t length = 0;
  if (first < 0x80)
    length = 1;
  else if (first >= 0xc2 && first < 0xe0)
    length = 2;
  else if (first >= 0xe0 && first < 0xf0)
    length = 3;
  else if (first >= 0xf0 && first < 0xf5)
    length = 4;
  if (position + length > text.size()) return 0;
  for (size_t i = 1; i < length; ++i) {
    if (!continues_character(text[position + i])) return 0;
  }
  return length;
}

std::string wrapped_line(const std::string& line, size_t columns, const std::string& indent) {
  std::istringstream words(line);
  std::string result, current;
  for (std::string word; words >> word;) {
    if (!current.empty() && columns_of(current) + 1 + columns_of(word) > columns) {
      result += indent + current + "\n";
      current.clear();
    }
    current += (current.empty() ? "" : " ") + word;
  }
  return result + (current.empty() ? "" : indent + current) + "\n";
}

}  // namespace

std::string fixed(double value, int digits) {
  char text[64];
  std::snprintf(text, sizeof(text), "%.*f", digits, value);
  return text;
}

std::string grouped(int64_t value) {
  auto text = std::to_string(value);
  for (auto i = static_cast<int64_t>(text.size()) - 3; i > (value < 0 ? 1 : 0); i -= 3)
    text.insert(static_cast<size_t>(i), 1, ',');
  return text;
}

std::string brief(double value) {
  if (value < 1e3) return fixed(value, 0);
  if (value < 1e6) return fixed(value / 1e3, 1) + "k";
  return fixed(value / 1e6, 1) + "M";
}

std::string mib(int64_t bytes) { return fixed(static_cast<double>(bytes) / (1 << 20), 2); }

std::string duration(double seconds) {
  const long long total = std::llround(seconds);
  char text[64];
  if (total < 3600) {
    std::snprintf(text, sizeof(text), "%lld:%02lld", total / 60, total % 60);
  } else {
    std::snprintf(text, sizeof(text), "%lld:%02lld:%02lld", total / 3600, total / 60 % 60, total % 60);
  }
  return text;
}

size_t columns_of(const std::string& text) {
  return text.size() - static_cast<size_t>(std::count_if(text.begin(), text.end(), continues_character));
}

std::string left(std::string text, size_t columns) {
  const auto used = columns_of(text);
  return used < columns ? text.append(columns - used, ' ') : text;
}

std::string right(std::string text, size_t columns) {
  const auto used = columns_of(text);
  return used < columns ? text.insert(0, columns - used, ' ') : text;
}

std::string cut(const std::string& text, size_t columns) {
  size_t end = 0;
  for (size_t column = 0; end < text.size() && column < columns; ++column) {
    do ++end;
    while (end < text.size() && continues_character(text[end]));
  }
  return text.substr(0, end);
}

std::string printable(const std::string& text) {
  std::string result;
  for (size_t i = 0; i < text.size();) {
    const size_t length = character_bytes(text, i);
    const auto byte = static_cast<unsigned char>(text[i]);
    const bool control = (byte < 0x20 && byte != '\n' && byte != '\t') || byte == 0x7f;
    if (length == 0 || control) {
      result += '?';
      ++i;
    } else {
      result += text.substr(i, length);
      i += length;
    }
  }
  return result;
}

std::string wrapped(const std::string& text, size_t columns, const std::string& indent) {
  std::istringstream lines(text);
  std::string result;
  for (std::string line; std::getline(lines, line);) result += wrapped_line(line, columns, indent);
  return result;
}

namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kLogLines = 20;  // number of progress lines of a run without a terminal
constexpr auto kRedrawEvery = std::chrono::milliseconds(100);
constexpr size_t kMaxBarColumns = 40;
constexpr double kSmoothedSteps = 10.0;  // smoothing of displayed numbers; files have the raw numbers

// The values that both kinds of progress show: smoothed loss and speed, the last validation loss, the remaining time.
class Figures {
 public:
  explicit Figures(int64_t steps) : steps_(steps) {}

  void update(const StepReport& report) {
    // Starts the clock after the first step of this process, which is slower than the others.
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

  // Returns the remaining time. Unlike speed(), includes the time of validations.
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
    if (report.waits && report.waits->waited_for()) {  // prints above the lines that are redrawn
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
  // Leaves the cursor at the end of the second line, so that later output begins below it. Does not use the last
  // column, because terminals differ in whether they wrap after it.
  void draw() {
    const size_t columns = terminal_columns() - 1;
    const auto before = figures_.step() + " ";
    const auto after = right(fixed(100.0 * figures_.fraction(), 0), 4) + "%  " + figures_.time_left();
    const auto fixed_columns = columns_of(before) + columns_of(after) + 6;  // room for a time with hours
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

namespace {

constexpr size_t kLabelColumns = 12;
constexpr size_t kFigureColumns = 12;
constexpr size_t kTextColumns = 76;
constexpr size_t kShownRanks = 8;

void line(std::ostream& out, const std::string& label, const std::string& text) {
  out << "  " << left(label, kLabelColumns) << text << "\n";
}

// Returns the memory of a process without sharding. AdamW's state is two moments of each parameter.
MemoryUse unsharded_use(int64_t parameter_bytes) {
  return {.parameter_bytes = parameter_bytes, .grad_bytes = parameter_bytes, .optimizer_bytes = 2 * parameter_bytes};
}

int64_t kept_bytes(const MemoryUse& use) { return use.parameter_bytes + use.grad_bytes + use.optimizer_bytes; }

std::string row(const std::string& label, const MemoryUse& use, const MemoryUse& whole) {
  std::string text = "  " + left(label, kLabelColumns);
  for (const int64_t bytes : {use.parameter_bytes, use.grad_bytes, use.optimizer_bytes, kept_bytes(use)}) {
    text += right(mib(bytes), kFigureColumns);
  }
  const double share = 100.0 * static_cast<double>(kept_bytes(use)) / static_cast<double>(kept_bytes(whole));
  text += right(fixed(share, 0) + "%", 8);
  for (const int64_t bytes : {use.peak_gathered_bytes, use.peak_bucket_bytes}) {
    text += right(bytes == 0 ? "-" : mib(bytes), kFigureColumns);
  }
  return text + "\n";
}

MemoryUse largest(const std::vector<MemoryUse>& ranks) {
  MemoryUse most;
  for (const auto& use : ranks) {
    most.parameter_bytes = std::max(most.parameter_bytes, use.parameter_bytes);
    most.grad_bytes = std::max(most.grad_bytes, use.grad_bytes);
    most.optimizer_bytes = std::max(most.optimizer_bytes, use.optimizer_bytes);
    most.peak_gathered_bytes = std::max(most.peak_gathered_bytes, use.peak_gathered_bytes);
    most.peak_bucket_bytes = std::max(most.peak_bucket_bytes, use.peak_bucket_bytes);
  }
  return most;
}

std::string with_perplexity(double loss) {
  if (std::isnan(loss)) return "unknown";
  return fixed(loss, 4) + "   (perplexity " + fixed(std::exp(loss), 2) + ")";
}

}  // namespace

void print_header(std::ostream& out, const TrainOptions& options, const Corpus& corpus, const RunFacts& facts) {
  const auto& model = options.model;
  line(out, "model",
       "GPT of " + std::to_string(model.layers) + " layers x " + std::to_string(model.width) + ", " +
           std::to_string(model.heads) + " heads, context " + std::to_string(model.context) + ": " +
           grouped(facts.parameters_numel) + " parameters" + (model.tie ? ", tied" : ""));
  if (facts.adapters_numel > 0)
    line(out, "adapters",
         "of rank " + std::to_string(options.lora_rank) + ": " + grouped(facts.adapters_numel) +
             " parameters are trained, beside frozen weights" +
             (options.base == BaseFormat::kFull ? "" : std::string(" in ") + name_of(options.base)));
  line(out, "layout",
       facts.layout + ", " + std::to_string(facts.threads) + (facts.threads == 1 ? " thread" : " threads") + " a rank");
  line(out, "device", examples::describe(facts.device, facts.precision));
  line(out, "data", printable(corpus.description));
  line(out, "",
       grouped(static_cast<int64_t>(corpus.train().size())) + " tokens to train, " +
           grouped(static_cast<int64_t>(corpus.validation().size())) + " to validate, vocabulary of " +
           std::to_string(corpus.vocabulary.size()) + (corpus.vocabulary.is_text() ? " bytes" : " ids"));
  line(out, "steps",
       grouped(options.steps) + " of " + grouped(facts.tokens_per_step) + " tokens (" + std::to_string(facts.ranks) +
           (facts.ranks == 1 ? " rank x " : " ranks x ") + std::to_string(options.batch) + " sequences" +
           (options.accumulate > 1 ? " x " + std::to_string(options.accumulate) + " accumulated" : "") + ")");
  line(out, "unigram", "validation loss " + fixed(facts.unigram_loss, 4) + ", the one to beat");
  out << std::endl;
}

void print_memory_table(std::ostream& out, const std::vector<MemoryUse>& ranks, int64_t unsharded_parameter_bytes) {
  out << "  " << left("MiB", kLabelColumns);
  for (const char* title : {"parameters", "gradients", "optimizer", "kept"}) out << right(title, kFigureColumns);
  out << right("of all", 8) << right("gathered", kFigureColumns) << right("reducing", kFigureColumns) << "\n";
  const auto whole = unsharded_use(unsharded_parameter_bytes);
  out << row("unsharded", whole, whole);
  const auto shown = std::min(ranks.size(), kShownRanks);
  for (size_t rank = 0; rank < shown; ++rank) out << row("rank " + std::to_string(rank), ranks[rank], whole);
  if (ranks.size() > shown) out << row("at most", largest(ranks), whole);
  out << "  gathered: full parameters of the units in use, the most at one time; reducing: their "
         "gradients\n\n";
}

void print_result(std::ostream& out, const RunResult& result) {
  line(out, "trained", "in " + duration(result.train_s));
  line(out, "losses", "training   " + with_perplexity(result.train_loss));
  line(out, "", "validation " + with_perplexity(result.val_loss));
  const std::string ratio = std::isnan(result.val_loss)
                                ? ""
                                : "   validation is " + fixed(result.val_loss / result.unigram_loss, 2) + " of it";
  line(out, "", "unigram    " + with_perplexity(result.unigram_loss) + ratio);
  out << std::endl;
}

void print_sample(std::ostream& out, const std::string& text) {
  out << "  sample, generated by the model as it lies on the ranks:\n\n"
      << wrapped(printable(text.substr(std::min(text.find_first_not_of('\n'), text.size()))), kTextColumns, "    ")
      << std::endl;
}

}  // namespace train_gpt
