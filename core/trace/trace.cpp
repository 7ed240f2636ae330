#include "core/trace/trace.h"

#include <c10/util/StringUtil.h>
#include <c10/util/env.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <iomanip>
#include <iostream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <sstream>
#include <system_error>

#include "core/runtime/host.h"
#include "core/trace/trace_file.h"

namespace tessera::internal {
namespace {

using nlohmann::ordered_json;

constexpr size_t kMaxSpans = size_t{1} << 20;  // about 100 MB
constexpr std::chrono::seconds kWriteEvery{1};
constexpr std::array<const char*, 5> kCategories = {"compute", "gather", "reduce", "wait", "optimizer"};

std::atomic<int> rank_of_process = 0;
thread_local int traced_rank = -1;

// Concurrent operations would overlap on one line of the display. So each kind of operation gets as many lines (the
// "threads" of the viewer) as necessary, numbered from these constants.
constexpr int kGatherLines = 100, kReduceLines = 200;

bool is_in_flight(SpanKind kind) { return kind == SpanKind::kGather || kind == SpanKind::kReduce; }

std::string name_of_line(int line) {
  if (line == 0) return "thread of the rank";
  return line < kReduceLines ? c10::str("gathers ", line - kGatherLines + 1)
                             : c10::str("reduces ", line - kReduceLines + 1);
}

double microseconds(Trace::Clock::duration duration) {
  return std::chrono::duration<double, std::micro>(duration).count();
}

ordered_json name_event(const char* what, int64_t pid, int line, const std::string& name) {
  return {{"name", what}, {"ph", "M"}, {"pid", pid}, {"tid", line}, {"args", {{"name", name}}}};
}

// Returns an instant event at the current time, on the line of a rank's thread.
ordered_json mark(std::string_view name, int64_t pid, ordered_json args) {
  const double ts = microseconds(Trace::Clock::now().time_since_epoch());
  return {{"name", name}, {"cat", "tessera"}, {"ph", "i"}, {"s", "p"},
          {"ts", ts},     {"pid", pid},       {"tid", 0},  {"args", std::move(args)}};
}

std::string line_of(const ordered_json& event) {
  // Names may contain any bytes, so invalid UTF-8 is replaced.
  std::string line = ",";
  line += event.dump(-1, ' ', false, ordered_json::error_handler_t::replace);
  return line += '\n';
}

// Returns a rank's first event, with the rank's clock offset and the current time by the Unix and the steady clock.
ordered_json rank_event(int rank, int64_t pid, const Trace::Run& run) {
  const auto unix_time = std::chrono::system_clock::now().time_since_epoch();
  return mark("tessera_trace", pid,
              {{"run", run.id},
               {"rank", rank},
               {"host", host_name()},
               {"process", ::getpid()},
               {"clock", Trace::clock_id()},
               {"offset_ns", run.offset_ns},
               {"error_ns", run.error_ns},
               {"unix_ns", std::chrono::nanoseconds(unix_time).count()},
               {"steady_ns", std::chrono::nanoseconds(Trace::Clock::now().time_since_epoch()).count()}});
}

std::string make_clock_id() {
  const std::string boot = boot_id();
  if (boot.empty()) return c10::str(host_name(), "/", ::getpid());  // without a boot id, assumes one clock per process
  // Adds the time namespace, because a container may have its own steady clock.
  std::error_code error;
  const auto space = std::filesystem::read_symlink("/proc/self/ns/time", error);
  return boot + "/" + (error ? "" : space.string());
}

}  // namespace

const std::string& Trace::clock_id() {
  static const auto* const id = new std::string(make_clock_id());  // never destroyed: the exit handler reads it
  return *id;
}

std::string Trace::new_run_id() {
  std::ostringstream text;
  text << std::hex << std::setfill('0') << std::setw(16) << random_bits() << std::setw(16) << random_bits();
  return text.str();
}

Trace::Trace(std::string path) : path_(std::move(path)), process_(::getpid()), run_{new_run_id()} {
  // Blocks signals in the writer thread, so that the program's own threads handle them.
  sigset_t all, before;
  sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  writer_ = std::thread([this] { write_every_second(); });
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

Trace* Trace::make() noexcept {
  const auto path = c10::utils::get_env("TESSERA_TRACE").value_or("");
  if (path.empty()) return nullptr;
  try {
    if (!may_hold_trace(path)) {
      std::cerr << "TESSERA_TRACE: " << path << " is not a trace; it is left as it is, and none is written\n";
      return nullptr;
    }
    static auto* const trace = new Trace(path);  // never destroyed: destructors of statics may add spans
    std::atexit([] { trace->finish(); });
    return trace;
  } catch (const std::exception& error) {
    std::cerr << "TESSERA_TRACE: no trace is written: " << error.what() << "\n";
    return nullptr;
  }
}

void Trace::write_every_second() noexcept {
  bool fails = false;
  for (;;) {
    {
      std::unique_lock lock(mutex_);
      if (ends_.wait_for(lock, kWriteEvery, [this] { return has_ended_; })) return;
    }
    try {
      write();
      fails = false;
    } catch (const std::exception& error) {
      if (!std::exchange(fails, true)) std::cerr << error.what() << "; it is tried again\n";
    }
  }
}

void Trace::finish() noexcept {
  if (::getpid() != process_) return;
  {
    const std::lock_guard lock(mutex_);
    has_ended_ = true;
  }
  ends_.notify_all();
  try {
    writer_.join();
    write();
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
  }
}

void Trace::set_rank_of_thread(int rank) noexcept { traced_rank = rank; }

void Trace::set_rank_of_process(int rank) noexcept {
  rank_of_process = rank;
  active();
}

void Trace::join(Run run) {
  const std::lock_guard lock(mutex_);
  run_ = std::move(run);
}

void Trace::add(SpanKind kind, std::string_view name, const char* operation, Clock::time_point begin,
                Clock::time_point end) {
  const int rank = traced_rank >= 0 ? traced_rank : rank_of_process.load();
  std::lock_guard lock(mutex_);
  if (spans_.size() >= kMaxSpans) {
    ++dropped_;
    return;
  }
  spans_.push_back({kind, rank, std::string(name), operation, begin, end});
}

std::string Trace::text_of(const std::vector<Span>& spans, int64_t dropped, const Run& run, Written& written) const {
  const int64_t first_pid = written.run_number * kPidsOfRun;
  std::string text;
  for (const Span& span : spans) {
    const int64_t pid = first_pid + span.rank;
    if (written.ranks.insert(span.rank).second) {
      text += line_of(rank_event(span.rank, pid, run));
      const std::string of_run = written.run_number == 0 ? "" : c10::str("run ", written.run_number + 1, ", ");
      text += line_of(name_event("process_name", pid, 0, c10::str(of_run, "rank ", span.rank)));
    }
    int line = 0;
    // Uses the first line that is free: its last span, perhaps of an earlier write(), has ended when this span begins.
    if (is_in_flight(span.kind)) {
      line = span.kind == SpanKind::kGather ? kGatherLines : kReduceLines;
      for (auto used = written.lines.find({span.rank, line}); used != written.lines.end() && used->second > span.begin;)
        used = written.lines.find({span.rank, ++line});
    }
    if (written.lines.insert_or_assign({span.rank, line}, span.end).second)
      text += line_of(name_event("thread_name", pid, line, name_of_line(line)));
    ordered_json event = {{"name", span.name},
                          {"cat", kCategories.at(static_cast<size_t>(span.kind))},
                          {"ph", "X"},
                          {"pid", pid},
                          {"tid", line},
                          {"ts", microseconds(span.begin.time_since_epoch())},
                          {"dur", microseconds(span.end - span.begin)}};
    if (span.operation != nullptr) event["args"] = {{"operation", span.operation}};
    text += line_of(event);
  }
  if (dropped > 0) text += line_of(mark("spans dropped", first_pid + spans.front().rank, {{"spans", dropped}}));
  return text;
}

void Trace::write() {
  const std::lock_guard lock_of_state(file_mutex_);
  std::vector<Span> spans;
  int64_t dropped = 0;
  Run run;
  {
    const std::lock_guard lock(mutex_);
    if (spans_.empty()) return;
    spans.swap(spans_);
    dropped = std::exchange(dropped_, 0);
    run = run_;
  }
  try {
    // Sorts by start time. If two spans start together, the longer one, the parent, precedes the nested one.
    std::ranges::stable_sort(
        spans, [](const Span& a, const Span& b) { return std::pair(a.begin, b.end) < std::pair(b.begin, a.end); });
    TraceAppender file(path_);
    Written written = file.is_empty() || run.id != written_run_ ? Written() : written_;
    if (written.run_number < 0) written.run_number = file.number_of(run.id);
    file.append(text_of(spans, dropped, run, written));
    written_ = std::move(written);
    written_run_ = run.id;
  } catch (...) {
    const std::lock_guard lock(mutex_);
    spans_.insert(spans_.begin(), std::make_move_iterator(spans.begin()), std::make_move_iterator(spans.end()));
    dropped_ += dropped;
    throw;
  }
}

}  // namespace tessera::internal
