// Runs the built program as a user does, with a tiny model.

#include <gtest/gtest.h>
#include <sys/wait.h>

#include <array>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <sstream>
#include <thread>
#include <vector>

#include "tessera/checkpoint/checkpoint.h"
#include "tests/support/child_process.h"
#include "tests/support/temporary_folder.h"

namespace train_gpt {
namespace {

using tessera::testing_support::TemporaryFolder;

constexpr const char* kTiny =
    " --layers 2 --width 24 --heads 3 --context 16 --steps 8 --lr 1e-2 --val-every 4 --threads 1 ";

struct Run {
  int exit_code = -1;
  std::string output;  // both streams
};

Run run(const std::string& arguments) {
  const std::string command = std::string(TRAIN_GPT_EXECUTABLE) + " " + arguments + " 2>&1";
  FILE* pipe = popen(command.c_str(), "r");
  Run result;
  std::array<char, 4096> chunk{};
  for (size_t bytes; (bytes = fread(chunk.data(), 1, chunk.size(), pipe)) > 0;) {
    result.output.append(chunk.data(), bytes);
  }
  const int status = pclose(pipe);
  result.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  return result;
}

std::vector<nlohmann::json> metrics_in(const std::filesystem::path& folder) {
  std::ifstream file(folder / "metrics.jsonl");
  std::vector<nlohmann::json> lines;
  for (std::string line; std::getline(file, line);) lines.push_back(nlohmann::json::parse(line));
  return lines;
}

std::vector<nlohmann::json> train(const std::string& arguments) {
  const TemporaryFolder out;
  const auto result = run(kTiny + arguments + " --out " + out.path().string());
  EXPECT_EQ(result.exit_code, 0) << result.output;
  return metrics_in(out.path());
}

void expect_same_losses(const std::vector<nlohmann::json>& a, const std::vector<nlohmann::json>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    EXPECT_NEAR(a[i]["loss"].get<double>(), b[i]["loss"].get<double>(), 1e-4) << "step " << i + 1;
    EXPECT_NEAR(a[i]["grad_norm"].get<double>(), b[i]["grad_norm"].get<double>(), 1e-3) << "step " << i + 1;
    ASSERT_EQ(a[i].contains("val_loss"), b[i].contains("val_loss"));
    if (a[i].contains("val_loss")) {
      EXPECT_NEAR(a[i]["val_loss"].get<double>(), b[i]["val_loss"].get<double>(), 1e-4) << "step " << i + 1;
    }
  }
}

TEST(TrainGpt, OneProcessWritesMetricsPlotAndSample) {
  const TemporaryFolder out;
  const auto result = run(kTiny + std::string("--wrapper local --batch 8 --sample 30 --prompt And --out ") +
                          (out / "new/folder").string());
  ASSERT_EQ(result.exit_code, 0) << result.output;
  const auto metrics = metrics_in(out / "new/folder");
  ASSERT_EQ(metrics.size(), 8u);
  for (size_t i = 0; i < metrics.size(); ++i) {
    EXPECT_EQ(metrics[i]["step"], i + 1);
    EXPECT_GT(metrics[i]["tokens_per_s"].get<double>(), 0.0);
    EXPECT_GT(metrics[i]["grad_norm"].get<double>(), 0.0);
    EXPECT_EQ(metrics[i].contains("val_loss"), i == 3 || i == 7);
  }
  EXPECT_LT(metrics.back()["loss"].get<double>(), metrics.front()["loss"].get<double>());
  EXPECT_TRUE(std::filesystem::exists(out / "new/folder/losses.svg"));
  for (const char* expected : {"unigram", "validation", "rank 0", "    And"}) {
    EXPECT_NE(result.output.find(expected), std::string::npos) << expected << " in\n" << result.output;
  }
}

// 12 sequences a step, however they are spread.
TEST(TrainGpt, LossesDoNotDependOnHowTheBatchIsSpread) {
  const auto expected = train("--wrapper local --batch 12 --val-batches 2 --sample 0");
  for (const char* other : {
           "--wrapper local --batch 3 --accumulate 4 --val-batches 2 --sample 0",
           "--wrapper ddp --ranks 2 --batch 6 --val-batches 2 --sample 0",
           "--wrapper ddp --ranks 3 --batch 2 --accumulate 2 --val-batches 2 --sample 0",
           "--wrapper oss --ranks 2 --batch 6 --val-batches 2 --sample 20",
           "--wrapper sdp --ranks 3 --batch 4 --val-batches 2 --sample 20",
           "--wrapper sdp --ranks 2 --batch 3 --accumulate 2 --val-batches 2 --sample 0",
           "--wrapper fsdp --batch 12 --val-batches 2 --sample 0",
           "--wrapper fsdp --ranks 2 --batch 6 --val-batches 2 --sample 20",
           "--wrapper fsdp --ranks 4 --batch 3 --val-batches 2 --sample 20",
           "--wrapper fsdp --ranks 2 --batch 3 --accumulate 2 --val-batches 2 --sample 0",
           "--wrapper fsdp --ranks 2 --batch 6 --val-batches 2 --sample 0 --offload cpu",
           "--wrapper fsdp --ranks 2 --batch 6 --val-batches 2 --sample 0 --offload disk",
           "--wrapper sdp --ranks 2 --batch 6 --val-batches 2 --sample 0 --offload cpu",
           "--wrapper fsdp --ranks 2 --batch 6 --val-batches 2 --sample 0 --reshard-after-forward false "
           "--prefetch 0",
       }) {
    SCOPED_TRACE(other);
    expect_same_losses(train(other), expected);
  }
}

TEST(TrainGpt, WrappersTrainBitEqualWithoutClipping) {
  for (const char* ranks : {"--ranks 2", "--ranks 3"}) {
    const auto expected = train(std::string("--wrapper fsdp --batch 4 --clip 0 --sample 0 ") + ranks);
    for (const char* wrapper : {"ddp", "oss", "sdp"}) {
      SCOPED_TRACE(std::string(wrapper) + " " + ranks);
      const auto losses = train(std::string("--wrapper ") + wrapper + " --batch 4 --clip 0 --sample 0 " + ranks);
      ASSERT_EQ(losses.size(), expected.size());
      for (size_t i = 0; i < losses.size(); ++i) {
        EXPECT_EQ(losses[i]["loss"], expected[i]["loss"]) << "step " << i + 1;
        EXPECT_EQ(losses[i].value("val_loss", 0.0), expected[i].value("val_loss", 0.0)) << "step " << i + 1;
      }
    }
  }
}

// Killed in the middle, and started again with other ranks and another wrapper.
TEST(TrainGpt, AKilledRunGoesOnWithOtherRanks) {
  const std::string common =
      " --layers 2 --width 24 --heads 3 --context 16 --steps 14 --lr 1e-2 --val-every 4 --threads 1 --val-batches 2 "
      "--sample 0";
  auto train_to = [&](const std::filesystem::path& out, const std::string& arguments) {
    const auto result = run(common + " --out " + out.string() + " " + arguments);
    EXPECT_EQ(result.exit_code, 0) << result.output;
    return metrics_in(out);
  };
  const TemporaryFolder folder;
  const auto expected = train_to(folder / "whole", "--wrapper fsdp --ranks 2 --batch 6");
  ASSERT_EQ(expected.size(), 14u);
  const char* continued[] = {"--wrapper fsdp --ranks 3 --batch 4", "--wrapper sdp --ranks 2 --batch 3 --accumulate 2",
                             "--wrapper local --batch 12"};
  for (const char* next : continued) {
    SCOPED_TRACE(next);
    const auto out = folder / (std::string("out-") + next[10]);
    {
      std::vector<std::string> command{TRAIN_GPT_EXECUTABLE};
      std::istringstream words(common + " --wrapper fsdp --ranks 2 --batch 6 --save-every 3 --resume auto --out " +
                               out.string());
      for (std::string word; words >> word;) command.push_back(word);
      tessera::testing::ChildProcess child(command);
      const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
      while (!std::filesystem::exists(out / "checkpoints/step-000006") && std::chrono::steady_clock::now() < end)
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
      ::kill(-child.pid(), SIGKILL);  // the ranks too, which are of its session
      child.wait();
    }
    const auto latest = tessera::latest_checkpoint(out / "checkpoints");
    ASSERT_TRUE(latest);
    const auto all = train_to(out, std::string(next) + " --save-every 3 --resume auto");
    expect_same_losses(all, expected);
    EXPECT_EQ(tessera::latest_checkpoint(out / "checkpoints"), out / "checkpoints/step-000014");
    // Once more: there is nothing left to do, and nothing is lost.
    EXPECT_EQ(train_to(out, std::string(next) + " --resume auto").size(), 14u);
  }
  const auto refused = run(common + " --wrapper local --batch 5 --resume auto --out " + (folder / "out-f").string());
  EXPECT_EQ(refused.exit_code, 2);
  EXPECT_NE(refused.output.find("sequences_per_step"), std::string::npos) << refused.output;
}

TEST(TrainGpt, TiedWeightsAndNoClipping) {
  expect_same_losses(train("--ranks 2 --batch 4 --tie --clip 0 --sample 0"),
                     train("--wrapper local --batch 8 --tie --clip 0 --sample 0"));
}

TEST(TrainGpt, TokenFilesTrainAndPrintIds) {
  const TemporaryFolder folder;
  std::string bytes;
  for (int i = 0; i < 3000; ++i) bytes += {static_cast<char>(i % 7), '\x01'};
  const auto data = folder.write("a.bin", bytes);
  const auto result = run(kTiny + std::string("--wrapper local --sample 3 --prompt '256 257' --data ") + data.string() +
                          " --out " + (folder / "out").string());
  ASSERT_EQ(result.exit_code, 0) << result.output;
  EXPECT_NE(result.output.find("    256 257 "), std::string::npos) << result.output;
}

TEST(TrainGpt, MistakesEndWithAMessageBeforeTraining) {
  const TemporaryFolder folder;
  const auto short_text = folder.write("short.txt", "too short").string();
  const auto check = [](const std::string& arguments, int exit_code, const std::string& message) {
    const auto result = run(arguments);
    EXPECT_EQ(result.exit_code, exit_code) << arguments;
    EXPECT_NE(result.output.find(message), std::string::npos) << result.output;
    EXPECT_EQ(result.output.find(message), result.output.rfind(message)) << "said once:\n" << result.output;
  };
  check("--bogus", 2, "bogus");
  check("--wrapper local --ranks 2", 2, "one process");
  check("--data " + short_text, 1, "needs at least");
  check("--ranks 2 --data /nonexistent", 1, "does not exist");
  check("--ranks 2 --prompt '#'", 2, "does not occur in the data");
  check("--ranks 2 --out " + short_text + "/x", 1, "--out");
  check("--help", 0, "--accumulate");
}

}  // namespace
}  // namespace train_gpt
