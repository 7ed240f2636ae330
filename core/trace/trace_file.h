#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <string_view>

namespace tessera::internal {

// The file of TESSERA_TRACE: Chrome's trace events in the JSON array format, one event per line. The last line, "]", is
// missing if a process was killed while it wrote:
//
//   [{"name":"tessera_trace","ph":"i","pid":0,...,"args":{"run":"5f..","rank":0,"host":"a","clock":"..",...}}
//   ,{"name":"unit 'layers.0'","ph":"X","pid":0,"tid":0,"ts":12.5,"dur":3.25,...}
//   ]
//
// Events are only added. With "]" after any event, the file is valid JSON. Processes and runs may share a file. The
// first event of a rank is its "tessera_trace", from which `tessera trace merge` gets the rank's clock. Times are in
// microseconds of the host's steady clock.

// The start of every trace file, and the start of a rank's first line after "[" or ",".
inline constexpr std::string_view kTraceBegin = R"([{"name":"tessera_trace",)";
inline constexpr std::string_view kRankBegin = kTraceBegin.substr(1);
// The last line of every complete trace file.
inline constexpr std::string_view kTraceEnd = "]\n";

// An event's "pid" is the rank plus this number times the run's number in the file, so that viewers show a process for
// each rank and run.
inline constexpr int64_t kPidsOfRun = 1'000'000;

// Returns whether a trace may be written to `path`: there is no file, an empty one or a trace. Opens no pipe or device.
bool may_hold_trace(const std::string& path);

// Returns the first bytes of a file, at most `bytes`; an empty text if the file cannot be read.
std::string begin_of_file(const std::string& path, size_t bytes);

// A trace file that is open for appending, with an exclusive lock (flock). Not thread-safe.
class TraceAppender {
 public:
  // Creates the file if necessary, and blocks until no other appender holds it. Removes an incomplete last line, which
  // a killed process has left. Throws std::runtime_error with the file's name if it cannot be written or is not a
  // trace; such a file is left unchanged.
  explicit TraceAppender(std::string path);
  ~TraceAppender();
  TraceAppender(const TraceAppender&) = delete;
  TraceAppender& operator=(const TraceAppender&) = delete;

  // Returns whether the file has no lines.
  bool is_empty() const { return bytes_ == 0; }

  // Returns the number of a run in the file, from 0; the next number if the run is new. Reads the whole file.
  int64_t number_of(const std::string& run) const;

  // Appends lines, each of which must begin with a comma. The first line of a file must be a rank's "tessera_trace". If
  // the write fails, appends no line and throws std::runtime_error.
  void append(std::string lines);

 private:
  [[noreturn]] void fail(const std::string& why) const;
  int64_t end_of_lines(int64_t bytes) const;
  int64_t end_of_events(int64_t bytes) const;
  void truncate(int64_t bytes) const;
  // Reads up to the end of the file; returns the number of bytes, or -1 with errno.
  ssize_t read_at(char* data, size_t bytes, int64_t position) const;

  const std::string path_;
  const int descriptor_;
  int64_t bytes_ = 0;  // bytes of the complete lines of events
  bool has_end_ = false;
};

}  // namespace tessera::internal
