// Runs the built program as a user does, with a tiny model.

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <thread>
#include <vector>

#include <tessera/checkpoint.h>
#include <tessera/checkpoint/full_file.h>
#include <tessera/tessera.h>
#include "checkpoint/format/slice_reader.h"
#include "checkpoint/full_file/find_full_tensors.h"
#include "gpt.h"
#include "options.h"
#include "run.h"
#include "tests/support/built.h"
#include "tests/support/child_process.h"
#include "tests/support/free_port.h"
#include "tests/support/temporary_folder.h"

namespace train_gpt {
namespace {

using tessera::testing_support::TemporaryFolder;

constexpr const char* kTinyModel = " --layers 2 --width 24 --heads 3 --context 16 --steps 8 --val-every 4 --threads 1 ";
const std::string kTiny = std::string(kTinyModel) + "--lr 1e-2 ";

struct Run {
  int exit_code = -1;
  std::string output;  // both streams
};

Run run(const std::string& arguments) {
  const std::string command = tessera::testing_support::built(TRAIN_GPT_EXECUTABLE) + " " + arguments + " 2>&1";
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

// Captures std::cout while it is alive.
class Captured {
 public:
  ~Captured() { std::cout.rdbuf(terminal_); }
  std::string text() const { return text_.str(); }

 private:
  std::ostringstream text_;
  std::streambuf* const terminal_ = std::cout.rdbuf(text_.rdbuf());
};

// Trains with ranks as threads: a process takes half a second to load libtorch, which is longer than the training.
std::vector<nlohmann::json> train(const std::string& arguments) {
  const TemporaryFolder out;
  const bool has_rate = arguments.find("--lr") != std::string::npos;
  std::istringstream line("train_gpt " + (has_rate ? kTinyModel : kTiny) + arguments + " --out " + out.path().string());
  const std::vector<std::string> words{std::istream_iterator<std::string>(line), {}};
  std::vector<const char*> argv;
  for (const auto& word : words) argv.push_back(word.c_str());
  const Captured printed;
  try {
    const auto options = parse_options(static_cast<int>(argv.size()), argv.data(), std::cout);
    const Job job = prepare(options.value());
    tessera::run_ranks(job.options.ranks.value_or(1),
                       [&](std::shared_ptr<tessera::Communicator> comm) { run_rank(job, comm); });
  } catch (const std::exception& error) {
    ADD_FAILURE() << arguments << ": " << error.what() << "\n" << printed.text();
  }
  return metrics_in(out.path());
}

std::vector<double> losses_of(const std::vector<nlohmann::json>& metrics) {
  std::vector<double> losses;
  for (const auto& step : metrics) losses.push_back(step["loss"]);
  return losses;
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

TEST(TrainGpt, LaunchersAgree) {
  const TemporaryFolder folder;
  const std::string program = tessera::testing_support::built(TRAIN_GPT_EXECUTABLE) + kTiny +
                              "--wrapper fsdp --batch 2 --val-batches 1 --sample 0 --out " + folder.path().string() +
                              "/";
  const auto metrics = [&](const std::string& name, const std::string& command) {
    tessera::testing_support::ChildProcess run({"sh", "-c", command});
    EXPECT_EQ(run.wait(), 0) << run.output();
    return metrics_in(folder / name);
  };
  const auto expected = metrics("spawn", program + "spawn --ranks 2");
  ASSERT_EQ(expected.size(), 8u);
  if (std::system("command -v mpirun > /dev/null") == 0) {
    EXPECT_EQ(losses_of(metrics("openmpi", "mpirun --allow-run-as-root --oversubscribe -np 2 " + program + "openmpi")),
              losses_of(expected));
  }
  if (std::system("command -v mpiexec.hydra > /dev/null") == 0) {
    EXPECT_EQ(losses_of(metrics("mpich", "mpiexec.hydra -n 2 " + program + "mpich")), losses_of(expected));
  }
  const std::string by_hand =
      "MASTER_ADDR=127.0.0.1 MASTER_PORT=" + std::to_string(tessera::testing_support::free_port()) + " WORLD_SIZE=2 ";
  EXPECT_EQ(
      losses_of(metrics("hand", "export " + by_hand + "; RANK=1 " + program + "hand & RANK=0 " + program + "hand")),
      losses_of(expected));
}

// Command lines of two hosts, say.
TEST(TrainGpt, RanksWithOtherOptionsAreRefusedByName) {
  const TemporaryFolder folder;
  const std::string program = tessera::testing_support::built(TRAIN_GPT_EXECUTABLE) + kTiny + "--batch 2 --sample 0 ";
  for (const char* option : {"weight-decay", "val-batches"}) {
    const std::string environment =
        "MASTER_ADDR=127.0.0.1 MASTER_PORT=" + std::to_string(tessera::testing_support::free_port()) + " WORLD_SIZE=2 ";
    const std::string out = "--out " + (folder / option).string();
    tessera::testing_support::ChildProcess run({"sh", "-c",
                                                "export " + environment + "; RANK=1 " + program + out + "1 --" +
                                                    option + " 3 & RANK=0 " + program + out + "0; wait"});
    run.wait();
    for (const std::string& text : {std::string("the options of train_gpt"), option + std::string(" 3")})
      EXPECT_NE(run.output().find(text), std::string::npos) << run.output();
  }
}

TEST(TrainGpt, KeepsTheMetricsAndCheckpointsOfEarlierRuns) {
  const TemporaryFolder out;
  const std::string words = kTiny + std::string("--wrapper local --batch 2 --sample 0 --out ") + out.path().string();
  const auto first = run(words + " --save-every 8"), second = run(words + " --resume auto");
  ASSERT_EQ(second.exit_code, 0) << second.output;
  EXPECT_FALSE(std::filesystem::exists(out / "metrics.before.jsonl")) << second.output;  // it has resumed
  const auto third = run(words + " --save-every 8"), fourth = run(words);
  ASSERT_EQ(fourth.exit_code, 0) << fourth.output;
  EXPECT_NE(third.output.find("are in checkpoints.before now"), std::string::npos) << third.output;
  EXPECT_NE(fourth.output.find("are in checkpoints.before-2 now"), std::string::npos) << fourth.output;
  EXPECT_NE(fourth.output.find("are in metrics.before-2.jsonl now"), std::string::npos) << fourth.output;
  for (const char* name : {"checkpoints.before", "checkpoints.before-2"})
    EXPECT_TRUE(tessera::latest_checkpoint(out / name)) << name;
}

TEST(TrainGpt, KeepsTheMetricsOfAnEarlierRun) {
  const TemporaryFolder out;
  const std::string words = kTiny + std::string("--wrapper local --batch 2 --sample 0 --out ") + out.path().string();
  const auto first = run(words + " --resume auto"), second = run(words + " --resume auto");  // there is no checkpoint
  ASSERT_EQ(second.exit_code, 0) << second.output;
  EXPECT_EQ(first.output.find("metrics.before.jsonl"), std::string::npos) << first.output;
  EXPECT_NE(second.output.find("are in metrics.before.jsonl now"), std::string::npos) << second.output;
  EXPECT_EQ(metrics_in(out.path()).size(), 8u);
  std::ifstream before(out / "metrics.before.jsonl");
  EXPECT_EQ(std::count(std::istreambuf_iterator<char>(before), {}, '\n'), 8);
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

// 12 sequences a step in every layout.
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

// The norm of some steps clips, so that some steps in backward are taken back.
TEST(TrainGpt, StepsInBackwardAreThoseAfterIt) {
  for (const std::string options : {"--clip 1 --accumulate 2", "--clip 0 --ema 0.9"}) {
    SCOPED_TRACE(options);
    const std::string common = "--wrapper fsdp --ranks 2 --batch 3 --sample 0 --offload cpu " + options;
    const auto expected = train(common), losses = train(common + " --step-in-backward --device-fraction 0.5");
    ASSERT_EQ(losses.size(), expected.size());
    for (size_t i = 0; i < losses.size(); ++i)
      for (const char* figure : {"loss", "grad_norm", "lr"})
        EXPECT_EQ(losses[i][figure], expected[i][figure]) << figure << " of step " << i + 1;
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

TEST(TrainGpt, EachWrapperComputesInThePrecisionThatIsAsked) {
  const auto exact = train("--wrapper local --batch 4 --sample 0");
  for (const std::string precision : {"bf16", "fp16"})
    for (const std::string wrapper : {"local --batch 4", "ddp --ranks 2 --batch 2", "oss --ranks 2 --batch 2",
                                      "sdp --ranks 2 --batch 2", "fsdp --ranks 2 --batch 2"}) {
      const auto rounded = train("--sample 0 --dtype " + precision + " --wrapper " + wrapper);
      ASSERT_EQ(rounded.size(), exact.size());
      for (size_t i = 0; i < exact.size(); ++i) {
        const double difference = std::abs(rounded[i]["loss"].get<double>() - exact[i]["loss"].get<double>());
        EXPECT_LT(difference, 0.02) << precision << " " << wrapper << " step " << i + 1;
        EXPECT_NE(difference, 0) << precision << " " << wrapper << ": computed in fp32";
      }
    }
}

TEST(TrainGpt, BlocksThatAreComputedAgainTrainBitEqual) {
  for (const std::string wrapper : {"local --batch 4", "fsdp --ranks 2 --batch 2"}) {
    const std::string arguments = "--sample 0 --dtype bf16 --wrapper " + wrapper;
    const auto kept = train(arguments), again = train(arguments + " --checkpoint-activations");
    ASSERT_EQ(kept.size(), again.size());
    for (size_t i = 0; i < kept.size(); ++i) EXPECT_EQ(kept[i]["loss"], again[i]["loss"]) << wrapper << " " << i;
  }
}

TEST(TrainGpt, TheScaleOfLossesIsResumed) {
  const TemporaryFolder out;
  const std::string arguments =
      kTiny + "--ranks 2 --batch 2 --dtype fp16 --sample 0 --save-every 4 --out " + out.path().string();
  const auto last = out.path() / "checkpoints" / "step-000008";
  const auto saved = [&] {
    return nlohmann::json::parse(std::ifstream(last / "tessera.json"))["extra"]["grad_scaler"];
  };
  EXPECT_EQ(run(arguments).exit_code, 0);
  const auto expected = saved();
  EXPECT_EQ(expected["steps"], 8);
  std::filesystem::remove_all(last);
  EXPECT_EQ(run(arguments + " --wrapper sdp --resume auto").exit_code, 0);
  EXPECT_EQ(saved(), expected);
}

// Each optimizer, in one stage over ranks, compared with one process.
TEST(TrainGpt, OptimizersDoNotDependOnHowTheBatchIsSpread) {
  const std::vector<std::pair<std::string, std::string>> spreads{{"adamw8bit --lr 1e-3", "fsdp"},
                                                                 {"muon --lr 1e-3", "fsdp"},
                                                                 {"lion --lr 1e-4 --ema 0.9", "sdp"},
                                                                 {"adafactor", "fsdp"},
                                                                 {"schedulefree --lr 1e-3", "oss"},
                                                                 {"lamb --lr 1e-3 --ema 0.9", "fsdp"},
                                                                 {"sgd", "ddp"},
                                                                 {"muon --lr 1e-3 --ema 0.9", "oss"}};
  for (const auto& [optimizer, wrapper] : spreads) {
    SCOPED_TRACE(optimizer + " " + wrapper);
    const std::string common = " --val-batches 2 --sample 0 --optimizer " + optimizer;
    expect_same_losses(train("--ranks 3 --batch 2 --accumulate 2 --wrapper " + wrapper + common),
                       train("--wrapper local --batch 12" + common));
  }
}

// Killed during training, and resumed with other ranks and another wrapper.
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
      std::vector<std::string> command{tessera::testing_support::built(TRAIN_GPT_EXECUTABLE)};
      std::istringstream words(common + " --wrapper fsdp --ranks 2 --batch 6 --save-every 3 --resume auto --out " +
                               out.string());
      for (std::string word; words >> word;) command.push_back(word);
      tessera::testing_support::ChildProcess child(command);
      const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
      while (!std::filesystem::exists(out / "checkpoints/step-000006") && std::chrono::steady_clock::now() < end)
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
      ::kill(-child.pid(), SIGKILL);  // with its ranks, which are in its session
      child.wait();
    }
    const auto latest = tessera::latest_checkpoint(out / "checkpoints");
    ASSERT_TRUE(latest);
    const auto all = train_to(out, std::string(next) + " --save-every 3 --resume auto");
    expect_same_losses(all, expected);
    EXPECT_EQ(tessera::latest_checkpoint(out / "checkpoints"), out / "checkpoints/step-000014");
    // Resumed again: no steps are left, and no data are lost.
    EXPECT_EQ(train_to(out, std::string(next) + " --resume auto").size(), 14u);
  }
  const auto refused = run(common + " --wrapper local --batch 5 --resume auto --out " + (folder / "out-f").string());
  EXPECT_EQ(refused.exit_code, 2);
  EXPECT_NE(refused.output.find("sequences_per_step"), std::string::npos) << refused.output;
}

// A resumed run keeps its options or takes the user's new ones, and reports each change.
TEST(TrainGpt, ARunIsExtendedAndNothingElseChangesInSilence) {
  const TemporaryFolder folder;
  const std::string model =
      " --wrapper local --layers 1 --width 12 --heads 2 --context 16 --batch 2 --threads 1 --sample 0 --val-every 0 "
      "--optimizer muon ";
  auto with = [&](const std::string& arguments) {
    return run(model + " --out " + (folder / "a").string() + " " + arguments);
  };
  std::string text;
  for (int i = 0; i < 3000; ++i) text += static_cast<char>('a' + i * i % 23);
  const auto data = folder.write("a.txt", text).string();
  std::swap(text[10], text[11]);
  const auto other = folder.write("b.txt", text).string();
  const std::string base_without_ema = "--data " + data + " --resume auto --save-every 4 ";
  const std::string base = base_without_ema + "--ema 0.9 ";
  const std::string same = base + "--lr 1e-2 --weight-decay 0.2 ";
  ASSERT_EQ(with(same + "--steps 8 --warmup 3").exit_code, 0);
  auto refused = [&](const std::string& arguments, const std::string& message) {
    const auto result = with(arguments);
    EXPECT_EQ(result.exit_code, 2) << result.output;
    EXPECT_NE(result.output.find(message), std::string::npos) << result.output;
  };
  refused("--data " + other + " --lr 1e-2 --weight-decay 0.2 --resume auto --steps 8", "of a run with data");
  refused(same + "--steps 8 --seed 2", "of a run with seed 1");
  refused(base + "--weight-decay 0.2 --steps 8 --lr 2e-2", "lr is 0.02, was 0.01; --allow-changes");
  refused(base + "--lr 1e-2 --steps 8 --weight-decay 0.3", "weight-decay is 0.3, was 0.2; --allow-changes");
  refused(same + "--steps 8 --clip 2", "clip is 2.0, was 1.0; --allow-changes");
  for (const char* ema : {"", "--ema 0.5 "})
    refused(base_without_ema + ema + "--lr 1e-2 --weight-decay 0.2 --steps 8", ", was 0.9; --allow-changes");
  refused(same + "--steps 6", "has done 8 steps");
  refused("--data " + data + " --resume " + (folder / "none").string(),
          "none: there is no such directory\n(--resume auto");
  refused("--data " + data + " --allow-changes", "no effect without --resume");
  const auto longer = with(same + "--steps 12");
  EXPECT_EQ(longer.exit_code, 0) << longer.output;
  EXPECT_NE(longer.output.find("steps is 12, was 8"), std::string::npos) << longer.output;
  const auto metrics = metrics_in(folder / "a");
  ASSERT_EQ(metrics.size(), 12u);
  EXPECT_GT(metrics[8]["lr"].get<double>(),
            metrics[7]["lr"].get<double>());  // the cosine of 12 steps, with the old warm-up
  const auto shown = longer.output.find("step  9/12");
  ASSERT_NE(shown, std::string::npos) << longer.output;
  char loss[32];
  std::snprintf(loss, sizeof loss, "loss %.3f", metrics[8]["loss"].get<double>());
  EXPECT_NE(longer.output.find(loss, shown), std::string::npos) << "not mixed with 0: " << longer.output;
  const auto changed = with(base + "--lr 1e-2 --steps 16 --weight-decay 0 --allow-changes");
  EXPECT_EQ(changed.exit_code, 0) << changed.output;
  EXPECT_NE(changed.output.find("weight-decay is 0.0, was 0.2"), std::string::npos) << changed.output;
  // The next checkpoint has the new value in all groups: Muon's, AdamW's matrices, the rest.
  EXPECT_EQ(with(base + "--lr 1e-2 --steps 16 --weight-decay 0").exit_code, 0);
  const auto manifest = nlohmann::json::parse(std::ifstream(folder / "a/checkpoints/step-000016/tessera.json"));
  ASSERT_EQ(manifest["optimizer"]["groups"].size(), 3U);
  for (const auto& group : manifest["optimizer"]["groups"]) EXPECT_EQ(group["options"]["weight_decay"], 0.0);
}

// As in other training programs: an average that is new begins with the weights of the checkpoint.
TEST(TrainGpt, ANewAverageBeginsWithTheLoadedWeights) {
  const TemporaryFolder folder;
  const std::string common =
      "--layers 1 --width 12 --heads 2 --context 16 --batch 2 --threads 1 --sample 0 --val-batches 1 --save-every 4 "
      "--ranks 2 --resume auto --out " +
      (folder / "a").string();
  ASSERT_EQ(run(common + " --steps 4 --lr 1e-2").exit_code, 0);
  const auto refused = run(common + " --steps 8 --lr 1e-2 --ema 0.9");
  EXPECT_EQ(refused.exit_code, 2);
  EXPECT_NE(refused.output.find("ema is 0.9, was 0.0; --allow-changes"), std::string::npos) << refused.output;
  const auto begun = run(common + " --steps 8 --lr 0 --ema 0.9 --allow-changes");
  EXPECT_EQ(begun.exit_code, 0) << begun.output;
  EXPECT_NE(begun.output.find("the average begins with the loaded weights"), std::string::npos) << begun.output;
  const auto metrics = metrics_in(folder / "a");
  ASSERT_EQ(metrics.size(), 8u);
  EXPECT_NEAR(metrics[7]["val_loss"].get<double>(), metrics[3]["val_loss"].get<double>(), 1e-5);
  EXPECT_EQ(run(common + " --steps 12 --lr 0 --ema 0.9").exit_code, 0);  // the checkpoint has it now
  EXPECT_EQ(run(common + " --steps 16 --lr 0 --allow-changes").exit_code, 0);
  const auto elastic = run(common + " --steps 20 --lr 0 --ema 0.9 --elastic --allow-changes");
  EXPECT_NE(elastic.output.find("if --ema is new, begin it in a run without --elastic"), std::string::npos)
      << elastic.output;
}

TEST(TrainGpt, ADamagedNewestCheckpointIsPassedOverAndSaid) {
  const TemporaryFolder folder;
  const std::string common =
      " --wrapper ddp --ranks 2 --layers 1 --width 12 --heads 2 --context 16 --batch 2 --threads 1 "
      "--sample 0 --val-every 0 --steps 6 --save-every 2 --resume auto --out " +
      (folder / "a").string();
  ASSERT_EQ(run(common).exit_code, 0);
  std::fstream file(folder / "a/checkpoints/step-000006/rank-00000-0.safetensors",
                    std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(-5, std::ios::end);
  file.put('\x7f');
  file.close();
  const auto result = run(common);
  EXPECT_EQ(result.exit_code, 0) << result.output;
  for (const char* part : {"passed over: ", "damaged", "goes on from ", "step-000004"})
    EXPECT_NE(result.output.find(part), std::string::npos) << part << " in\n" << result.output;
  EXPECT_EQ(metrics_in(folder / "a").size(), 6u);
  // An error found by all ranks is printed by one.
  const auto refused = run(common + " --lr 3 ");
  EXPECT_EQ(refused.exit_code, 2) << refused.output;
  const auto first = refused.output.find("lr is 3.0, was");
  EXPECT_NE(first, std::string::npos) << refused.output;
  EXPECT_EQ(refused.output.find("lr is 3.0, was", first + 1), std::string::npos) << refused.output;
}

TEST(TrainGpt, ASecondJobWithTheSameFolderIsRefused) {
  const TemporaryFolder folder;
  const tessera::FolderLock lock(folder / "a");
  for (const char* arguments : {"--wrapper local --out ", "--ranks 2 --out "}) {
    const auto result = run(kTiny + std::string(arguments) + (folder / "a").string());
    EXPECT_EQ(result.exit_code, 1) << result.output;
    EXPECT_NE(result.output.find("is in use by process " + std::to_string(::getpid())), std::string::npos)
        << result.output;
  }
}

const std::string kShortRun = " --layers 2 --width 24 --heads 3 --context 16 --threads 1 --val-every 0 --sample 0 ";

TEST(TrainGpt, OfTwoJobsThatBeginAtOnceOneIsRefused) {
  const TemporaryFolder folder;
  std::istringstream line(tessera::testing_support::built(TRAIN_GPT_EXECUTABLE) + kShortRun +
                          "--steps 1000000 --wrapper local --out " + (folder / "a").string());
  const std::vector<std::string> command{std::istream_iterator<std::string>(line), {}};
  tessera::testing_support::ChildProcess one(command), two(command);
  int codes[2] = {-1, -1};
  for (int i = 0; i < 600 && codes[0] < 0 && codes[1] < 0; ++i) {
    codes[0] = one.wait(std::chrono::seconds(0));
    codes[1] = two.wait(std::chrono::seconds(0));
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
  const bool is_first = codes[0] >= 0;
  auto& refused = is_first ? one : two;
  auto& other = is_first ? two : one;
  EXPECT_EQ(std::max(codes[0], codes[1]), 1) << refused.output();
  EXPECT_EQ(refused.printed("is in use by "), 1) << refused.output();
  EXPECT_TRUE(other.await("step", 1)) << other.output();
}

// A signal at any rank makes all ranks save. The resumed run continues from that step.
TEST(TrainGpt, ASignalSavesAndStops) {
  const TemporaryFolder folder;
  const std::string program =
      tessera::testing_support::built(TRAIN_GPT_EXECUTABLE) + kShortRun + "--ranks 2 --batch 2 --warmup 1 ";
  for (const int signal : {SIGINT, SIGTERM}) {
    const auto out = folder / std::to_string(signal);
    std::istringstream line(program + "--steps 1000000 --out " + out.string());
    tessera::testing_support::ChildProcess stopped({std::istream_iterator<std::string>(line), {}});
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (metrics_in(out).size() < 3 && std::chrono::steady_clock::now() < end)
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    ::kill(stopped.pid(), signal);
    EXPECT_EQ(stopped.wait(), 128 + signal) << stopped.output();
    EXPECT_EQ(stopped.printed("stopped by signal " + std::to_string(signal)), 1) << stopped.output();
    const auto saved = tessera::latest_checkpoint(out / "checkpoints");
    ASSERT_TRUE(saved) << stopped.output();
    const auto steps = metrics_in(out).size();
    EXPECT_EQ(std::stoull(saved->filename().string().substr(5)), steps);
    const auto later = run(kShortRun + "--ranks 2 --batch 2 --warmup 1 --resume auto --steps " +
                           std::to_string(steps + 2) + " --out " + out.string());
    EXPECT_EQ(later.exit_code, 0) << later.output;
    EXPECT_EQ(metrics_in(out).size(), steps + 2);
  }
}

TEST(TrainGpt, AFinishedRunWithoutItsMetricsIsResumed) {
  const TemporaryFolder folder;
  const std::string common =
      kShortRun + "--wrapper local --batch 2 --steps 4 --save-every 4 --resume auto --out " + folder.path().string();
  ASSERT_EQ(run(common).exit_code, 0);
  std::filesystem::remove(folder / "metrics.jsonl");
  const auto plot = std::filesystem::last_write_time(folder / "losses.svg");
  const auto result = run(common);
  EXPECT_EQ(result.exit_code, 0) << result.output;
  EXPECT_NE(result.output.find("training   unknown"), std::string::npos) << result.output;
  EXPECT_EQ(result.output.find("nan"), std::string::npos) << result.output;
  EXPECT_EQ(std::filesystem::last_write_time(folder / "losses.svg"), plot);
}

// The checkpoint cannot be written: the run reports it once, within seconds, and resumes from the previous checkpoint.
TEST(TrainGpt, ADiskThatIsFullEndsARunThatGoesOnLater) {
  const TemporaryFolder folder;
  const std::string common = kShortRun + ("--ranks 2 --lr 1e-2 --batch 2 --resume auto --out " +
                                          (folder / "a").string() + " --save-every 4 --steps ");
  ASSERT_EQ(run(common + "4").exit_code, 0);
  const auto began = std::chrono::steady_clock::now();
  tessera::testing_support::ChildProcess full({"sh", "-c",
                                               "trap '' XFSZ; ulimit -f 40; exec " +
                                                   tessera::testing_support::built(TRAIN_GPT_EXECUTABLE) + " " +
                                                   common + "8"});
  EXPECT_EQ(full.wait(), 1) << full.output();
  EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::seconds(40));
  EXPECT_EQ(full.printed("File too large"), 1) << full.output();
  for (const char* part : {"rank ", "step-000008"}) EXPECT_GE(full.printed(part), 1) << full.output();
  const auto later = run(common + "8");
  EXPECT_EQ(later.exit_code, 0) << later.output;
  EXPECT_NE(later.output.find("step 5/8"), std::string::npos) << later.output;
  EXPECT_EQ(metrics_in(folder / "a").size(), 8u);
}

// A GPT-2 with other scales is exported unchanged, and importing does not change its folder.
TEST(TrainGpt, AGpt2KeepsItsScalesAndItsFolder) {
  const TemporaryFolder folder;
  GptOptions options{.vocabulary = 11, .layers = 2, .width = 12, .heads = 3, .context = 8};
  options.norm_epsilon = 0.25;
  options.scale_attention_by_layer = true;
  const auto source = folder / "gpt2";
  std::filesystem::create_directories(source);
  const auto tokens = torch::arange(8).view({1, 8});
  at::Tensor expected, plain;
  torch::manual_seed(1);
  Gpt original(options);
  {
    const at::NoGradGuard no_grad;
    for (auto& parameter : original->parameters()) parameter.normal_();
    expected = original->forward(tokens);
  }
  tessera::run_ranks(1, [&](std::shared_ptr<tessera::Communicator> comm) {
    tessera::FullyShardedDataParallel fsdp(original, comm);
    export_gpt2(source, fsdp, options);
  });
  std::set<std::string> before;
  for (const auto& entry : std::filesystem::directory_iterator(source)) before.insert(entry.path().filename());
  std::filesystem::permissions(source, std::filesystem::perms::owner_read | std::filesystem::perms::owner_exec);
  const GptOptions read = read_gpt2_options(source);
  EXPECT_EQ(read.norm_epsilon, 0.25);
  EXPECT_TRUE(read.scale_attention_by_layer && read.scale_attention);
  tessera::run_ranks(2, [&](std::shared_ptr<tessera::Communicator> comm) {
    Gpt model(read);
    tessera::FullyShardedDataParallel fsdp(model, comm);
    GptOptions usual = options;
    usual.norm_epsilon = 1e-5;
    EXPECT_THROW(import_gpt2(source, fsdp, usual), tessera::CheckpointError);
    GptOptions tied = options;
    tied.tie = true;  // and the head is the embedding's
    tessera::FullyShardedDataParallel without_head(Gpt(tied), comm);
    EXPECT_THROW(import_gpt2(source, without_head, tied), tessera::CheckpointError);
    import_gpt2(source, fsdp, read);
    const at::NoGradGuard no_grad;
    EXPECT_TRUE(at::allclose(fsdp(tokens), expected, 1e-4, 1e-4));
    comm->barrier();
  });
  std::set<std::string> after;
  for (const auto& entry : std::filesystem::directory_iterator(source)) after.insert(entry.path().filename());
  EXPECT_EQ(after, before);
  std::filesystem::permissions(source, std::filesystem::perms::owner_all);
  const auto config = source / "config.json";
  std::ofstream(config) << R"({"model_type": 2})";
  EXPECT_THROW(read_gpt2_options(source), tessera::CheckpointError);
  std::filesystem::remove(config);
  ASSERT_EQ(::mkfifo(config.c_str(), 0600), 0);  // to open it would block
  EXPECT_THROW(read_gpt2_options(source), tessera::CheckpointError);
}

// Adapters on a base in 4 and 8 bit: equal losses on any ranks, an unchanged base, and an export that computes the
// trained model.
TEST(TrainGpt, AdaptersAreTrainedBesideAFrozenBase) {
  const TemporaryFolder folder;
  const auto base = (folder / "base").string(), first = (folder / "first").string(),
             again = (folder / "again").string();
  for (const auto& path : {base, first, again}) std::filesystem::create_directories(path);
  train("--wrapper local --batch 12 --val-batches 2 --sample 0 --export-gpt2 " + base);
  const std::string common = " --val-batches 2 --sample 0 --import-gpt2 " + base + " --lora 2 ";
  const auto expected = train("--wrapper local --batch 12" + common + "--quantize nf4 --export-gpt2 " + first);
  EXPECT_LT(expected.back()["val_loss"], expected[3]["val_loss"]);
  for (const char* other : {"--wrapper fsdp --ranks 3 --batch 4 --export-gpt2 ", "--wrapper sdp --ranks 2 --batch 6 ",
                            "--wrapper fsdp --ranks 2 --batch 6 --offload cpu --ema 0.9 "}) {
    SCOPED_TRACE(other);
    const bool exports = std::string(other).ends_with("--export-gpt2 ");
    const auto losses = train(other + (exports ? again : "") + common + "--quantize nf4");
    ASSERT_EQ(losses.size(), expected.size());
    for (size_t i = 0; i < losses.size(); ++i)
      EXPECT_NEAR(losses[i]["loss"].get<double>(), expected[i]["loss"].get<double>(), 1e-4) << "step " << i + 1;
  }
  train("--wrapper oss --ranks 2 --batch 6 --optimizer muon --quantize int8" + common);
  const auto norms = [](const std::string& name) { return name.find("ln_") != std::string::npos; };
  const auto read = [](const std::string& path, const std::string& name) {
    const auto found = tessera::internal::find_full_tensors(path + "/model.safetensors");
    return tessera::internal::SliceReader(found).read(name, tessera::internal::whole_box(found.tensors.at(name).shape));
  };
  const auto found = tessera::internal::find_full_tensors(base + "/model.safetensors");
  for (const auto& [name, tensor] : found.tensors) {
    const bool adapted = name.find(".h.") != std::string::npos && name.ends_with(".weight") && !norms(name);
    EXPECT_TRUE(at::allclose(read(first, name), read(again, name), 1e-3, 1e-4)) << name;
    EXPECT_EQ(torch::equal(read(first, name), read(base, name)), !adapted) << name;
  }
  // One more step, in full precision, starts with the trained adapters' loss.
  const auto next = train("--wrapper local --batch 12 --val-batches 2 --sample 0 --lr 0 --import-gpt2 " + first);
  EXPECT_NEAR(next.back()["val_loss"].get<double>(), expected.back()["val_loss"].get<double>(), 1e-4);
}

// tests/interop/tensorboard_test.py reads the files with TensorBoard.
TEST(TrainGpt, WritesCurvesAndSaysWhoIsWaitedFor) {
  const TemporaryFolder curves;
  const auto metrics = train("--wrapper fsdp --ranks 2 --batch 4 --sample 0 --tensorboard " + curves.path().string());
  EXPECT_EQ(metrics.size(), 8u);
  const std::vector<std::filesystem::directory_entry> files{std::filesystem::directory_iterator(curves.path()), {}};
  ASSERT_EQ(files.size(), 1u);  // of rank 0 alone
  const std::string bytes = tessera::testing_support::file_bytes(files.front().path());
  const auto count = [&](const std::string& tag) {
    int found = 0;
    for (size_t at = 0; (at = bytes.find(tag, at)) != std::string::npos; ++at) ++found;
    return found;
  };
  for (const char* tag : {"train/loss", "train/learning_rate", "train/grad_norm", "train/tokens_per_s",
                          "memory/state_MiB", "memory/held_MiB", "memory/peak_MiB"})
    EXPECT_EQ(count(tag), 8) << tag;
  EXPECT_EQ(count("val/loss"), 2);
  EXPECT_EQ(count("wait/"), 0);  // every 10 steps by default
  const auto report = run(kTiny + std::string("--wrapper fsdp --ranks 2 --batch 4 --sample 0 --report-every 4 --out ") +
                          (curves / "out").string());
  EXPECT_EQ(report.exit_code, 0) << report.output;
  EXPECT_NE(report.output.find("step 4/8  "), std::string::npos) << report.output;
  EXPECT_NE(report.output.find(" waited for: "), std::string::npos) << report.output;
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
  check("--ranks 100000", 2, "--oversubscribe allows it");
  const std::string tiny = kTiny + "--sample 0 --out " + (folder / "out").string();
  for (const std::string option : {"--export-gpt2", "--tensorboard", "--offload disk --offload-directory"}) {
    check(tiny + " " + option + " " + short_text + "/x", 1, option.substr(option.rfind("--")) + ": ");
    EXPECT_FALSE(std::filesystem::exists(folder / "out/metrics.jsonl"));
  }
  check("--help", 0, "--accumulate");
}

}  // namespace
}  // namespace train_gpt
