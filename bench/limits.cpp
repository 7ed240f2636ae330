// Measures lower bounds of a step's time on this machine: computing alone, moving the bytes of each stage alone, and
// copying the same bytes. To compute, each rank trains the whole model in its own process, and its optimizer steps all
// parameters.
//
//   limits --model deep --ranks 2 --json
//
// The options are those of train_step. Results are comparable only with a step_s_median of the same hour.
#include <torch/torch.h>

#include <algorithm>
#include <boost/program_options.hpp>
#include <chrono>
#include <functional>
#include <iostream>
#include <nlohmann/json.hpp>

#include <tessera/tessera.h>
#include "measure.h"
#include "options.h"

namespace {

using Clock = std::chrono::steady_clock;

double seconds_of(const std::function<void()>& work) {
  const auto began = Clock::now();
  work();
  return std::chrono::duration<double>(Clock::now() - began).count();
}

struct Cost {
  double seconds = 0, cpu_seconds = 0;
};

// Returns the median over `repeats` of the slowest rank's time, and on rank 0 also the mean processor time.
Cost cost_of(int repeats, tessera::Communicator& comm, const std::function<void()>& work) {
  std::vector<double> seconds;
  const double cpu_before = train_step::cpu_seconds();
  for (int i = 0; i < repeats; ++i) {
    comm.barrier();
    const auto slowest = torch::tensor({seconds_of(work)}, torch::kFloat64);
    comm.all_reduce(slowest, tessera::ReduceOp::kMax).wait();
    seconds.push_back(slowest.item<double>());
  }
  std::sort(seconds.begin(), seconds.end());
  return {seconds[seconds.size() / 2], (train_step::cpu_seconds() - cpu_before) / repeats};
}

}  // namespace

int main(int argc, char** argv) {
  try {
    auto options = train_step::parse(argc, argv);
    if (!options) return 0;
    if (!tessera::launched() && options->ranks > 1) return tessera::spawn_local(options->ranks, argc, argv);
    at::set_num_threads(options->threads);
    const auto comm = tessera::init();
    options->wrapper = "local";
    const auto local = train_step::measure(*options, comm);

    // All parameters, padded to a multiple of N. An all-gather moves (N-1)/N of these bytes.
    const int64_t shard_bytes = (local["model_bytes"].get<int64_t>() + comm->size() - 1) / comm->size();
    const auto full = torch::zeros({shard_bytes * comm->size()}, torch::kByte), copy = torch::zeros_like(full);
    const auto shard = full.narrow(0, comm->rank() * shard_bytes, shard_bytes);
    const Cost exchange = cost_of(5, *comm, [&] { comm->all_gather(full, shard).wait(); });
    const Cost memcpy = cost_of(5, *comm, [&] { copy.copy_(full); });
    if (comm->rank() == 0) {
      const nlohmann::ordered_json line = {{"model", options->model},
                                           {"ranks", comm->size()},
                                           {"model_bytes", local["model_bytes"]},
                                           {"compute_s", local["step_s_median"]},
                                           {"compute_cpu_s", local["cpu_s"]},
                                           {"exchange_stage_0_and_2_s", 2 * exchange.seconds},
                                           {"exchange_stage_1_and_3_s", 3 * exchange.seconds},
                                           {"exchange_stage_0_and_2_cpu_s", 2 * exchange.cpu_seconds},
                                           {"exchange_stage_1_and_3_cpu_s", 3 * exchange.cpu_seconds},
                                           {"memcpy_s", memcpy.seconds}};
      if (options->json) {
        std::cout << line.dump() << std::endl;
      } else {
        for (const auto& [name, value] : line.items()) std::cout << name << ": " << value << "\n";
      }
    }
    return 0;
  } catch (const boost::program_options::error& error) {
    std::cerr << "limits: " << error.what() << "\n";
    return 2;
  } catch (const std::exception& error) {
    std::cerr << "limits: " << error.what() << "\n";
    return 1;
  }
}
