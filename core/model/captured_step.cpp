#include <tessera/model/data_parallel.h>

#include <ATen/autocast_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/ones_like.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/StringUtil.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <exception>
#include <stdexcept>
#include <utility>

#include <tessera/host_results.h>
#include "core/comm/group_process.h"
#include "core/comm/recordable_group.h"
#include "core/gradients/backward_pass.h"
#include "core/paging/residency.h"
#include "core/runtime/graph_recorder.h"
#include "core/runtime/require.h"
#include "core/runtime/stream_uses.h"

namespace tessera {
using namespace internal;
namespace {

// Returns the wrapper's group. Throws std::invalid_argument if the collectives of this group cannot be recorded.
RecordableGroup& recordable(const DataParallel& wrapper, int rank) {
  const at::Device device = wrapper.comm()->device();
  const std::string where = c10::str("CapturedStep on rank ", rank, ": ");
  require(!device.is_cpu(), where,
          "the wrapper's group is on the CPU, expected an accelerator: call the step's functions in a loop instead");
  auto* const group = dynamic_cast<RecordableGroup*>(wrapper.comm().get());
  require(group != nullptr, where, "the wrapper's group is not NCCL's, and the host takes part in its collectives");
  if (const std::string problem = group->why_not_recorded(); !problem.empty())
    throw std::invalid_argument(where + problem);
  return *group;
}

std::string layout_text(const at::Tensor& tensor) {
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
  // Steps run on this stream, because the default stream cannot be recorded.
  const c10::Stream stream = c10::impl::VirtualGuardImpl(device().type()).getStreamFromGlobalPool(device());
  std::unique_ptr<GraphRecorder> recorder = make_graph_recorder();  // null after a failure
  bool is_captured = false;
  at::Tensor seed;  // the gradient of the loss, 1; allocated before the recording, so that replays do not fill it

  struct Gradient {
    at::Tensor leaf, value;  // `value` is undefined if the leaf has no gradient
    bool trains;
  };
  struct Place {
    at::Tensor tensor;
    const void* address = tensor.const_data_ptr();
  };
  struct Mode {
    std::shared_ptr<torch::nn::Module> module;
    bool trains = module->is_training();
  };
  struct Settings {
    std::optional<double> divisor;
    std::pair<bool, at::ScalarType> autocast;  // whether it is on around the call, and its dtype
    std::vector<size_t> group_sizes;           // of the optimizer
  };
  // The memory that replays read and write, and the state of the model and the optimizer at the capture.
  struct Recorded {
    // Meta tensors with the dtypes, shapes and strides of the first call's inputs; empty before the first call.
    std::optional<std::vector<at::Tensor>> given;
    std::vector<at::Tensor> inputs;  // tensors that replays read; before the capture, inputs of the first call
    std::vector<Gradient> gradients;
    std::vector<Place> places;  // addresses of parameters and buffers
    std::vector<Mode> modes;
    Settings settings;
    bool has_optimizer = false;  // whether the graph contains the optimizer's step
    std::vector<RecordedStep> steps;
    CapturedWork::Passes passes;  // of all wrappers that the body uses
    at::Tensor loss;
    GradNorm norm = GradNorm(0.0);
  };
  Recorded recorded{.passes = {wrapper.backward_pass().shared_from_this()}};

  at::Device device() const { return comm->device(); }
  std::string where() const { return c10::str("CapturedStep on rank ", comm->rank(), ": "); }
  Settings settings() const;
  std::vector<at::Tensor> leaves() const;
  bool has_recordable_parameters() const;
  void clear_gradients() const;
  void check(const std::vector<at::Tensor>& given) const;
  void record_state();
  void require_as_recorded() const;
  std::string name_of(const at::Tensor& tensor) const;
  at::Tensor run(const std::vector<at::Tensor>& given);
  at::Tensor run_eagerly(const std::vector<at::Tensor>& given);
  void capture();
  at::Tensor replay(const std::vector<at::Tensor>& given);
};

// The parameters of the wrapper, the optimizer and ignored modules, each once.
std::vector<at::Tensor> CapturedStep::State::leaves() const {
  std::vector<at::Tensor> leaves = wrapper.parameters();
  for (const auto& of_group : optimizer.param_groups())
    leaves.insert(leaves.end(), of_group.params().begin(), of_group.params().end());
  for (const at::Tensor& parameter : wrapper.backward_pass().module().parameters())
    if (parameter.defined() && !is_paged(parameter)) leaves.push_back(parameter);
  std::ranges::sort(leaves, {}, &at::Tensor::unsafeGetTensorImpl);
  leaves.erase(std::ranges::unique(leaves, {}, &at::Tensor::unsafeGetTensorImpl).begin(), leaves.end());
  return leaves;
}

CapturedStep::State::Settings CapturedStep::State::settings() const {
  const auto type = device().type();
  Settings now{wrapper.backward_pass().divisor(),
               {at::autocast::is_autocast_enabled(type), at::autocast::get_autocast_dtype(type)}};
  for (const auto& of_group : optimizer.param_groups()) now.group_sizes.push_back(of_group.params().size());
  return now;
}

// Whether a graph may contain the optimizer's step. Excludes fp64: recorded kernels read the learning rate in fp32.
bool CapturedStep::State::has_recordable_parameters() const {
  for (const auto& of_group : optimizer.param_groups())
    for (const at::Tensor& parameter : of_group.params())
      if (parameter.device() != device() || parameter.scalar_type() == at::kDouble) return false;
  return true;
}

void CapturedStep::State::clear_gradients() const {
  for (const at::Tensor& leaf : leaves()) leaf.mutable_grad().reset();
}

void CapturedStep::State::check(const std::vector<at::Tensor>& given) const {
  if (!recorder) throw std::logic_error(where() + "the capture failed in an earlier call");
  for (size_t i = 0; i < given.size(); ++i)
    if (!given[i].defined() || given[i].requires_grad() || given[i].layout() != at::kStrided)
      throw std::invalid_argument(c10::str(where(), "input ", i,
                                           " is undefined, requires a gradient or is not strided, expected a strided "
                                           "tensor of values"));
  if (!recorded.given) return;
  const std::vector<at::Tensor>& inputs = *recorded.given;
  if (given.size() != inputs.size())
    throw std::invalid_argument(
        c10::str(where(), "got ", given.size(), " inputs, expected ", inputs.size(), " as in the first call"));
  for (size_t i = 0; i < given.size(); ++i)
    if (given[i].scalar_type() != inputs[i].scalar_type() || given[i].sizes() != inputs[i].sizes() ||
        given[i].strides() != inputs[i].strides())
      throw std::invalid_argument(c10::str(where(), "input ", i, " is ", layout_text(given[i]), ", expected ",
                                           layout_text(inputs[i]),
                                           " as in the first call: pad it, or make another CapturedStep"));
}

void CapturedStep::State::record_state() {
  for (const at::Tensor& leaf : leaves()) {
    recorded.gradients.push_back({leaf, leaf.grad(), leaf.requires_grad()});
    recorded.places.push_back({leaf});
  }
  for (const auto& pass : recorded.passes) {
    for (const auto& buffer : defined_buffers(pass->module())) recorded.places.push_back({buffer.value()});
    for (const at::Tensor& parameter : pass->module().parameters())
      if (parameter.defined() && !is_paged(parameter)) recorded.places.push_back({parameter});
    for (const auto& module : pass->module().modules()) recorded.modes.push_back({module});
  }
  recorded.settings = settings();
}

std::string CapturedStep::State::name_of(const at::Tensor& tensor) const {
  for (const auto& parameter : wrapper.named_parameters())
    if (parameter.value().is_same(tensor)) return "parameter '" + parameter.key() + "'";
  for (const auto& buffer : wrapper.named_buffers())
    if (buffer.value().is_same(tensor)) return "buffer '" + buffer.key() + "'";
  return "a tensor of the optimizer or of another wrapper";
}

// Throws std::logic_error if the state has changed since the capture: replays would ignore the change.
void CapturedStep::State::require_as_recorded() const {
  const auto fail = [this](const auto&... parts) {
    throw std::logic_error(c10::str(where(), parts...,
                                    " since the capture, which replays do not follow: undo it, or make another "
                                    "CapturedStep"));
  };
  for (const Gradient& gradient : recorded.gradients)
    if (gradient.leaf.requires_grad() != gradient.trains)
      fail(name_of(gradient.leaf), gradient.trains ? " was frozen" : " was unfrozen");
  for (const Place& place : recorded.places)
    if (place.tensor.const_data_ptr() != place.address)
      fail(name_of(place.tensor), " was given other memory, by torch::load() or set_data(), say,");
  for (const Mode& mode : recorded.modes)
    if (mode.module->is_training() != mode.trains)
      fail("a ", mode.module->name(), " was put into ", mode.trains ? "evaluation" : "training", " mode");
  const Settings now = settings(), &then = recorded.settings;
  if (now.group_sizes != then.group_sizes) fail("parameters were added to the optimizer or removed from it");
  if (now.divisor != then.divisor) fail("the divisor of gradients was changed");
  const auto [is_on, dtype] = now.autocast;
  if (is_on != then.autocast.first) fail("autocast around the call was switched ", is_on ? "on" : "off");
  if (dtype != then.autocast.second) fail("autocast's dtype has become ", dtype, " instead of ", then.autocast.second);
  for (const RecordedStep& step : recorded.steps)
    if (const std::string change = step.change(); !change.empty()) fail(change);
}

at::Tensor CapturedStep::State::run(const std::vector<at::Tensor>& given) {
  at::Tensor result = body(given);
  if (!result.defined() || result.numel() != 1 || !result.requires_grad())
    throw std::invalid_argument(where() + "the body must return a loss of one element that requires a gradient");
  if (eager_steps > 0) seed = at::ones_like(result);
  result.backward(seed);
  if (max_norm) recorded.norm = wrapper.clip_grad_norm_on_device_(*max_norm);
  // Ends the operations that other wrappers began, such as all-gathers of a teacher. Refuses their options early.
  for (const auto& pass : recorded.passes) pass->prepare_capture();
  return result.detach();
}

at::Tensor CapturedStep::State::run_eagerly(const std::vector<at::Tensor>& given) {
  CapturedWork work(device(), /*is_recording=*/false, leaves(), recorded.passes);
  std::vector<at::Tensor> here;
  for (const at::Tensor& input : given) here.push_back(input.to(device(), input.scalar_type(), /*non_blocking=*/true));
  if (!recorded.given) {
    recorded.inputs = here;
    recorded.given.emplace();
    for (const at::Tensor& input : given)
      recorded.given->push_back(at::empty_strided(input.sizes(), input.strides(), input.options().device(at::kMeta)));
  }
  clear_gradients();
  at::Tensor result = run(here);
  optimizer.step();
  recorded.has_optimizer = work.is_recordable(&optimizer) && has_recordable_parameters();
  --eager_steps;
  return result;
}

// Captures the step. A failed recording aborts the group: other ranks would wait for collectives that never run.
void CapturedStep::State::capture() {
  for (const auto& pass : recorded.passes) pass->prepare_capture();
  for (at::Tensor& input : recorded.inputs) input = at::empty_like(input);
  // Memory for the learning rates and step counts that the host sets before each replay. `room` is an upper limit.
  const auto room = static_cast<int64_t>((leaves().size() + 1) * (optimizer.param_groups().size() + 1));
  const at::Tensor numbers = at::empty({room}, at::TensorOptions(at::kFloat).device(device()));
  clear_gradients();
  stream.synchronize();
  // Frees the cached memory of eager steps, which the graph's own pool of memory cannot use.
  c10::getDeviceAllocator(device().type())->emptyCache();
  std::vector<std::string> collectives;
  try {
    CapturedWork work(device(), /*is_recording=*/true, leaves(), recorded.passes);
    work.give_numbers(numbers);
    recorder->begin();
    try {
      recorded.loss = run(recorded.inputs);
      if (recorded.has_optimizer) optimizer.step();
    } catch (...) {
      try {
        recorder->end();
      } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): rethrows the first error
      }
      throw;
    }
    recorder->end();
    collectives = work.collectives();
    recorded.steps = work.take_steps();
  } catch (...) {
    recorder.reset();  // NCCL's abort waits until no graph refers to its communicator
    comm->abort(where() + "the capture failed: " + text_of(std::current_exception()));
    throw;
  }
  record_state();
  const ScopeExit refused([this] {
    if (!is_captured) recorder.reset();
  });
  require_agreement(*comm, "the collectives of a captured step", collectives);
  is_captured = true;
}

