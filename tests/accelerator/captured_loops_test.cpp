// Users' loops around a CapturedStep: several models, accumulation, evaluation, averages, checkpoints. Each has the
// bits of the eager loop, or is refused by name.
#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <memory>
#include <optional>

#include "core/runtime/stream_uses.h"
#include "tests/accelerator/captured_training.h"
#include "tests/accelerator/simulated_training.h"
#include "tests/support/temporary_folder.h"

namespace tessera::captured_loops_test {
using namespace internal;
namespace {

using accelerator::Simulation;
using accelerator_training::difference;
using accelerator_training::State;
using captured_training::kFeatures;
using captured_training::Net;
using testing_support::error_of;
using testing_support::expect_contains;
using testing_support::seeded;
using Inputs = std::vector<at::Tensor>;
using Comm = std::shared_ptr<Communicator>;

enum Kind { kFsdp, kKept, kSdp, kDdp };  // kKept: FSDP that keeps units unsharded after forward
constexpr Kind kKinds[] = {kFsdp, kKept, kSdp, kDdp};

// A model under one of the wrappers, with an AdamW of its parameters.
struct Wrapped {
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  std::unique_ptr<DataParallel> wrapper;
  std::function<at::Tensor(const at::Tensor&)> forward;
};

template <class Holder>
Wrapped wrapped(Kind kind, Holder net, const Comm& comm) {
  Wrapped made;
  const auto keep = [&](auto wrapper) {
    made.forward = [it = wrapper.get()](const at::Tensor& x) { return (*it)(x); };
    made.wrapper = std::move(wrapper);
  };
  const auto options = torch::optim::AdamWOptions(1e-2);
  if (kind == kSdp) {
    auto oss = std::make_unique<OSS<AdamW>>(net->parameters(), options, comm);
    keep(std::make_unique<ShardedDataParallel<Holder>>(net, *oss, comm));
    made.optimizer = std::move(oss);
    return made;
  }
  if (kind == kDdp)
    keep(std::make_unique<DistributedDataParallel<Holder>>(net, comm));
  else
    keep(std::make_unique<FullyShardedDataParallel<Holder>>(
        net, comm,
        FsdpOptions{.auto_wrap = wrap_modules<torch::nn::LinearImpl>(), .reshard_after_forward = kind == kFsdp}));
  made.optimizer = std::make_unique<AdamW>(made.wrapper->parameters(), options);
  return made;
}

Net net_on(const Communicator& comm, uint64_t seed = 5, double dropout = 0) {
  Net net = seeded(seed, [&] { return Net(dropout); });
  net->to(comm.device());
  return net;
}

at::Tensor rows_of(const Communicator& comm, int step, int64_t rows = 4) {
  return torch::full({rows, kFeatures}, 0.1 * (step + 1) * (comm.rank() + 1), comm.device()).tril();
}

// Runs loop(kind, comm, captures) on two devices with an eager loop, then with captured steps. Expects equal bits, no
// races.
using Loop = std::function<State(Kind kind, const Comm& comm, bool captures)>;
void expect_equal_bits(const Loop& loop, std::vector<Kind> kinds = {std::begin(kKinds), std::end(kKinds)}) {
  for (const Kind kind : kinds) {
    SCOPED_TRACE(testing::Message() << "kind " << kind);
    const Simulation simulation;
    std::map<bool, State> states;
    for (const bool captures : {false, true})
      accelerator::on_devices(std::min(2, accelerator::device_count()), [&](Comm comm) {
        State own = loop(kind, comm, captures);
        if (comm->rank() == comm->size() - 1) states[captures] = std::move(own);
      });
    EXPECT_EQ(difference(states[false], states[true]), "");
    for (const std::string& finding : Simulation::findings()) ADD_FAILURE() << finding;
  }
}

using Step = std::function<at::Tensor(const Inputs&)>;
Step eager_step(DataParallel& wrapper, torch::optim::Optimizer& optimizer, const CapturedStep::Body& body,
                std::optional<double> max_norm = {}) {
  return [&wrapper, &optimizer, body, max_norm](const Inputs& in) {
    for (at::Tensor parameter : wrapper.parameters()) parameter.mutable_grad().reset();
    optimizer.zero_grad();
    at::Tensor loss = body(in);
    loss.backward();
    if (max_norm) wrapper.clip_grad_norm_on_device_(*max_norm);
    optimizer.step();
    return loss.detach();
  };
}
// Returns a function that trains one step, captured or not.
Step step_of(DataParallel& wrapper, torch::optim::Optimizer& optimizer, const CapturedStep::Body& body, bool captures,
             std::optional<double> max_norm = {}) {
  if (!captures) return eager_step(wrapper, optimizer, body, max_norm);
  return [step = std::make_shared<CapturedStep>(wrapper, optimizer, body, max_norm)](const Inputs& in) {
    return (*step)(in);
  };
}

void note_parameters(State& state, const std::string& name, const DataParallel& wrapper) {
  for (const auto& entry : wrapper.named_parameters()) state[name + entry.key()] = entry.value().detach().cpu();
}

// Trains seven steps. Returns the losses and the parameters.
State trained(const Step& step, const Wrapped& own, const Comm& comm) {
  State state;
  for (int i = 0; i < 7; ++i) state["loss " + std::to_string(i)] = step({rows_of(*comm, i)}).cpu();
  note_parameters(state, "", *own.wrapper);
  return state;
}

at::Tensor without_gradients(const Wrapped& model, const at::Tensor& x) {
  const at::NoGradGuard no_grad;
  return model.forward(x);
}

// ---- several models ----------------------------------------------------------------------------------

// A teacher in a wrapper of its own follows the student between replays, and is evaluated then.
TEST(CapturedLoops, ATeacherInAWrapperOfItsOwn) {
  for (const bool by_module : {false, true})
    expect_equal_bits([&](Kind kind, const Comm& comm, bool captures) {
      Net net = net_on(*comm), teaching = net_on(*comm, 6);
      Wrapped student = wrapped(kind, net, comm), teacher = wrapped(kind, teaching, comm);
      for (at::Tensor parameter : teaching->parameters()) parameter.requires_grad_(false);
      const auto teach = [&](const at::Tensor& x) {
        const at::NoGradGuard no_grad;
        return by_module ? teaching->forward(x) : teacher.forward(x);
      };
      const auto step = step_of(
          *student.wrapper, *student.optimizer,
          [&](const Inputs& in) { return (student.forward(in[0]) - teach(in[0])).square().mean(); }, captures);
      State state;
      for (int i = 0; i < 8; ++i) {
        state["loss " + std::to_string(i)] = step({rows_of(*comm, i)}).cpu();
        if (i % 2 == 0) state["taught " + std::to_string(i)] = teach(rows_of(*comm, 3)).cpu();
        const at::NoGradGuard no_grad;
        const auto own = teacher.wrapper->parameters(), of_student = student.wrapper->parameters();
        for (size_t p = 0; p < own.size(); ++p) own[p].lerp_(of_student[p], 0.25);
      }
      note_parameters(state, "student ", *student.wrapper);
      note_parameters(state, "teacher ", *teacher.wrapper);
      return state;
    });
}

// The second step is captured while a replay of the first step is in flight.
TEST(CapturedLoops, OneTeacherOfTwoStudents) {
  expect_equal_bits([&](Kind kind, const Comm& comm, bool captures) {
    Wrapped teacher = wrapped(kind, net_on(*comm, 6), comm);
    std::vector<Wrapped> students;
    for (const uint64_t seed : {5, 7}) students.push_back(wrapped(kind, net_on(*comm, seed), comm));
    std::vector<Step> steps;
    for (const Wrapped& own : students) {
      const CapturedStep::Body body = [&](const Inputs& in) {
        return (own.forward(in[0]) - without_gradients(teacher, in[0])).square().mean();
      };
      steps.push_back(step_of(*own.wrapper, *own.optimizer, body, captures));
    }
    std::vector<at::Tensor> losses;
    for (int i = 0; i < 14; ++i) losses.push_back(steps[i % 2]({rows_of(*comm, i)}));
    State state;
    for (size_t i = 0; i < losses.size(); ++i) state["loss " + std::to_string(i)] = losses[i].cpu();
    return state;
  });
}

// A momentum encoder that never trains, in training mode: each rank's running statistics are of its own batches.
TEST(CapturedLoops, AMomentumEncoderWithBatchNorm) {
  expect_equal_bits([&](Kind kind, const Comm& comm, bool captures) {
    const auto encoder = [&](uint64_t seed) {
      torch::nn::Sequential net = seeded(seed, [] {
        return torch::nn::Sequential(torch::nn::Linear(kFeatures, kFeatures), torch::nn::BatchNorm1d(kFeatures));
      });
      net->to(comm->device());
      return net;
    };
    const auto net = encoder(5), following = encoder(6);
    Wrapped own = wrapped(kind, net, comm), teacher = wrapped(kind, following, comm);
    const CapturedStep::Body body = [&](const Inputs& in) {
      return (own.forward(in[0]) - without_gradients(teacher, in[0])).square().mean();
    };
    const auto step = step_of(*own.wrapper, *own.optimizer, body, captures);
    State state;
    for (int i = 0; i < 8; ++i) {
      state["loss " + std::to_string(i)] = step({rows_of(*comm, i)}).cpu();
      const at::NoGradGuard no_grad;
      const auto to = teacher.wrapper->parameters(), from = own.wrapper->parameters();
      for (size_t p = 0; p < to.size(); ++p) to[p].lerp_(from[p], 0.25);
      if (i % 3 == 0) state["output " + std::to_string(i)] = teacher.forward(rows_of(*comm, i)).cpu();
      for (const auto& buffer : following->named_buffers())
        state[buffer.key() + std::to_string(i)] = buffer.value().cpu();
    }
    return state;
  });
}

// Gradients flow through a frozen model to the trained one.
TEST(CapturedLoops, APerceptualLossByAFrozenModel) {
  expect_equal_bits([&](Kind kind, const Comm& comm, bool captures) {
    Net net = net_on(*comm), frozen = net_on(*comm, 6);
    for (at::Tensor parameter : frozen->parameters()) parameter.requires_grad_(false);
    Wrapped own = wrapped(kind, net, comm), judge = wrapped(kind == kSdp ? kDdp : kind, frozen, comm);
    const auto step = step_of(
        *own.wrapper, *own.optimizer,
        [&](const Inputs& in) { return (judge.forward(own.forward(in[0])) - judge.forward(in[1])).square().mean(); },
        captures);
    State state;
    for (int i = 0; i < 7; ++i) {
      state["loss " + std::to_string(i)] = step({rows_of(*comm, i), rows_of(*comm, i + 1)}).cpu();
      const at::NoGradGuard no_grad;
      state["judged " + std::to_string(i)] = judge.forward(rows_of(*comm, i)).cpu();
    }
    note_parameters(state, "", *own.wrapper);
    return state;
  });
}

// Only the generator's step is captured. The judge trains eagerly, and is frozen meanwhile.
TEST(CapturedLoops, AGanWhoseJudgeTrainsEagerly) {
  expect_equal_bits([&](Kind kind, const Comm& comm, bool captures) {
    Net net = net_on(*comm), judging = net_on(*comm, 6);
    Wrapped own = wrapped(kind, net, comm), judge = wrapped(kind, judging, comm);
    const auto judge_step = eager_step(*judge.wrapper, *judge.optimizer, [&](const Inputs& in) {
      return (judge.forward(without_gradients(own, in[0])) - judge.forward(in[1])).square().mean();
    });
    const auto step = step_of(
        *own.wrapper, *own.optimizer,
        [&](const Inputs& in) { return judge.forward(own.forward(in[0])).square().mean(); }, captures);
    State state;
    for (int i = 0; i < 7; ++i) {
      for (at::Tensor parameter : judging->parameters()) parameter.requires_grad_(true);
      state["judge " + std::to_string(i)] = judge_step({rows_of(*comm, i), rows_of(*comm, i + 1)}).cpu();
      for (at::Tensor parameter : judging->parameters()) parameter.requires_grad_(false);
      state["loss " + std::to_string(i)] = step({rows_of(*comm, i)}).cpu();
    }
    note_parameters(state, "own ", *own.wrapper);
    note_parameters(state, "judge ", *judge.wrapper);
    return state;
  });
}

TEST(CapturedLoops, AJudgeThatIsNotFrozenIsRefusedInTheFirstCall) {
  for (const Kind kind : kKinds) {
    const Simulation simulation;
    accelerator::on_devices(std::min(2, accelerator::device_count()), [&](Comm comm) {
      Net net = net_on(*comm), judging = net_on(*comm, 6);
      Wrapped own = wrapped(kind, net, comm), judge = wrapped(kind, judging, comm);
      CapturedStep step(*own.wrapper, *own.optimizer,
                        [&](const Inputs& in) { return judge.forward(own.forward(in[0])).square().mean(); });
      const std::string error = error_of<std::invalid_argument>([&] { step({rows_of(*comm, 0)}); });
      expect_contains(error, "a gradient of parameter 'norm.");
      expect_contains(error, "which another wrapper trains, cannot be captured: freeze that wrapper's parameters");
    });
  }
}

TEST(CapturedLoops, ATeacherInHostMemoryIsRefusedInTheFirstCall) {
  const Simulation simulation;
  accelerator::on_devices(1, [&](Comm comm) {
    Net net = net_on(*comm), teaching = net_on(*comm, 6);
    Wrapped own = wrapped(kFsdp, net, comm);
    FullyShardedDataParallel teacher(teaching, comm, {.offload = {.params = true, .grads = true}});
    CapturedStep step(*own.wrapper, *own.optimizer,
                      [&](const Inputs& in) { return (own.forward(in[0]) - teacher(in[0]).detach()).square().mean(); });
    expect_contains(error_of<std::invalid_argument>([&] { step({rows_of(*comm, 0)}); }), "FsdpOptions::offload");
  });
}

TEST(CapturedLoops, ChangesOfATeacherThatReplaysWouldIgnoreAreRefused) {
  for (const Kind kind : kKinds) {
    const Simulation simulation;
    accelerator::on_devices(std::min(2, accelerator::device_count()), [&](Comm comm) {
      Net net = net_on(*comm);
      torch::nn::Sequential teaching(torch::nn::Linear(kFeatures, kFeatures), torch::nn::BatchNorm1d(kFeatures),
                                     torch::nn::Dropout());
      teaching->to(comm->device());
      teaching->eval();
      for (at::Tensor parameter : teaching->parameters()) parameter.requires_grad_(false);
      Wrapped own = wrapped(kind, net, comm), teacher = wrapped(kind, teaching, comm);
      CapturedStep step(*own.wrapper, *own.optimizer, [&](const Inputs& in) {
        return (own.forward(in[0]) - without_gradients(teacher, in[0])).square().mean();
      });
      const auto run = [&] { return step({rows_of(*comm, 0)}).item<float>(); };
      while (!step.is_captured()) run();
      teaching->train();
      expect_contains(error_of<std::logic_error>(run), "was put into training mode since the capture");
      teaching->eval();
      run();
      const auto refuse_other_memory = [&](at::Tensor tensor) {
        const at::Tensor before = tensor.detach();
        tensor.set_data(before.clone());
        expect_contains(error_of<std::logic_error>(run),
                        "a tensor of the optimizer or of another wrapper was given other");
        tensor.set_data(before);
        run();
      };
      refuse_other_memory(teaching->named_buffers()["1.running_mean"]);
      // FSDP copies the new values of a parameter to its shards, and replays read the shards.
      if (kind == kSdp || kind == kDdp) refuse_other_memory(teaching->parameters()[0]);
    });
  }
}

// One optimizer trains the models of two wrappers.
TEST(CapturedLoops, OneLossOfTwoWrappersAndOneOptimizer) {
  expect_equal_bits(
      [&](Kind kind, const Comm& comm, bool captures) {
        Net net = net_on(*comm), other = net_on(*comm, 6);
        Wrapped first = wrapped(kind, net, comm), second = wrapped(kind, other, comm);
        auto parameters = first.wrapper->parameters();
        for (const auto& parameter : second.wrapper->parameters()) parameters.push_back(parameter);
        AdamW optimizer(parameters, torch::optim::AdamWOptions(1e-2));
        const auto step = step_of(
            *first.wrapper, optimizer,
            [&](const Inputs& in) { return second.forward(first.forward(in[0])).square().mean(); }, captures);
        State state;
        for (int i = 0; i < 7; ++i) state["loss " + std::to_string(i)] = step({rows_of(*comm, i)}).cpu();
        note_parameters(state, "first ", *first.wrapper);
        note_parameters(state, "second ", *second.wrapper);
        return state;
      },
      {kFsdp, kKept, kDdp});
}

// In the capture, the last rank's pass gives the parameters no gradients. Replays cannot tell the other ranks.
TEST(CapturedLoops, ARankWithoutGradientsInTheCaptureIsRefused) {
  for (const Kind kind : kKinds) {
    SCOPED_TRACE(testing::Message() << "kind " << kind);
    const Simulation simulation;
    accelerator::on_devices(std::min(2, accelerator::device_count()), [&](Comm comm) {
      if (comm->size() == 1) return;
      Net net = net_on(*comm);
      Wrapped own = wrapped(kind, net, comm);
      int calls = 0;
      CapturedStep step(*own.wrapper, *own.optimizer, [&](const Inputs& in) {
        const at::Tensor x = in[0].detach().requires_grad_();
        const at::Tensor y = own.forward(x).square().mean();
        if (++calls <= 3 || comm->rank() == 0) return y;
        return x.square().mean() + torch::autograd::grad({y}, {x})[0].sum();
      });
      for (int i = 0; i < 3; ++i) step({rows_of(*comm, i)});
      expect_contains(error_of<std::exception>([&] { step({rows_of(*comm, 3)}); }), "collectives of a captured step");
    });
  }
}

// ---- one model ---------------------------------------------------------------------------------------

// Several forwards before one backward, clipping and a schedule; the epoch's last batch, which is smaller, is eager.
TEST(CapturedLoops, MicroBatchesInTheBodyAndASmallerLastBatch) {
  expect_equal_bits([&](Kind kind, const Comm& comm, bool captures) {
    Net net = net_on(*comm);
    Wrapped own = wrapped(kind, net, comm);
    const CapturedStep::Body body = [&](const Inputs& in) {
      at::Tensor sum = torch::zeros({}, comm->device());
      for (const at::Tensor& part : in[0].chunk(2)) sum = sum + own.forward(part).square().mean() / 2;
      return sum;
    };
    torch::optim::StepLR schedule(*own.optimizer, 2, 0.5);
    const auto step = step_of(*own.wrapper, *own.optimizer, body, captures, 0.25);
    const auto last = eager_step(*own.wrapper, *own.optimizer, body, 0.25);
    State state;
    for (int i = 0; i < 11; ++i) {
      state["loss " + std::to_string(i)] =
          i % 4 == 3 ? last({rows_of(*comm, i, 2)}).cpu() : step({rows_of(*comm, i)}).cpu();
      schedule.step();
    }
    note_parameters(state, "", *own.wrapper);
    return state;
  });
}

// Averages of weights, which evaluations in eval() mode use between replays; dropout in training.
TEST(CapturedLoops, AveragesAndEvaluationsBetweenReplays) {
  expect_equal_bits([&](Kind kind, const Comm& comm, bool captures) {
    Net net = net_on(*comm, 5, 0.25);
    Wrapped own = wrapped(kind, net, comm);
    comm->barrier("models");
    at::Generator generator = at::globalContext().defaultGenerator(comm->device());
    generator.set_current_seed(7);
    Ema averages(*own.wrapper, {.decay = 0.5});
    const auto step = step_of(
        *own.wrapper, *own.optimizer, [&](const Inputs& in) { return own.forward(in[0]).square().mean(); }, captures);
    State state;
    for (int i = 0; i < 9; ++i) {
      state["loss " + std::to_string(i)] = step({rows_of(*comm, i)}).cpu();
      averages.update();
      if (i % 2 == 0) continue;
      net->eval();
      {
        const auto swapped = averages.swap_in();
        const c10::InferenceMode inference;
        state["evaluation " + std::to_string(i)] = own.forward(rows_of(*comm, 3)).cpu();
      }
      net->train();
    }
    note_parameters(state, "", *own.wrapper);
    return state;
  });
}

// A checkpoint that was saved between replays continues in an eager loop under each other wrapper.
TEST(CapturedLoops, ACheckpointOfReplaysContinuesEagerly) {
  const testing_support::TemporaryFolder folder;
  expect_equal_bits([&](Kind kind, const Comm& comm, bool captures) {
    State state;
    const auto path = folder.path() / ("saved" + std::to_string(kind) + (captures ? "c" : "e"));
    {
      Net net = net_on(*comm);
      Wrapped own = wrapped(kind, net, comm);
      const auto step = step_of(
          *own.wrapper, *own.optimizer, [&](const Inputs& in) { return own.forward(in[0]).square().mean(); }, captures);
      for (int i = 0; i < 8; ++i) {
        step({rows_of(*comm, i)});
        if (i == 5) save_checkpoint(path, *own.wrapper, *own.optimizer);
      }
    }
    for (const Kind next : kKinds) {
      Net net = net_on(*comm, 8);
      Wrapped own = wrapped(next, net, comm);
      load_checkpoint(path, *own.wrapper, *own.optimizer);
      const auto step = eager_step(*own.wrapper, *own.optimizer,
                                   [&](const Inputs& in) { return own.forward(in[0]).square().mean(); });
      for (int i = 6; i < 9; ++i)
        state["loss " + std::to_string(next) + std::to_string(i)] = step({rows_of(*comm, i)}).cpu();
    }
    return state;
  });
}

// Layers are unfrozen one after another, with a new CapturedStep for each phase.
TEST(CapturedLoops, LayersThatAreUnfrozenOneByOne) {
  expect_equal_bits([&](Kind kind, const Comm& comm, bool captures) {
    Net net = net_on(*comm);
    Wrapped own = wrapped(kind, net, comm);
    State state;
    for (int phase = 0; phase < 3; ++phase) {
      for (int layer = 0; layer < 4; ++layer)
        for (at::Tensor parameter : net->blocks[layer]->parameters()) parameter.requires_grad_(layer >= 3 - phase);
      const auto step = step_of(
          *own.wrapper, *own.optimizer, [&](const Inputs& in) { return own.forward(in[0]).square().mean(); }, captures);
      for (int i = 0; i < 6; ++i)
        state["loss " + std::to_string(phase) + std::to_string(i)] = step({rows_of(*comm, i)}).cpu();
    }
    note_parameters(state, "", *own.wrapper);
    return state;
  });
}

struct TiedImpl : torch::nn::Module {
  TiedImpl() {
    register_module("words", words);
    register_module("inner", inner);
    head = register_parameter("head", words->weight);
  }
  at::Tensor forward(const at::Tensor& x) {
    return at::linear(torch::tanh(inner(words(x.abs().sum(1).to(at::kLong) % 16))), head);
  }
  torch::nn::Embedding words{16, kFeatures};
  torch::nn::Linear inner{kFeatures, kFeatures};
  at::Tensor head;  // the weight of `words`
};
TORCH_MODULE(Tied);

TEST(CapturedLoops, TiedWeightsUnderAutocast) {
  expect_equal_bits([&](Kind kind, const Comm& comm, bool captures) {
    Tied net = seeded(5, [] { return Tied(); });
    net->to(comm->device());
    Wrapped own = wrapped(kind, net, comm);
    const auto step = step_of(
        *own.wrapper, *own.optimizer,
        [&](const Inputs& in) {
          const Autocast autocast(comm->device().type(), at::kBFloat16);
          return own.forward(in[0]).to(at::kFloat).square().mean();
        },
        captures);
    return trained(step, own, comm);
  });
}

// Two optimizers share the parameters of one wrapper. The second one steps after each call.
TEST(CapturedLoops, ASecondOptimizerStepsAfterEachCall) {
  expect_equal_bits(
      [&](Kind kind, const Comm& comm, bool captures) {
        Net net = net_on(*comm);
        Wrapped own = wrapped(kind, net, comm);
        const auto all = own.wrapper->parameters();
        AdamW first(std::vector<at::Tensor>(all.begin(), all.begin() + 3), torch::optim::AdamWOptions(1e-2));
        SGD second(std::vector<at::Tensor>(all.begin() + 3, all.end()), torch::optim::SGDOptions(1e-2).momentum(0.9));
        const auto step = step_of(
            *own.wrapper, first, [&](const Inputs& in) { return own.forward(in[0]).square().mean(); }, captures, 0.5);
        State state;
        for (int i = 0; i < 8; ++i) {
          state["loss " + std::to_string(i)] = step({rows_of(*comm, i)}).cpu();
          second.step();
        }
        note_parameters(state, "", *own.wrapper);
        return state;
      },
      {kFsdp, kKept, kDdp});
}

// Computes on a side stream in both directions.
struct OnSideStream : torch::autograd::Function<OnSideStream> {
  static at::Tensor on_side(const at::Tensor& x, const std::function<at::Tensor()>& compute) {
    const c10::impl::VirtualGuardImpl impl(x.device().type());
    const c10::Stream here = impl.getStream(x.device()), side = impl.getStreamFromGlobalPool(x.device());
    order_streams(here, side);
    at::Tensor result;
    {
      const c10::StreamGuard on(side);
      x.record_stream(side);
      result = compute();
    }
    order_streams(side, here);
    result.record_stream(here);
    return result;
  }
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x) {
    const at::Tensor result = on_side(x, [&] { return torch::tanh(x); });
    context->save_for_backward({result});
    return result;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const at::Tensor result = context->get_saved_variables()[0];
    return {on_side(gradients[0], [&] { return gradients[0] * (1 - result * result); })};
  }
};

TEST(CapturedLoops, AFunctionOfTheUsersOnASideStream) {
  expect_equal_bits([&](Kind kind, const Comm& comm, bool captures) {
    Net net = net_on(*comm);
    Wrapped own = wrapped(kind, net, comm);
    const auto step = step_of(
        *own.wrapper, *own.optimizer,
        [&](const Inputs& in) { return OnSideStream::apply(own.forward(OnSideStream::apply(in[0]))).square().mean(); },
        captures);
    return trained(step, own, comm);
  });
}

// A gradient penalty in the loss.
TEST(CapturedLoops, APenaltyOnTheSlope) {
  expect_equal_bits([&](Kind kind, const Comm& comm, bool captures) {
    Net net = net_on(*comm);
    Wrapped own = wrapped(kind, net, comm);
    const auto step = step_of(
        *own.wrapper, *own.optimizer,
        [&](const Inputs& in) {
          const at::Tensor x = in[0].detach().requires_grad_();
          const at::Tensor y = own.forward(x).square().mean();
          const at::Tensor slope = torch::autograd::grad({y}, {x}, {torch::ones_like(y)}, true, true)[0];
          return y + slope.square().sum();
        },
        captures);
    return trained(step, own, comm);
  });
}

// The loss scaler steps an eager warm-up of the loop; captured steps follow.
TEST(CapturedLoops, AScaledWarmUpBeforeCapturedSteps) {
  expect_equal_bits([&](Kind kind, const Comm& comm, bool captures) {
    Net net = net_on(*comm);
    Wrapped own = wrapped(kind, net, comm);
    ShardedGradScaler scaler(comm, {.initial_scale = 8});
    for (int i = 0; i < 3; ++i) {
      own.optimizer->zero_grad();
      scaler.scale(own.forward(rows_of(*comm, i)).square().mean()).backward();
      scaler.step(*own.optimizer);
      scaler.update();
    }
    const auto step = step_of(
        *own.wrapper, *own.optimizer, [&](const Inputs& in) { return own.forward(in[0]).square().mean(); }, captures);
    return trained(step, own, comm);
  });
}

}  // namespace
}  // namespace tessera::captured_loops_test
