// What `train_gpt --plan` starts: a program of its own, with the same options.

#include <iostream>

#include <tessera/launch.h>
#include "plan.h"
#include "program.h"

namespace train_gpt {
namespace {

void plan(const TrainOptions& options) {
  if (tessera::launched())
    throw OptionsError("--plan is one process for all ranks: expected no launcher, and --ranks N");
  print_plan(std::cout, prepare(options));
}

}  // namespace
}  // namespace train_gpt

int main(int argc, char** argv) { return train_gpt::program(argc, argv, train_gpt::plan); }
