// train_gpt --plan predicts the memory and time of a training with data.
#include "plan.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <iterator>
#include <sstream>
#include <string>
#include <vector>

#include <tessera/plan.h>
#include <tessera/plan/dry_run.h>
#include <tessera/tessera.h>
#include "gpt.h"
#include "model.h"
#include "options.h"
#include "tests/support/built.h"
#include "tests/support/child_process.h"
#include "tests/support/temporary_folder.h"

namespace train_gpt {
namespace {

using tessera::MemoryKind;

Job job_of(const std::string& arguments) {
  std::istringstream line("train_gpt --layers 2 --width 24 --heads 3 --context 16 --val-batches 1 " + arguments);
  const std::vector<std::string> words{std::istream_iterator<std::string>(line), {}};
  std::vector<const char*> argv;
  for (const auto& word : words) argv.push_back(word.c_str());
  std::ostringstream help;
  return prepare(parse_options(static_cast<int>(argv.size()), argv.data(), help).value());
}

TEST(TrainGptPlan, SaysWhatATrainingTakes) {
  const tessera::testing_support::TemporaryFolder folder;
  const Job base = job_of("--wrapper local");
  tessera::run_ranks(1, [&](std::shared_ptr<tessera::Communicator> comm) {
    const auto model = wrap(draw_model(base.options, at::kCPU), base.options, std::move(comm));
    export_gpt2(folder.path(), model->own_shards(), base.options.model);
  });
  for (const std::string arguments :
       {"--ranks 3", "--ranks 3 --accumulate 2 --ema 0.9", "--ranks 2 --wrapper sdp --optimizer lion",
        "--ranks 2 --wrapper oss", "--ranks 2 --wrapper sdp --optimizer muon",
        "--ranks 2 --wrapper oss --optimizer muon", "--ranks 3 --optimizer muon", "--ranks 2 --optimizer adamw8bit",
        "--ranks 2 --wrapper ddp --clip 0", "--wrapper local", "--ranks 2 --wire int8", "--ranks 2 --offload cpu",
        "--ranks 2 --offload cpu --device-fraction 0.5", "--ranks 2 --offload cpu --step-in-backward",
        "--ranks 2 --offload disk --offload-directory ", "--ranks 2 --lora 2 --quantize nf4 --import-gpt2 ",
        "--ranks 2 --lora 2 --quantize int8 --import-gpt2 "}) {
    const Job job = job_of(arguments.ends_with(" ") ? arguments + folder.path().string() : arguments);
    const bool has_disk = job.options.offload == Offload::kDisk;
    const int world = job.options.ranks.value_or(1);
    std::vector<tessera::RunRecord> real(static_cast<size_t>(world));
    tessera::run_ranks(world, [&](std::shared_ptr<tessera::Communicator> comm) {
      const auto rank = static_cast<size_t>(comm->rank());
      real[rank] = tessera::record_run([&](auto of_rank) { return std::make_unique<Rehearsal>(job, of_rank); },
                                       [](auto& training) { training->step(); }, comm, Rehearsal::kSteps);
    });
    for (int rank = 0; rank < world; ++rank) {
      const auto planned = plan_of(job, rank);
      const auto& peak = real[static_cast<size_t>(rank)].peak;
      EXPECT_GT(planned.peak[has_disk ? MemoryKind::kDisk : MemoryKind::kOptimizer], 0);
      if (job.options.step_in_backward) {  // the real peak depends on the speed of the thread that steps
        EXPECT_GE(planned.peak[MemoryKind::kOptimizer], peak[MemoryKind::kOptimizer]) << "rank " << rank;
        continue;
      }
      for (size_t i = 0; i < tessera::kMemoryKinds; ++i) {
        const auto kind = static_cast<MemoryKind>(i);
        if (kind == MemoryKind::kScratch || kind == MemoryKind::kTransport) continue;
        EXPECT_EQ(planned.peak[kind], peak[kind]) << arguments << ", rank " << rank << ": " << tessera::name_of(kind);
      }
    }
  }
}

TEST(TrainGptPlan, PrintsRanksAndTrainsNothing) {
  const tessera::testing_support::TemporaryFolder folder;
  const auto out = (folder / "out").string();
  const auto run = [&](std::vector<std::string> arguments,
                       const tessera::testing_support::ChildProcess::Environment& environment = {}) {
    arguments.insert(arguments.begin(),
                     {tessera::testing_support::built(TRAIN_GPT_EXECUTABLE), "--plan", "--demo", "--out", out});
    tessera::testing_support::ChildProcess child(arguments, environment);
    const int code = child.wait();
    return std::pair(code, child.output());
  };
  const auto [code, text] = run({"--ranks", "64"});
  EXPECT_EQ(code, 0) << text;
  for (const char* part : {"fsdp on 64 ranks", "parameters", "optimizer", "\n0  ", "\n6  ", "\n...\n63 ", "peak is in"})
    EXPECT_NE(text.find(part), std::string::npos) << part << " in\n" << text;
  EXPECT_EQ(text.find("\n7  "), std::string::npos) << text;
  const auto [disk_code, disk] = run({"--ranks", "2", "--offload", "disk"});
  EXPECT_EQ(disk_code, 0) << disk;
  EXPECT_NE(disk.find("disk\n"), std::string::npos) << disk;
  const auto [rank_code, rank] = run(
      {},
      {{"RANK", "0"}, {"WORLD_SIZE", "1"}, {"LOCAL_RANK", "0"}, {"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", "1"}});
  EXPECT_EQ(rank_code, 2);
  EXPECT_NE(rank.find("--plan is one process for all ranks"), std::string::npos) << rank;
  EXPECT_FALSE(std::filesystem::exists(out));
}

// `make demo` builds train_gpt without the planner.
TEST(TrainGptPlan, SaysWhatBuildsIt) {
  const tessera::testing_support::TemporaryFolder folder;
  const auto copy = folder / "train_gpt";
  std::filesystem::copy_file(tessera::testing_support::built(TRAIN_GPT_EXECUTABLE), copy);
  tessera::testing_support::ChildProcess child({copy.string(), "--plan", "--demo"});
  EXPECT_EQ(child.wait(), 2);
  EXPECT_NE(child.output().find(copy.string() + "_plan (No such file or directory)"), std::string::npos)
      << child.output();
  EXPECT_NE(child.output().find("--target train_gpt_plan builds it"), std::string::npos) << child.output();
}

}  // namespace
}  // namespace train_gpt
