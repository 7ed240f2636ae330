// The state machine of a backward pass: the order of its calls, without a wrapper.
#include "core/gradients/backward_pass.h"
#include "core/gradients/binding.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <tessera/errors.h>

namespace tessera::backward_pass_test {
using namespace internal;
namespace {

using Events = std::vector<std::string>;

const torch::nn::Module no_module;

// Records the calls of a backward pass.
class Recorded : public BackwardPass {
 public:
  explicit Recorded(std::shared_ptr<Events> recorded)
      : BackwardPass(at::kCPU, no_module), recorded_(std::move(recorded)) {}
  void set_divisor(double) override {}
  std::optional<double> divisor() const override { return {}; }
  void prepare_capture() override {}
  void prepare_replay() override {}
  void take(const std::string& name) {
    enter();
    note(name);
  }
  using BackwardPass::is_running;
  using BackwardPass::recover;
  std::function<void()> at_end = [] {};

 protected:
  void begin() override { note_quietly("begin"); }
  void end() override {
    note_quietly("end");
    EXPECT_FALSE(is_running());
    at_end();
  }
  void fail() override { note_quietly("fail"); }
  std::string name() const override { return "Recorded"; }
  void abandon(bool) override { note_quietly("abandon"); }
  void after_failure() override { note("after failure"); }

