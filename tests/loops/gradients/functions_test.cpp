// Functions and operators of the program.
#include "tests/loops/loops.h"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/library.h>
#include <future>
#include <limits>
#include <optional>
#include <sstream>
#include <utility>
#include <vector>

namespace tessera::loops::functions_test {
using namespace internal;
namespace {

TESSERA_LOOPS(Functions, all_setups);

// Activation checkpointing, written by a user: backward computes the layer again.
struct ComputedAgain : torch::autograd::Function<ComputedAgain> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            torch::nn::LinearImpl* layer) {
    context->save_for_backward({x});
    context->saved_data["layer"] = reinterpret_cast<int64_t>(layer);
    const at::AutoGradMode off(false);
    return layer->forward(x).tanh();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    auto* layer = reinterpret_cast<torch::nn::LinearImpl*>(context->saved_data["layer"].toInt());
    const at::Tensor x = context->get_saved_variables()[0].detach().requires_grad_();
    const at::AutoGradMode on(true);
    layer->forward(x).tanh().backward(gradients[0]);
    return {x.grad(), at::Tensor()};
  }
};
struct LessMemory : Mlp {
  at::Tensor forward(const at::Tensor& x) override {
    const at::Tensor h = fc1(x).tanh();
    return fc3(h.requires_grad() ? ComputedAgain::apply(h, fc2.get()) : fc2(h).tanh());
  }
};

TEST_P(Functions, APartComputedAgainByHand) {
  play(GetParam(), {.model = [] { return seeded_model<LessMemory>(42); }}, three_steps);
}

struct Reversed : torch::autograd::Function<Reversed> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) { return x.view_as(x); }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list& gradients) {
    return {-0.1 * gradients[0]};
  }
};
struct WithReversal : Mlp {
  at::Tensor forward(const at::Tensor& x) override {
    const at::Tensor h = fc1(x).tanh();
    return fc2(h) + fc3(Reversed::apply(h));
  }
};

TEST_P(Functions, AGradientThatIsReversed) {
  play(GetParam(), {.model = [] { return seeded_model<WithReversal>(43); }}, three_steps);
}

// Gives the first layer no gradient, in two ways.
template <bool kDetaches>
struct Stopped : Mlp {
  at::Tensor forward(const at::Tensor& x) override {
    if (kDetaches) return fc3(fc2(fc1(x).tanh().detach()).tanh());
    at::Tensor features;
    {
      const torch::NoGradGuard no_grad;
      features = fc1(x).tanh();
    }
    return fc3(fc2(features).tanh());
  }
};

TEST_P(Functions, APartUnderNoGradInsideForward) {
  play(GetParam(), {.model = [] { return seeded_model<Stopped<false>>(31); }, .unused = true}, three_steps);
}

TEST_P(Functions, APartThatIsDetached) {
  play(GetParam(), {.model = [] { return seeded_model<Stopped<true>>(32); }, .unused = true}, three_steps);
}

// A user's own operator, which saves tensors for backward as variables, or directly.
template <bool kAsVariables>
struct OwnLinear : torch::autograd::Function<OwnLinear<kAsVariables>> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, const at::Tensor& weight) {
    if (kAsVariables) {
      context->save_for_backward({x, weight});
    } else {
      context->saved_data["x"] = x;
      context->saved_data["weight"] = weight;
    }
    return x.matmul(weight.t());
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    at::Tensor x, weight;
    if (kAsVariables) {
      const auto saved = context->get_saved_variables();
      x = saved[0], weight = saved[1];
    } else {
      x = context->saved_data["x"].toTensor(), weight = context->saved_data["weight"].toTensor();
    }
    return {gradients[0].matmul(weight), gradients[0].t().matmul(x)};
  }
};

template <bool kAsVariables>
struct WithOwnLinear : Mlp {
  at::Tensor forward(const at::Tensor& x) override {
    return fc3(OwnLinear<kAsVariables>::apply(fc1(x).tanh(), fc2->weight) + fc2->bias);
  }
};

TEST_P(Functions, AFunctionThatSavesAWeight) {
  play(GetParam(), {.model = [] { return seeded_model<WithOwnLinear<true>>(33); }}, three_steps);
}

TEST_P(Functions, AFunctionThatKeepsAWeight) {
  play(GetParam(), {.model = [] { return seeded_model<WithOwnLinear<false>>(34); }}, three_steps);
}

// A user's own operator whose weight gets a lazy negative as gradient, or zeros without memory.
template <bool kZeros>
struct LazyGradient : torch::autograd::Function<LazyGradient<kZeros>> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x, const at::Tensor&) {
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list gradients) {
    const at::Tensor& gradient = gradients[0];
    if (kZeros) return {gradient, at::_efficientzerotensor({kFeatures, kFeatures}, gradient.options())};
    return {gradient, at::_neg_view(gradient.sum(0).expand({kFeatures, kFeatures}).clone())};
  }
};

template <bool kZeros>
struct WithLazyGradient : Mlp {
  at::Tensor forward(const at::Tensor& x) override {
    return fc3(LazyGradient<kZeros>::apply(fc1(x).tanh(), fc2->weight) + fc2->bias);
  }
};

