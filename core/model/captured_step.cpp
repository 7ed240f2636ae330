#include <tessera/model/data_parallel.h>

#include <ATen/ops/empty_like.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/StringUtil.h>
#include <torch/optim/optimizer.h>

#include <exception>
#include <stdexcept>
#include <utility>

#include "core/comm/agreement.h"
#include "core/comm/recordable_group.h"
#include "core/gradients/backward_pass.h"
#include "core/runtime/graph_recorder.h"
#include "core/runtime/stream_uses.h"

namespace tessera {
using namespace internal;
namespace {

// Throws if work on this device of the wrapper's group cannot be recorded.
RecordableGroup& recordable(const DataParallel& wrapper, int rank) {
  const at::Device device = wrapper.comm()->device();
  const std::string where = c10::str("CapturedStep on rank ", rank, ": ");
  if (device.is_cpu())
    throw std::invalid_argument(where +
                                "the wrapper's group is on the CPU, expected an accelerator: call the step's "
                                "functions in a loop instead");
  auto* const group = dynamic_cast<RecordableGroup*>(wrapper.comm().get());
  if (group == nullptr)
    throw std::invalid_argument(where +
                                "the wrapper's group is not NCCL's, and the host takes part in its collectives");
  if (const std::string problem = group->why_not_recorded(); !problem.empty())
    throw std::invalid_argument(where + problem);
  return *group;
}

bool is_alike(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() && a.strides() == b.strides();
}

std::string text_of(const at::Tensor& tensor) {
  return c10::str(tensor.scalar_type(), " of shape ", tensor.sizes(), " with strides ", tensor.strides());
}

}  // namespace

struct CapturedStep::State {
  DataParallel& wrapper;
  torch::optim::Optimizer& optimizer;
  const Body body;
  const std::optional<double> max_norm;
  int eager_steps;

  const std::shared_ptr<Communicator> comm = wrapper.comm();
  RecordableGroup& group = recordable(wrapper, comm->rank());
  // All work of steps runs on it: the default stream cannot be recorded.
  const c10::Stream stream = c10::impl::VirtualGuardImpl(device().type()).getStreamFromGlobalPool(device());
  const std::unique_ptr<GraphRecorder> recorder = make_graph_recorder();
  bool is_captured = false, has_failed = false;

  struct Gradient {
    at::Tensor leaf, value;  // undefined: it has none
    bool trains;
  };
  // The memory that replays read and write.
  struct Recorded {
    std::vector<at::Tensor> inputs;  // before the capture those of the first call
    std::vector<Gradient> gradients;
    at::Tensor loss;
    GradNorm norm = GradNorm(0.0);
  };
  Recorded recorded;

