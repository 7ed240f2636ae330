// Batches of other sizes.
#include "tests/loops/loops.h"

#include <ATen/CPUGeneratorImpl.h>
#include <limits>
#include <sstream>
#include <utility>
#include <vector>

namespace tessera::loops::batches_test {
using namespace internal;
namespace {

TESSERA_LOOPS(Batches, all_setups);

TEST_P(Batches, RowsOfNothing) {
  play(GetParam(), {}, [](Trainer& run) {
    run.train(0);
    const at::Tensor none = run.x(1).slice(0, 0, 0);
    run.optimizer().zero_grad();
    (run(none).sum() * 0).backward();
    run.optimizer().step();
    run.train(1);
  });
}

TEST_P(Batches, BatchesOfOtherSizes) {
  play(GetParam(), {}, [](Trainer& run) {
    for (int step = 0; step < 4; ++step) {
      std::vector<at::Tensor> x, y;
      for (int part = 0; part <= step % 3; ++part) x.push_back(run.x(step + part)), y.push_back(run.y(step + part));
      step_with(run, torch::mse_loss(run(torch::cat(x)), torch::cat(y)));
    }
  });
}

struct Wide : Net {
  Wide() { register_module("first", first), register_module("last", last); }
  at::Tensor forward(const at::Tensor& x) override { return last(first(x).tanh()); }
  torch::nn::Linear first{kFeatures, 64}, last{64, kFeatures};
};

// Blocks of hundreds of kilobytes, of another size in each step and between steps: a validation, and a forward whose
// loss is dropped.
TEST_P(Batches, LargeBatchesOfOtherSizes) {
  play(GetParam(), {.model = [] { return seeded_model<Wide>(71); }, .rounding = 10}, [](Trainer& run) {
    const auto large = [](const at::Tensor& rows, int64_t times) { return rows.repeat({times, 1}); };
    int step = 0;
    for (const int64_t times : {200, 700, 300, 800, 100, 600}) {
      step_with(run, torch::mse_loss(run(large(run.x(step), times)), large(run.y(step), times)));
      try {
        const at::Tensor loss = run(large(run.x(step + 1), times / 2)).sum();
        throw std::runtime_error("the data were no good");
      } catch (const std::runtime_error&) {
        torch::NoGradGuard no_grad;
        run.note(torch::mse_loss(run(large(run.x(step + 2), 900 - times)), large(run.y(step + 2), 900 - times)));
      }
      ++step;
    }
  });
}

// Sequences of several lengths.
struct Packed : Net {
  Packed() { register_module("lstm", lstm), register_module("out", out); }
  at::Tensor forward(const at::Tensor& x) override {
    const at::Tensor lengths = torch::arange(x.size(0)).remainder(3) + 2;
    const auto packed = torch::nn::utils::rnn::pack_padded_sequence(x.view({x.size(0), 4, 2}), lengths, true, false);
    return out(std::get<1>(std::get<1>(lstm->forward_with_packed_input(packed)))[0]);
  }
  torch::nn::LSTM lstm{torch::nn::LSTMOptions(2, 5).batch_first(true)};
  torch::nn::Linear out{5, kFeatures};
};

TEST_P(Batches, SequencesOfSeveralLengths) {
  play(GetParam(), {.model = [] { return seeded_model<Packed>(37); }, .same_data = true}, three_steps);
}

}  // namespace
}  // namespace tessera::loops::batches_test
