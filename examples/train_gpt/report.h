#pragma once

#include <tessera/event_writer.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iosfwd>
#include <memory>
#include <string>
#include <vector>

#include "trainer.h"

namespace train_gpt {

std::string fixed(double value, int digits);  // "1.842"
std::string grouped(int64_t value);           // "1,228,800"
std::string brief(double value);              // "950", "12.3k", "1.2M"
std::string mib(int64_t bytes);               // "1.53"
std::string duration(double seconds);         // "0:07", "12:34", "1:02:03"

// Columns are UTF-8 characters. left() and right() align by padding with spaces, and cut() truncates.
std::string left(std::string text, size_t columns);
std::string right(std::string text, size_t columns);
size_t columns_of(const std::string& text);
std::string cut(const std::string& text, size_t columns);

// Returns text that is safe for a terminal: replaces invalid UTF-8, and control characters except new lines and tabs,
// by '?'.
std::string printable(const std::string& text);

// Breaks text between words into lines of at most `columns`, and puts `indent` before each line.
std::string wrapped(const std::string& text, size_t columns, const std::string& indent);

// Shows the progress of the training.
class Progress {
 public:
  virtual ~Progress() = default;
  virtual void show(const StepReport& report) = 0;
  virtual void finish() = 0;  // must be called after the last step, or before an error is printed
};

// On a terminal, redraws two lines in place; elsewhere, prints a line every few per cent of the steps.
std::unique_ptr<Progress> make_progress(std::ostream& out, bool terminal, int64_t steps);

bool standard_output_is_terminal();

// The values that print_header() prints about a run.
struct RunFacts {
  std::string layout;  // Trainable::describe()
  std::string device;
  Precision precision = Precision::kFloat;  // of forward and backward
  int ranks = 1;
  int threads = 1;
  int64_t parameters_numel = 0;
  int64_t adapters_numel = 0;  // 0: the whole model is trained
  int64_t tokens_per_step = 0;
  double unigram_loss = 0.0;
};
void print_header(std::ostream& out, const TrainOptions& options, const Corpus& corpus, const RunFacts& facts);

// Prints each rank's memory, compared with one process that holds the whole state.
void print_memory_table(std::ostream& out, const std::vector<MemoryUse>& ranks, int64_t unsharded_parameter_bytes);

struct RunResult {
  double train_loss = 0.0;  // the mean over the last steps
  double val_loss = 0.0;
  double unigram_loss = 0.0;
  double train_s = 0.0;
};
void print_result(std::ostream& out, const RunResult& result);

void print_sample(std::ostream& out, const std::string& text);

// A change of an elastic run's group (kLost, kJoined), or the end of the first step after it (kResumed).
struct ElasticEvent {
  enum class Kind { kLost, kJoined, kResumed } kind = Kind::kLost;
  int64_t step = 0;
  int world = 0;
  tessera::ElasticChange change;
};

// Writes metrics.jsonl: one line per step with a JSON object, which has val_loss if the step was validated:
//   {"step":1,"loss":4.1,"tokens_per_s":9000.0,"lr":1e-4,"grad_norm":2.0,"val_loss":4.0}
// Events of an elastic run have their own lines. The step of a change is the step from which training continues. One
// change may write both "lost" and "joined". The ranks of "joined" are numbers in the new group:
//   {"event":"lost","step":10,"ranks":[1],"world":3,"world_before":4,"reason":"..."}
//   {"event":"joined","step":20,"ranks":[3],"world":4,"world_before":3}
//   {"event":"resumed","step":11,"world":3,"seconds":0.4}
class MetricsLog {
 public:
  // Keeps the file's lines of the first `kept_steps` steps, and removes the lines after them. Throws
  // std::runtime_error if the file cannot be written.
  explicit MetricsLog(const std::filesystem::path& path, int64_t kept_steps = 0);

  // Returns the reports of the kept steps.
  const std::vector<StepReport>& kept() const { return kept_; }

  // Throw std::runtime_error if the line cannot be written, for example on a full disk.
  void write(const StepReport& report);
  void write(const ElasticEvent& event);

 private:
  void write_line(const std::string& line);
  std::filesystem::path path_;
  std::vector<StepReport> kept_;
  std::ofstream file_;
};

struct LossPoint {
  double step = 0.0;
  double loss = 0.0;
};

struct LossCurves {
  std::vector<LossPoint> train;       // one point a step
  std::vector<LossPoint> validation;  // the validated steps
  double unigram_loss = 0.0;
};

// Returns an SVG picture of the curves over the steps, with a moving average of the training loss. `curves.train` must
// not be empty.
std::string draw_losses(const LossCurves& curves);

// Throws std::runtime_error if the file cannot be written.
void write_loss_plot(const std::filesystem::path& path, const LossCurves& curves);

// Writes the curves of a run for TensorBoard: train/..., val/loss, and memory/... and wait/... of all ranks.
class TensorboardLog {
 public:
  // Throws std::runtime_error if no file can be created in `folder`.
  explicit TensorboardLog(const std::filesystem::path& folder) : events_(folder) {}

  // Do not throw if the disk is full, so that training continues.
  void write(const StepReport& report);
  void write(const ElasticEvent& event);  // elastic/world, elastic/lost, elastic/joined, elastic/seconds_to_resume

 private:
  tessera::EventWriter events_;
};

}  // namespace train_gpt
