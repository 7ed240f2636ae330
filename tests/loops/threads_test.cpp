// Threads of the program.
#include "tests/loops/loops.h"

#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/library.h>
#include <functional>
#include <future>
#include <optional>
#include <semaphore>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>

namespace tessera::loops::threads_test {
using namespace internal;
namespace {

TESSERA_LOOPS(Threads, all_setups);

TEST_P(Threads, EachPartOfAStepInAThreadOfItsOwn) {
  play(GetParam(), {}, [](Trainer& run) {
    auto in_thread = [](auto work) {
      std::exception_ptr error;
      std::thread([&] {
        try {
          work();
        } catch (...) {
          error = std::current_exception();
        }
      }).join();
      if (error) std::rethrow_exception(error);
    };
    for (int step = 0; step < 3; ++step) {
      at::Tensor loss;
      in_thread([&] { run.optimizer().zero_grad(); });
      in_thread([&] { loss = run.loss(step); });
      in_thread([&] { loss.backward(); });
      in_thread([&] { run.optimizer().step(); });
    }
  });
}

// One thread validates after each step during the whole run, and catches an error of its own.
TEST_P(Threads, AThreadThatValidatesByTurns) {
  play(GetParam(), {}, [](Trainer& run) {
    std::binary_semaphore turn{0}, back{0};
    std::exception_ptr error;
    std::jthread validator([&] {
      for (int step = 0; step < 3; ++step) {
        turn.acquire();
        try {
          const at::NoGradGuard no_grad;
          run.note(run.loss(step + 10));
          throw std::runtime_error("no room for a plot");
        } catch (const std::runtime_error& caught) {
          if (std::string(caught.what()) != "no room for a plot") error = std::current_exception();
        } catch (...) {
          error = std::current_exception();
        }
        back.release();
      }
    });
    for (int step = 0; step < 3; ++step) {
      if (!error) run.train(step);
      turn.release();
      back.acquire();
    }
    if (error) std::rethrow_exception(error);
  });
}

// Returns the error of `work` on a thread of its own; "" if it throws none.
std::string error_in_thread(const std::function<void()>& work) {
  return std::async(std::launch::async, [&] { return error_of<std::logic_error>(work); }).get();
}

// The second thread's calls come while the first is inside forward, then inside backward. The first goes on.
TEST_P(Threads, ASecondThreadIsRefusedAndTheFirstGoesOn) {
  play(GetParam(), {}, [](Trainer& run) {
    run.train(0);
    if (run.shards() == nullptr) return three_steps(run);
    const auto expect_refused = [&](const char* second, const char* first, const std::function<void()>& work) {
      const std::string error = error_in_thread(work);
      expect_contains(error, std::string(second) + " while another thread is in " + first + "; expected one thread");
      expect_contains(error, " on rank " + std::to_string(run.rank) + ": a second thread calls ");
    };
    Mlp& mlp = mlp_of(*run.model);
    for (int step = 0; step < 3; ++step) {
      run.optimizer().zero_grad();
      const at::Tensor other = run.loss(step);
      mlp.in_forward = [&] {
        expect_refused("forward()", "forward()", [&] { run.loss(step); });
        expect_refused("clip_grad_norm_()", "forward()", [&] { run.clip_grad_norm_(1); });
      };
      const bool has_pass = run.world > 1 || run.fsdp() != nullptr;  // the others leave one rank's backward alone
      mlp.hook = [&](const at::Tensor& gradient) {
        if (has_pass) expect_refused("forward()", "backward()", [&] { run.loss(step); });
        if (has_pass && run.device.is_cpu()) expect_refused("backward()", "backward()", [&] { other.backward(); });
        return gradient;
      };
      const at::Tensor loss = run.loss(step);
      mlp.in_forward = nullptr;
      mlp.hook = nullptr;
      run.note(loss.detach());
      loss.backward();
      run.optimizer().step();
    }
  });
}

// Two programs in one process: each rank trains a second model, of another group, in a thread of its own.
TEST(ThreadsOfPrograms, TrainedInTwoThreadsAtATime) {
  auto losses = [](bool at_a_time) {
    std::vector<double> of_both(2);
    on_ranks(2, [&](std::shared_ptr<Communicator> comm) {
      const std::shared_ptr<Communicator> groups[] = {comm, comm->split(0)};
      double last[2] = {};
      auto train = [&](int which) {
        auto model = which == 0 ? mlp() : another_mlp();
        FullyShardedDataParallel fsdp(model, groups[which], {.auto_wrap = wrap_modules<torch::nn::LinearImpl>()});
        torch::optim::AdamW optimizer(fsdp.parameters(), 1e-2);
        for (int step = 0; step < 20; ++step) {
          optimizer.zero_grad();
          const at::Tensor x =
              torch::linspace(-1, 1, 4 * kFeatures, at::kDouble).view({4, kFeatures}) * (1 + comm->rank());
          const at::Tensor loss = torch::mse_loss(fsdp(x), x.flip(1));
          loss.backward();
          optimizer.step();
          last[which] = loss.item<double>();
        }
      };
      if (at_a_time) {
        std::thread other([&] { train(1); });
        train(0);
        other.join();
      } else {
        train(0);
        train(1);
      }
      if (comm->rank() == 0) of_both = {last[0], last[1]};
    });
    return of_both;
  };
  EXPECT_EQ(losses(true), losses(false));
}

// y = x w, whose backward multiplies on a thread of its own, as a user's pool of threads does.
struct Threaded : torch::autograd::Function<Threaded> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, const at::Tensor& weight) {
    context->save_for_backward({x, weight});
    return x.matmul(weight);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    auto saved = context->get_saved_variables();
    auto of_x = std::async(std::launch::async, [&] {
      torch::NoGradGuard no_grad;
      return gradients[0].matmul(saved[1].t());
    });
    return {of_x.get(), saved[0].t().matmul(gradients[0])};
  }
};

struct WithThreads : Net {
  WithThreads() {
    register_module("fc1", fc1);
    register_module("fc2", fc2);
    to(at::kDouble);
  }
  at::Tensor forward(const at::Tensor& x) override { return Threaded::apply(fc1(x).tanh(), fc2->weight) + fc2->bias; }
  torch::nn::Linear fc1{kFeatures, kFeatures}, fc2{kFeatures, kFeatures};
};

TEST_P(Threads, AnAutogradFunctionWithAThread) {
  auto model = [] { return seeded(8, []() -> Model { return std::make_shared<WithThreads>(); }); };
  play(GetParam(), {.expect = Expect::kEither, .model = model}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) run.train(step);
  });
}

// A Function saves a weight, which forward then uses again with autograd. The loop does not call the wrapper.
struct WithFunctionFirst : WithThreads {
  at::Tensor forward(const at::Tensor& x) override {
    const at::Tensor h = Threaded::apply(x, fc2->weight);
    return h + fc2->bias + fc1(x).tanh().matmul(fc2->weight);
  }
};

TEST_P(Threads, AnAutogradFunctionSavesAWeightPastTheWrapper) {
  auto model = [] { return seeded(8, []() -> Model { return std::make_shared<WithFunctionFirst>(); }); };
  play(GetParam(), {.model = model}, [](Trainer& run) {
    for (int step = 0; step < 4; ++step) {
      run.optimizer().zero_grad();
      const at::Tensor loss = torch::mse_loss(run.model->forward(run.x(step)), run.y(step));
      run.note(loss.detach());
      loss.backward();
      run.optimizer().step();
    }
  });
}

}  // namespace
}  // namespace tessera::loops::threads_test
