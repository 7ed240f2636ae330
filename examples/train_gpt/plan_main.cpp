// The program train_gpt_plan, which `train_gpt --plan` executes with the same arguments.

#include <tessera/launch.h>

#include <iostream>

#include "plan.h"
#include "run.h"

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
