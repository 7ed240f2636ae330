#include "core/trace/trace_file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <system_error>
#include <utility>
#include <vector>

#include "core/runtime/file.h"

namespace tessera::internal {
namespace {

std::string error_text(int error_number) { return std::generic_category().message(error_number); }

// Also accepts a prefix of kTraceBegin, because a killed process may have left an incomplete first line.
bool is_begin_of_trace(std::string_view text) { return text == kTraceBegin.substr(0, text.size()); }

}  // namespace

bool may_hold_trace(const std::string& path) {
  struct stat status {};
  if (::stat(path.c_str(), &status) != 0) return true;
  if (!S_ISREG(status.st_mode)) return false;  // opening a pipe would block
  return std::ifstream(path) && is_begin_of_trace(begin_of_file(path, kTraceBegin.size()));
}

std::string begin_of_file(const std::string& path, size_t bytes) {
  std::string text(bytes, '\0');
  std::ifstream file(path, std::ios::binary);
  file.read(text.data(), static_cast<std::streamsize>(bytes));
  text.resize(static_cast<size_t>(file.gcount()));
  return text;
}

TraceAppender::TraceAppender(std::string path)
    : path_(std::move(path)), descriptor_(retried([this] {
        return ::open(path_.c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC | O_NONBLOCK, 0644);
      })) {
  try {
    struct stat status {};
    if (descriptor_ < 0 || retried([&] { return ::flock(descriptor_, LOCK_EX); }) != 0 ||
        ::fstat(descriptor_, &status) != 0)
      fail("cannot write " + path_ + ": " + error_text(errno));
    std::string text(kTraceBegin.size(), '\0');
    const ssize_t bytes = S_ISREG(status.st_mode) ? read_at(text.data(), text.size(), 0) : -1;
    if (bytes < 0 || !is_begin_of_trace(std::string_view(text).substr(0, static_cast<size_t>(bytes))))
      fail(path_ + " is not a trace; nothing was written");
    const int64_t whole_bytes = end_of_lines(status.st_size);
    if (whole_bytes < status.st_size) truncate(whole_bytes);
    bytes_ = end_of_events(whole_bytes);
    has_end_ = bytes_ < whole_bytes;
  } catch (...) {
    if (descriptor_ >= 0) ::close(descriptor_);
    throw;
  }
}

ssize_t TraceAppender::read_at(char* data, size_t bytes, int64_t position) const {
  size_t done = 0;
  ssize_t got = 1;
  while (done < bytes && got > 0) {
    got =
        retried([&] { return ::pread(descriptor_, data + done, bytes - done, position + static_cast<int64_t>(done)); });
    if (got < 0) return got;
    done += static_cast<size_t>(got);
  }
  return static_cast<ssize_t>(done);
}

TraceAppender::~TraceAppender() { ::close(descriptor_); }

void TraceAppender::fail(const std::string& why) const { throw std::runtime_error("TESSERA_TRACE: " + why); }

// Returns the end of the last complete line in the first `bytes` bytes of the file; 0 if there is none.
int64_t TraceAppender::end_of_lines(int64_t bytes) const {
  std::string block(size_t{1} << 12, '\0');
  while (bytes > 0) {
    const int64_t begin = std::max(int64_t{0}, bytes - std::ssize(block));
    const auto count = static_cast<size_t>(bytes - begin);
    if (read_at(block.data(), count, begin) != static_cast<ssize_t>(count))
      fail("cannot read " + path_ + ": " + error_text(errno));
    const auto at = std::string_view(block).substr(0, count).rfind('\n');
    if (at != std::string_view::npos) return begin + static_cast<int64_t>(at) + 1;
    bytes = begin;
  }
  return 0;
}

// Returns the end of the last event in the first `bytes` bytes, without the line kTraceEnd that may follow.
int64_t TraceAppender::end_of_events(int64_t bytes) const {
  std::string expected = "\n";
  expected += kTraceEnd;
  std::string last(expected.size(), '\0');
  const int64_t begin = bytes - std::ssize(last);
  if (begin < 0 || read_at(last.data(), last.size(), begin) != std::ssize(last)) return bytes;
  return last == expected ? bytes - std::ssize(kTraceEnd) : bytes;
}

void TraceAppender::truncate(int64_t bytes) const {
  if (retried([&] { return ::ftruncate(descriptor_, bytes); }) != 0)
    fail("cannot write " + path_ + ": " + error_text(errno));
}

int64_t TraceAppender::number_of(const std::string& run) const {
  const nlohmann::json::json_pointer run_place("/args/run");
  std::vector<nlohmann::json> runs;
  std::ifstream file(path_, std::ios::binary);
  for (std::string line; std::getline(file, line);) {
    if (line.empty() || line.compare(1, kRankBegin.size(), kRankBegin) != 0) continue;
    const auto event = nlohmann::json::parse(line.substr(1), nullptr, /*allow_exceptions=*/false);
    if (!event.contains(run_place)) continue;  // the file was edited, which merge_traces() reports
    if (std::ranges::find(runs, event[run_place]) == runs.end()) runs.push_back(event[run_place]);
  }
  return std::ranges::find(runs, nlohmann::json(run)) - runs.begin();
}

void TraceAppender::append(std::string lines) {
  if (lines.empty()) return;
  if (is_empty()) lines.front() = '[';
  lines += kTraceEnd;
  truncate(bytes_);
  // If append_all() can neither write nor truncate, the next appender removes the incomplete line.
  const auto [error_number, is_whole] = append_all(descriptor_, lines, bytes_);
  if (error_number != 0) {
    if (is_whole && has_end_) append_all(descriptor_, kTraceEnd, bytes_);
    fail("cannot write " + path_ + ": " + error_text(error_number) +
         (is_whole ? "" : "; it ends in a part of an event"));
  }
  bytes_ += std::ssize(lines) - std::ssize(kTraceEnd);
  has_end_ = true;
}

}  // namespace tessera::internal
