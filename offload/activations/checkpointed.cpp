#include <tessera/checkpointed.h>

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/ScopeExit.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/custom_class.h>

#include <algorithm>
#include <mutex>
#include <sstream>

#include <tessera/activation_offload.h>
#include "core/paging/residency.h"
#include "core/runtime/graph_recorder.h"
#include "core/runtime/require.h"

namespace tessera {
using namespace internal;
namespace {

using torch::autograd::AutogradContext;
using Tensors = torch::autograd::variable_list;

// Returns the CPU, the tensors' devices, and this thread's current accelerator if the process has used it.
std::vector<at::Device> devices_of(const Tensors& tensors) {
  std::vector<at::Device> devices{at::kCPU};
  if (at::globalContext().hasCUDA()) {
    const at::Device current = c10::impl::VirtualGuardImpl(at::kCUDA).getDevice();
    if (at::detail::getCUDAHooks().hasPrimaryContext(current.index())) devices.push_back(current);
  }
  for (const at::Tensor& tensor : tensors)
    if (std::ranges::find(devices, tensor.device()) == devices.end() && !tensor.is_meta())
      devices.push_back(tensor.device());
  return devices;
}

// Like devices_of(), plus all accelerators that this process has used: the function may draw random numbers there.
std::vector<at::Device> devices_in_use(const Tensors& tensors) {
  std::vector<at::Device> devices = devices_of(tensors);
  if (!at::globalContext().hasCUDA()) return devices;
  for (c10::DeviceIndex index = 0; index < c10::impl::VirtualGuardImpl(at::kCUDA).deviceCount(); ++index)
    if (at::detail::getCUDAHooks().hasPrimaryContext(index) &&
        std::ranges::find(devices, at::Device(at::kCUDA, index)) == devices.end())
      devices.emplace_back(at::kCUDA, index);
  return devices;
}

// The state on which a computation depends in addition to its inputs: default generators and autocast.
class ExecutionState {
 public:
  explicit ExecutionState(const std::vector<at::Device>& devices) {
    // Skips the generators in a recording, which draws no random numbers: an earlier eager step would have thrown.
    const bool is_recorded = std::ranges::any_of(
        devices, [](const at::Device& device) { return CapturedWork::recording_on(device) != nullptr; });
    for (const at::Device& device : devices) {
      casts_.emplace_back(device.type(), at::autocast::is_autocast_enabled(device.type()),
                          at::autocast::get_autocast_dtype(device.type()));
      if (is_recorded) continue;
      at::Generator generator = at::globalContext().defaultGenerator(device);
      std::lock_guard lock(generator.mutex());
      generators_.push_back({device, generator, generator.get_state()});
    }
    cast_cache_ = at::autocast::is_autocast_cache_enabled();
  }
  // Keeps only generators on `devices` that the first call advanced. The recomputation must not change other
  // generators, such as those of other ranks' devices.
  void keep_used_generators(const std::vector<at::Device>& devices) {
    std::erase_if(generators_, [&](State& entry) {
      if (std::ranges::find(devices, entry.device) == devices.end()) return true;
      std::lock_guard lock(entry.generator.mutex());
      return at::equal(entry.generator.get_state(), entry.state);
    });
  }
  bool draws() const { return !generators_.empty(); }
  void forget_generators() { generators_.clear(); }
  void restore() {
    for (auto& [device, generator, state] : generators_) {
      std::lock_guard lock(generator.mutex());
      generator.set_state(state);
    }
    for (const auto& [device, enabled, dtype] : casts_) {
      at::autocast::set_autocast_enabled(device, enabled);
      at::autocast::set_autocast_dtype(device, dtype);
    }
    at::autocast::set_autocast_cache_enabled(cast_cache_);
  }

 private:
  struct State {
    at::Device device;
    at::Generator generator;
    at::Tensor state;
  };
  std::vector<State> generators_;
  std::vector<std::tuple<at::DeviceType, bool, at::ScalarType>> casts_;
  bool cast_cache_ = true;
};

// The version of an input when the checkpointed function was called. Holds the version counter, not the tensor.
struct Version {
  explicit Version(const at::Tensor& tensor) : counter(torch::autograd::impl::version_counter(tensor)), then(now()) {}
  // Tensors made under InferenceMode have no version counter.
  int64_t now() const { return counter.enabled() ? counter.current_version() : 0; }

  c10::VariableVersion counter;
  int64_t then;
};

struct Part : torch::CustomClassHolder {
  std::function<Tensors(const Tensors&)> compute;
  std::vector<at::Device> devices;
  std::optional<ExecutionState> first_state;  // the state before the first call
  std::vector<std::pair<std::vector<int64_t>, at::ScalarType>> outputs;
  std::vector<ActivationOffload::Fetch> kept;  // by input; empty for inputs that autograd keeps
  std::vector<bool> requires_grad;             // by input
  std::vector<Version> versions;               // by input of the caller, without the anchor (see Checkpoint::forward)

