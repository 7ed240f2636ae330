// Times of steps written by hand, which are known exactly, and of real ones.
#include <sys/stat.h>

#include <array>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include <tessera/launch.h>
#include <tessera/plan/machine_speed.h>
#include <tessera/plan/measured_step.h>
#include <tessera/plan/memory_plan.h>
#include <tessera/plan/step_time.h>
#include <tessera/plan/timeline_page.h>
#include "plan/calibrate/calibrate.h"
#include "plan/calibrate/calibrate_operators.h"
#include "plan/report/timeline_data.h"
#include "tests/plan/models.h"
#include "tests/plan/page.h"
#include "tests/plan/script.h"
#include "tests/support/reference.h"
#include "tests/support/temporary_folder.h"

namespace tessera::step_time_test {
using namespace internal;
namespace {

using namespace plan_tests;
using namespace testing_support;

TEST(StepTime, OperatorsFollowEachOther) {
  Script script;
  script.compute(2);
  script.record.operators.push_back({.name = "aten::add", .step = 1, .bytes = 3 * kGB});
  script.record.operators.push_back(
      {.name = "aten::mm", .step = 1, .flop = 1'000'000, .bytes = 4 * kGB});  // mostly reads
  MachineSpeed speed = plain();
  speed.operator_s = 0.5;
  const StepTime time = predict_step(script.record, speed);
  EXPECT_NEAR(time.total_s, 2 + 3 + 4 + 3 * 0.5, kExact);
  EXPECT_NEAR(time.compute_s, time.total_s, kExact);
  EXPECT_NEAR(time.exposed_s, 0, kExact);
  ASSERT_EQ(time.intervals.size(), 3U);
  EXPECT_EQ(time.intervals[1].name, "aten::add");
  EXPECT_NEAR(time.intervals[1].begin_s, 2.5, kExact);
  EXPECT_NEAR(time.intervals[1].end_s, 6, kExact);
}

// Uses the operator's own curve if known, in fp32; work without kernel time takes the cost of every operator.
TEST(StepTime, NamedOperatorsHaveTheirOwnSpeed) {
  MachineSpeed speed = plain();
  speed.operator_s = 0.5;
  speed.operators["aten::gelu"] = {0, SpeedCurve::of_speed(0.25e9)};
  speed.operators["aten::mm"] = {1000, SpeedCurve::of_speed(2e12)};  // a byte counts as a thousand FLOP
  RecordedOperator gelu{.name = "aten::gelu", .step = 1, .bytes = kGB};
  EXPECT_NEAR(speed.seconds_of(gelu), 4.5, kExact);
  gelu.dtype = c10::ScalarType::BFloat16;
  EXPECT_NEAR(speed.seconds_of(gelu), 1.5, kExact);
  EXPECT_NEAR(speed.seconds_of({.name = "aten::mm", .flop = 4'000'000'000'000, .bytes = kGB}), 3, kExact);
  EXPECT_NEAR(speed.seconds_of({.name = "aten::gelu"}), 0.5, kExact);
}

// A page draws consecutive operators of a unit as one, and each collective.
TEST(StepTime, IsDrawnByUnit) {
  Script script;
  script.record.units = {"", "blocks.0"};
  script.compute(1);
  for (const bool in_backward : {false, false, true}) {
    script.compute(1);
    script.record.operators.back().unit = 1;
    script.record.operators.back().in_backward = in_backward;
  }
  script.wait(script.start("all-reduce", 4 * kGB));
  const auto lanes = lanes_of(predict_step(script.record, plain()));
  ASSERT_EQ(lanes.size(), 2U);
  const auto& compute = lanes[0]["intervals"];
  ASSERT_EQ(compute.size(), 3U);
  EXPECT_EQ(compute[0]["name"], "outside of units");
  EXPECT_EQ(compute[1]["name"], "blocks.0");
  EXPECT_EQ(compute[1]["operators"], 2);
  EXPECT_NEAR(compute[1]["end_ms"].get<double>(), 3000, 1e-6);
  EXPECT_TRUE(compute[2]["backward"].get<bool>());
  EXPECT_EQ(lanes[1]["intervals"][0]["name"], "all-reduce of x");
  EXPECT_NEAR(lanes[1]["intervals"][0]["end_ms"].get<double>(), 8000, 1e-6);
}

TEST(StepTime, WhatOverlapsIsWhatLiesBetweenStartAndWait) {
  Script at_once, later, never;
  at_once.wait(at_once.start("all-gather", 8 * kGB));  // 4 s
  at_once.compute(3);
  later.start("all-gather", 8 * kGB);
  later.compute(3);
  later.wait(0);
  never.start("all-gather", 8 * kGB);
  never.compute(3);
  EXPECT_NEAR(predict_step(at_once.record, plain()).total_s, 7, kExact);
  EXPECT_NEAR(predict_step(at_once.record, plain()).exposed_s, 4, kExact);
  EXPECT_NEAR(predict_step(later.record, plain()).total_s, 4, kExact);
  EXPECT_NEAR(predict_step(later.record, plain()).exposed_s, 1, kExact);
  EXPECT_NEAR(predict_step(never.record, plain()).total_s, 3, kExact);
  EXPECT_NEAR(predict_step(never.record, plain()).communication_s, 4, kExact);
}

// The second collective begins when the first ends, whatever is computed; a wait between two starts delays the second.
TEST(StepTime, CollectivesAreInTheOrderOfStarts) {
  Script script;
  const size_t first = script.start("all-gather", 8 * kGB), second = script.start("reduce-scatter", 4 * kGB);
  script.compute(1);
  script.wait(first);
  script.compute(1);
  script.wait(second);
  const StepTime time = predict_step(script.record, plain());
  EXPECT_NEAR(time.total_s, 6, kExact);  // 4 + 2; compute ends at 5
  EXPECT_NEAR(time.exposed_s, 4, kExact);
  const TimedInterval& last = time.intervals.back();
  EXPECT_EQ(last.name, "reduce-scatter of x");
  EXPECT_NEAR(last.begin_s, 4, kExact);

  Script held;
  held.wait(held.start("all-gather", 8 * kGB, 2, {0, 1}));
  held.start("all-gather", 8 * kGB, 2, {0, 2});  // between hosts: a separate lane, but not before 4
  held.wait(1);
  MachineSpeed two_hosts = plain();
  two_hosts.ranks_per_host = 2;
  two_hosts.between_hosts.bytes_per_s = 4e9;
  EXPECT_NEAR(predict_step(held.record, two_hosts).total_s, 5, kExact);
  std::swap(held.record.collectives[0].wait, held.record.collectives[1].wait);
  held.record.collectives[0].wait = held.record.collectives[1].wait = RecordedWait{1, 0, 2};
  EXPECT_NEAR(predict_step(held.record, two_hosts).total_s, 4, kExact);  // concurrent
}

TEST(StepTime, ComputeIsSlowerWhileSomethingIsCommunicated) {
  Script script;
  script.start("all-gather", 8 * kGB);  // 4 s, in which 1 s of work is done
  script.compute(3);
  MachineSpeed speed = plain();
  speed.lost_to_communication = 0.75;
  EXPECT_NEAR(predict_step(script.record, speed).total_s, 6, kExact);
  speed.lost_to_communication = 1;
  EXPECT_NEAR(predict_step(script.record, speed).compute_s, 7, kExact);
}

// Flat products take longer than square ones with equal FLOP, whichever shape dominated the calls.
TEST(OperatorSpeed, IsFoundFromCallsOfAnyShape) {
  constexpr double kFlops = 1e11, kBytesPerS = 1e10;
  const auto call = [](double m, double n, double k) {
    const double flop = 2 * m * n * k, bytes = 4 * (m * n + n * k + k * m);
    return TimedKernel{flop, bytes, 1e-6 + flop / kFlops + bytes / kBytesPerS};
  };
  std::vector<TimedKernel> calls;
  for (const double n : {32, 48, 100, 160, 300, 512})
    for (const double m : {16, 64, 200}) calls.push_back(call(m, n, 4 * n)), calls.push_back(call(n, n, n));
  const OperatorSpeed speed = speed_through(calls);
  EXPECT_NEAR(speed.flop_per_byte, kFlops / kBytesPerS, 0.01 * kFlops / kBytesPerS);
  for (const auto& [m, n, k] : {std::array{8., 700., 700.}, {256., 256., 256.}, {40., 128., 1000.}}) {
    const TimedKernel other = call(m, n, k);
    EXPECT_NEAR(speed.curve.seconds_of(speed.work_of(other.flop, other.bytes)), other.seconds, 0.05 * other.seconds);
  }
  // One shape gives no information on bytes; operators without FLOP use bytes.
  const OperatorSpeed one = speed_through({call(8, 8, 8), call(8, 8, 8)});
  EXPECT_NEAR(one.curve.seconds_of(one.work_of(1024, 768)), call(8, 8, 8).seconds, 1e-9);
  EXPECT_NEAR(speed_through({{0, 1000, 1e-3}}).curve.seconds_of(2000), 2e-3, kExact);
}

// Collectives left in flight by a step delay the next.
TEST(StepTime, StepsGoOnIntoEachOther) {
  Script script;
  script.step = 0;
  script.compute(100);  // the constructor
  script.step = 1;
  script.compute(1);
  const size_t left = script.start("broadcast", 3 * kGB);  // 1 to 4
  script.step = 2;
  script.compute(1);
  script.wait(left);
  script.compute(1);
  const StepTime time = predict_step(script.record, plain());
  EXPECT_NEAR(time.total_s, 4, kExact);
  EXPECT_NEAR(time.exposed_s, 2, kExact);
  EXPECT_NEAR(time.communication_s, 0, kExact);
  EXPECT_NEAR(predict_step(script.record, plain(), 1).total_s, 1, kExact);
  expect_contains(error_of<std::invalid_argument>([&] { predict_step(script.record, plain(), 3); }), "step 3");
}

TEST(CollectiveTime, OfOneLevelAndOfTwo) {
  MachineSpeed speed = plain();
  speed.within_host = {1, 1e9, 0.5e9};
  const auto seconds = [&](const std::string& operation, int ranks, std::vector<int> members = {}) {
    Script script;
    script.start(operation, 16 * kGB, ranks, std::move(members));
    return time_of(script.record.collectives[0], speed).seconds;
  };
  EXPECT_NEAR(seconds("all-gather", 2), 1 + 8, kExact);
  EXPECT_NEAR(seconds("all-gather", 8), 3 + 14, kExact);
  EXPECT_NEAR(seconds("reduce-scatter", 8), 3 + 28, kExact);
  EXPECT_NEAR(seconds("all-reduce", 8), 6 + 14 + 28, kExact);
  EXPECT_NEAR(seconds("broadcast", 5), 3 + 16, kExact);
  EXPECT_NEAR(seconds("reduce", 5), 3 + 32, kExact);
  speed.ranks_per_host = 4;
  expect_contains(error_of<std::invalid_argument>([&] { seconds("all-gather", 8); }), "between hosts");
  speed.between_hosts = {10, 0.25e9, 0};
  EXPECT_NEAR(seconds("all-gather", 4), 2 + 12, kExact);
  EXPECT_NEAR(seconds("all-gather", 8), (2 + 12) + (10 + 4 / 2 / 0.25), kExact);
  EXPECT_NEAR(seconds("all-gather", 2, {0, 4}), 10 + 16 / 2 / 0.25, kExact);
  EXPECT_NEAR(seconds("all-gather", 2, {4, 6}), 1 + 8, kExact);
  expect_contains(error_of<std::invalid_argument>([&] { seconds("gossip", 2); }), "gossip");
}

TEST(SpeedCurve, GoesThroughItsPoints) {
  const SpeedCurve curve({{10, 2}, {20, 3}, {100, 11}});
  EXPECT_NEAR(curve.seconds_of(5), 1, kExact);
  EXPECT_NEAR(curve.seconds_of(15), 2.5, kExact);
  EXPECT_NEAR(curve.seconds_of(20), 3, kExact);
  EXPECT_NEAR(curve.seconds_of(200), 22, kExact);
  expect_contains(error_of<std::invalid_argument>([] { SpeedCurve({{2, 1}, {1, 2}}); }), "growing");
  expect_contains(error_of<std::invalid_argument>([] { SpeedCurve::of_speed(0); }), "above 0");
}

TEST(SpeedFile, IsReadBackAndRefusedByName) {
  const TemporaryFolder folder;
  const auto file = folder.path() / "speed.json";
  MachineSpeed speed = plain();
  speed.work_16bit[0] = SpeedCurve({{1e6, 1e-5}, {1e9, 0.125}});
  speed.operators["aten::mm"] = {7.5, SpeedCurve({{3e3, 1e-6}, {5e5, 1e-3}})};
  speed.operator_s = 3e-6;
  speed.between_hosts = {1e-5, 5e10, 4e10};
  speed.ranks_per_host = 8;
  speed.lost_to_communication = 0.25;
  speed.cores = 2;
  speed.wake_s = 5e-5;
  speed.jitter = 0.125;
  speed.tcp = {2e-5, 1.5e9, 1e9};
  write_speed(speed, file);
  const MachineSpeed read = read_speed(file);
  for (size_t i = 0; i < kWorkClasses; ++i) {
    EXPECT_EQ(read.work[i].points(), speed.work[i].points());
    EXPECT_EQ(read.work_16bit[i].points(), speed.work_16bit[i].points());
  }
  ASSERT_EQ(read.operators.size(), 1U);
  EXPECT_EQ(read.operators.at("aten::mm").curve.points(), speed.operators.at("aten::mm").curve.points());
  EXPECT_EQ(read.operators.at("aten::mm").flop_per_byte, 7.5);
  EXPECT_EQ(read.operator_s, speed.operator_s);
  EXPECT_EQ(read.within_host, speed.within_host);
  EXPECT_EQ(read.between_hosts, speed.between_hosts);
  EXPECT_EQ(read.ranks_per_host, 8);
  EXPECT_EQ(read.lost_to_communication, 0.25);
  EXPECT_EQ(read.cores, 2);
  EXPECT_EQ(read.wake_s, 5e-5);
  EXPECT_EQ(read.jitter, 0.125);
  EXPECT_EQ(read.tcp, speed.tcp);

  const std::string good = [&] {
    std::ifstream stream(file);
    return std::string(std::istreambuf_iterator<char>(stream), {});
  }();
  const auto refused = [&](const std::string& from, const std::string& to) {
    std::string text = good;
    EXPECT_NE(text.find(from), std::string::npos) << from;
    std::ofstream(file) << text.replace(text.find(from), from.size(), to);
    const std::string error = error_of<std::invalid_argument>([&] { read_speed(file); });
    expect_contains(error, file.string());
    return error;
  };
  expect_contains(refused("\"operator_s\"", "\"operators\""), "'operator_s' is missing");
  expect_contains(refused("\"version\"", "\"extra\": 1, \"version\""), "'extra' is not known");
  expect_contains(refused("\"version\": 3", "\"version\": 9"), "9");
  expect_contains(refused("\"version\": 3", "\"version\": 2"), "'cores' is not known");
  expect_contains(refused("\"cores\": 2", "\"cores\": 1.5"), "'cores' is 1.5");
  auto older = nlohmann::json::parse(good);
  older["version"] = 2;
  for (const char* name : {"cores", "wake_s", "jitter", "tcp"}) older.erase(name);
  std::ofstream(file) << older;
  EXPECT_EQ(read_speed(file).cores, 0);
  EXPECT_EQ(read_speed(file).between_hosts, speed.between_hosts);
  expect_contains(refused("\"latency_s\": 0.0", "\"latency_s\": -1"), "'within_host.latency_s' is -1");
  expect_contains(refused("\"lost_to_communication\": 0.25", "\"lost_to_communication\": 2"), "0 to 1");
  expect_contains(refused("1000000.0", "0"), "'work_16bit.matmul'");
  expect_contains(refused("\"flop_per_byte\": 7.5", "\"flop_per_byte\": -1"),
                  "'operators.aten::mm.flop_per_byte' is -1");
  refused("{", "");
  expect_contains(refused(good, kLfsPointer), kLfsProblem);
  expect_contains(error_of<std::invalid_argument>([&] { read_speed(folder.path() / "none.json"); }), "none.json");
  EXPECT_DOUBLE_EQ(bytes_per_s_of_text("3e12"), 3e12);
  EXPECT_DOUBLE_EQ(seconds_of_text("10us"), 10e-6);
  for (const char* wrong : {"-1s", "10"})
    expect_contains(error_of<std::invalid_argument>([&] { seconds_of_text(wrong); }), wrong);
}

// As in data sheets.
TEST(SpeedText, IsUnderstoodInBitsAndBytes) {
  for (const char* text : {"400Gbit", "400Gb/s", "400Gbit/s", "400 Gb/s", "400Gbps", "50GB/s", "50 GB", "0.05TB/s"})
    EXPECT_DOUBLE_EQ(bytes_per_s_of_text(text), 50e9) << text;
  EXPECT_DOUBLE_EQ(bytes_per_s_of_text("2GiB/s"), 0x1p31);
  for (const char* text : {"300e12", "300TFLOP/s", "300 TFLOPS", "0.3PFLOP"})
    EXPECT_DOUBLE_EQ(flop_per_s_of_text(text), 300e12) << text;
  for (const char* text : {"400", "0", "999999", "400gb/s", "400Gb/h", "400/s", "/s", "Gb/s", "0GB/s", "-1GB/s",
                           "1e400GB/s", "1e308GB/s", "80GB //s"})
    EXPECT_THROW(bytes_per_s_of_text(text), std::invalid_argument) << text;
  for (const char* text : {"300", "300GB/s", "300Tbit", "0", "300TFLOP/h", "1e308TFLOP"})
    EXPECT_THROW(flop_per_s_of_text(text), std::invalid_argument) << text;
  EXPECT_EQ(bytes_of_text("80GiB"), int64_t{80} << 30);
  EXPECT_EQ(bytes_of_text("80 GiB"), int64_t{80} << 30);
  EXPECT_THROW(bytes_of_text("80GB/s"), std::invalid_argument);
  EXPECT_EQ(bytes_of_text("8B"), 8);
  EXPECT_EQ(bytes_of_text("1048576"), 1 << 20);
  EXPECT_THROW(bytes_of_text("0.4B"), std::invalid_argument);
  for (const char* text : {"8", "80", "999999"})  // means another unit
    EXPECT_THROW(bytes_of_text(text), std::invalid_argument) << text;
}

// A file of TESSERA_TRACE with steps of these microseconds, half of each in a unit's compute.
void write_trace(const std::filesystem::path& file, const std::vector<int>& steps_us, int64_t pid = 0) {
  std::ofstream stream(file, std::ios::app);
  if (stream.tellp() == 0) stream << R"([{"name":"tessera_trace","ph":"i","pid":0,"tid":0,"args":{"rank":0}})" << "\n";
  int64_t at = 1000000;
  const auto span = [&](const char* category, const char* name, const char* operation, int64_t begin, int64_t us) {
    stream << R"(,{"name":")" << name << R"(","cat":")" << category << R"(","ph":"X","pid":)" << pid
           << R"(,"tid":0,"ts":)" << begin << R"(,"dur":)" << us << R"(,"args":{"operation":")" << operation
           << "\"}}\n";
  };
  for (const int us : steps_us) {
    span("compute", "unit 'a'", "forward", at, us / 4);
    span("gather", "unit 'a'", "all-gather", at, us / 8);
    span("wait", "unit 'a'", "all-gather", at, us / 16);
    span("compute", "unit 'a'", "backward", at + us / 4, us / 4);
    span("optimizer", "AdamW", "", at + us / 2, us / 2);
    span("optimizer", "within", "", at + us / 2, us / 4);
    at += us;
  }
}

TEST(MeasuredStep, IsTheMedianOfATrace) {
  const TemporaryFolder folder;
  const auto file = folder.path() / "trace.json";
  write_trace(file, {16000, 16000, 16000, 16000});
  constexpr int64_t kSecondRun = 1000000;
  write_trace(file, {64000, 1600, 3200, 4800}, kSecondRun);
  const MeasuredStep step = measured_step(file, 0);
  EXPECT_EQ(step.steps, 3);
  EXPECT_NEAR(step.total_s, 3.2e-3, 1e-9);
  EXPECT_NEAR(step.wait_s, 0.2e-3, 1e-9);
  ASSERT_EQ(step.intervals.size(), 5U);  // the optimizer once
  EXPECT_EQ(step.intervals.back().name, "optimizer");
  EXPECT_NEAR(step.intervals.back().begin_s, 1.6e-3, 1e-9);
  const auto refused = [&](const std::filesystem::path& path, int rank) {
    return error_of<std::invalid_argument>([&] { measured_step(path, rank); });
  };
  expect_contains(refused(file, 1), "has 0 steps of rank 1");
  expect_contains(refused(folder.path() / "none.json", 0), "none.json cannot be read");
  ASSERT_EQ(::mkfifo((folder.path() / "pipe.json").c_str(), 0600), 0);
  expect_contains(refused(folder.path() / "pipe.json", 0), "pipe.json cannot be read");
  std::ofstream(folder.path() / "other.json") << "{}\n";
  expect_contains(refused(folder.path() / "other.json", 0), "is not a trace");
  expect_contains(refused(folder.write("pointer.json", kLfsPointer), 0), "pointer.json " + kLfsProblem);
  for (const char* line :
       {R"(,{"ph":7})", R"(,{"ph":"X","pid":1000000,"ts":"1"})", R"(,{"ph":"X","pid":1000000,"args":[]})"}) {
    std::filesystem::copy_file(file, folder.path() / "edited.json", std::filesystem::copy_options::overwrite_existing);
    std::ofstream(folder.path() / "edited.json", std::ios::app) << line << "\n";
    expect_contains(refused(folder.path() / "edited.json", 0), "edited.json is damaged: ");
  }
}

// Without a traced optimizer, the last backward of a step is unknown.
TEST(MeasuredStep, RefusesATraceWithoutOptimizers) {
  const TemporaryFolder folder;
  const auto file = folder.path() / "trace.json";
  write_trace(file, {1600, 1600, 1600});
  std::ifstream all(file);
  std::ofstream others(folder.path() / "others.json");
  for (std::string line; std::getline(all, line);)
    if (line.find("optimizer") == std::string::npos) others << line << "\n";
  others.close();
  expect_contains(error_of<std::invalid_argument>([&] { measured_step(folder.path() / "others.json", 0); }),
                  "has computing of rank 0 but no optimizer");
}

// Compute by unit, without its waits; the largest difference first.
TEST(MeasuredStep, IsComparedByName) {
  const TemporaryFolder folder;
  const auto file = folder.path() / "trace.json";
  write_trace(file, {1600, 1600, 1600});
  StepTime predicted{.total_s = 1e-3, .compute_s = 0.9e-3, .exposed_s = 0.1e-3};
  predicted.intervals = {{"aten::mm", Lane::kCompute, 0, 0.3e-3, "unit 'a'", false},
                         {"aten::mm", Lane::kCompute, 0.3e-3, 0.7e-3, "unit 'a'", true},
                         {"aten::_fused_adamw_", Lane::kCompute, 0.7e-3, 0.9e-3, "unit 'a'", false},
                         {"all-gather of unit 'a'", Lane::kWithinHost, 0, 0.2e-3}};
  const MeasuredStep measured = measured_step(file, 0);
  const auto data = data_of_page(timeline_page({}, {.time = &predicted, .measured_time = &measured}))["measured_time"];
  std::map<std::string, std::pair<double, double>> times;
  for (const auto& one : data["differences"])
    times[one["name"]] = {one["predicted_ms"].get<double>(), one["measured_ms"].get<double>()};
  const auto expect = [&](const std::string& name, double predicted_ms, double measured_ms) {
    ASSERT_TRUE(times.contains(name)) << name;
    EXPECT_NEAR(times[name].first, predicted_ms, 1e-6) << name;
    EXPECT_NEAR(times[name].second, measured_ms, 1e-6) << name;
  };
  expect("unit 'a'", 0.3, 0.4 - 0.1);
  expect("unit 'a', in backward", 0.4, 0.4);
  expect("optimizer", 0.2, 0.8);
  expect("all-gather of unit 'a'", 0.2, 0.2);
  expect("waits", 0.1, 0.1);
  EXPECT_EQ(data["differences"][0]["name"], "optimizer");
  EXPECT_TRUE(data["differences"][0]["is_large"].get<bool>());
  EXPECT_FALSE(data["differences"][1]["is_large"].get<bool>());
}

TEST(MeasuredStep, DrawsTheLongestIntervalsOfALane) {
  MeasuredStep measured{.total_s = 3};
  for (int i = 0; i < 2500; ++i)
    measured.intervals.push_back({MeasuredInterval::Kind::kWait, std::to_string(i), i * 1e-3, i * 1e-3 + i * 1e-7});
  const auto lanes = measured_time_of({}, measured)["lanes"];
  ASSERT_EQ(lanes.size(), 1U);
  ASSERT_EQ(lanes[0]["intervals"].size(), 2000U);
  EXPECT_EQ(lanes[0]["intervals"][0]["name"], "500");
  EXPECT_EQ(lanes[0]["intervals"][1999]["name"], "2499");
}

RunRecord dry_gpt(int prefetch, int world, HybridSharding hybrid = {}) {
  return dry_run(
      [&](std::shared_ptr<Communicator> comm) {
        return zero(
            plan_tests::Gpt(), torch::optim::AdamWOptions(1e-3), std::move(comm),
            {.stage = 3,
             .fsdp = {.auto_wrap = wrap_modules<plan_tests::BlockImpl>(), .prefetch = prefetch, .hybrid = hybrid}});
      },
      [](auto& model) {
        model.optimizer().zero_grad();
        const auto tokens = torch::zeros({2, 24}, at::kLong);
        torch::cross_entropy_loss(model(tokens), tokens.flatten()).backward();
        model.step();
      },
      {.world_size = world});
}

// Starts and waits of a real program: prefetched gathers overlap compute, others do not.
TEST(StepTime, OfARealStepFollowsItsPrefetching) {
  MachineSpeed speed = plain();
  speed.work[0] = SpeedCurve::of_speed(1e9);
  speed.within_host = {1e-6, 1e8, 1e8};
  const StepTime behind = predict_step(dry_gpt(0, 4), speed), ahead = predict_step(dry_gpt(1, 4), speed);
  EXPECT_NEAR(behind.compute_s, ahead.compute_s, 1e-9);
  EXPECT_NEAR(behind.communication_s, ahead.communication_s, 1e-9);
  EXPECT_LT(ahead.total_s, behind.total_s - 1e-4);
  EXPECT_GE(ahead.total_s, std::max(ahead.compute_s, 0.0));
  EXPECT_LE(behind.total_s, behind.compute_s + behind.communication_s + 1e-9);

  const RunRecord hybrid = dry_gpt(1, 4, {.ranks_per_copy = 2});
  std::set<std::vector<int>> groups;
  for (const RecordedCollective& collective : hybrid.collectives)
    if (collective.members) groups.insert(*collective.members);
  EXPECT_TRUE(groups.contains({0, 1}));
  EXPECT_TRUE(groups.contains({0, 2}));
  for (const RecordedCollective& collective : hybrid.collectives)
    EXPECT_TRUE(collective.wait.has_value()) << collective.what;
}

// Threads of one machine without shared memory represent hosts.
TEST(StepTime, TheLinkBetweenHostsIsMeasured) {
  MachineSpeed machine = plain();
  machine.cores = 1;
  machine.tcp = {1e-6, 2e9, 1e9};
  const InitOptions by_tcp{.peer_memory = false};
  std::vector<MachineSpeed> found(3);
  run_ranks(
      3,
      [&](const std::shared_ptr<Communicator>& comm) {
        const auto rank = static_cast<size_t>(comm->rank());
        found[rank] = calibrate_hosts(rank == 0 ? machine : MachineSpeed(), comm, {.quick = true});
      },
      by_tcp);
  for (const MachineSpeed& each : found) {
    EXPECT_GT(each.between_hosts.latency_s, 0);
    EXPECT_GT(each.between_hosts.bytes_per_s, 1e6);
    EXPECT_GT(each.tcp.bytes_per_s, 1e6);
    EXPECT_LE(each.tcp.reduced_bytes_per_s, each.tcp.bytes_per_s);
    EXPECT_EQ(each.between_hosts, found[0].between_hosts);
    EXPECT_EQ(each.tcp, found[0].tcp);
  }
  EXPECT_EQ(found[0].tcp.latency_s, 1e-6);
  EXPECT_EQ(found[0].cores, 1);

  const auto refusal = [&](int world, const MachineSpeed& speed) {
    return error_of<std::invalid_argument>(
        [&] { run_ranks(world, [&](const auto& comm) { calibrate_hosts(speed, comm, {.quick = true}); }, by_tcp); });
  };
  expect_contains(refusal(2, MachineSpeed()), "lacks `tcp`");
  expect_contains(refusal(1, machine), "1 rank");
}

}  // namespace
}  // namespace tessera::step_time_test
