// Trains a GPT (gpt.h) with its state sharded over ranks. Reading order: gpt.h, which knows nothing
// of ranks; sharded.cpp, which wraps it; trainer.cpp, the loop; then whatever you like.

#include <exception>
#include <iostream>

#include "options.h"
#include "run_rank.h"
#include "tessera/tessera.h"

namespace {

int start_ranks(const train_gpt::TrainOptions& options, int argc, char** argv) {
  train_gpt::prepare(options);  // a mistake is reported once, not by every rank
  train_gpt::prepare_output(options);
  return tessera::spawn_local(*options.ranks, argc, argv);
}

int run_launched(const train_gpt::TrainOptions& options) {
  const auto job = train_gpt::prepare(options);
  const auto comm = tessera::init();
  try {
    train_gpt::run_rank(job, comm);
  } catch (const std::exception& error) {
    comm->abort(error.what());  // the other ranks need not wait for the timeout
    throw;
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const auto options = train_gpt::parse_options(argc, argv, std::cout);
    if (!options) return 0;
    if (options->ranks.value_or(1) > 1 && !tessera::launched()) return start_ranks(*options, argc, argv);
    return run_launched(*options);
  } catch (const train_gpt::OptionsError& error) {
    std::cerr << "train_gpt: " << error.what() << "\n(train_gpt --help lists the options)\n";
    return 2;
  } catch (const c10::Error& error) {
    std::cerr << "train_gpt: " << error.what_without_backtrace() << "\n";
    return 1;
  } catch (const std::exception& error) {
    std::cerr << "train_gpt: " << error.what() << "\n";
    return 1;
  }
}
