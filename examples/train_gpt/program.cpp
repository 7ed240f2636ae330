#include "program.h"

#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <exception>
#include <filesystem>
#include <iostream>
#include <string>

#include <tessera/tessera.h>
#include "core/comm/notes.h"
#include "options.h"
#include "run_rank.h"

namespace train_gpt {
namespace {

int start_ranks(const TrainOptions& options, int argc, char** argv) {
  prepare(options);  // a mistake is reported once, not by every rank
  static_cast<void>(prepare_output(options));
  return tessera::spawn_local(*options.ranks, argc, argv);
}

// An error that all ranks have is told by one of them.
bool is_first_to_fail(const tessera::Communicator& comm) {
  try {
    return tessera::internal::Notes(comm, "train_gpt").add("failed", 1) == 1;
  } catch (const tessera::CommError&) {
    return true;
  }
}

int run_launched(const TrainOptions& options) {
  const auto comm = tessera::init();
  try {
    run_rank(prepare(options), comm);
  } catch (const std::exception& error) {
    const bool tells = is_first_to_fail(*comm);
    comm->abort(error.what());  // the other ranks need not wait for the timeout
    if (tells) throw;
    return dynamic_cast<const OptionsError*>(&error) != nullptr ? 2 : 1;
  }
  return 0;
}

// --plan is train_gpt_plan, beside this program: what trains is linked, and so built, without the libraries that plan.
int start_planner(char** argv) {
  const std::string planner = std::filesystem::read_symlink("/proc/self/exe").string() + "_plan";
  ::execv(planner.c_str(), argv);
  throw OptionsError("--plan cannot start " + planner + " (" + std::strerror(errno) +
                     "): cmake --build --preset release --target train_gpt_plan builds it");
}

}  // namespace

int program(int argc, char** argv, Planner plans) {
  try {
    const auto options = parse_options(argc, argv, std::cout);
    if (!options) return 0;
    if (plans != nullptr) {
      plans(*options);
      return 0;
    }
    if (options->plan) return start_planner(argv);
    if (options->ranks.value_or(1) > 1 && !tessera::launched()) return start_ranks(*options, argc, argv);
    return run_launched(*options);
  } catch (const OptionsError& error) {
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

}  // namespace train_gpt
