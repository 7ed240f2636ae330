// train_gpt --elastic as a user runs it, with ranks that are killed.
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/support/built.h"
#include "tests/support/child_process.h"
#include "tests/support/free_port.h"
#include "tests/support/temporary_folder.h"

namespace train_gpt_elastic {
namespace {

using nlohmann::json;
using tessera::testing_support::TemporaryFolder;

// `is_written`: by processes that may truncate the file and write on while it is read, so that a line may be damaged.
std::vector<json> lines_of(const std::filesystem::path& file, bool is_written = false) {
  std::vector<json> lines;
  std::ifstream text(file);
  for (std::string line; std::getline(text, line);) {
    json parsed = json::parse(line, nullptr, /*allow_exceptions=*/!is_written);
    if (!parsed.is_discarded()) lines.push_back(std::move(parsed));
  }
  return lines;
}

// The process under the launcher that is this rank, or the last one of its shells' children; 0: none.
pid_t process_of_rank(pid_t launcher, int rank) {
  const std::string wanted = "RANK=" + std::to_string(rank), process = std::to_string(launcher);
  std::ifstream children("/proc/" + process + "/task/" + process + "/children");
  for (pid_t child = 0; children >> child;) {
    if (const pid_t found = process_of_rank(child, rank); found > 0) return found;
    std::ifstream environment("/proc/" + std::to_string(child) + "/environ");
    for (std::string one; std::getline(environment, one, '\0');)
      if (one == wanted) return child;
  }
  return 0;
}

struct Result {
  std::vector<json> steps, events;
  std::string output;
};

constexpr int kSteps = 60;
constexpr int kMostSteps = 1000000;  // of a run that is stopped

std::string command(const std::filesystem::path& out, int steps, const std::string& more) {
  return tessera::testing_support::built(TRAIN_GPT_EXECUTABLE) +
         " --layers 2 --width 24 --heads 3 --context 16 --batch 2 --threads 1 --sample 0 --steps " +
         std::to_string(steps) + " --out " + out.string() + " " + more;
}

tessera::testing_support::ChildProcess start(const std::filesystem::path& out, int ranks, int steps,
                                             const std::string& more) {
  std::istringstream words(command(out, steps, "--ranks " + std::to_string(ranks) + " " + more));
  return tessera::testing_support::ChildProcess({std::istream_iterator<std::string>(words), {}});
}

// Waits until this many lines of metrics.jsonl have the field.
void await(const std::filesystem::path& out, const std::string& field, size_t count) {
  const auto start = std::chrono::steady_clock::now();
  while (std::chrono::steady_clock::now() - start < std::chrono::seconds(60)) {
    const auto lines = lines_of(out / "metrics.jsonl", /*is_written=*/true);
    if (static_cast<size_t>(std::ranges::count_if(lines, [&](const json& line) { return line.contains(field); })) >=
        count)
      return;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

void kill_rank(const tessera::testing_support::ChildProcess& run, int victim, int signal = SIGKILL) {
  const pid_t process = process_of_rank(run.pid(), victim);
  EXPECT_GT(process, 0) << run.output();
  if (process > 0) ::kill(process, signal);
}

Result result_of(const std::filesystem::path& out, std::string output) {
  Result result{.output = std::move(output)};
  for (const json& line : lines_of(out / "metrics.jsonl"))
    (line.contains("event") ? result.events : result.steps).push_back(line);
  return result;
}

// Trains without restarts, and kills a rank after a few steps; -1: none.
Result train(const std::filesystem::path& out, int ranks, int victim, const std::string& more) {
  auto run = start(out, ranks, kSteps, more);
  if (victim >= 0) {
    await(out, "loss", 8);
    kill_rank(run, victim);
  }
  EXPECT_EQ(run.wait(), 0) << run.output();
  return result_of(out, run.output());
}

void expect_each_step_once(const Result& result) {
  for (size_t i = 0; i < result.steps.size(); ++i) EXPECT_EQ(result.steps[i]["step"], i + 1);
}

void expect_all_steps(const Result& result) {
  ASSERT_EQ(result.steps.size(), static_cast<size_t>(kSteps)) << result.output;
  expect_each_step_once(result);
}

std::string board_of(const std::filesystem::path& folder) {
  std::string board;
  for (const auto& file : std::filesystem::directory_iterator(folder))
    board += tessera::testing_support::file_bytes(file.path());
  return board;
}

TEST(TrainGptElastic, KeepsTheBatchAndTheMetricsWhenRankZeroIsKilled) {
  const TemporaryFolder folder;
  const auto expected = train(folder / "undisturbed", 2, -1, "--val-every 0");
  const auto result =
      train(folder / "killed", 2, 0,
            "--val-every 0 --elastic --restarts 0 --copy-every 3 --tensorboard " + (folder / "board").string());
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
  for (const char* text : {"rank 0 of 2 was lost", "1 rank goes on", "training goes on with 1 rank:"})
    EXPECT_NE(result.output.find(text), std::string::npos) << text << "\n" << result.output;
  const std::string board = board_of(folder / "board");
  EXPECT_NE(board.find("elastic/world"), std::string::npos);
  EXPECT_NE(board.find("elastic/seconds_to_resume"), std::string::npos);
}

TEST(TrainGptElastic, FollowsTheWorldAndGoesOnFromItsCheckpoints) {
  const TemporaryFolder folder;
  const auto result =
      train(folder / "out", 3, 1, "--elastic --restarts 0 --elastic-batch follow --copy-every 3 --save-every 20");
  expect_all_steps(result);
  ASSERT_EQ(result.events.size(), 2U) << result.output;
  EXPECT_EQ(result.events[0]["world"], 2);
  EXPECT_EQ(result.events[0]["world_before"], 3);
  // All steps are done: the checkpoint of two ranks ends a run of three at once.
  const auto again = train(folder / "out", 3, -1, "--elastic --elastic-batch follow --resume auto");
  expect_all_steps(again);
  EXPECT_EQ(again.events.size(), 2U);
}

TEST(TrainGptElastic, NamesTheFolderThatCannotBeCreated) {
  const TemporaryFolder folder;
  const std::string none = (folder / "none").string();
  tessera::testing_support::ChildProcess run({"env", "TMPDIR=" + none,
                                              tessera::testing_support::built(TRAIN_GPT_EXECUTABLE), "--elastic",
                                              "--ranks", "2", "--out", (folder / "out").string()});
  EXPECT_EQ(run.wait(), 1);
  EXPECT_NE(run.output().find("tessera::spawn_elastic: cannot create " + none + "/tessera-elastic-"), std::string::npos)
      << run.output();
}

TEST(TrainGptElastic, ADeadRankIsStartedAgainAndJoins) {
  const TemporaryFolder folder;
  const auto out = folder / "out";
  auto run =
      start(out, 2, kMostSteps, "--val-every 0 --elastic --copy-every 3 --tensorboard " + (folder / "board").string());
  await(out, "loss", 8);
  kill_rank(run, 0);
  await(out, "seconds", 2);
  ::kill(run.pid(), SIGTERM);
  EXPECT_EQ(run.wait(), 128 + SIGTERM) << run.output();
  const auto result = result_of(out, run.output());
  expect_each_step_once(result);
  ASSERT_EQ(result.events.size(), 4U) << result.output;
  const json lost = result.events[0], joined = result.events[2];
  EXPECT_EQ(lost["event"], "lost");
  EXPECT_EQ(lost["ranks"], std::vector<int>{0});
  EXPECT_EQ(lost["world"], 1);
  EXPECT_EQ(joined["event"], "joined");
  EXPECT_EQ(joined["ranks"], std::vector<int>{1});
  EXPECT_EQ(joined["world"], 2);
  EXPECT_EQ(joined["world_before"], 1);
  for (const size_t change : {0, 2}) {
    EXPECT_EQ(result.events[change + 1]["event"], "resumed");
    EXPECT_EQ(result.events[change + 1]["step"], result.events[change]["step"].get<int>() + 1);
  }
  EXPECT_NE(result.output.find("rank 1 joined; 2 ranks go on"), std::string::npos) << result.output;
  EXPECT_NE(board_of(folder / "board").find("elastic/joined"), std::string::npos);
}

// Starts two ranks as a launcher does that starts no rank again. Its exit code is the sum of theirs.
tessera::testing_support::ChildProcess start_shells(const TemporaryFolder& folder, const std::string& more) {
  const std::string rank =
      tessera::testing_support::built(ELASTIC_RANK_SCRIPT) + " " +
      command(folder / "out", kMostSteps,
              "--val-every 0 --elastic --copy-every 3 --rendezvous " + (folder / "elastic").string() + " " + more);
  return tessera::testing_support::ChildProcess({"sh", "-c",
                                                 "export WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=" +
                                                     std::to_string(tessera::testing_support::free_port()) +
                                                     "; RANK=1 " + rank + " & RANK=0 " + rank +
                                                     "; code=$?; wait $!; exit $((code + $?))"});
}

TEST(TrainGptElastic, AShellUnderALauncherStartsItsDeadRankAgain) {
  const TemporaryFolder folder;
  const auto out = folder / "out";
  auto run = start_shells(folder, "");
  await(out, "loss", 8);
  kill_rank(run, 0);
  await(out, "seconds", 2);
  kill_rank(run, 1, SIGUSR1);
  EXPECT_EQ(run.wait(), (2 * (128 + SIGUSR1)) % 256) << run.output();
  const auto result = result_of(out, run.output());
  expect_each_step_once(result);
  ASSERT_EQ(result.events.size(), 4U) << result.output;
  EXPECT_EQ(result.events[2]["event"], "joined");

  auto mistaken = start_shells(folder, "--accumulate 2 --resume auto");
  EXPECT_EQ(mistaken.wait(), 2 + 2) << mistaken.output();
  EXPECT_NE(mistaken.output().find("of a run with sequences_per_step"), std::string::npos) << mistaken.output();
}

}  // namespace
}  // namespace train_gpt_elastic
