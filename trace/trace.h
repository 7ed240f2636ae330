#pragma once

#include <chrono>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

// What a rank does in a span of time; the category ("cat") in the file.
enum class SpanKind {
  kCompute,    // operators: of a unit under FSDP, else of a forward or backward
  kGather,     // from the start of an all-gather, broadcast or scatter until its results are there
  kReduce,     // the same of a reduce-scatter, all-reduce or reduce
  kWait,       // the rank's thread stands in Pending::wait()
  kOptimizer,  // an optimizer's step
};

// A timeline of what the ranks of this process do, for Perfetto or chrome://tracing: set TESSERA_TRACE=file. The file
// is Chrome's trace JSON, written when the process ends; processes with the same file (the ranks of one host) add to it
// in turn. docs/benchmarks.md says how to read it. Times are the host's: on a device with streams they say when work
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

  // Whose spans this thread adds from now on. Threads that never said: the process's rank.
  static void set_rank_of_thread(int rank) noexcept;
  // The first of these calls removes what an earlier run left in the file, so it comes before ranks can have ended:
  // in init(), before they meet. A file that is no trace is left as it is, and there is no trace.
  static void set_rank_of_process(int rank) noexcept;

  // `operation`, a literal or null, says more than the kind: "reduce-scatter".
  void add(SpanKind kind, std::string_view name, const char* operation, Clock::time_point begin, Clock::time_point end);

  // Adds what was recorded since the last call to the file. Throws std::runtime_error if it cannot.
  void write();

 private:
  struct Span {
    SpanKind kind;
    int rank;
    std::string name;
    const char* operation;
    Clock::time_point begin, end;
  };
  explicit Trace(std::string path) : path_(std::move(path)) {}
  static Trace* make() noexcept;

  const std::string path_;
  std::mutex mutex_;
  std::vector<Span> spans_;
  int64_t dropped_ = 0;  // of a run longer than the memory for it
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

}  // namespace tessera
