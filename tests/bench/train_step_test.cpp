// Runs train_step as scripts do: every model under every wrapper, and its trace.

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "tests/support/built.h"
#include "tests/support/child_process.h"
#include "tests/support/matrix.h"
#include "tests/support/trace_events.h"

namespace {

using nlohmann::json;
using tessera::testing_support::built;
using tessera::testing_support::ChildProcess;
using tessera::testing_support::has_full_matrix;

json run(std::vector<std::string> arguments, const ChildProcess::Environment& environment = {}) {
  arguments.insert(arguments.begin(), built(TRAIN_STEP_EXECUTABLE));
  arguments.insert(arguments.end(), {"--json", "--steps", "2", "--warmup", "1"});
  ChildProcess child(arguments, environment);
  EXPECT_EQ(child.wait(std::chrono::seconds(200)), 0) << child.output();
  return json::parse(child.output());
}

const std::map<std::string, std::vector<std::string>> kSmall = {
    {"gpt", {"--layers", "2", "--width", "32", "--heads", "2", "--context", "16", "--batch", "2"}},
    {"deep", {"--count", "5", "--width", "24"}},
    {"recipe", {"--layers", "3", "--width", "40"}},
    {"mlp", {}}};

json run_small(const std::string& model, const std::string& wrapper, int ranks, std::vector<std::string> more = {}) {
  std::vector<std::string> arguments = {"--model", model, "--wrapper", wrapper, "--ranks", std::to_string(ranks)};
  arguments.insert(arguments.end(), kSmall.at(model).begin(), kSmall.at(model).end());
  arguments.insert(arguments.end(), more.begin(), more.end());
  return run(arguments);
}

class TrainStep : public ::testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Models, TrainStep, ::testing::Values("gpt", "deep", "recipe", "mlp"),
                         [](const auto& traced) { return traced.param; });

// Returns all wrappers for the GPT, one for other models; in the full matrix all for each.
std::vector<std::string> wrappers_of(const std::string& model) {
  if (model == "gpt" || has_full_matrix()) return {"local", "ddp", "oss", "sdp", "fsdp"};
  return {"ddp", model == "deep" ? "fsdp" : model == "recipe" ? "sdp" : "oss"};
}

// SGD is elementwise, and every wrapper computes the same operations for each element: results are bit-equal.
TEST_P(TrainStep, AllWrappersTrainAlikeAndHoldWhatTheirStageSays) {
  constexpr int kRanks = 2;
  std::map<std::string, json> lines;
  for (const std::string& wrapper : wrappers_of(GetParam()))
    lines[wrapper] = run_small(GetParam(), wrapper, kRanks, {"--optimizer", "sgd"});
  const bool is_full = lines.size() == 5;
  for (const auto& [wrapper, line] : lines) {
    for (const char* field : {"step_s_median", "step_s_min", "param_bytes", "grad_bytes", "optimizer_bytes",
                              "peak_gathered_bytes", "rss_before_bytes", "rss_peak_bytes", "sent_bytes", "collectives",
                              "comm_wait_s", "page_faults", "loss", "param_sum"})
      EXPECT_TRUE(line.contains(field) && line[field].is_number()) << wrapper << " " << field;
    EXPECT_EQ(line["wrapper"], wrapper);
    EXPECT_EQ(line["ranks"], kRanks);
    EXPECT_EQ(line["losses"].size(), 3u);
    EXPECT_LE(line["step_s_min"], line["step_s_median"]);
    EXPECT_GT(line["rss_peak_bytes"], line["rss_before_bytes"]);
    if (is_full) {
      EXPECT_EQ(line["losses"][0], lines["local"]["losses"][0]) << wrapper << ": the same values and data at the start";
    }
    if (wrapper != "local") {
      EXPECT_EQ(line["param_sum"], lines["ddp"]["param_sum"]) << wrapper;
      EXPECT_EQ(line["losses"], lines["ddp"]["losses"]) << wrapper;
    }
  }
  if (is_full) {
    EXPECT_NE(lines["local"]["param_sum"], lines["ddp"]["param_sum"]) << "by itself a rank sees half of the data";
  }
  const double model = lines["ddp"]["model_bytes"];
  const double part = static_cast<double>(kRanks - 1) / kRanks;
  for (const auto& [wrapper, line] : lines) {
    const double params = line["param_bytes"], grads = line["grad_bytes"], sent = line["sent_bytes"];
    if (wrapper == "local" || wrapper == "ddp" || wrapper == "oss") {
      EXPECT_EQ(params, model) << wrapper;
      EXPECT_EQ(grads, model) << wrapper;
    }
    // Bytes sent in a step, as in docs/zero.md. SDP and FSDP send some more to agree on used parameters.
    if (wrapper == "local") {
      EXPECT_EQ(sent, 0);
    } else if (wrapper == "fsdp") {
      // Padding is added: of buckets, and of units to whole cache lines for each rank.
      EXPECT_GE(params, model / kRanks);
      EXPECT_LE(params, model / kRanks * 1.05 + 4096);
      EXPECT_EQ(grads, params);
      EXPECT_LE(sent / model, 3 * part * 1.05 + 0.02);
      EXPECT_GE(sent / model, 2 * part);  // the last units stay gathered for backward
    } else {
      EXPECT_NEAR(sent / model, (wrapper == "oss" ? 3 : 2) * part, wrapper == "ddp" ? 0.03 : 0.05) << wrapper;
    }
  }
}

