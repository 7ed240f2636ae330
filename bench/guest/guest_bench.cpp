// Measures the step of a double-precision MLP in the ranks of an MPI program, trained in three ways:
//
//   moose      as MOOSE's LibtorchArtificialNeuralNetTrainer: after backward one blocking MPI_Allreduce per parameter
//   torchfort  as TorchFort: after backward all gradients are reduced at once, without overlap
//   tessera    DistributedDataParallel over communicator_from_mpi(), with the fused Adam
//
// The first two are reimplementations of those programs' steps, with torch::optim::Adam as they use it. All three must
// compute the same parameters. A fourth way, `bound`, is a lower bound without an exchange of gradients: forward,
// backward, the fused Adam and one MPI_Barrier. The ways take turns, block by block, so that other work on the machine
// affects all of them.
//
//   mpirun -n 4 guest_bench [WIDTH] [LAYERS] [BATCH] [ROUNDS]
#include <tessera/mpi.h>
#include <tessera/tessera.h>
#include <torch/torch.h>

#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include "bench/median.h"
#include "bench/number_argument.h"

namespace {

constexpr int kInputs = 16, kStepsOfBlock = 40;

torch::nn::Sequential make_model(int width, int layers) {
  torch::manual_seed(1);
  torch::nn::Sequential model;
  for (int layer = 0; layer < layers; ++layer) {
    model->push_back(torch::nn::Linear(layer == 0 ? kInputs : width, width));
    model->push_back(torch::nn::Tanh());
  }
  model->push_back(torch::nn::Linear(width, 1));
  model->to(torch::kDouble);
  return model;
}

void sum_over_ranks(const at::Tensor& tensor) {
  MPI_Allreduce(MPI_IN_PLACE, tensor.mutable_data_ptr<double>(), static_cast<int>(tensor.numel()), MPI_DOUBLE, MPI_SUM,
                MPI_COMM_WORLD);
}

void reduce_each(const std::vector<at::Tensor>& parameters, int size) {
  for (const at::Tensor& parameter : parameters) {
    sum_over_ranks(parameter.grad());
    parameter.grad().div_(size);
  }
}

void reduce_at_once(const std::vector<at::Tensor>& parameters, int size) {
  std::vector<at::Tensor> flat;
  for (const at::Tensor& parameter : parameters) flat.push_back(parameter.grad().view({-1}));
  const at::Tensor all = torch::cat(flat);
  sum_over_ranks(all);
  all.div_(size);
  int64_t begin = 0;
  for (const at::Tensor& gradient : flat) {
    gradient.copy_(all.narrow(0, begin, gradient.numel()));
    begin += gradient.numel();
  }
}

struct Way {
  const char* name;
  torch::nn::Sequential model;
  std::function<void()> step;
  std::vector<double> seconds;  // mean time of a step in each block
};

int run(int width, int layers, int batch, int rounds) {
  int rank = 0, size = 1;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  at::set_num_threads(1);
  const auto x = torch::arange(batch * kInputs, torch::kDouble).view({batch, kInputs}).add(rank).sin();
  const auto y = x.sum(1, true).tanh();
  const auto comm = tessera::communicator_from_mpi(MPI_COMM_WORLD);

  std::vector<Way> ways;
  for (const bool each : {true, false}) {
    const auto model = make_model(width, layers);
    const auto optimizer = std::make_shared<torch::optim::Adam>(model->parameters(), torch::optim::AdamOptions(1e-4));
    ways.push_back({each ? "moose" : "torchfort",
                    model,
                    [=] {
                      optimizer->zero_grad();
                      torch::mse_loss(torch::nn::Sequential(model)->forward(x), y).backward();
                      each ? reduce_each(model->parameters(), size) : reduce_at_once(model->parameters(), size);
                      optimizer->step();
                    },
                    {}});
  }
  const auto model = make_model(width, layers);
  tessera::DistributedDataParallel ddp(model, comm);
  tessera::Adam optimizer(model->parameters(), torch::optim::AdamOptions(1e-4));
  ways.push_back({"tessera",
                  model,
                  [&] {
                    optimizer.zero_grad();
                    torch::mse_loss(ddp(x), y).backward();
                    optimizer.step();
                  },
                  {}});

  const size_t exchanging = ways.size();
  const auto alone = make_model(width, layers);
  tessera::Adam own_optimizer(alone->parameters(), torch::optim::AdamOptions(1e-4));
  ways.push_back({"bound",
                  alone,
                  [&] {
                    own_optimizer.zero_grad();
                    torch::mse_loss(torch::nn::Sequential(alone)->forward(x), y).backward();
                    MPI_Barrier(MPI_COMM_WORLD);
                    own_optimizer.step();
                  },
                  {}});

  for (int round = 0; round <= rounds; ++round)
    for (Way& way : ways) {
      MPI_Barrier(MPI_COMM_WORLD);
      const double began = MPI_Wtime();
      for (int step = 0; step < kStepsOfBlock; ++step) way.step();
      MPI_Barrier(MPI_COMM_WORLD);
      if (round > 0) way.seconds.push_back((MPI_Wtime() - began) / kStepsOfBlock);  // round 0 is a warm-up
    }
  for (size_t way = 0; way < exchanging; ++way)
    for (size_t i = 0; i < model->parameters().size(); ++i)
      if (!torch::allclose(ways[way].model->parameters()[i], ways[0].model->parameters()[i], 1e-9, 1e-9)) {
        std::printf("rank %d: %s trains otherwise than %s\n", rank, ways[way].name, ways[0].name);
        return 1;
      }
  if (rank != 0) return 0;
  const double own = median(ways[2].seconds);
  std::printf("%d ranks, %d layers of %d, %d rows a rank\n", size, layers, width, batch);
  for (const Way& way : ways)
    std::printf("%-10s %8.1f us a step, tessera takes %.2f of it\n", way.name, median(way.seconds) * 1e6,
                own / median(way.seconds));
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const auto argument = [&](int index, int otherwise) { return number_argument(argc, argv, index, otherwise); };
  int level = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &level);
  int code = 1;
  try {
    code = run(argument(1, 64), argument(2, 4), argument(3, 16), argument(4, 15));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "guest_bench: %s\n", error.what());
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
  MPI_Finalize();
  return code;
}
