// Ranks are forked processes that train a small model; the test kills, stops or fails some of them. The final
// parameters must have the bits of a run that loads a checkpoint of the same step at the same worlds.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <vector>

#include "tests/elastic/elastic_ranks.h"

namespace tessera::death_test {
namespace {

using namespace testing_support;

// Runs with a fault, and checks that the survivors' parameters are those of the reference.
void expect_survival(int world, const Training& training, const std::set<int>& victims, const Fault& fault,
                     ElasticOptions options = quick_options()) {
  const TemporaryFolder folder;
  const auto codes = run_ranks_as_processes(folder, world, training, options, fault);
  const std::string warnings = warnings_of(folder, world);
  std::vector<Segment> segments;
  std::string parameters;
  for (int rank = 0; rank < world; ++rank) {
    if (victims.contains(rank)) continue;
    ASSERT_EQ(codes[static_cast<size_t>(rank)], 0) << "rank " << rank << "\n" << warnings;
    const auto own = segments_of(folder, rank);
    const std::string bytes = file_bytes(folder / ("parameters-" + std::to_string(rank)));
    if (segments.empty()) {
      segments = own;
      parameters = bytes;
    }
    EXPECT_EQ(bytes, parameters) << "rank " << rank;
  }
  ASSERT_GE(segments.size(), 2U) << warnings;
  EXPECT_EQ(segments.back().world, world - static_cast<int>(victims.size())) << warnings;
  EXPECT_EQ(parameters, reference(folder, segments, training)) << warnings;
  EXPECT_NE(warnings.find("lost"), std::string::npos) << warnings;
  EXPECT_NE(warnings.find("training goes on"), std::string::npos) << warnings;
}

void kill_at(int rank, int64_t generation, int64_t step, const std::set<int>& victims, int64_t when) {
  if (generation == 0 && step == when && victims.contains(rank)) ::kill(::getpid(), SIGKILL);
}

TEST(ElasticDeath, AnyRankMayBeKilled) {
  for (const int victim : {0, 1, 2})
    expect_survival(3, {}, {victim},
                    [&](int rank, int64_t generation, int64_t step) { kill_at(rank, generation, step, {victim}, 8); });
}

TEST(ElasticDeath, EveryWrapperSurvives) {
  for (const Wrapper wrapper : {Wrapper::kDdp, Wrapper::kOss})
    expect_survival(3, {.wrapper = wrapper}, {0},
                    [](int rank, int64_t generation, int64_t step) { kill_at(rank, generation, step, {0}, 8); });
}

TEST(ElasticDeath, TwoOfFourMayDieAtOnce) {
  expect_survival(4, {}, {0, 2},
                  [](int rank, int64_t generation, int64_t step) { kill_at(rank, generation, step, {0, 2}, 8); });
}

TEST(ElasticDeath, ARankMayThrowExitOrCrash) {
  for (const int way : {0, 1, 2})
    expect_survival(3, {}, {1}, [&](int rank, int64_t generation, int64_t step) {
      if (rank != 1 || generation != 0 || step != 7) return;
      if (way == 0) throw std::runtime_error("as planned");
      if (way == 1) ::_exit(3);
      ::raise(SIGSEGV);
    });
}

TEST(ElasticDeath, AStoppedRankIsLeftOutAndEndsWhenItReturns) {
  ElasticOptions options = quick_options();
  options.group.timeout = milliseconds(2000);
  options.stopped_after = milliseconds(1000);
  const Training training{.wake_after = milliseconds(6000)};
  for (const int victim : {0, 2})
    expect_survival(
        3, training, {victim},
        [&](int rank, int64_t generation, int64_t step) {
          if (generation == 0 && step == 8 && rank == victim) ::raise(SIGSTOP);
        },
        options);
}

TEST(ElasticDeath, AnotherRankMayDieWhileTheOthersRegroupOrRestore) {
  expect_survival(4, {}, {0, 2}, [](int rank, int64_t generation, int64_t step) {
    kill_at(rank, generation, step, {0}, 8);
    if (generation == 0 && rank == 2 && step == 8) {
      std::thread([] {
        std::this_thread::sleep_for(milliseconds(30));
        ::kill(::getpid(), SIGKILL);
      }).detach();
    }
  });
}

// Ranks 0 and 1 hold all copies of rank 0's part.
void kill_neighbours(int rank, int64_t generation, int64_t step) { kill_at(rank, generation, step, {0, 1}, 8); }

TEST(ElasticDeath, IfAllCopiesAreLostTheNewestCheckpointIsLoaded) {
  ElasticOptions options = quick_options();
  const TemporaryFolder folder;
  const Training training{.save_every = 4};
  options.checkpoints = folder / "saved";
  const auto codes = run_ranks_as_processes(folder, 4, training, options, &kill_neighbours);
  const std::string warnings = warnings_of(folder, 4);
  EXPECT_EQ(codes, (std::vector<int>{137, 137, 0, 0})) << warnings;
  const auto segments = segments_of(folder, 3);
  ASSERT_EQ(segments.size(), 2U) << warnings;
  EXPECT_EQ(segments[1].step % 4, 0);
  EXPECT_GE(segments[1].step, 4);
  EXPECT_NE(warnings.find("no step is complete in memory; continuing from"), std::string::npos) << warnings;
  EXPECT_EQ(file_bytes(folder / "parameters-3"), reference(folder, segments, training));
}

TEST(ElasticDeath, IfAllCopiesAreLostWithoutACheckpointTrainingDoesNotBeginAgain) {
  const TemporaryFolder folder;
  const auto codes = run_ranks_as_processes(folder, 4, {}, quick_options(), &kill_neighbours);
  EXPECT_EQ(codes, (std::vector<int>{137, 137, 1, 1})) << warnings_of(folder, 4);
  EXPECT_EQ(segments_of(folder, 3).size(), 1U);
}

TEST(ElasticDeath, ADeathBeforeTheFirstCopyOfAStepBeginsAgain) {
  for (const int copies : {0, 1}) {  // of the drawn state: from new values, or from those of its copy
    ElasticOptions options = quick_options();
    options.copies = copies;
    expect_survival(
        3, {}, {1}, [](int rank, int64_t generation, int64_t step) { kill_at(rank, generation, step, {1}, 1); },
        options);
  }
}

TEST(ElasticDeath, FewerThanTheLeastRanksAreRefused) {
  ElasticOptions options = quick_options();
  options.least_ranks = 3;
  options.regroup_timeout = milliseconds(1500);
  const TemporaryFolder folder;
  const auto codes = run_ranks_as_processes(folder, 3, {}, options, [](int rank, int64_t generation, int64_t step) {
    kill_at(rank, generation, step, {1}, 8);
  });
  EXPECT_EQ(codes, (std::vector<int>{1, 137, 1}));
}

// The body of the processes of the next test, which spawn_elastic() starts; disabled because it needs their
// environment. Rank 1 is killed, and the others must have the same parameters.
TEST(ElasticJob, DISABLED_Rank) {
  ASSERT_TRUE(launched());
  const std::string rank = std::getenv("RANK");
  at::set_num_threads(1);
  Elastic elastic(quick_options());
  std::string parameters;
  elastic.run([&](ElasticRun& run) {
    Trainer trainer(run.comm(), {});
    run.restore(trainer.state());
    while (run.step() < 12) {
      trainer.step();
      run.commit();
      if (rank == "1" && run.generation() == 0 && run.step() == 8) ::kill(::getpid(), SIGKILL);
    }
    parameters = trainer.parameters();
    EXPECT_EQ(run.accumulation(), run.generation() == 0 ? 1 : 2);  // three halves, rounded up
  });
  std::ofstream(std::filesystem::path(std::getenv("TESSERA_TEST_OUTPUT")) / ("parameters-" + rank)) << parameters;
}

// Returns the exit code of spawn_elastic() for three ranks.
int spawn_job(const TemporaryFolder& folder, int least_ranks) {
  const pid_t child = run_in_child([&] {
    ::setenv("TESSERA_TEST_OUTPUT", folder.path().c_str(), 1);
    std::vector<std::string> arguments{"elastic_tests", "--gtest_filter=ElasticJob.DISABLED_Rank",
                                       "--gtest_also_run_disabled_tests", "--gtest_brief=1"};
    std::vector<char*> argv;
    for (std::string& argument : arguments) argv.push_back(argument.data());
    ::_exit(spawn_elastic(3, static_cast<int>(argv.size()), argv.data(), {.least_ranks = least_ranks, .restarts = 0}));
  });
  int status = 0;
  ::waitpid(child, &status, 0);
  return WEXITSTATUS(status);
}

TEST(ElasticDeath, SpawnElasticLeavesTheOthersRunning) {
  const TemporaryFolder folder;
  EXPECT_EQ(spawn_job(folder, 2), 0);
  EXPECT_NE(file_bytes(folder / "parameters-0"), "");
  EXPECT_EQ(file_bytes(folder / "parameters-0"), file_bytes(folder / "parameters-2"));
  const TemporaryFolder other;
  EXPECT_EQ(spawn_job(other, 3), 128 + SIGKILL);
  EXPECT_THROW(spawn_elastic(3, 0, nullptr, {.least_ranks = 4}), std::invalid_argument);
}

// A child that returns from the body would otherwise form a group of its own, and run the body again.
TEST(ElasticFork, AChildOfTheBodyIsNoMember) {
  const pid_t member = run_in_child([] {
    Elastic elastic(c10::make_intrusive<c10d::HashStore>(), 0, 1, quick_options());
    pid_t child = -1;
    std::string error;
    try {
      elastic.run([&](ElasticRun&) {
        if (child < 0) child = ::fork();
      });
    } catch (const CommError& refusal) {
      error = refusal.what();
    }
    if (child == 0) ::_exit(error.find("is a child (fork) of process") == std::string::npos ? 3 : 0);
    int status = 0;
    ::waitpid(child, &status, 0);
    if (!error.empty() || status != 0) ::_exit(4);
  });
  int status = 0;
  ::waitpid(member, &status, 0);
  EXPECT_EQ(status, 0);
}

TEST(ElasticDeath, OneOfTwoGoesOnAlone) {
  expect_survival(2, {}, {0},
                  [](int rank, int64_t generation, int64_t step) { kill_at(rank, generation, step, {0}, 8); });
}

}  // namespace
}  // namespace tessera::death_test
