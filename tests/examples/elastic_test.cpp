// train_gpt --elastic as a user runs it, with ranks that are killed.
#include <gtest/gtest.h>
#include <signal.h>

#include <chrono>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/built.h"
#include "tests/support/child_process.h"
#include "tests/support/temporary_folder.h"

namespace train_gpt_elastic {
namespace {

using nlohmann::json;
using tessera::testing_support::TemporaryFolder;

std::vector<json> lines_of(const std::filesystem::path& file) {
  std::vector<json> lines;
  std::ifstream text(file);
  for (std::string line; std::getline(text, line);) lines.push_back(json::parse(line));
  return lines;
}

// The process under the launcher that is this rank; 0: none.
pid_t process_of_rank(pid_t launcher, int rank) {
  const std::string wanted = "RANK=" + std::to_string(rank), process = std::to_string(launcher);
  std::ifstream children("/proc/" + process + "/task/" + process + "/children");
  for (pid_t child = 0; children >> child;) {
    std::ifstream environment("/proc/" + std::to_string(child) + "/environ");
    for (std::string one; std::getline(environment, one, '\0');)
      if (one == wanted) return child;
    if (const pid_t found = process_of_rank(child, rank); found > 0) return found;
  }
  return 0;
}

struct Result {
  std::vector<json> steps, events;
  std::string output;
};

constexpr int kSteps = 60;

// Trains, and kills a rank after a few steps; -1: none.
Result train(const std::filesystem::path& out, int ranks, int victim, const std::string& more) {
  std::istringstream words(tessera::testing_support::built(TRAIN_GPT_EXECUTABLE) +
                           " --layers 2 --width 24 --heads 3 --context 16 --batch 2 --threads 1 --sample 0 --steps " +
                           std::to_string(kSteps) + " --ranks " + std::to_string(ranks) + " --out " + out.string() +
                           " " + more);
  tessera::testing::ChildProcess run({std::istream_iterator<std::string>(words), {}});
  const auto metrics = out / "metrics.jsonl";
  if (victim >= 0) {
    const auto start = std::chrono::steady_clock::now();
    while (lines_of(metrics).size() < 8 && std::chrono::steady_clock::now() - start < std::chrono::seconds(60))
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    const pid_t process = process_of_rank(run.pid(), victim);
    EXPECT_GT(process, 0) << run.output();
    if (process > 0) ::kill(process, SIGKILL);
  }
  EXPECT_EQ(run.wait(), 0) << run.output();
  Result result{.output = run.output()};
  for (const json& line : lines_of(metrics)) (line.contains("event") ? result.events : result.steps).push_back(line);
  return result;
}

void expect_all_steps(const Result& result) {
  ASSERT_EQ(result.steps.size(), static_cast<size_t>(kSteps)) << result.output;
  for (size_t i = 0; i < result.steps.size(); ++i) EXPECT_EQ(result.steps[i]["step"], i + 1);
}

TEST(TrainGptElastic, KeepsTheBatchAndTheMetricsWhenRankZeroIsKilled) {
  const TemporaryFolder folder;
  const auto expected = train(folder / "undisturbed", 2, -1, "--val-every 0");
  const auto result = train(folder / "killed", 2, 0,
                            "--val-every 0 --elastic --copy-every 3 --tensorboard " + (folder / "board").string());
  expect_all_steps(result);
  expect_all_steps(expected);
  ASSERT_EQ(result.events.size(), 2U) << result.output;
  EXPECT_EQ(result.events[0]["event"], "lost");
  EXPECT_EQ(result.events[0]["ranks"], std::vector<int>{0});
  EXPECT_EQ(result.events[0]["world"], 1);
  EXPECT_EQ(result.events[1]["event"], "resumed");
  EXPECT_EQ(result.events[1]["step"], result.events[0]["step"].get<int>() + 1);
  EXPECT_GT(result.events[1]["seconds"], 0);
  // Each step has the sequences that two ranks would have had.
  for (size_t i = 0; i < result.steps.size(); ++i) {
    EXPECT_NEAR(result.steps[i]["loss"], expected.steps[i]["loss"], 1e-3) << "step " << i + 1;
    EXPECT_EQ(result.steps[i]["lr"], expected.steps[i]["lr"]) << "step " << i + 1;
  }
  for (const char* text : {"rank 0 of 2 was lost", "1 ranks go on", "training goes on with 1 ranks"})
    EXPECT_NE(result.output.find(text), std::string::npos) << text << "\n" << result.output;
  std::string board;
  for (const auto& file : std::filesystem::directory_iterator(folder / "board"))
    board += tessera::testing_support::file_bytes(file.path());
  EXPECT_NE(board.find("elastic/world"), std::string::npos);
  EXPECT_NE(board.find("elastic/seconds_to_resume"), std::string::npos);
}

TEST(TrainGptElastic, FollowsTheWorldAndGoesOnFromItsCheckpoints) {
  const TemporaryFolder folder;
  const auto result = train(folder / "out", 3, 1, "--elastic --elastic-batch follow --copy-every 3 --save-every 20");
  expect_all_steps(result);
  ASSERT_EQ(result.events.size(), 2U) << result.output;
  EXPECT_EQ(result.events[0]["world"], 2);
  EXPECT_EQ(result.events[0]["world_before"], 3);
  // All steps are done: the checkpoint of two ranks ends a run of three at once.
  const auto again = train(folder / "out", 3, -1, "--elastic --elastic-batch follow --resume auto");
  expect_all_steps(again);
  EXPECT_EQ(again.events.size(), 2U);
}

}  // namespace
}  // namespace train_gpt_elastic
