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

#include "core/runtime/guarded_by.h"
#include "core/trace/ranges.h"

namespace tessera::internal {

// The kind of work that a rank does during a span. The trace file stores the kind as the category ("cat") of an event.
enum class SpanKind {
  kCompute,    // operators of a unit (FSDP), or of a forward or backward pass (other wrappers)
  kGather,     // an all-gather, broadcast, scatter or all-to-all, from its start until its wait() returns
  kReduce,     // a reduce-scatter, all-reduce or reduce, from its start until its wait() returns
  kWait,       // the rank's thread blocks in Pending::wait()
  kOptimizer,  // an optimizer's step
};

// A timeline of this process's ranks for Perfetto or chrome://tracing, enabled by TESSERA_TRACE=file. Spans are
// appended to the file every second and at the end of the process. A killed process loses the spans of at most one
// second. Several processes, such as the ranks of one host, and consecutive runs may append to one file. trace_file.h
// describes the format; docs/benchmarks.md describes the use of a trace. Times are measured on the host: with device
// streams, a span covers the time when the host enqueues the work. Thread-safe.
class Trace {
 public:
  using Clock = std::chrono::steady_clock;

  // Returns the trace; null unless TESSERA_TRACE names a trace or a new file. If null, a span costs one comparison.
  static Trace* active() noexcept {
    static Trace* const trace = make();
    return trace;
  }

  // The run to which this process's ranks belong, and the offset of this host's clock.
  struct Run {
    std::string id;  // equal on all ranks of a run, and unique to the run
    // `offset_ns` must be added to this host's steady clock to get the reference rank's clock. It is 0 on the reference
    // rank's host. `error_ns` bounds the error of `offset_ns` at the time of init().
    int64_t offset_ns = 0, error_ns = 0;
  };

  // Sets the rank of all spans that the calling thread adds later. By default, spans have the process's rank.
  static void set_rank_of_thread(int rank) noexcept;
  // Sets the process's rank, and opens the trace. init() calls this function before the rendezvous, so an error is
  // printed early. A file that is not a trace is left unchanged, and tracing is disabled.
  static void set_rank_of_process(int rank) noexcept;
  // Sets the run of all spans that were not written to the file yet. By default, each process is a run of its own.
  void join(Run run);

  // Returns an id of the steady clock, without spaces. Processes with equal ids read the same clock.
  static const std::string& clock_id();
  // Returns a random value for Run::id.
  static std::string new_run_id();

  // Adds a span. `operation` must be null or a literal that refines the kind, such as "reduce-scatter" for kReduce.
  void add(SpanKind kind, std::string_view name, const char* operation, Clock::time_point begin, Clock::time_point end);

  // Appends to the file all spans that were added since the last call. On failure, throws std::runtime_error, and keeps
  // the spans for the next call. If a million spans wait, add() drops further spans.
  void write();

 private:
  struct Span {
    SpanKind kind;
    int rank;
    std::string name;
    const char* operation;
    Clock::time_point begin, end;
  };
  // The state of the file after this process's last write().
  struct Written {
    int64_t run_number = -1;                                 // number of the run in the file; -1 if unknown
    std::map<std::pair<int, int>, Clock::time_point> lines;  // end of the last span, by rank and display line
    std::set<int> ranks;
  };
  explicit Trace(std::string path);
  static Trace* make() noexcept;
  void write_every_second() noexcept;
  void finish() noexcept;
  std::string text_of(const std::vector<Span>& spans, int64_t dropped, const Run& run, Written& written) const;

  const std::string path_;
  const pid_t process_;  // a forked child has another id, so its finish() is a no-op
  std::mutex mutex_;
  std::condition_variable ends_;
  bool has_ended_ TESSERA_GUARDED_BY(mutex_) = false;
  Run run_ TESSERA_GUARDED_BY(mutex_);
  std::vector<Span> spans_ TESSERA_GUARDED_BY(mutex_);
  int64_t dropped_ TESSERA_GUARDED_BY(mutex_) = 0;  // number of spans dropped because spans_ is full

  std::mutex file_mutex_;  // locked before mutex_
  Written written_ TESSERA_GUARDED_BY(file_mutex_);
  std::string written_run_ TESSERA_GUARDED_BY(file_mutex_);

  std::thread writer_;
};

// Adds a span that lasts from this object's construction to its destruction, and also passes the span to the profiler
// as a range. `name` and `operation` must outlive this object.
class TraceSpan {
 public:
  TraceSpan(SpanKind kind, std::string_view name, const char* operation = nullptr) noexcept
      : range_([&] { return std::string(name); }),
        trace_(Trace::active()),
        kind_(kind),
        name_(name),
        operation_(operation) {
    if (trace_ != nullptr) begin_ = Trace::Clock::now();
  }
  ~TraceSpan() {
    if (trace_ != nullptr) trace_->add(kind_, name_, operation_, begin_, Trace::Clock::now());
  }
  TraceSpan(const TraceSpan&) = delete;
  TraceSpan& operator=(const TraceSpan&) = delete;

 private:
  const NestedRange range_;
  Trace* const trace_;
  const SpanKind kind_;
  const std::string_view name_;
  const char* const operation_;
  Trace::Clock::time_point begin_;
};

}  // namespace tessera::internal
