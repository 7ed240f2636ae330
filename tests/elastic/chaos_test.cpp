// Random faults on ranks that train: a rank is killed, stopped, crashes, exits or throws at a random moment, so in a
// gather, a reduction, a step, a copy, a commit, a save, and, for a second victim, a regroup or a restore. No rank may
// hang; each rank that ends well has the parameters of a run that loads checkpoints of the same steps at the same
// worlds; and a death loses no more than the steps since the last complete copy.
//
// TESSERA_CHAOS_FAULTS (40) rounds from seed TESSERA_CHAOS_SEED (1). `make elastic-chaos` runs 1,000.
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <random>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "tests/elastic/elastic_ranks.h"

namespace tessera::chaos_test {
namespace {

using namespace testing_support;

enum class Way { kKill, kStop, kCrash, kExit, kThrow };
constexpr const char* kWays[] = {"SIGKILL", "SIGSTOP", "SIGSEGV", "exit", "exception"};

struct Blow {
  int rank = 0;
  Way way = Way::kKill;
  int64_t generation = 0;  // the first group in which it may happen
  int64_t step = 0;        // 0: when the group begins
  int delay_us = 0;
};

struct Round {
  int world = 2;
  Training training;
  ElasticOptions options;
  std::vector<Blow> blows;

  std::string text() const {
    std::ostringstream text;
    text << world << " ranks, wrapper " << static_cast<int>(training.wrapper) << ", copy_every " << options.copy_every
         << ", copies " << options.copies;
    for (const Blow& blow : blows)
      text << "; rank " << blow.rank << ": " << kWays[static_cast<int>(blow.way)] << " in generation "
           << blow.generation << " after step " << blow.step << " + " << blow.delay_us << " us";
    return text.str();
  }
};

Round draw_round(unsigned seed) {
  std::mt19937 random(seed);
  const auto draw = [&](int least, int most) { return std::uniform_int_distribution<int>(least, most)(random); };
  Round round;
  round.world = draw(2, 6);
  round.training.wrapper = static_cast<Wrapper>(draw(0, 2));
  round.training.steps = 11;
  round.training.save_every = 4;
  round.options = quick_options();
  round.options.copy_every = draw(1, 4);
  round.options.copies = draw(1, 2);
  const int victims = round.world > 2 && draw(0, 2) == 0 ? 2 : 1;
  for (int i = 0; i < victims; ++i) {
    Blow blow;
    do {
      blow.rank = draw(0, round.world - 1);
    } while (!round.blows.empty() && blow.rank == round.blows[0].rank);
    const int way = draw(0, 24);  // stopped ranks cost seconds
    blow.way = way == 0 ? Way::kStop : way < 16 ? Way::kKill : static_cast<Way>(2 + way % 3);
    const bool in_regroup = i == 1 && draw(0, 1) == 0;
    blow.generation = in_regroup ? 1 : 0;
    blow.step = in_regroup ? 0 : draw(0, static_cast<int>(round.training.steps) - 1);
    blow.delay_us = draw(0, 1) == 0 ? draw(0, 3000) : draw(0, 30000);
    round.blows.push_back(blow);
    if (blow.way == Way::kStop) {
      round.options.group.timeout = milliseconds(2000);
      round.options.stopped_after = milliseconds(1000);
      round.training.wake_after = milliseconds(5000);
    }
  }
  return round;
}

void strike(const Blow& blow) {
  if (blow.way == Way::kThrow) throw std::runtime_error("as planned");
  std::thread([blow] {
    std::this_thread::sleep_for(std::chrono::microseconds(blow.delay_us));
    if (blow.way == Way::kExit) ::_exit(3);
    ::kill(::getpid(), blow.way == Way::kKill ? SIGKILL : blow.way == Way::kStop ? SIGSTOP : SIGSEGV);
  }).detach();
}

void run_round(unsigned seed) {
  Round round = draw_round(seed);
  SCOPED_TRACE(round.text() + "\nrepeat: make elastic-chaos FAULTS=1 SEED=" + std::to_string(seed));
  const TemporaryFolder folder;
  round.options.checkpoints = folder / "saved";
  const auto codes = run_ranks_as_processes(
      folder, round.world, round.training, round.options, [&](int rank, int64_t generation, int64_t step) {
        for (const Blow& blow : round.blows)
          if (rank == blow.rank && generation == blow.generation && step == blow.step) strike(blow);
      });
  const std::string warnings = warnings_of(folder, round.world);
  std::map<std::string, std::string> references;  // by segments
  // As many deaths as there are holders lose a part; before the first checkpoint on disk nothing replaces it.
  const bool may_lose =
      static_cast<int>(round.blows.size()) > round.options.copies && !latest_checkpoint(round.options.checkpoints);
  for (int rank = 0; rank < round.world; ++rank) {
    const bool is_victim = std::ranges::any_of(round.blows, [&](const Blow& blow) { return blow.rank == rank; });
    const int code = codes[static_cast<size_t>(rank)];
    EXPECT_TRUE(code == 0 || is_victim || (code == 1 && may_lose)) << "rank " << rank << "\n" << warnings;
    if (code != 0) continue;
    const auto segments = segments_of(folder, rank);
    ASSERT_FALSE(segments.empty());
    std::string name;
    for (size_t i = 0; i < segments.size(); ++i) {
      name += std::to_string(segments[i].world) + " from " + std::to_string(segments[i].step) + ", ";
      // A copy ends before the next one starts, so the newest complete one is at most two periods old. A rank that did
      // not reach a step has a group that did.
      const bool is_from_disk = warnings.find("continuing from") != std::string::npos;
      EXPECT_TRUE(i == 0 || is_from_disk || segments[i].last_before - segments[i].step <= 2 * round.options.copy_every)
          << name << "\n"
          << warnings;
    }
    if (!references.contains(name)) references[name] = reference(folder, segments, round.training);
    EXPECT_EQ(file_bytes(folder / ("parameters-" + std::to_string(rank))), references[name])
        << "rank " << rank << ": " << name << "\n"
        << warnings;
  }
}

int number_of(const char* variable, int otherwise) {
  const char* text = std::getenv(variable);
  return text == nullptr ? otherwise : std::atoi(text);
}

TEST(ElasticChaos, SurvivorsGoOnAfterAnyFault) {
  const int faults = number_of("TESSERA_CHAOS_FAULTS", 40), seed = number_of("TESSERA_CHAOS_SEED", 1);
  for (int i = 0; i < faults && !HasFailure(); ++i) run_round(static_cast<unsigned>(seed + i));
}

}  // namespace
}  // namespace tessera::chaos_test
