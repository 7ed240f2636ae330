// Measures the cost per rank as the number of ranks grows: start, step and checkpoint of eight Linear(64, 64) under
// FullyShardedDataParallel, on thread ranks. The model is so small that the runtime dominates.
#include <unistd.h>

#include <boost/program_options.hpp>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <iostream>
#include <string>
#include <vector>

#include <tessera/tessera.h>

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

// Returns a model with the same values on each rank. Does not draw them, because ranks are threads that share torch's
// random generator.
torch::nn::Sequential eight_layers() {
  torch::nn::Sequential model;
  for (int layer = 0; layer < 8; ++layer) model->push_back(torch::nn::Linear(64, 64));
  torch::NoGradGuard no_grad;
  for (auto& parameter : model->parameters())
    parameter.copy_(torch::linspace(-0.1, 0.12, parameter.numel()).sin().view_as(parameter));
  return model;
}

// Runs one step with the same rows on each rank, so that the mean gradient equals that of one rank. Returns the loss.
template <class Model>
double train_step(Model& model, torch::optim::Optimizer& optimizer) {
  auto loss = model.forward(torch::ones({4, 64})).square().mean();
  loss.backward();
  optimizer.step();
  optimizer.zero_grad();
  return loss.template item<double>();
}

struct Seconds {
  double start = 0, step = 0, save = 0, loss = 0;
};

// Returns the times with `world` ranks, measured by rank 0 between barriers.
Seconds measure(int world, int steps, const std::filesystem::path& folder) {
  Seconds seconds;
  const auto begin = Clock::now();
  tessera::run_ranks(world, [&](const std::shared_ptr<tessera::Communicator>& comm) {
    auto model = eight_layers();
    tessera::FullyShardedDataParallel fsdp(model, comm, {.auto_wrap = tessera::wrap_modules<torch::nn::LinearImpl>()});
    torch::optim::SGD optimizer(fsdp.parameters(), 0.01);
    train_step(fsdp, optimizer);
    comm->barrier();
    if (comm->rank() == 0) seconds.start = seconds_since(begin);
    const auto first = Clock::now();
    double loss = 0;
    for (int number = 0; number < steps; ++number) loss = train_step(fsdp, optimizer);
    comm->barrier();
    if (comm->rank() == 0) {
      seconds.step = seconds_since(first) / steps;
      seconds.loss = loss;
    }
    const auto save = Clock::now();
    tessera::save_checkpoint(folder, fsdp, optimizer);
    if (comm->rank() == 0) seconds.save = seconds_since(save);
  });
  std::filesystem::remove_all(folder);
  return seconds;
}

// Returns the loss of the same training in one process.
double reference(int steps) {
  auto model = eight_layers();
  torch::optim::SGD optimizer(model->parameters(), 0.01);
  double loss = 0;
  for (int number = 0; number <= steps; ++number) loss = train_step(*model, optimizer);
  return loss;
}

}  // namespace

int main(int argc, char** argv) {
  namespace po = boost::program_options;
  std::vector<int> worlds = {2, 8, 32, 64, 128, 256};
  int steps = 10;
  po::options_description all("ranks_bench: what start, step and checkpoint cost by the number of thread ranks");
  all.add_options()("help,h", "this text")("ranks", po::value(&worlds)->multitoken(), "worlds")(
      "steps", po::value(&steps)->default_value(steps), "timed steps");
  try {
    po::variables_map values;
    po::store(po::parse_command_line(argc, argv, all), values);
    po::notify(values);
    if (values.count("help")) {
      std::cout << all;
      return 0;
    }
    if (steps < 1) throw po::error("--steps must be at least 1, got " + std::to_string(steps));
    torch::set_num_threads(1);
    const double expected = reference(steps);
    const auto folder = std::filesystem::temp_directory_path() / ("tessera_ranks_bench_" + std::to_string(getpid()));
    std::printf("ranks  start s  step ms  step ms a rank  checkpoint s\n");
    for (const int world : worlds) {
      const Seconds seconds = measure(world, steps, folder);
      if (std::abs(seconds.loss - expected) > 1e-5 * std::abs(expected)) {
        std::fprintf(stderr, "%d ranks: the loss is %.9g, and %.9g without sharding\n", world, seconds.loss, expected);
        return 1;
      }
      std::printf("%5d  %7.2f  %7.1f  %14.2f  %12.2f\n", world, seconds.start, seconds.step * 1e3,
                  seconds.step * 1e3 / world, seconds.save);
      std::fflush(stdout);
    }
  } catch (const std::exception& error) {
    std::cerr << "ranks_bench: " << error.what() << "\n";
    return 2;
  }
}
