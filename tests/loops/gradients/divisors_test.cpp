// Losses that are sums over unequal parts.
#include "tests/loops/loops.h"

#include <ATen/CPUGeneratorImpl.h>
#include <sstream>
#include <utility>
#include <vector>

namespace tessera::loops::divisors_test {
using namespace internal;
namespace {

TESSERA_LOOPS(Divisors, all_setups);

// In every second step each rank but the last also takes the first row of the next rank.
at::Tensor rows_of(const Trainer& run, const at::Tensor& all, int step) {
  const int64_t least = kRows / run.world, more = step % 2 == 0 ? 1 : 0;
  const int64_t begin = least * run.rank + (run.rank > 0 ? more : 0);
  const int64_t end = least * (run.rank + 1) + (run.rank + 1 < run.world ? more : 0);
  return all.slice(0, begin, end);
}

TEST_P(Divisors, ADivisorOfTheirOwnForEachStep) {
  for (bool summed : {false, true}) {
    play(GetParam(), {.same_data = true}, [summed](Trainer& run) {
      for (int step = 0; step < 4; ++step) {
        const at::Tensor x = rows_of(run, run.x(step), step), y = rows_of(run, run.y(step), step);
        if (summed)
          run.divide_gradients_by_sum(x.size(0) * (1 + step));
        else
          run.set_gradient_divide_factor(kRows * (1 + step));
        run.optimizer().zero_grad();
        (run(x) - y).square().sum().backward();
        run.optimizer().step();
      }
    });
  }
}

// The first rank has most of the rows, the others two each.
at::Tensor part(const Trainer& run, const at::Tensor& all) {
  const int64_t first = kRows - 2 * (run.world - 1);
  if (run.rank == 0) return all.slice(0, 0, first);
  return all.slice(0, first + 2 * (run.rank - 1), first + 2 * run.rank);
}

TEST_P(Divisors, GradientsDividedByTheNumberOfTokens) {
  play(GetParam(), {.same_data = true}, [](Trainer& run) {
    run.set_gradient_divide_factor(kRows);
    for (int step = 0; step < 3; ++step) {
      run.optimizer().zero_grad();
      (run(part(run, run.x(step))) - part(run, run.y(step))).square().sum().backward();
      run.optimizer().step();
    }
  });
}

// Weight decay that the loop itself puts into the gradients.
TEST_P(Divisors, GradientsOfTheLoopsOwnAreNotDivided) {
  for (const bool accumulates : {false, true})
    play(GetParam(), {.same_data = true}, [accumulates](Trainer& run) {
      const auto loss = [&](int step) { return (run(part(run, run.x(step))) - part(run, run.y(step))).square().sum(); };
      run.set_gradient_divide_factor(kRows);
      for (int step = 0; step < 3; ++step) {
        for (at::Tensor& parameter : run.parameters()) parameter.mutable_grad() = 0.01 * parameter.detach();
        if (accumulates) {
          auto scope = run.no_sync();
          loss(2 * step).backward();
        }
        loss(2 * step + 1).backward();
        run.optimizer().step();
      }
    });
}

// The last backward divides all parts of the sum. Gradients that are kept as zeros are no average.
TEST_P(Divisors, ADivisorSetAfterTheFirstPart) {
  if (GetParam().name == "oss_alone") return;  // which has no wrapper that divides
  for (const bool sets_to_none : {true, false})
    play(GetParam(), {.same_data = true}, [sets_to_none](Trainer& run) {
      const auto loss = [&](int step) { return (run(part(run, run.x(step))) - part(run, run.y(step))).square().sum(); };
      run.set_gradient_divide_factor(kRows);
      for (int step = 0; step < 3; ++step) {
        run.optimizer().zero_grad(sets_to_none);
        if (run.shards() == nullptr) run.set_gradient_divide_factor(kRows * (2 + step));
        {
          auto scope = run.no_sync();
          loss(2 * step).backward();
        }
        run.set_gradient_divide_factor(kRows * (2 + step));
        loss(2 * step + 1).backward();
        run.optimizer().step();
      }
    });
}

TEST_P(Divisors, ADivisorSetInABackwardIsRefused) {
  play(GetParam(), {}, [](Trainer& run) {
    for (int step = 0; step < 2; ++step) {
      run.optimizer().zero_grad();
      const at::Tensor out = run(run.x(step));
      if (run.shards() != nullptr)
        out.register_hook([&](const at::Tensor&) {
          const std::string refused = " inside a backward pass";
          EXPECT_EQ(error_of<std::logic_error>([&] { run.set_gradient_divide_factor(3); }),
                    "set_gradient_divide_factor" + refused);
          EXPECT_EQ(error_of<std::logic_error>([&] { run.divide_gradients_by_sum(3); }),
                    "divide_gradients_by_sum" + refused);
        });
      torch::mse_loss(out, run.y(step)).backward();
      run.optimizer().step();
    }
  });
}

TEST_P(Divisors, AGradientDivisorOfNothingIsRefused) {
  play(GetParam(), {.optimizers = {Optim::kSgd}}, [](Trainer& run) {
    if (run.world == 1) return;
    for (double factor : {0.0, -1.0})
      EXPECT_NE(error_of<std::invalid_argument>([&] { run.set_gradient_divide_factor(factor); }), "") << factor;
  });
}

}  // namespace
}  // namespace tessera::loops::divisors_test
