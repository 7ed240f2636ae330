#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "tests/loops/loops.h"

// A training loop drawn at random: a model, an optimizer and a list of actions. Each action is valid in any state: a
// backward without a forward is a no-op. So a failing program can be reduced to some of its actions. A seed always
// draws the same program.
namespace tessera::loops {
using namespace internal;

struct Player;

struct Action {
  std::string text;  // as a user would write it
  std::function<void(Player&)> run;
  int model = 0;  // of two
};

struct DrawnProgram {
  uint64_t seed;
  Optim optim;
  unsigned tree;   // of the model's two parts
  bool same_data;  // output rows depend on other rows
  // false: a step() of gradients of a backward under no_sync() is a no-op. DDP does not detect it (docs/loops.md).
  bool steps_own_sums = true;
  std::vector<Action> actions;
};

DrawnProgram draw_program(uint64_t seed);
std::string text_of(const DrawnProgram& program);
Play play_of(const DrawnProgram& program);
Loop loop_of(const DrawnProgram& program);

}  // namespace tessera::loops
