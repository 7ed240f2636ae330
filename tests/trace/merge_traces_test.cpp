// Merges traces of several hosts, by the function and by `tessera trace merge`.
#include "core/trace/merge_traces.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <csignal>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "core/trace/trace_file.h"
#include "tests/support/reference.h"
#include "tests/support/temporary_folder.h"
#ifdef TESSERA_COMMAND
#include "tests/support/built.h"
#include "tests/support/child_process.h"
#endif

namespace tessera::merge_traces_test {
using namespace internal;
namespace {

using namespace testing_support;
using nlohmann::ordered_json;

// The first line of a rank. Unix time is steady time plus `boot_s`.
struct Rank {
  std::string run;
  int rank;
  std::string host;
  int64_t offset_ns = 0, error_ns = 0;
  double boot_s = 0;
};

std::string lines_of(const Rank& rank, int64_t pid, const std::vector<std::pair<std::string, double>>& spans) {
  const auto line = [](const ordered_json& event) { return "," + event.dump() + "\n"; };
  const double begin = spans.at(0).second;
  std::string lines = line({{"name", "tessera_trace"},
                            {"ph", "i"},
                            {"pid", pid},
                            {"tid", 0},
                            {"ts", begin},
                            {"args",
                             {{"run", rank.run},
                              {"rank", rank.rank},
                              {"host", rank.host},
                              {"clock", rank.host},
                              {"offset_ns", rank.offset_ns},
                              {"error_ns", rank.error_ns},
                              {"unix_ns", static_cast<int64_t>(begin * 1e3 + rank.boot_s * 1e9)},
                              {"steady_ns", static_cast<int64_t>(begin * 1e3)}}}});
  lines += line({{"name", "process_name"}, {"ph", "M"}, {"pid", pid}, {"tid", 0}, {"args", {{"name", "?"}}}});
  for (const auto& [name, ts] : spans)
    lines += line({{"name", name}, {"ph", "X"}, {"pid", pid}, {"tid", 0}, {"ts", ts}, {"dur", 1.5}});
  return lines;
}

ordered_json json_in(const std::filesystem::path& path) {
  std::ifstream file(path);
  return ordered_json::parse(file);
}

std::vector<std::string> names_in_order(const ordered_json& merged) {
  std::vector<std::pair<double, std::string>> spans;
  for (const auto& event : merged["traceEvents"])
    if (event["ph"] == "X") spans.emplace_back(event["ts"], event["name"]);
  std::sort(spans.begin(), spans.end());
  std::vector<std::string> names;
  for (const auto& [ts, name] : spans) names.push_back(name);
  return names;
}

class MergeTraces : public ::testing::Test {
 protected:
  MergeTraces() {
    // b's clock is an hour behind a's, so the second host has the smallest times.
    TraceAppender(a_).append(lines_of({"one", 0, "a", 0, 0, 100}, 0, {{"first", 4e9}, {"third", 4e9 + 20}}));
    TraceAppender(b_).append(
        lines_of({"one", 1, "b", 3'600'000'000'000, 2'500, 3'700}, 1, {{"second", 4e8 + 10}, {"fourth", 4e8 + 30.25}}));
  }
  std::filesystem::path at(const std::string& name) const { return folder_ / name; }
  void expect_error(const std::vector<std::filesystem::path>& in, const std::vector<std::string>& parts,
                    const std::string& out = "out.json") const {
    try {
      merge_traces(at(out), in);
      ADD_FAILURE() << "was merged; expected " << parts[0];
    } catch (const std::runtime_error& error) {
      for (const auto& part : parts) expect_contains(error.what(), part);
    }
    EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder_.path()), {}), files_) << "left something";
  }
  const TemporaryFolder folder_;
  const std::string a_ = at("a.json"), b_ = at("b.json");
  int files_ = 2;
};