  // Calls the function again in the state of the first call, with autograd recording. Returns the outputs.
  Tensors compute_again(const Tensors& inputs) {
    ExecutionState present(devices);
    if (!first_state->draws()) present.forget_generators();
    const auto back = c10::make_scope_exit([&] { present.restore(); });
    // At the outermost level of autocast, clears the cache of cast weights, which the next forward must not reuse.
    at::autocast::increment_nesting();
    const auto uncached = c10::make_scope_exit([] {
      if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
    });
    first_state->restore();
    at::AutoGradMode recording(true);
    Tensors again = compute(inputs);
    require_same_outputs(again);
    return again;
  }

  // Throws if an input has changed since the call. Autograd checks only tensors that it saves, and its error does not
  // name the input. A change during the copy to the host may also have corrupted this copy.
  void check_versions() const {
    for (size_t i = 0; i < versions.size(); ++i)
      require(versions[i].now() == versions[i].then, "tensor ", i,
              " of a checkpointed function's inputs, which backward needs, has been modified by an inplace operation: "
              "it is at version ",
              versions[i].now(), "; expected version ", versions[i].then, " instead");
  }

  void require_same_outputs(const Tensors& again) const {
    std::ostringstream problem;
    if (again.size() != outputs.size()) problem << again.size() << " tensors, not " << outputs.size();
    for (size_t i = 0; i < outputs.size() && problem.str().empty(); ++i)
      if (again[i].sizes() != outputs[i].first || again[i].scalar_type() != outputs[i].second)
        problem << "output " << i << " as " << again[i].scalar_type() << " " << again[i].sizes() << ", not "
                << outputs[i].second << " " << at::IntArrayRef(outputs[i].first);
    if (!problem.str().empty())
      throw std::logic_error("a checkpointed function gave other outputs when backward called it again: " +
                             problem.str());
  }
};

struct Checkpoint : torch::autograd::Function<Checkpoint> {
  // inputs[0] is an anchor that requires a gradient. Parameters of the function may require gradients even if no input
  // does. With the anchor, autograd calls backward in that case too.
  static Tensors forward(AutogradContext* context, const c10::intrusive_ptr<Part>& part, at::TensorList inputs) {
    context->saved_data["part"] = c10::IValue::make_capsule(part);
    context->set_materialize_grads(false);  // outputs without a gradient must not add zeros to parameters
    save(context, *part, inputs);
    const Tensors given(inputs.begin() + 1, inputs.end());
    for (const at::Tensor& tensor : given) part->versions.emplace_back(tensor);
    RecomputesLater later;
    Tensors outputs = part->compute(given);
    Tensors known = given;
    known.insert(known.end(), outputs.begin(), outputs.end());
    part->devices = devices_of(known);
    part->first_state->keep_used_generators(part->devices);
    if (part->first_state->draws())
      for (const at::Device& device : part->devices)
        CapturedWork::refuse(device, "a checkpointed function that draws random numbers, whose state the host restores",
                             "draw them outside of it");
    for (size_t i = 0; i < given.size(); ++i)
      require(part->versions[i].now() == part->versions[i].then, "a checkpointed function changed tensor ", i,
              " of its inputs in place, so that it cannot be called again: clone it first");
    for (const at::Tensor& output : outputs) part->outputs.emplace_back(output.sizes().vec(), output.scalar_type());
    // Autograd sets grad_fn in the returned tensor objects themselves, so outputs that are held elsewhere are replaced.
    for (at::Tensor& output : outputs)
      if (output.use_count() > 1 &&
          std::ranges::none_of(given, [&](const auto& input) { return input.is_same(output); }))
        output = output.detach();
    return outputs;
  }

  // Saves the inputs for backward. Does not offload paged tensors, or leaves that require gradients (parameters).
  static void save(AutogradContext* context, Part& part, at::TensorList inputs) {
    Tensors saved = inputs.vec();
    part.kept.resize(inputs.size());
    for (size_t i = 0; i < saved.size(); ++i) {
      const bool requires_grad = saved[i].requires_grad();
      part.requires_grad.push_back(requires_grad);
      ActivationOffload* elsewhere = ActivationOffload::current();
      if (i == 0 || elsewhere == nullptr || (saved[i].is_leaf() && requires_grad) || is_paged(saved[i])) continue;
      part.kept[i] = elsewhere->keep(saved[i]);
      if (part.kept[i]) saved[i] = at::Tensor();
    }
    context->save_for_backward(std::move(saved));
  }