TEST_P(Functions, AFunctionThatGivesAGradientOfNegatives) {
  play(GetParam(), {.model = [] { return seeded_model<WithLazyGradient<false>>(37); }}, three_steps);
}

TEST_P(Functions, AFunctionThatGivesAGradientOfZerosWithoutMemory) {
  play(GetParam(), {.model = [] { return seeded_model<WithLazyGradient<true>>(38); }}, three_steps);
}

// A user's own operator whose weight gets a parameter of another unit as gradient. No operator reads it before that.
template <bool kAsVariable>
struct ParameterAsGradient : torch::autograd::Function<ParameterAsGradient<kAsVariable>> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, const at::Tensor&,
                            const at::Tensor& other) {
    if (kAsVariable)
      context->save_for_backward({other});
    else
      context->saved_data["other"] = other;
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const at::Tensor other = kAsVariable ? context->get_saved_variables()[0] : context->saved_data["other"].toTensor();
    return {gradients[0], other, at::Tensor()};
  }
};

template <bool kAsVariable>
struct WithParameterAsGradient : Mlp {
  at::Tensor forward(const at::Tensor& x) override {
    // Last, so that backward begins with the function: fc1 is resharded then.
    return ParameterAsGradient<kAsVariable>::apply(fc3(fc1(x).tanh()), fc2->weight, fc1->weight) + fc2->bias;
  }
};

TEST_P(Functions, AFunctionThatGivesASavedParameterAsGradient) {
  play(GetParam(), {.model = [] { return seeded_model<WithParameterAsGradient<true>>(39); }}, three_steps);
}

TEST_P(Functions, AFunctionThatGivesAKeptParameterAsGradient) {
  play(GetParam(), {.model = [] { return seeded_model<WithParameterAsGradient<false>>(40); }}, three_steps);
}

// A parameter of another unit, which the operator below uses besides its arguments.
thread_local const at::Tensor* hidden_weight = nullptr;

at::Tensor linear_and_hidden(const at::Tensor& x, const at::Tensor& weight) {
  return x.matmul(weight).matmul(*hidden_weight);
}

TORCH_LIBRARY(tessera_loops, library) {
  library.def("linear_and_hidden(Tensor x, Tensor weight) -> Tensor", &linear_and_hidden);
}

struct WithOperator : Net {
  WithOperator() {
    register_module("fc1", fc1);
    register_module("fc2", fc2);
    to(at::kDouble);
  }
  at::Tensor forward(const at::Tensor& x) override {
    static const auto op = c10::Dispatcher::singleton()
                               .findSchemaOrThrow("tessera_loops::linear_and_hidden", "")
                               .typed<at::Tensor(const at::Tensor&, const at::Tensor&)>();
    hidden_weight = &fc2->weight;
    return op.call(x, fc1->weight) + fc1->bias + fc2->bias;
  }
  torch::nn::Linear fc1{kFeatures, kFeatures}, fc2{kFeatures, kFeatures};
};

// The kernel runs below the dispatch key that pages parameters in, and uses one that is not its argument.
TEST_P(Functions, AnOperatorWhoseKernelUsesAnotherUnitsParameter) {
  auto model = [] { return seeded(7, []() -> Model { return std::make_shared<WithOperator>(); }); };
  play(GetParam(), {.model = model}, [](Trainer& run) {
    for (int step = 0; step < 3; ++step) run.train(step);
  });
}

// Gathers the rows of all ranks by the wrapper's communicator. Backward adds up the ranks' gradients of this rank's
// rows.
struct RowsOfAllRanks : torch::autograd::Function<RowsOfAllRanks> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& rows, Communicator* comm) {
    context->saved_data["comm"] = reinterpret_cast<int64_t>(comm);
    at::Tensor all = torch::empty({rows.size(0) * comm->size(), rows.size(1)}, rows.options());
    comm->all_gather(all, rows.contiguous()).wait();
    return all;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    auto* comm = reinterpret_cast<Communicator*>(context->saved_data["comm"].toInt());
    const at::Tensor sum = gradients[0].contiguous().clone();
    comm->all_reduce(sum).wait();
    return {sum.chunk(comm->size())[comm->rank()], at::Tensor()};
  }
};

// A contrastive loss compares this rank's rows with those of all ranks.
TEST_P(Functions, ALossOverTheRowsOfAllRanks) {
  play(GetParam(), {}, [](Trainer& run) {
    const auto normal = [&](const at::Tensor& x) { return run(x) / run(x).norm(2, 1, true); };
    const auto loss = [&](int step) {
      const at::Tensor own = normal(run.x(step)), other = normal(run.y(step));
      const at::Tensor all = run.shards() ? RowsOfAllRanks::apply(other, run.shards()->comm().get()) : other;
      const at::Tensor pairs = torch::arange(own.size(0), at::device(run.device)) + own.size(0) * run.rank;
      return torch::nn::functional::cross_entropy(own.matmul(all.t()) / 0.3, pairs);
    };
    for (int step = 0; step < 2; ++step) {
      run.optimizer().zero_grad();
      {
        const auto scope = run.no_sync();
        loss(step + 5).backward();
      }
      const at::Tensor value = loss(step);
      run.note(value.detach());
      value.backward();
      run.optimizer().step();
    }
  });
}

}  // namespace
}  // namespace tessera::loops::functions_test