TEST(TrainStepMore, AdamHoldsTwoNumbersForEachOfItsParameters) {
  const json ddp = run_small("recipe", "ddp", 3), fsdp = run_small("recipe", "fsdp", 3),
             sdp = run_small("recipe", "sdp", 3);
  EXPECT_EQ(ddp["optimizer_bytes"].get<int64_t>(), 2 * ddp["param_bytes"].get<int64_t>());
  EXPECT_LT(fsdp["optimizer_bytes"].get<int64_t>(), ddp["optimizer_bytes"].get<int64_t>() / 2);
  EXPECT_LT(sdp["optimizer_bytes"].get<int64_t>(), ddp["optimizer_bytes"].get<int64_t>() / 2);
  EXPECT_NEAR(fsdp["loss"].get<double>(), ddp["loss"].get<double>(), 1e-5);
}

TEST(TrainStepMore, Bfloat16HalvesTheBytes) {
  const json full = run_small("deep", "fsdp", 2), half = run_small("deep", "fsdp", 2, {"--dtype", "bfloat16"});
  EXPECT_EQ(half["model_bytes"].get<int64_t>() * 2, full["model_bytes"].get<int64_t>());
  EXPECT_NEAR(half["sent_bytes"].get<double>() / full["sent_bytes"].get<double>(), 0.5, 0.1);
  EXPECT_NEAR(half["loss"].get<double>(), full["loss"].get<double>(), 0.1);
}

TEST(TrainStepMore, MistakesEndWithAMessage) {
  ChildProcess child({built(TRAIN_STEP_EXECUTABLE), "--model", "resnet"});
  EXPECT_EQ(child.wait(), 2);
  EXPECT_NE(child.output().find("--model must be gpt, deep, recipe, mlp or archive, got 'resnet'"), std::string::npos)
      << child.output();
}

// ---- the trace ---------------------------------------------------------------------------------

struct Span {
  double begin, end;
  std::string category, name;
};

// Spans on one line of the display must be nested or disjoint.
void expect_nested(std::vector<Span> spans, const std::string& where) {
  std::sort(spans.begin(), spans.end(),
            [](const Span& a, const Span& b) { return a.begin != b.begin ? a.begin < b.begin : a.end > b.end; });
  std::vector<Span> open;
  constexpr double kRounding = 1e-2;  // microseconds
  for (const Span& span : spans) {
    while (!open.empty() && open.back().end <= span.begin + kRounding) open.pop_back();
    if (!open.empty()) {
      EXPECT_LE(span.end, open.back().end + kRounding)
          << where << ": " << span.category << " '" << span.name << "' overlaps " << open.back().category << " '"
          << open.back().name << "'";
    }
    open.push_back(span);
  }
}

class Traced : public ::testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Wrappers, Traced, ::testing::Values("ddp", "oss", "sdp", "fsdp"),
                         [](const auto& traced) { return traced.param; });

TEST_P(Traced, EveryRankHasSpansOfEveryKindRightlyNested) {
  char path[] = "/tmp/tessera-trace-XXXXXX";
  ::close(::mkstemp(path));
  run({"--model", "deep", "--count", "4", "--width", "16", "--wrapper", GetParam(), "--ranks", "3"},
      {{"TESSERA_TRACE", path}});
  const json events = tessera::testing_support::trace_events(path);
  ::unlink(path);
  std::map<int, std::set<std::string>> categories, units;
  std::map<std::pair<int, int>, std::vector<Span>> lines;
  for (const json& event : events) {
    if (event["ph"] != "X") continue;
    const int rank = event["pid"];
    categories[rank].insert(event["cat"]);
    if (event["cat"] == "compute") units[rank].insert(event["name"]);
    EXPECT_GE(event["dur"].get<double>(), 0);
    lines[{rank, event["tid"]}].push_back(
        {event["ts"], event["ts"].get<double>() + event["dur"].get<double>(), event["cat"], event["name"]});
  }
  ASSERT_EQ(categories.size(), 3u);
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(categories[rank], (std::set<std::string>{"compute", "gather", "optimizer", "reduce", "wait"}))
        << "rank " << rank;
    if (GetParam() == "fsdp") {
      for (const char* unit : {"unit 'layers.0'", "unit 'layers.3'"}) EXPECT_TRUE(units[rank].contains(unit)) << unit;
    } else {
      EXPECT_EQ(units[rank], (std::set<std::string>{"forward", "backward"}));
    }
  }
  for (const auto& [line, spans] : lines)
    expect_nested(spans, "rank " + std::to_string(line.first) + ", line " + std::to_string(line.second));
}

}  // namespace
