// Trains a GPT (gpt.h) with its state sharded over ranks. Reading order: gpt.h, which knows nothing
// of ranks; sharded.cpp, which wraps it; trainer.cpp, the loop; then whatever you like.

#include <exception>
#include <iostream>

#include "options.h"
#include "plan.h"
#include "run_rank.h"
#include "tessera/comm/notes.h"
#include "tessera/tessera.h"

namespace {

int start_ranks(const train_gpt::TrainOptions& options, int argc, char** argv) {
  train_gpt::prepare(options);  // a mistake is reported once, not by every rank
  static_cast<void>(train_gpt::prepare_output(options));
  return tessera::spawn_local(*options.ranks, argc, argv);
}

// An error that all ranks have is told by one of them.
bool is_first_to_fail(const tessera::Communicator& comm) {
  try {
    return tessera::Notes(comm, "train_gpt").add("failed", 1) == 1;
  } catch (const tessera::CommError&) {
    return true;
  }
}

int run_launched(const train_gpt::TrainOptions& options) {
  const auto comm = tessera::init();
  try {
    train_gpt::run_rank(train_gpt::prepare(options), comm);
  } catch (const std::exception& error) {
    const bool tells = is_first_to_fail(*comm);
    comm->abort(error.what());  // the other ranks need not wait for the timeout
    if (tells) throw;
    return dynamic_cast<const train_gpt::OptionsError*>(&error) != nullptr ? 2 : 1;
  }
  return 0;
}

int print_plan(const train_gpt::TrainOptions& options) {
  if (tessera::launched())
    throw train_gpt::OptionsError("--plan is one process for all ranks: expected no launcher, and --ranks N");
  train_gpt::print_plan(std::cout, train_gpt::prepare(options));
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const auto options = train_gpt::parse_options(argc, argv, std::cout);
    if (!options) return 0;
    if (options->plan) return print_plan(*options);
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
