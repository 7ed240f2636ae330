// Selects the ZeRO stage by one number, after OneFlow's example: trains a small classifier by SGD on cross entropy,
// then predicts with the sharded model.
#include <boost/program_options.hpp>

#include <cstdio>
#include <iostream>
#include <string>

#include <ATen/CPUGeneratorImpl.h>

#include <tessera/tessera.h>
#include <torch/torch.h>
#include "examples/common/option_checks.h"

namespace {

namespace po = boost::program_options;

struct Options {
  int stage = 3;
  int ranks = 2;
  int64_t steps = 20;
  int64_t batch = 16;
};

struct Data {
  at::Tensor features, labels;
};

// Draws rows whose class is that of a cluster, so that the classes can be learned.
Data draw(int64_t rows, at::Generator& generator) {
  static const auto centres = [] {
    auto fixed = at::make_generator<at::CPUGeneratorImpl>(7);
    return torch::randn({10, 256}, fixed);
  }();
  const auto labels = torch::randint(0, 10, {rows}, generator, torch::kInt64);
  return {centres.index_select(0, labels) + torch::randn({rows, 256}, generator), labels};
}

void train(const Options& options, const std::shared_ptr<tessera::Communicator>& comm) {
  torch::manual_seed(0);
  torch::nn::Sequential module(torch::nn::Linear(256, 128), torch::nn::ReLU(), torch::nn::Linear(128, 10));
  tessera::ZeroOptions zero{.stage = options.stage};
  zero.fsdp.auto_wrap = tessera::wrap_modules<torch::nn::LinearImpl>();
  auto model = tessera::zero(module, torch::optim::SGDOptions(0.05), comm, zero);

  auto generator = at::make_generator<at::CPUGeneratorImpl>(100 + comm->rank());  // each rank draws other data
  for (int64_t step = 0; step < options.steps; ++step) {
    const auto data = draw(options.batch, generator);
    const auto loss = torch::cross_entropy_loss(model(data.features), data.labels);
    loss.backward();
    model.step();
    model.zero_grad();
    const auto mean = tessera::reduce_to_host(*comm, loss.detach().clone(), tessera::ReduceOp::kAverage, "the loss");
    if (comm->rank() == 0)
      std::printf("step %3lld  loss %.9g\n", static_cast<long long>(step + 1), mean.item<double>());
  }

  const torch::NoGradGuard no_grad;
  auto same_for_all = at::make_generator<at::CPUGeneratorImpl>(5);
  const auto data = draw(200, same_for_all);
  const double right = model(data.features).argmax(1).eq(data.labels).to(torch::kFloat64).mean().item<double>();
  const auto memory = model.memory();
  if (comm->rank() == 0)
    std::printf("stage %d on %d ranks: %.1f %% of 200 new examples classified, %lld of %lld bytes of parameters kept\n",
                model.stage(), comm->size(), 100 * right, static_cast<long long>(memory.shard_bytes),
                static_cast<long long>(memory.unsharded_bytes));
}

Options parse(int argc, char** argv) {
  Options options;
  po::options_description all("stages");
  all.add_options()("help", "this text")(
      "stage", po::value(&options.stage)->default_value(options.stage),
      "ZeRO stage, sharded over ranks: 0 nothing, 1 optimizer state, 2 gradients too, 3 parameters too")(
      "ranks", po::value(&options.ranks)->default_value(options.ranks),
      "processes to start; a launcher's number takes precedence")(
      "steps", po::value(&options.steps)->default_value(options.steps), "steps to train")(
      "batch", po::value(&options.batch)->default_value(options.batch), "examples per rank and step");
  po::variables_map values;
  po::store(po::command_line_parser(argc, argv).options(all).positional({}).run(), values);
  po::notify(values);
  if (values.count("help") > 0) {
    std::cout << all;
    std::exit(0);
  }
  examples::check_ranges({{"stage", options.stage, 0, 3},
                          {"ranks", options.ranks, 1, 1024},
                          {"steps", options.steps, 1, 1'000'000'000},
                          {"batch", options.batch, 1, 1'000'000}});
  return options;
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  try {
    options = parse(argc, argv);
  } catch (const std::logic_error& error) {  // po::error or OptionsError
    std::cerr << "stages: " << error.what() << "\n";
    return 2;
  }
  return tessera::run_main([&] {
    if (!tessera::launched() && options.ranks > 1) return tessera::spawn_local(options.ranks, argc, argv);
    train(options, tessera::init());
    return 0;
  });
}