  at::Device device() const { return comm->device(); }
  std::string where() const { return c10::str("CapturedStep on rank ", comm->rank(), ": "); }
  std::vector<at::Tensor> leaves() const;
  void clear_gradients() const;
  void check(const std::vector<at::Tensor>& given) const;
  at::Tensor run(const std::vector<at::Tensor>& given);
  at::Tensor run_eagerly(const std::vector<at::Tensor>& given);
  void capture();
  at::Tensor replay(const std::vector<at::Tensor>& given);
};

std::vector<at::Tensor> CapturedStep::State::leaves() const {
  std::vector<at::Tensor> leaves = wrapper.parameters();
  for (const auto& of_group : optimizer.param_groups())
    leaves.insert(leaves.end(), of_group.params().begin(), of_group.params().end());
  return leaves;
}

void CapturedStep::State::clear_gradients() const {
  for (const at::Tensor& leaf : leaves()) leaf.mutable_grad().reset();
}

// Replays read the same memory every time.
void CapturedStep::State::check(const std::vector<at::Tensor>& given) const {
  if (has_failed) throw std::logic_error(where() + "the capture failed in an earlier call");
  for (size_t i = 0; i < given.size(); ++i)
    if (!given[i].defined() || given[i].requires_grad() || given[i].layout() != at::kStrided)
      throw std::invalid_argument(c10::str(where(), "input ", i,
                                           " is undefined, requires a gradient or is not strided, expected a strided "
                                           "tensor of values"));
  const std::vector<at::Tensor>& inputs = recorded.inputs;
  if (inputs.empty() && recorded.gradients.empty()) return;
  if (given.size() != inputs.size())
    throw std::invalid_argument(
        c10::str(where(), "got ", given.size(), " inputs, expected ", inputs.size(), " as in the first call"));
  for (size_t i = 0; i < given.size(); ++i)
    if (!is_alike(given[i], inputs[i]))
      throw std::invalid_argument(c10::str(where(), "input ", i, " is ", text_of(given[i]), ", expected ",
                                           text_of(inputs[i]),
                                           " as in the first call: pad it, or make another CapturedStep"));
  for (const Gradient& gradient : recorded.gradients)
    if (gradient.leaf.requires_grad() != gradient.trains)
      throw std::logic_error(where() + "a parameter was " + (gradient.trains ? "frozen" : "unfrozen") +
                             " since the capture, which replays ignore: make another CapturedStep");
}

at::Tensor CapturedStep::State::run(const std::vector<at::Tensor>& given) {
  at::Tensor result = body(given);
  if (!result.defined() || result.numel() != 1 || !result.requires_grad())
    throw std::invalid_argument(where() + "the body must return a loss of one element that requires a gradient");
  result.backward();
  if (max_norm) recorded.norm = wrapper.clip_grad_norm_on_device_(*max_norm);
  return result.detach();
}

at::Tensor CapturedStep::State::run_eagerly(const std::vector<at::Tensor>& given) {
  const CapturedWork work(device(), /*is_recording=*/false);
  std::vector<at::Tensor> here;
  for (const at::Tensor& input : given) here.push_back(input.to(device(), input.scalar_type(), /*non_blocking=*/true));
  if (recorded.inputs.empty()) recorded.inputs = here;
  clear_gradients();
  at::Tensor result = run(here);
  optimizer.step();
  --eager_steps;
  return result;
}

// A failure leaves collectives of the wrapper that will never run, so the group ends with it.
void CapturedStep::State::capture() {
  wrapper.backward_pass().prepare_capture();
  for (at::Tensor& input : recorded.inputs) input = at::empty_like(input);
  clear_gradients();
  stream.synchronize();
  std::vector<std::string> collectives;
  try {
    CapturedWork work(device(), /*is_recording=*/true);
    recorder->begin();
    try {
      recorded.loss = run(recorded.inputs);
    } catch (...) {
      const std::exception_ptr reason = std::current_exception();
      try {
        recorder->end();
      } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): it ends by the first error
      }
      std::rethrow_exception(reason);
    }
    recorder->end();
    collectives = work.collectives();
  } catch (const std::exception& error) {
    has_failed = true;
    comm->abort(where() + "the capture failed: " + error.what());
    throw;
  }
  for (const at::Tensor& leaf : leaves()) recorded.gradients.push_back({leaf, leaf.grad(), leaf.requires_grad()});
  require_agreement(*comm, "the collectives of a captured step", collectives);
  is_captured = true;
}

at::Tensor CapturedStep::State::replay(const std::vector<at::Tensor>& given) {
  {
    at::NoGradGuard no_grad;
    for (size_t i = 0; i < given.size(); ++i) recorded.inputs[i].copy_(given[i], /*non_blocking=*/true);
  }
  group.enqueue_recorded("a captured step", [this] { recorder->replay(); });
  for (const Gradient& gradient : recorded.gradients)
    if (!gradient.leaf.grad().is_same(gradient.value)) gradient.leaf.mutable_grad() = gradient.value;
  optimizer.step();
  return recorded.loss.clone();
}

CapturedStep::CapturedStep(DataParallel& wrapper, torch::optim::Optimizer& optimizer, Body body,
                           std::optional<double> max_norm, int eager_steps)
    : state_(new State{wrapper, optimizer, std::move(body), max_norm, eager_steps}) {
  if (eager_steps < 2)
    throw std::invalid_argument(c10::str(state_->where(), "eager_steps is ", eager_steps,
                                         ", expected 2 or more: the first ones allocate, and agree on orders"));
  const c10::StreamGuard on(state_->stream);
  wrapper.backward_pass().prepare_capture();
}

CapturedStep::~CapturedStep() = default;

at::Tensor CapturedStep::operator()(const std::vector<at::Tensor>& inputs) {
  State& state = *state_;
  state.check(inputs);
  const c10::Stream caller = current_stream(state.device());
  order_streams(caller, state.stream);
  at::Tensor loss;
  {
    const c10::StreamGuard on(state.stream);
    for (const at::Tensor& input : inputs)
      if (input.device() == state.device()) input.record_stream(state.stream);
    if (state.eager_steps > 0) {
      loss = state.run_eagerly(inputs);
    } else {
      if (!state.is_captured) state.capture();
      loss = state.replay(inputs);
    }
  }
  order_streams(state.stream, caller);
  loss.record_stream(caller);
  return loss;
}

bool CapturedStep::is_captured() const { return state_->is_captured; }

GradNorm CapturedStep::norm() const {
  const at::Tensor& value = state_->recorded.norm.on_device();
  return value.defined() ? GradNorm(value.clone()) : state_->recorded.norm;
}

}  // namespace tessera
