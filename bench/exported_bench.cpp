// Measures the time that a node of an exported model adds to that of its operator. ExportedModule, which runs the chain
// of bench/exported_chain.py, takes turns with the same chain in C++.
//
//   tools/python.sh bench/exported_chain.py out/chain.pt2 && build/release/bench/exported_bench out/chain.pt2
//
// Checks that the results are equal. Then prints medians over rounds, without and with autograd.
#include <torch/torch.h>

#include <chrono>
#include <cstdio>
#include <vector>

#include <tessera/exported.h>
#include <tessera/tessera.h>
#include "median.h"
#include "number_argument.h"

namespace {

constexpr int kRounds = 400;

// Runs the chain of the archive in C++, `rounds` times.
at::Tensor written_out(at::Tensor x, const at::Tensor& shift, int64_t rounds) {
  for (int64_t i = 0; i < rounds; ++i) x = at::sub(at::tanh(at::mul(at::add(x, shift), 0.75)), shift);
  return x;
}

template <class Call>
double microseconds(Call call) {
  const auto began = std::chrono::steady_clock::now();
  const at::Tensor result = call();  // the time excludes freeing the result and its graph
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - began).count();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr,
                 "exported_bench: expected the archive of bench/exported_chain.py, and how many nodes it has\n");
    return 2;
  }
  const int64_t nodes = number_argument<int64_t>(argc, argv, 2, 500);
  at::set_num_threads(1);
  const auto model = tessera::load_exported(argv[1]);
  const at::Tensor shift = model->named_parameters()["shift"], x = torch::ones({4});
  auto exported = [&] { return model->forward(x).tensor(); };
  auto direct = [&] { return written_out(x, shift, nodes / 4); };
  if (!at::equal(exported(), direct())) {
    std::fprintf(stderr, "exported_bench: the archive computes something else: was it made with %ld nodes?\n",
                 static_cast<long>(nodes));
    return 1;
  }
  std::printf("%-10s %16s %16s %22s\n", "autograd", "exported, us", "operators, us", "a node beside it, us");
  for (const bool grad : {false, true}) {
    const at::AutoGradMode mode(grad);
    std::vector<double> of_exported, of_operators, beside;
    for (int round = 0; round < kRounds; ++round) {
      of_exported.push_back(microseconds(exported) / static_cast<double>(nodes));
      of_operators.push_back(microseconds(direct) / static_cast<double>(nodes));
      beside.push_back(of_exported.back() - of_operators.back());
    }
    std::printf("%-10s %16.3f %16.3f %22.3f\n", grad ? "on" : "off", median(of_exported), median(of_operators),
                median(beside));
  }
}
