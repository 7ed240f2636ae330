#pragma once

#include <sys/types.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

namespace tessera::internal {

// What a rank does in a span of time; the category ("cat") in the file.
enum class SpanKind {
  kCompute,    // operators: of a unit under FSDP, else of a forward or backward
  kGather,     // from the start of an all-gather, broadcast or scatter until its results are there
  kReduce,     // the same of a reduce-scatter, all-reduce or reduce
  kWait,       // the rank's thread stands in Pending::wait()
  kOptimizer,  // an optimizer's step
};

// A timeline of what the ranks of this process do, for Perfetto or chrome://tracing: set TESSERA_TRACE=file. Every
// second, and when the process ends, what has come together is added to the file (trace_file.h says how it looks), so
// that a kill loses a second; processes with the same file, the ranks of one host, and runs one after another add to
// it in turn. docs/benchmarks.md says how to read it. Times are the host's: on a device with streams they say when work
// was enqueued. Thread-safe.
class Trace {
 public:
  using Clock = std::chrono::steady_clock;

  // The process's trace; null unless TESSERA_TRACE names a file that is a trace or yet to be made, and then tracing
  // costs a comparison.
  static Trace* active() noexcept {
    static Trace* const trace = make();
    return trace;
  }

  // The group that the ranks of this process are in, and the clock of its spans.
  struct Run {
    std::string id;  // the same on all ranks, and no other run's
    // Added to this host's steady clock they are the clock of one rank, the same for all: its host's are 0. By as much
    // it can be wrong at most, at the time of init().
    int64_t offset_ns = 0, error_ns = 0;
  };

  // Whose spans this thread adds from now on. Threads that never said: the process's rank.
  static void set_rank_of_thread(int rank) noexcept;
  // Comes first in init(): a file that is no trace is told of before ranks meet. It is left as it is, and there is no
  // trace.
  static void set_rank_of_process(int rank) noexcept;
  // The run that spans belong to which are not in the file yet, and all later ones. Without it, the process is a run by
  // itself.
  void join(Run run);

  // Of this host's steady clock, and no other's: processes with the same id read the same clock. Without blanks.
  static const std::string& clock_id();
  // An id for Run.
  static std::string new_run_id();

  // `operation`, a literal or null, says more than the kind: "reduce-scatter".
  void add(SpanKind kind, std::string_view name, const char* operation, Clock::time_point begin, Clock::time_point end);

  // Adds what was recorded since the last call to the file. Throws std::runtime_error if it cannot; what was recorded
  // is then kept, up to a million spans, for the next call.
  void write();

 private:
  struct Span {
    SpanKind kind;
    int rank;
    std::string name;
    const char* operation;
    Clock::time_point begin, end;
  };
  // What the file has of this process so far.
  struct Written {
    int64_t run_number = -1;                                 // in the file; -1: not known
    std::map<std::pair<int, int>, Clock::time_point> lines;  // by rank and line: when it is free again
    std::set<int> ranks;
  };
  explicit Trace(std::string path);
  static Trace* make() noexcept;
  void write_every_second() noexcept;
  void finish() noexcept;
  std::string text_of(const std::vector<Span>& spans, int64_t dropped, const Run& run, Written& written) const;

  const std::string path_;
  const pid_t process_;  // a fork of it is no rank
  std::mutex mutex_;     // guards what follows
  std::condition_variable ends_;
  bool has_ended_ = false;
  Run run_;
  std::vector<Span> spans_;
  int64_t dropped_ = 0;  // where the file cannot be written

  std::mutex file_mutex_;  // taken before mutex_; guards what follows
  Written written_;
  std::string written_run_;

  std::thread writer_;
};

// Adds a span from construction to destruction. `name` and `operation` outlive it.
class TraceSpan {
 public:
  TraceSpan(SpanKind kind, std::string_view name, const char* operation = nullptr) noexcept
      : trace_(Trace::active()), kind_(kind), name_(name), operation_(operation) {
    if (trace_ != nullptr) begin_ = Trace::Clock::now();
  }
  ~TraceSpan() {
    if (trace_ != nullptr) trace_->add(kind_, name_, operation_, begin_, Trace::Clock::now());
  }
  TraceSpan(const TraceSpan&) = delete;
  TraceSpan& operator=(const TraceSpan&) = delete;

 private:
  Trace* const trace_;
  const SpanKind kind_;
  const std::string_view name_;
  const char* const operation_;
  Trace::Clock::time_point begin_;
};

}  // namespace tessera::internal