at::Tensor CapturedStep::State::replay(const std::vector<at::Tensor>& given) {
  {
    at::NoGradGuard no_grad;
    for (size_t i = 0; i < given.size(); ++i) recorded.inputs[i].copy_(given[i], /*non_blocking=*/true);
  }
  for (const RecordedStep& step : recorded.steps) step.prepare_replay();
  group.enqueue_recorded("a captured step", [this] { recorder->replay(); });
  for (const Gradient& gradient : recorded.gradients)
    if (!gradient.leaf.grad().is_same(gradient.value)) gradient.leaf.mutable_grad() = gradient.value;
  if (recorded.has_optimizer) {
    // Counts writes like an eager step. So autograd refuses the backward of a graph that saved the old values.
    for (const Gradient& gradient : recorded.gradients)
      if (gradient.trains) {
        gradient.leaf.unsafeGetTensorImpl()->bump_version();
        note_write(gradient.leaf);  // gathered copies of a shard become stale
      }
  } else {
    optimizer.step();
  }
  return recorded.loss.clone();
}

CapturedStep::CapturedStep(DataParallel& wrapper, torch::optim::Optimizer& optimizer, Body body,
                           std::optional<double> max_norm, int eager_steps)
    : state_(new State{wrapper, optimizer, std::move(body), max_norm, eager_steps}) {
  require(eager_steps >= 2, state_->where(), "eager_steps is ", eager_steps,
          ", expected 2 or more: the first ones allocate, and agree on orders");
  const c10::StreamGuard on(state_->stream);
  wrapper.backward_pass().prepare_capture();
}

CapturedStep::~CapturedStep() = default;

at::Tensor CapturedStep::operator()(const std::vector<at::Tensor>& inputs) {
  State& state = *state_;
  const BackwardPass::UserCall call(state.wrapper.backward_pass(), "a captured step");
  state.check(inputs);
  if (state.is_captured) {
    // Runs on the caller's stream, because prepare_replay() may read and free tensors of that stream.
    for (const auto& pass : state.recorded.passes) pass->prepare_replay();
    state.require_as_recorded();
  }
  const c10::Stream caller = current_stream(state.device());
  order_streams(caller, state.stream);
  // Also after an exception: the caller may then write tensors that the begun step uses.
  const ScopeExit joined([&] { order_streams(state.stream, caller); });
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
  loss.record_stream(caller);
  return loss;
}

bool CapturedStep::is_captured() const { return state_->is_captured; }

GradNorm CapturedStep::norm() const {
  const at::Tensor& value = state_->recorded.norm.on_device();
  return value.defined() ? GradNorm(value.clone()) : state_->recorded.norm;
}

}  // namespace tessera
