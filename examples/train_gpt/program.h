#pragma once

namespace train_gpt {

struct TrainOptions;

using Planner = void (*)(const TrainOptions& options);

// What main() does: reads the command line, trains, and tells of errors. Returns the exit status. With `plans`, which
// may throw, that is called in the place of training.
int program(int argc, char** argv, Planner plans = nullptr);

}  // namespace train_gpt