 private:
  void note(const std::string& event) { recorded_->push_back(event); }
  void note_quietly(const std::string& event) {
    EXPECT_FALSE(c10::GradMode::is_enabled()) << event;
    note(event);
  }
  const std::shared_ptr<Events> recorded_;
};

using Hook = std::function<void()>;

// The loss of a chain x -> "first" -> "second" -> loss. Backward runs the hook at "second" first.
at::Tensor chain(const Hook& first, const Hook& second) {
  auto hooked = [](const at::Tensor& tensor, const Hook& hook) {
    if (hook) tensor.register_hook([hook](const at::Tensor&) { hook(); });
    return tensor;
  };
  const at::Tensor x = torch::ones({2}, at::TensorOptions().requires_grad(true));
  return hooked(hooked(x * 2, first) * 3, second).sum();
}

class BackwardPasses : public testing::Test {
 protected:
  Hook take(const std::string& name) {
    return while_alive(
        std::weak_ptr(pass), [name](Recorded& self) { self.take(name); }, [this] { events->push_back("gone"); });
  }
  // Returns the events since the last call.
  Events seen() { return std::exchange(*events, {}); }
  // Returns the error of backward(), "" if it throws none. Records the events before the caller handles it.
  template <class Error>
  std::string error_of(const at::Tensor& loss) {
    try {
      loss.backward();
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  }

  std::shared_ptr<Events> events = std::make_shared<Events>();
  std::shared_ptr<Recorded> pass = std::make_shared<Recorded>(events);
};

const Hook kThrows = [] { throw std::runtime_error("the user's hook"); };

TEST_F(BackwardPasses, BeginAtTheFirstGradientAndEndOnceAtTheLast) {
  for (int round = 0; round < 2; ++round) {
    chain(take("first"), take("second")).backward();
    EXPECT_EQ(seen(), (Events{"begin", "second", "first", "end"}));
    EXPECT_FALSE(pass->is_running());
  }
  chain(nullptr, nullptr).backward();  // reaches no hook
  EXPECT_EQ(seen(), Events{});
  chain(take("first"), take("second")).backward({}, /*retain_graph=*/true, /*create_graph=*/true);
  EXPECT_EQ(seen(), (Events{"begin", "second", "first", "end"}));
}

TEST_F(BackwardPasses, RunWhileTheEngineWorksAsOtherThreadsSee) {
  bool before = true, during = false, inside = true;
  chain(nullptr, [&] {
    before = pass->is_running();
    take("second")();
    std::thread([&] { during = pass->is_running(), inside = inside_backward(); }).join();
    EXPECT_TRUE(inside_backward());
  }).backward();
  EXPECT_FALSE(before);
  EXPECT_TRUE(during);
  EXPECT_FALSE(inside);
  EXPECT_FALSE(inside_backward());
  EXPECT_FALSE(pass->is_running());
}

TEST_F(BackwardPasses, ThatFailAreKnownToHaveFailedBeforeTheCallerIsTold) {
  EXPECT_EQ(error_of<std::runtime_error>(chain(kThrows, take("second"))), "the user's hook");
  EXPECT_EQ(seen(), (Events{"begin", "second", "after failure", "fail"}));
  EXPECT_FALSE(pass->is_running());
  chain(take("first"), take("second")).backward();  // waits for the failed pass, then begins
  EXPECT_EQ(seen(), (Events{"abandon", "begin", "second", "first", "end"}));
}

TEST_F(BackwardPasses, RefuseASecondThread) {
  const auto error_in_thread = [](const std::function<std::string()>& work) {
    std::string error;
    std::thread([&] { error = work(); }).join();
    return error;
  };
  const auto forward = [&] { return BackwardPass::UserCall(*pass, "forward()"); };
  const auto forward_there = [&] {
    return error_in_thread([&]() -> std::string {
      try {
        forward();
      } catch (const std::logic_error& error) {
        return error.what();
      }
      return "";
    });
  };
  const auto backward_there = [&] {
    return error_in_thread([&] { return error_of<std::logic_error>(chain(take("first"), take("second"))); });
  };
  const std::string in_backward =
      " while another thread is in backward(); expected one thread at a time: guard the "
      "calls by a mutex";
  chain(take("first"), [&] {
    take("second")();
    forward();  // recomputes a part
    EXPECT_EQ(forward_there(), "Recorded: a second thread calls forward()" + in_backward);
    EXPECT_EQ(backward_there(), "Recorded: a second thread calls backward()" + in_backward);
  }).backward();
  EXPECT_EQ(seen(), (Events{"begin", "second", "first", "end"}));
  {
    const auto outer = forward(), inner = forward();
    EXPECT_NE(backward_there(), "");
    EXPECT_NE(forward_there(), "");
    chain(take("first"), take("second")).backward();  // of a gradient that forward computes
    EXPECT_NE(forward_there(), "");
    EXPECT_EQ(seen(), (Events{"begin", "second", "first", "end"}));
  }
  error_of<std::runtime_error>(chain(kThrows, take("second")));
  EXPECT_EQ(forward_there(), "");
  EXPECT_EQ(backward_there(), "");
}

TEST_F(BackwardPasses, AreRecoveredFromOnce) {
  pass->recover();
  EXPECT_EQ(seen(), Events{});  // there is nothing to recover from
  EXPECT_EQ(error_of<std::runtime_error>(chain(kThrows, take("second"))), "the user's hook");
  seen();
  torch::NoGradGuard no_grad;
  pass->recover();
  pass->recover();
  EXPECT_EQ(seen(), Events{"abandon"});
  torch::AutoGradMode recording(true);
  chain(nullptr, take("second")).backward();
  EXPECT_EQ(seen(), (Events{"begin", "second", "end"}));
}

// A policy's check at the end may throw, for parameters without a gradient, say. Nothing is in flight then.
TEST_F(BackwardPasses, WhoseEndThrowsAreAbandonedAtOnce) {
  pass->at_end = [] { throw std::logic_error("unused"); };
  EXPECT_EQ(error_of<std::logic_error>(chain(nullptr, take("second"))), "unused");
  EXPECT_EQ(seen(), (Events{"begin", "second", "end", "fail", "abandon", "after failure"}));
  pass->at_end = [] {};
  chain(nullptr, take("second")).backward();
  EXPECT_EQ(seen(), (Events{"begin", "second", "end"}));
}

TEST_F(BackwardPasses, WaitForNothingAfterACommError) {
  pass->at_end = [] { throw CommError("a rank is gone"); };
  EXPECT_EQ(error_of<CommError>(chain(nullptr, take("second"))), "a rank is gone");
  EXPECT_EQ(seen(), (Events{"begin", "second", "end", "after failure"}));
  pass->recover();
  EXPECT_EQ(seen(), Events{});
}

// A nested backward, of a checkpointed part, say, belongs to the outermost pass.
TEST_F(BackwardPasses, InsideOneAreThatOne) {
  const at::Tensor inner = chain(take("inner first"), take("inner second"));
  const Hook outer = take("outer");
  chain(take("first"), [&] {
    outer();
    inner.backward();
  }).backward();
  EXPECT_EQ(seen(), (Events{"begin", "outer", "inner second", "inner first", "first", "end"}));
}

TEST_F(BackwardPasses, ReduceUnlessAScopeSaysOtherwise) {
  EXPECT_TRUE(pass->reduces());
  {
    const ScopeExit outer = pass->no_sync();
    EXPECT_FALSE(pass->reduces());
    {
      const ScopeExit inner = pass->no_sync();
      EXPECT_FALSE(pass->reduces());
    }
    EXPECT_FALSE(pass->reduces());
  }
  EXPECT_TRUE(pass->reduces());
  EXPECT_EQ(error_of<std::logic_error>(chain(nullptr, [&] { pass->no_sync().leave(); })),
            "no_sync inside a backward pass");
  ScopeExit scope = pass->no_sync();
  EXPECT_EQ(error_of<std::logic_error>(chain(nullptr, [&] { scope.leave(); })), "no_sync inside a backward pass");
  EXPECT_TRUE(pass->reduces());  // an error closes the scope, too
}

// Graphs keep hooks and callbacks alive. The gradients of this pass are reduced on no rank.
TEST_F(BackwardPasses, OfAnObjectThatIsGoneFail) {
  const at::Tensor loss = chain(take("first"), [this, take = take("second")] {
    take();
    pass.reset();
  });
  EXPECT_EQ(error_of<std::logic_error>(loss),
            "Recorded was destroyed inside its own backward pass, so gradients are not reduced over the ranks: keep it "
            "until backward() has returned");
  EXPECT_EQ(seen(), (Events{"begin", "second", "gone"}));
}

}  // namespace
}  // namespace tessera::backward_pass_test
