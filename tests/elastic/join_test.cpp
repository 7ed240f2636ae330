// Processes that join an elastic run: restarted ranks and spares. As in death_test.cpp, ranks are forked processes, and
// the final parameters must have the bits of a run that loads checkpoints of the same steps at the same worlds.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <set>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <vector>

#include "elastic/joining.h"
#include "tests/elastic/elastic_ranks.h"

namespace tessera::join_test {
namespace {

using namespace testing_support;

struct Expected {
  std::set<int> victims;    // that do not end well
  std::vector<int> worlds;  // of the groups of each survivor, the last ones of a process that joined
  std::vector<std::string> warnings;
};

// Runs, and checks that all processes but the victims have the parameters of the reference.
void expect_growth(int world, const Training& training, const Fault& fault, const Expected& expected,
                   ElasticOptions options = quick_options()) {
  const TemporaryFolder folder;
  options.rendezvous = folder / "rendezvous";
  const auto codes = run_ranks_as_processes(folder, world, training, options, fault);
  const std::string warnings = warnings_of(folder, static_cast<int>(codes.size()));
  std::string parameters;
  for (int rank = 0; rank < static_cast<int>(codes.size()); ++rank) {
    if (expected.victims.contains(rank)) continue;
    ASSERT_EQ(codes[static_cast<size_t>(rank)], 0) << "process " << rank << "\n" << warnings;
    std::vector<int> worlds;
    for (const Segment& segment : segments_of(folder, rank))
      if (!segment.is_unchanged) worlds.push_back(segment.world);
    ASSERT_FALSE(worlds.empty()) << "process " << rank << "\n" << warnings;
    ASSERT_LE(worlds.size(), expected.worlds.size()) << "process " << rank << "\n" << warnings;
    EXPECT_EQ(worlds, std::vector<int>(expected.worlds.end() - static_cast<std::ptrdiff_t>(worlds.size()),
                                       expected.worlds.end()))
        << "process " << rank << "\n"
        << warnings;
    const std::string own = file_bytes(folder / ("parameters-" + std::to_string(rank)));
    if (parameters.empty()) parameters = own;
    EXPECT_EQ(own, parameters) << "process " << rank;
    if (worlds == expected.worlds) {
      EXPECT_EQ(parameters, reference(folder, segments_of(folder, rank), training)) << warnings;
    }
  }
  for (const std::string& text : expected.warnings)
    EXPECT_NE(warnings.find(text), std::string::npos) << text << "\n" << warnings;
}

ElasticOptions options_for(int most_ranks) {
  ElasticOptions options = quick_options();
  options.most_ranks = most_ranks;
  return options;
}

TEST(ElasticJoin, ASpareJoinsBetweenTwoSteps) {
  for (const Wrapper wrapper : {Wrapper::kFsdp, Wrapper::kDdp, Wrapper::kOss})
    expect_growth(2, {.wrapper = wrapper, .joiners = 1, .least_world = 3}, nullptr,
                  {{}, {2, 3}, {"rank 2 joined; 3 ranks go on from step "}}, options_for(3));
}

TEST(ElasticJoin, OneRankGrows) {
  expect_growth(1, {.joiners = 1, .least_world = 2}, nullptr, {{}, {1, 2}, {"rank 1 joined"}}, options_for(2));
}

TEST(ElasticJoin, ALaterProcessTakesThePlaceOfADeadRank) {
  for (const int victim : {0, 2})
    expect_growth(3, {.joiners = 1, .join_in = 1, .least_generation = 2, .least_world = 3},
                  [&](int rank, int64_t generation, int64_t step) {
                    if (generation == 0 && step == 8 && rank == victim) ::kill(::getpid(), SIGKILL);
                  },
                  {{victim}, {3, 2, 3}, {"of 3 was lost", "rank 2 joined; 3 ranks go on from step "}});
}

TEST(ElasticJoin, AWaitingSpareReplacesADeadRankAtOnce) {
  expect_growth(3, {.joiners = 1},
                [](int rank, int64_t generation, int64_t step) {
                  if (generation != 0 || step != 8) return;
                  std::this_thread::sleep_for(milliseconds(1000));  // the spare waits by then
                  if (rank == 1) ::kill(::getpid(), SIGKILL);
                },
                {{1}, {3, 3}, {"rank 1 of 3 was lost", "), rank 2 joined; 3 ranks go on from step "}});
}

TEST(ElasticJoin, TwoMayJoin) {
  const TemporaryFolder folder;
  ElasticOptions options = options_for(4);
  options.rendezvous = folder / "rendezvous";
  const Training training{.joiners = 2, .least_world = 4};
  EXPECT_EQ(run_ranks_as_processes(folder, 2, training, options, nullptr), std::vector<int>(4, 0));
  const auto segments = segments_of(folder, 0);
  EXPECT_EQ(segments.back().world, 4);
  // A join loses no step.
  for (const Segment& segment : segments) EXPECT_EQ(segment.step, segment.last_before);
  const std::string parameters = reference(folder, segments, training);
  for (const int rank : {0, 1, 2, 3})
    EXPECT_EQ(file_bytes(folder / ("parameters-" + std::to_string(rank))), parameters)
        << file_bytes(folder / "segments-0") << warnings_of(folder, 4);
}

TEST(ElasticJoin, AProcessMayDieWhenItHasJoined) {
  expect_growth(
      2, {.joiners = 1, .least_generation = 2},
      [](int rank, int64_t, int64_t step) {
        if (rank == 2 && step == 0) ::kill(::getpid(), SIGKILL);
      },
      {{2}, {2, 3, 2}, {"rank 2 joined", "rank 2 of 3 was lost"}}, options_for(3));
}

TEST(ElasticJoin, AMemberMayDieWhenAnotherProcessHasJoined) {
  for (const int victim : {0, 1})
    expect_growth(
        2, {.joiners = 1, .least_generation = 2},
        [&](int rank, int64_t generation, int64_t step) {
          if (rank == victim && generation == 1 && step == 0) ::kill(::getpid(), SIGKILL);
        },
        {{victim}, {2, 3, 2}, {"rank 2 joined", "of 3 was lost"}}, options_for(3));
}

// Its server may have told the others already that it has entered the new group.
TEST(ElasticJoin, AMemberMayDieWhileTheNewGroupForms) {
  for (const int delay_ms : {0, 5, 10, 15, 20, 25, 30}) {
    const TemporaryFolder folder;
    ElasticOptions options = options_for(5);
    options.rendezvous = folder / "rendezvous";
    options.stopped_after = milliseconds(2000);
    const auto codes = run_ranks_as_processes(folder, 4, {.pause = milliseconds(20), .joiners = 1}, options, nullptr,
                                              [&](int process, Place place) {
                                                if (process != 0 || place != Place::kJoin) return;
                                                std::thread([=] {
                                                  std::this_thread::sleep_for(milliseconds(delay_ms));
                                                  ::kill(::getpid(), SIGKILL);
                                                }).detach();
                                              });
    EXPECT_EQ(codes, (std::vector<int>{137, 0, 0, 0, 0})) << delay_ms << " ms\n" << warnings_of(folder, 5);
  }
}

// Without copies each death loses a part.
TEST(ElasticJoin, AProcessDoesNotBeginTrainingAgainIfTheMembersHaveLostTheCopies) {
  const TemporaryFolder folder;
  ElasticOptions options = quick_options();
  options.rendezvous = folder / "rendezvous";
  options.copies = 0;
  const auto codes = run_ranks_as_processes(folder, 2, {.joiners = 1}, options, [](int rank, int64_t, int64_t step) {
    if (step != 8) return;
    std::this_thread::sleep_for(milliseconds(1000));  // the spare waits by then
    if (rank == 1) ::kill(::getpid(), SIGKILL);
  });
  EXPECT_EQ(codes, (std::vector<int>{1, 137, 1})) << warnings_of(folder, 3);
  EXPECT_TRUE(segments_of(folder, 2).empty());
}

TEST(ElasticJoin, ASpareOfAFullGroupEndsWithTheRun) {
  const TemporaryFolder folder;
  ElasticOptions options = quick_options();
  options.rendezvous = folder / "rendezvous";
  EXPECT_EQ(run_ranks_as_processes(folder, 2, {.joiners = 1}, options, nullptr), std::vector<int>(3, 0));
  EXPECT_TRUE(segments_of(folder, 2).empty());
}

// The spare finds the file of the former run, which has ended.
TEST(ElasticJoin, ASpareMayStartBeforeTheNextRunInAFolder) {
  const TemporaryFolder former, folder;
  ElasticOptions options = options_for(2);
  options.rendezvous = folder / "rendezvous";
  EXPECT_EQ(run_ranks_as_processes(former, 1, {.steps = 3}, options, nullptr), std::vector<int>{0});
  const auto codes = run_ranks_as_processes(folder, 1, {.joiners = 1, .least_generation = 1}, options, nullptr, nullptr,
                                            [](int process) {
                                              if (process == 0) std::this_thread::sleep_for(milliseconds(1000));
                                            });
  EXPECT_EQ(codes, std::vector<int>(2, 0)) << warnings_of(folder, 2);
  EXPECT_EQ(segments_of(folder, 1).size(), 1U);
}

// Its connections belong to the parent process, which the other members must still reach.
TEST(ElasticJoin, AChildOfForkMayDestroyItsElastic) {
  const TemporaryFolder folder;
  const pid_t member = ::fork();  // because this process must not start threads
  if (member == 0) {
    ::alarm(60);
    ElasticOptions options = quick_options();
    options.rendezvous = folder.path();
    auto elastic = std::make_unique<Elastic>(c10::make_intrusive<c10d::HashStore>(), 0, 1, options);
    const pid_t child = ::fork();
    if (child == 0) {
      elastic.reset();
      ::_exit(0);
    }
    ::waitpid(child, nullptr, 0);
    ::_exit(internal::is_alive(internal::RunFile(folder.path())) ? 0 : 1);
  }
  int status = -1;
  ::waitpid(member, &status, 0);
  EXPECT_EQ(status, 0);
}

TEST(ElasticJoin, AProcessWithOtherOptionsIsRefusedByNameOnBothSides) {
  const TemporaryFolder folder;
  ElasticOptions options = quick_options();
  options.rendezvous = folder / "rendezvous";
  const pid_t joiner = run_in_child([&] {
    ElasticOptions others = options;
    others.copy_every = 5;
    ::setenv("TESSERA_ELASTIC_JOIN", "1", 1);
    try {
      Elastic(others).run([](ElasticRun&) {});
    } catch (const std::invalid_argument& error) {
      std::ofstream(folder / "error") << error.what();
    }
  });
  const auto codes = run_ranks_as_processes(folder, 2, {}, options, [](int, int64_t, int64_t) {
    std::this_thread::sleep_for(milliseconds(30));  // the process asks meanwhile
  });
  EXPECT_EQ(codes, std::vector<int>(2, 0));
  EXPECT_EQ(::waitpid(joiner, nullptr, 0), joiner);
  const std::string error = file_bytes(folder / "error"), warnings = warnings_of(folder, 2);
  EXPECT_TRUE(error.find("this process passes copy_every 5, ") != std::string::npos &&
              error.find("the run that it joins copy_every 3, ") != std::string::npos)
      << error;
  EXPECT_TRUE(warnings.find(" cannot join: it passes copy_every 5, ") != std::string::npos &&
              warnings.find("this run copy_every 3, ") != std::string::npos)
      << warnings;
  EXPECT_EQ(segments_of(folder, 0).size(), 1U);
}

TEST(ElasticJoin, AWaitingProcessFailsIfAllMembersDie) {
  const TemporaryFolder folder;
  ElasticOptions options = quick_options();
  options.rendezvous = folder / "rendezvous";
  options.stopped_after = milliseconds(1000);
  const auto codes = run_ranks_as_processes(folder, 2, {.joiners = 1}, options, [](int, int64_t, int64_t step) {
    if (step == 8) ::_exit(3);
  });
  EXPECT_EQ(codes, (std::vector<int>{3, 3, 1}));
}

// The body of the processes of the next tests, which spawn_elastic() starts; disabled because it needs their
// environment. Rank 1 is killed at step 8 until it has died as often as TESSERA_TEST_DEATHS says.
TEST(ElasticRestart, DISABLED_Rank) {
  ASSERT_TRUE(launched());
  const std::string rank = std::getenv("RANK");
  const auto deaths = static_cast<size_t>(std::atoi(std::getenv("TESSERA_TEST_DEATHS")));
  const int last_world = std::atoi(std::getenv("TESSERA_TEST_WORLD"));
  const std::filesystem::path folder = std::getenv("TESSERA_TEST_OUTPUT");
  at::set_num_threads(1);
  ElasticOptions elastic_options = quick_options();
  elastic_options.least_ranks = std::atoi(std::getenv("TESSERA_TEST_LEAST"));
  Elastic elastic(elastic_options);
  std::string parameters;
  elastic.run([&](ElasticRun& run) {
    Trainer trainer(run.comm(), {});
    run.restore(trainer.state());
    // A death happens before the next group, so all ranks read the same number.
    const bool is_last = file_bytes(folder / "deaths").size() == deaths && run.comm()->size() == last_world;
    EXPECT_EQ(run.first_world(), 3);  // also in a process that has joined
    EXPECT_EQ(run.accumulation(), run.comm()->size() == 3 ? 1 : 2);
    while (run.step() < 12 || !is_last) {
      trainer.step();
      run.commit();
      std::this_thread::sleep_for(milliseconds(2));
      if (rank != "1" || is_last || run.step() < 8 || file_bytes(folder / "deaths").size() == deaths) continue;
      std::ofstream(folder / "deaths", std::ios::app) << "x";
      ::kill(::getpid(), SIGKILL);
    }
    parameters = trainer.parameters();
  });
  std::ofstream(folder / ("parameters-" + rank)) << parameters;
}

// Rank 1 is killed after all ranks have received SIGUSR1. Training stops when it has joined again, or at step 2000.
TEST(ElasticRestart, DISABLED_RankThatIsWarned) {
  static volatile sig_atomic_t is_warned = 0;
  ::signal(SIGUSR1, [](int) { is_warned = 1; });
  const std::string rank = std::getenv("RANK");
  const std::filesystem::path folder = std::getenv("TESSERA_TEST_OUTPUT");
  at::set_num_threads(1);
  Elastic elastic(quick_options());
  elastic.run([&](ElasticRun& run) {
    Trainer trainer(run.comm(), {});
    run.restore(trainer.state());
    while (run.step() < 2000 && (run.generation() == 0 || run.comm()->size() < 3)) {
      trainer.step();
      run.commit();
      if (run.step() == 1) std::ofstream(folder / ("began-" + rank)).flush();
      std::this_thread::sleep_for(milliseconds(5));
      if (rank == "1" && run.generation() == 0 && is_warned != 0) ::kill(::getpid(), SIGKILL);
    }
    std::ofstream(folder / ("end-" + rank)) << run.comm()->size();
  });
}

// As above, but all ranks throw.
TEST(ElasticRestart, DISABLED_RankThatThrows) {
  std::ofstream(std::filesystem::path(std::getenv("TESSERA_TEST_OUTPUT")) / "starts", std::ios::app) << "x";
  Elastic elastic(quick_options());
  elastic.run([&](ElasticRun& run) {
    run.comm()->barrier("before the error");
    throw std::runtime_error("as planned");
  });
}

// Returns the exit code of spawn_elastic() for three ranks.
int spawn_job(
    const TemporaryFolder& folder, int deaths, int last_world, const SpawnElasticOptions& options,
    const std::string& body = "Rank", const std::function<void(pid_t)>& meanwhile = [](pid_t) {}) {
  std::ofstream(folder / "deaths").flush();
  const pid_t child = run_in_child([&] {
    ::setenv("TESSERA_TEST_OUTPUT", folder.path().c_str(), 1);
    ::setenv("TESSERA_TEST_DEATHS", std::to_string(deaths).c_str(), 1);
    ::setenv("TESSERA_TEST_LEAST", std::to_string(options.least_ranks).c_str(), 1);
    ::setenv("TESSERA_TEST_WORLD", std::to_string(last_world).c_str(), 1);
    std::vector<std::string> arguments{"elastic_tests", "--gtest_filter=ElasticRestart.DISABLED_" + body,
                                       "--gtest_also_run_disabled_tests", "--gtest_brief=1"};
    std::vector<char*> argv;
    for (std::string& argument : arguments) argv.push_back(argument.data());
    ::_exit(spawn_elastic(3, static_cast<int>(argv.size()), argv.data(), options));
  });
  meanwhile(child);
  int status = 0;
  ::waitpid(child, &status, 0);
  return WEXITSTATUS(status);
}

TEST(ElasticRestart, ADeadRankIsStartedAgainAndJoins) {
  const TemporaryFolder folder;
  EXPECT_EQ(spawn_job(folder, 1, 3, {.least_ranks = 2}), 0);
  const std::string parameters = file_bytes(folder / "parameters-0");
  EXPECT_NE(parameters, "");
  for (const char* rank : {"1", "2"}) EXPECT_EQ(file_bytes(folder / (std::string("parameters-") + rank)), parameters);
}

// SIGUSR1 is only a warning, which the parent forwards.
TEST(ElasticRestart, ARankThatDiesAfterAWarningIsStartedAgain) {
  const TemporaryFolder folder;
  EXPECT_EQ(spawn_job(folder, 0, 3, {}, "RankThatIsWarned",
                      [&](pid_t parent) {
                        for (const char* rank : {"began-0", "began-1", "began-2"})
                          while (!std::filesystem::exists(folder / rank)) std::this_thread::sleep_for(milliseconds(5));
                        ::kill(parent, SIGUSR1);
                      }),
            0);
  for (const char* rank : {"end-0", "end-1", "end-2"}) EXPECT_EQ(file_bytes(folder / rank), "3") << rank;
}

TEST(ElasticRestart, TheGroupWaitsForTheRankIfItNeedsAll) {
  const TemporaryFolder folder;
  EXPECT_EQ(spawn_job(folder, 1, 3, {.least_ranks = 3}), 0);
  EXPECT_NE(file_bytes(folder / "parameters-1"), "");
}

TEST(ElasticRestart, NoRankIsStartedAgainIfAllHaveFailed) {
  const TemporaryFolder folder;
  EXPECT_EQ(spawn_job(folder, 0, 3, {}, "RankThatThrows"), 1);
  // The first ranks that fail may be started again, while the others live.
  EXPECT_LE(file_bytes(folder / "starts").size(), 6U);
}

TEST(ElasticRestart, ARankThatDiesAgainAndAgainIsGivenUp) {
  const TemporaryFolder folder;
  EXPECT_EQ(spawn_job(folder, 3, 2, {.least_ranks = 2, .restarts = 2}), 0);
  EXPECT_EQ(file_bytes(folder / "deaths").size(), 3U);
  EXPECT_NE(file_bytes(folder / "parameters-0"), "");
  EXPECT_FALSE(std::filesystem::exists(folder / "parameters-1"));
  EXPECT_THROW(spawn_elastic(3, 0, nullptr, {.restarts = -1}), std::invalid_argument);
}

}  // namespace
}  // namespace tessera::join_test
