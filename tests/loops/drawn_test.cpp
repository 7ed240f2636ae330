// Loops drawn at random, under every wrapper. A failure prints the shortest program that fails, and the command that
// runs it again.
#include <cstdlib>

#include <chrono>
#include <iostream>
#include <map>

#include "tests/loops/drawn_program.h"

namespace tessera::loops::drawn_test {
namespace {

TESSERA_LOOPS(Drawn, all_setups);

uint64_t number_of(const char* variable, uint64_t otherwise) {
  const char* text = std::getenv(variable);
  return text != nullptr ? std::stoull(text) : otherwise;
}

std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

Outcome run(const Setup& setup, const DrawnProgram& program, int world) {
  Outcome outcome =
      outcome_of(setup, play_of(program), loop_of(program), world, program.optim, std::chrono::seconds(5));
  const char* refused = std::getenv("TESSERA_LOOP_REFUSED");  // to find the program with this error
  if (refused != nullptr && outcome.wrong.empty() && outcome.error.find(refused) != std::string::npos)
    outcome.wrong = "refused: " + first_line(outcome.error);
  return outcome;
}

// Removes each action that the failure does not need.
void cut_down(const Setup& setup, int world, DrawnProgram& program, std::string& wrong) {
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(40);
  for (size_t i = program.actions.size(); i > 0 && std::chrono::steady_clock::now() < until; --i) {
    DrawnProgram shorter = program;
    shorter.actions.erase(shorter.actions.begin() + static_cast<int64_t>(i) - 1);
    const std::string still = run(setup, shorter, world).wrong;
    if (still.empty()) continue;
    wrong = still;
    program = std::move(shorter);
  }
}

TEST_P(Drawn, Loops) {
  const auto& setup = GetParam();
  // Setups that take turns run fewer programs.
  const uint64_t first = number_of("TESSERA_LOOP_SEED", 1),
                 count = number_of("TESSERA_LOOP_PROGRAMS", setup.takes_turns ? 2 : 6);
  std::map<std::string, std::pair<int, uint64_t>> refusals;  // how often, and by which program
  uint64_t equal = 0;
  for (uint64_t seed = first; seed < first + count; ++seed) {
    DrawnProgram program = draw_program(seed);
    program.steps_own_sums = setup.stage > 0;
    const int world = setup.worlds[(seed + setup.name.size()) % setup.worlds.size()];
    Outcome outcome = run(setup, program, world);
    if (!outcome.wrong.empty()) {
      cut_down(setup, world, program, outcome.wrong);
      ADD_FAILURE() << setup.name << " world " << world << ": " << outcome.wrong << "\n"
                    << text_of(program) << "again: TESSERA_LOOP_SEED=" << seed
                    << " TESSERA_LOOP_PROGRAMS=1 loops_tests --gtest_filter='*Drawn.*/" << setup.name << "'";
    } else if (outcome.error.empty()) {
      ++equal;
    } else {
      auto& [times, last] =
          refusals[first_line(outcome.error) + (outcome.expected_error.empty() ? "" : " (one process throws, too)")];
      ++times;
      last = seed;
    }
  }
  if (std::getenv("TESSERA_LOOP_REFUSALS") == nullptr) return;
  std::cout << setup.name << ": " << equal << " of " << count << " equal\n";
  for (const auto& [error, times] : refusals)
    std::cout << "  " << times.first << ", program " << times.second << ": " << error << "\n";
}

}  // namespace
}  // namespace tessera::loops::drawn_test