  // Backpropagates `seeds`, the gradients of `roots`, to all leaves; in torch::autograd::grad(), only to `inputs` that
  // need it. Throws in a backward() restricted to inputs, because it would skip parameters of the function.
  static void add_gradients(AutogradContext* context, const Tensors& roots, const Tensors& seeds,
                            const Tensors& inputs) {
    if (roots.empty()) return;
    const auto* const restricted = torch::autograd::get_current_graph_task_exec_info();  // empty: all leaves
    if (restricted == nullptr || restricted->empty()) return torch::autograd::backward(roots, seeds);
    if (std::ranges::none_of(*restricted, [](const auto& entry) { return entry.second.captures_ != nullptr; }))
      throw std::logic_error(
          "backward with inputs reached a checkpointed function, whose parameters would get no gradient: call it "
          "without inputs, or use torch::autograd::grad()");
    Tensors wanted;
    for (size_t i = 0; i < inputs.size(); ++i)  // edge 0 is the anchor's
      if (inputs[i].requires_grad() && context->needs_input_grad(i + 1)) wanted.push_back(inputs[i]);
    if (wanted.empty()) return;
    const Tensors found = torch::autograd::grad(roots, wanted, seeds, {}, false, /*allow_unused=*/true);
    for (size_t i = 0; i < found.size(); ++i) wanted[i].mutable_grad() = found[i];
  }

  static Tensors backward(AutogradContext* context, Tensors gradients) {
    require<std::logic_error>(!c10::GradMode::is_enabled(),
                              "backward with create_graph=true reached a checkpointed function: its gradients cannot "
                              "be differentiated again");
    const auto part = c10::static_intrusive_pointer_cast<Part>(context->saved_data["part"].toCapsule());
    part->check_versions();
    Tensors inputs;
    const Tensors saved = context->get_saved_variables();
    for (size_t i = 1; i < saved.size(); ++i) {
      const at::Tensor value = part->kept[i] ? part->kept[i]() : saved[i];
      inputs.push_back(
          value.detach().set_requires_grad(part->kept[i] ? bool(part->requires_grad[i]) : saved[i].requires_grad()));
    }
    const Tensors outputs = part->compute_again(inputs);
    Tensors roots, seeds;
    for (size_t i = 0; i < outputs.size(); ++i) {
      if (!outputs[i].requires_grad() || !gradients[i].defined()) continue;
      roots.push_back(outputs[i]);
      seeds.push_back(gradients[i]);
    }
    add_gradients(context, roots, seeds, inputs);
    Tensors result(2);  // `part` and the anchor get no gradients
    for (const at::Tensor& input : inputs) result.push_back(input.grad());
    return result;
  }
};

}  // namespace

void internal::require_same(const std::vector<at::Tensor>& before, const std::vector<at::Tensor>& after) {
  for (size_t i = 0; i < std::max(before.size(), after.size()); ++i)
    require(i < before.size() && i < after.size() && before[i].is_same(after[i]),
            "a checkpointed function put another tensor in the place of tensor ", i,
            " of what it takes by reference, which its caller would not see: return it");
}

std::vector<at::Tensor> run_checkpointed(std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)> compute,
                                         std::vector<at::Tensor> inputs) {
  if (!c10::GradMode::is_enabled() || c10::InferenceMode::is_enabled()) return compute(inputs);
  auto part = c10::make_intrusive<Part>();
  part->compute = std::move(compute);
  part->first_state.emplace(devices_in_use(inputs));
  const at::Device device = inputs.empty() ? at::kCPU : inputs.back().device();  // whose stream backward() then awaits
  inputs.insert(inputs.begin(), at::empty({0}, device).set_requires_grad(true));
  return Checkpoint::apply(part, at::TensorList(inputs));  // a TensorList, because autograd ignores tensors in vectors
}

CheckpointedSequentialImpl::CheckpointedSequentialImpl(const torch::nn::Sequential& sequential,
                                                       const WrapPolicy& policy) {
  auto module = sequential->begin();
  for (const auto& child : sequential->named_children()) {
    register_module(child.key(), child.value());
    int64_t numel = 0;
    for (const at::Tensor& parameter : child.value()->parameters()) numel += parameter.numel();
    children_of_mine_.push_back({*module++, !policy || policy(child.key(), *child.value(), numel)});
  }
}

at::Tensor CheckpointedSequentialImpl::forward(at::Tensor x) {
  for (auto& [module, is_checkpointed] : children_of_mine_)
    x = is_checkpointed
            ? checkpointed([child = module](const at::Tensor& input) mutable { return child.forward(input); }, x)
            : module.forward(x);
  return x;
}

}  // namespace tessera