TEST_F(MergeTraces, PutsHostsOnOneClock) {
  const auto merged = merge_traces(at("out.json"), {b_, a_});
  EXPECT_EQ(merged.events, 6);
  ASSERT_EQ(merged.clocks.size(), 2u);
  EXPECT_EQ(merged.clocks[0].host, "b");
  EXPECT_EQ(merged.clocks[0].error_ns, 2'500);
  const auto trace = json_in(at("out.json"));
  EXPECT_EQ(names_in_order(trace), (std::vector<std::string>{"first", "second", "third", "fourth"}));
  for (const auto& event : trace["traceEvents"]) {
    if (event["name"] == "first") {
      EXPECT_EQ(event["ts"], 0);
    }
    if (event["name"] == "fourth") {
      EXPECT_EQ(event["ts"], 30.25);
    }
    if (event["name"] == "process_name") {
      EXPECT_EQ(event["args"]["name"], event["pid"] == 0 ? "rank 0" : "rank 1");
    }
  }
  merge_traces(at("out.json"), {a_});  // a merged trace may be replaced
  EXPECT_EQ(names_in_order(json_in(at("out.json"))), (std::vector<std::string>{"first", "third"}));
}

TEST_F(MergeTraces, RunsFollowEachOtherAsUnixTimeHasIt) {
  // A later run of both ranks, after a reboot of a: its steady clock has restarted, and it is the second run in b's
  // file.
  TraceAppender(at("c.json")).append(lines_of({"two", 0, "a", 0, 0, 9'000}, 0, {{"fifth", 2e6}}));
  {
    TraceAppender b(b_);
    EXPECT_EQ(b.number_of("one"), 0);
    ASSERT_EQ(b.number_of("two"), 1);
    b.append(lines_of({"two", 1, "b", -5'298'000'000'000, 1'000, 3'700}, kPidsOfRun + 1, {{"sixth", 5.3e9 + 5}}));
    EXPECT_EQ(b.number_of("two"), 1);
  }
  merge_traces(at("out.json"), {at("c.json"), b_, a_});
  const auto trace = json_in(at("out.json"));
  EXPECT_EQ(names_in_order(trace), (std::vector<std::string>{"first", "second", "third", "fourth", "fifth", "sixth"}));
  for (const auto& event : trace["traceEvents"]) {
    if (event["name"] == "sixth") {
      EXPECT_EQ(event["pid"], kPidsOfRun + 1);
    }
    if (event["name"] == "process_name" && event["pid"] == kPidsOfRun) {
      EXPECT_EQ(event["args"]["name"], "run 2, rank 0");
    }
  }
}

TEST_F(MergeTraces, WhatIsBrokenIsNamed) {
  auto text = file_bytes(a_);
  text.resize(text.rfind(kTraceEnd));
  expect_error({a_, at("none.json")}, {"none.json"});
  expect_error({a_, a_}, {"rank 0 of the same run is in", "a.json already"});
  expect_error({a_}, {"b.json exists and is no merged trace"}, "b.json");
  ++files_;
  folder_.write("broken.json", "{}");
  expect_error({a_, at("broken.json")}, {"broken.json is not a trace"});
  folder_.write("broken.json", kLfsPointer);
  expect_error({a_, at("broken.json")}, {"broken.json " + kLfsProblem});
  folder_.write("broken.json", "");
  expect_error({at("broken.json")}, {"broken.json is not a trace"});
  folder_.write("broken.json", text + ",{\"name\":\n");
  expect_error({at("broken.json")}, {"broken.json, line 5", "expected ',' and an event"});
  folder_.write("broken.json", text + ",{\"name\":\"x\",\"ph\":\"X\",\"pid\":9,\"ts\":1}\n");
  expect_error({at("broken.json")}, {"broken.json, line 5", "process 9 has no tessera_trace"});
  folder_.write("broken.json", text + ",{\"name\":\"x\",\"ph\":\"X\",\"pid\":0}\n");
  expect_error({at("broken.json")}, {"broken.json, line 5", "'ts' not found"});
  folder_.write("broken.json", text + ",{\"name\":\"x\",\"ph\":\"X\",\"pid\":0,\"ts\":1e300}\n");
  expect_error({at("broken.json")}, {"broken.json, line 5", "'ts' is", "out of range"});
  auto early = text;
  early.insert(early.find("\"steady_ns\""), "\"steady_ns\":-9223372036854775807,\"other_");
  early.erase(early.find("\"other_") + 7, 1);
  folder_.write("broken.json", early);
  expect_error({at("broken.json")}, {"broken.json, line 1", "'steady_ns' is -9223372036854775807", "out of range"});

  folder_.write("broken.json", text.substr(0, text.size() - 9));  // as after a kill
  const auto merged = merge_traces(at("out.json"), {at("broken.json"), b_});
  ASSERT_EQ(merged.notes.size(), 1u);
  expect_contains(merged.notes[0], "broken.json: ends in a part of an event");
  EXPECT_EQ(names_in_order(json_in(at("out.json"))), (std::vector<std::string>{"first", "second", "fourth"}));
  files_ += 1;
  expect_error({at("out.json")}, {"out.json is a merged trace"}, "other.json");
}

TEST_F(MergeTraces, EditedFilesAreAppendedTo) {
  auto text = file_bytes(a_);
  text.resize(text.rfind(kTraceEnd));
  for (const char* line : {"\n", ",\n", ",{\"name\":\"tessera_trace\",\"args\":7}\n",
                           ",{\"name\":\"tessera_trace\",\"args\":{\"run\":7}}\n"}) {
    const TraceAppender appender(folder_.write("edited.json", text + line + std::string(kTraceEnd)));
    EXPECT_EQ(appender.number_of("one"), 0) << line;
  }
}

// A file that may not grow simulates a full disk.
TEST_F(MergeTraces, AppendsAllOrNothingAndToTracesAlone) {
  const auto before = file_bytes(a_);
  rlimit unlimited{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &unlimited), 0);
  auto* const handler = std::signal(SIGXFSZ, SIG_IGN);
  rlimit full = unlimited;
  full.rlim_cur = before.size() + 10;
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &full), 0);
  std::string message;
  try {
    TraceAppender(a_).append(",{\"name\":\"of more than ten bytes\"}\n");
  } catch (const std::runtime_error& error) {
    message = error.what();
  }
  setrlimit(RLIMIT_FSIZE, &unlimited);
  std::signal(SIGXFSZ, handler);
  expect_contains(message, "TESSERA_TRACE: cannot write " + a_);
  EXPECT_EQ(file_bytes(a_), before);

  const auto notes = folder_.write("notes.json", "[{\"name\":\"my only copy\"}");
  EXPECT_FALSE(may_hold_trace(notes));
  EXPECT_THROW(TraceAppender appender(notes), std::runtime_error);
  EXPECT_EQ(file_bytes(notes), "[{\"name\":\"my only copy\"}");
  const auto begun = folder_.write("begun.json", "[{\"name\":\"tess");  // as after a kill during the first line
  EXPECT_TRUE(may_hold_trace(begun));
  TraceAppender appender(begun);
  EXPECT_TRUE(appender.is_empty());
  appender.append(lines_of({"one", 0, "a"}, 0, {{"first", 1.0}}));
  EXPECT_TRUE(file_bytes(begun).starts_with(kTraceBegin)) << file_bytes(begun);
}

#ifdef TESSERA_COMMAND
TEST_F(MergeTraces, IsACommand) {
  const auto run = [](std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), {built(TESSERA_COMMAND), "trace"});
    tessera::testing_support::ChildProcess child(arguments);
    const int code = child.wait();
    return std::pair(code, child.output());
  };
  const auto out = at("out.json").string();
  const auto [code, text] = run({"merge", out, a_, b_});
  EXPECT_EQ(code, 0) << text;
  expect_contains(text, "out.json: 6 events");
  expect_contains(text, "rank 1 on b: clock moved by 3600000000.0 us, right within 2.5 us");
  const auto printed = ordered_json::parse(run({"merge", out, a_, b_, "--json"}).second);
  EXPECT_EQ(printed["clocks"][1]["error_us"], 2.5);
  const std::pair<std::vector<std::string>, const char*> wrong[] = {
      {{"merge", out}, "expected: tessera trace merge OUT IN..."},
      {{"join", out, a_}, "no command 'trace join'"},
  };
  for (const auto& [arguments, message] : wrong) {
    const auto [error_code, error] = run(arguments);
    EXPECT_EQ(error_code, 2) << error;
    expect_contains(error, message);
  }
  expect_contains(run({"merge", "--help"}).second, "tessera trace merge OUT IN...");
}
#endif

}  // namespace
}  // namespace tessera::merge_traces_test
