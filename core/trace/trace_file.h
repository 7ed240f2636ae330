#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <string_view>

namespace tessera::internal {

// The file of TESSERA_TRACE contains Chrome trace events in the JSON array format, one event per line. The last line is
// "]". It is missing if a process was killed during a write. Example:
//
//   [{"name":"tessera_trace","ph":"i","pid":0,...,"args":{"run":"5f..","rank":0,"host":"a","clock":"..",...}}
//   ,{"name":"unit 'layers.0'","ph":"X","pid":0,"tid":0,"ts":12.5,"dur":3.25,...}
//   ]
//
// Events are never changed after they were appended. If a file ends after any event, a "]" makes it valid JSON.
// Processes and runs may share a file. A rank's first event is its "tessera_trace", from which `tessera trace merge`
// gets the rank's clock. Times are in microseconds of the host's steady clock.

// The start of every trace file, and the start of a rank's first line after "[" or ",".
inline constexpr std::string_view kTraceBegin = R"([{"name":"tessera_trace",)";
inline constexpr std::string_view kRankBegin = kTraceBegin.substr(1);
// The last line of every complete trace file.
inline constexpr std::string_view kTraceEnd = "]\n";

// An event's "pid" is its rank plus kPidsOfRun times the number of its run in the file. So viewers show one process for
// each rank of each run.
inline constexpr int64_t kPidsOfRun = 1'000'000;

// Returns whether the file at `path` is missing, empty or a trace. Does not open pipes or devices.
bool may_hold_trace(const std::string& path);

// Returns at most `bytes` bytes from the start of a file, or "" if the file cannot be read.
std::string begin_of_file(const std::string& path, size_t bytes);

// A trace file that is open for appending and locked exclusively (flock). Not thread-safe.
class TraceAppender {
 public:
  // Creates the file if necessary. Blocks while another appender holds the lock. Removes an incomplete last line, which
  // a killed process left. If the file cannot be written or is not a trace, leaves the file unchanged and throws
  // std::runtime_error with the file's name.
  explicit TraceAppender(std::string path);
  ~TraceAppender();
  TraceAppender(const TraceAppender&) = delete;
  TraceAppender& operator=(const TraceAppender&) = delete;

  bool is_empty() const { return bytes_ == 0; }

  // Returns the number of a run in the file, from 0, or the next free number for a new run. Reads the whole file.
  int64_t number_of(const std::string& run) const;

  // Appends lines, each of which must begin with a comma. The first line of a file must be a "tessera_trace" event. If
  // the write fails, throws std::runtime_error, and tries to remove the incomplete lines.
  void append(std::string lines);

 private:
  [[noreturn]] void fail(const std::string& why) const;
  int64_t end_of_lines(int64_t bytes) const;
  int64_t end_of_events(int64_t bytes) const;
  void truncate(int64_t bytes) const;
  // Reads at most `bytes` bytes, up to the end of the file. Returns the number of bytes read, or -1 with errno set.
  ssize_t read_at(char* data, size_t bytes, int64_t position) const;

  const std::string path_;
  const int descriptor_;
  int64_t bytes_ = 0;  // size of the file without the last line kTraceEnd
  bool has_end_ = false;
};

}  // namespace tessera::internal
