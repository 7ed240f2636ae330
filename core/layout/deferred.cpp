#include "core/layout/deferred.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/_neg_view.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/GradMode.h>
#include <torch/library.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <stdexcept>
#include <utility>

#include "core/layout/example_shapes.h"
#include "core/paging/boxed_tensors.h"
#include "core/runtime/require.h"

namespace tessera::internal {

// The dispatch key of the boxed fallback that records operators; no other file names the key. libtorch means it for
// tests, and does not use it, so no mode of libtorch conflicts.
#define TESSERA_DEFERRED_KEY TESTING_ONLY_GenericMode
static constexpr auto kDeferredKey = c10::DispatchKey::TESSERA_DEFERRED_KEY;

// Records the operator calls of constructors, in order. Describes deferred tensors by View. If the tape held the
// tensors themselves, whose storages own the tape, it would never be freed.
struct Tape {
  // A view of one of the tape's storages.
  struct View {
    size_t storage;
    std::vector<int64_t> sizes, strides;
    int64_t offset;
    at::ScalarType dtype;  // view_as_real() and view(dtype) change it
    bool is_conjugated, is_negated;
  };
  // A view among a call's arguments: tensor `number` of the argument with index `argument`, which may be a list.
  struct Argument {
    size_t argument, number;
    View view;
  };
  struct Call {
    c10::OperatorHandle op;
    torch::jit::Stack arguments;  // with undefined tensors in place of the views
    std::vector<Argument> views;
    std::vector<std::optional<size_t>> made = {};  // by result: the index of the new storage, if any
    at::Device device = at::kCPU;                  // of the results
  };

  std::vector<Call> calls;
  std::vector<size_t> last_use;  // by storage: the index of the last call that uses it
  at::Tensor generator_state;    // state of the default CPU generator when recording began
  bool draws = false;            // whether a call draws random numbers
};

namespace {

// The DataPtr context of a deferred storage, which has no data.
struct TapeStorage {
  std::shared_ptr<Tape> tape;
  size_t storage;
  at::Device device;  // in the replay
};
// The DataPtr context in the storage of a deferred_from() tensor.
struct Source {
  ReadElements read;
  at::Device device;
};

template <class Context>
void delete_context(void* context) {
  delete static_cast<Context*>(context);
}
// Returns the context in the tensor's storage; null if there is none of this type.
template <class Context>
const Context* context_of(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_meta() || !tensor.has_storage()) return nullptr;
  const at::DataPtr& pointer = tensor.unsafeGetTensorImpl()->unsafe_storage().data_ptr();
  return pointer.get_deleter() == &delete_context<Context> ? static_cast<Context*>(pointer.get_context()) : nullptr;
}

at::Tensor read_all(const at::Tensor& tensor, const Source& source) {
  const at::Tensor values =
      at::empty_strided(tensor.sizes(), tensor.strides(), at::TensorOptions(at::kCPU).dtype(tensor.scalar_type()));
  source.read({0, tensor.numel()}, values.mutable_data_ptr());
  return values.to(source.device);
}

thread_local std::shared_ptr<Tape> recording;

Tape::View view_of(const at::Tensor& tensor, const TapeStorage& known) {
  return {known.storage,        tensor.sizes().vec(), tensor.strides().vec(), tensor.storage_offset(),
          tensor.scalar_type(), tensor.is_conj(),     tensor.is_neg()};
}

at::Tensor view_in(const at::Tensor& tensor, const Tape::View& view) {
  at::Tensor viewed = tensor.scalar_type() == view.dtype
                          ? tensor.as_strided(view.sizes, view.strides, view.offset)
                          : at::empty({0}, tensor.options().dtype(view.dtype))
                                .set_(tensor.storage(), view.offset, view.sizes, view.strides);
  if (view.is_conjugated) viewed = viewed.conj();
  return view.is_negated ? at::_neg_view(viewed) : viewed;
}

// Replaces the tape's tensors in the call's arguments by entries of call.views. Throws std::logic_error for
// deferred_from() tensors.
void take_views(Tape& tape, Tape::Call& call) {
  for (size_t i = 0; i < call.arguments.size(); ++i) {
    size_t count = 0;
    replace_boxed_tensors(call.arguments[i], [&](const at::Tensor& tensor) {
      const size_t number = count++;
      require<std::logic_error>(
          context_of<Source>(tensor) == nullptr, "deferred(): ", call.op.schema().name(),
          " is given a tensor whose values will be read later: change it when the model is wrapped");
      const TapeStorage* known = context_of<TapeStorage>(tensor);
      if (known == nullptr) return tensor;
      if (call.views.empty()) call.device = known->device;
      call.views.push_back({i, number, view_of(tensor, *known)});
      tape.last_use[known->storage] = tape.calls.size();
      return at::Tensor();
    });
  }
}

// Replaces ordinary tensors by meta tensors of the same shape, because operators cannot mix the two kinds. Keeps
// scalars, which operators do accept, and index tensors: a masked result's shape depends on the mask's values.
void substitute_meta(torch::jit::Stack& stack, size_t count) {
  for (size_t i = stack.size() - count; i < stack.size(); ++i) {
    if (stack[i].isOptionalTensorList()) continue;
    replace_boxed_tensors(stack[i], [](const at::Tensor& tensor) {
      const bool is_ordinary = tensor.defined() && !tensor.is_meta() && tensor.dim() > 0;
      return is_ordinary ? at::empty_like(tensor, tensor.options().device(at::kMeta)) : tensor;
    });
  }
}

// Registers the storage of a new meta tensor with the tape. Returns the storage's index; nullopt for other results.
std::optional<size_t> adopt(const std::shared_ptr<Tape>& tape, const c10::IValue& result, at::Device device) {
  if (!result.isTensor()) return std::nullopt;
  const at::Tensor& tensor = result.toTensor();
  if (!tensor.defined() || !tensor.is_meta() || context_of<TapeStorage>(tensor) != nullptr) return std::nullopt;
  const size_t storage = tape->last_use.size();
  tape->last_use.push_back(tape->calls.size());
  tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl()->set_data_ptr_noswap(
      at::DataPtr(nullptr, new TapeStorage{tape, storage, device}, &delete_context<TapeStorage>, at::kMeta));
  return storage;
}

bool has_tensor_argument(const c10::FunctionSchema& schema) {
  return std::ranges::any_of(schema.arguments(), [](const c10::Argument& argument) {
    const auto& type = argument.type();
    return type->kind() == c10::TypeKind::TensorType ||
           (type->kind() == c10::TypeKind::ListType &&
            type->castRaw<c10::ListType>()->getElementType()->kind() == c10::TypeKind::TensorType);
  });
}

void record(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard below(kDeferredKey);
  if (!recording) return op.callBoxed(stack);
  Tape& tape = *recording;
  const auto& schema = op.schema();
  const size_t count = schema.arguments().size();
  const auto arguments = torch::jit::last(*stack, count);
  Tape::Call call{op, torch::jit::Stack(arguments.begin(), arguments.end()), {}};

  const auto device = schema.argumentIndexWithName("device");
  const bool is_factory = device && !has_tensor_argument(schema);
  take_views(tape, call);
  const bool concerns = !call.views.empty();
  if (!is_factory && !concerns) return op.callBoxed(stack);  // all tensors are ordinary
  if (device) {
    c10::IValue& target = torch::jit::peek(*stack, *device, count);
    // Records the device of the call's first tensor: the options() of a deferred tensor have the meta device.
    if (target.isDevice() && target.toDevice().is_meta()) call.arguments[*device] = call.device;
    if (is_factory || !target.isNone()) target = c10::Device(c10::kMeta);
  }
  if (concerns) substitute_meta(*stack, count);
  const at::Device before = call.device;
  if (device && !call.arguments[*device].isNone()) call.device = call.arguments[*device].toDevice();
  // On the meta device, to() another device would return its argument.
  if (const auto copy = schema.argumentIndexWithName("copy"); copy && call.device != before)
    torch::jit::peek(*stack, *copy, count) = true;
  call_for_shapes(op, *stack);
  for (const c10::IValue& result : torch::jit::last(*stack, schema.returns().size()))
    call.made.push_back(adopt(recording, result, call.device));
  const auto dtype = schema.argumentIndexWithName("dtype");
  if (is_factory && dtype && call.arguments[*dtype].isNone())  // the default dtype may change before the replay
    call.arguments[*dtype] = torch::jit::last(*stack, 1)[0].toTensor().scalar_type();
  tape.draws = tape.draws || op.hasTag(at::Tag::nondeterministic_seeded);
  tape.calls.push_back(std::move(call));
}

TORCH_LIBRARY_IMPL(_, TESSERA_DEFERRED_KEY, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&record>());
}

// Locked while a random operator without a generator argument is replayed: meanwhile the default CPU generator has the
// tape's state.
std::mutex default_generator_mutex;

// Runs the calls of a tape.
class Replay {
 public:
  explicit Replay(std::shared_ptr<Tape> tape) : tape_(std::move(tape)), generator_(at::detail::createCPUGenerator()) {
    generator_.set_state(tape_->generator_state);
  }
  bool done() const { return next_ == tape_->calls.size(); }
  // Runs the next call. Then calls final(index, tensor) for each storage without a later use, and frees the storage.
  template <class Final>
  void step(Final final) {
    const Tape::Call& call = tape_->calls[next_];
    torch::jit::Stack stack = call.arguments;
    for (auto next = call.views.begin(); next != call.views.end();) {
      const size_t argument = next->argument;
      size_t count = 0;
      replace_boxed_tensors(stack[argument], [&](const at::Tensor& tensor) {
        const size_t number = count++;
        if (next == call.views.end() || next->argument != argument || next->number != number) return tensor;
        return at((next++)->view);
      });
    }
    run(call, stack);
    for (size_t i = 0; i < call.made.size(); ++i)
      if (call.made[i]) real_[*call.made[i]] = stack[i].toTensor();
    stack.clear();
    ++next_;
    std::erase_if(real_, [&](const auto& entry) {
      const bool is_final = tape_->last_use[entry.first] < next_;
      if (is_final) final(entry.first, entry.second);
      return is_final;
    });
  }

 private:
  at::Tensor at(const Tape::View& view) const { return view_in(real_.at(view.storage), view); }
  void run(const Tape::Call& call, torch::jit::Stack& stack) {
    if (!call.device.is_cpu()) return call.op.callBoxed(stack);  // draws from the device's generator
    const auto generator = call.op.schema().argumentIndexWithName("generator");
    if (generator) {
      if (stack[*generator].isNone()) stack[*generator] = generator_;
      return call.op.callBoxed(stack);
    }
    if (!call.op.hasTag(at::Tag::nondeterministic_seeded)) return call.op.callBoxed(stack);
    std::lock_guard lock(default_generator_mutex);
    at::Generator common = at::detail::getDefaultCPUGenerator();
    const auto exchange_states = [&] {
      std::lock_guard of_common(common.mutex());  // other threads of the program may draw
      const at::Tensor before = common.get_state();
      common.set_state(generator_.get_state());
      generator_.set_state(before);
    };
    exchange_states();
    call.op.callBoxed(stack);
    exchange_states();
  }

  const std::shared_ptr<Tape> tape_;
  at::Generator generator_;
  size_t next_ = 0;
  std::map<size_t, at::Tensor> real_;  // by storage index: a tensor that owns the storage
};

}  // namespace

DeferredScope::DeferredScope() : tape_(std::make_shared<Tape>()), recording_(kDeferredKey) {
  if (recording) throw std::logic_error("deferred() inside deferred()");
  auto generator = at::detail::getDefaultCPUGenerator();
  {
    c10::impl::ExcludeDispatchKeyGuard ordinary(kDeferredKey);
    std::lock_guard lock(generator.mutex());
    tape_->generator_state = generator.get_state();
  }
  recording = tape_;
  if (is_deferred(at::empty({0}, at::kCPU))) return;
  recording.reset();
  throw std::runtime_error(
      "Tessera's fallback for the dispatch key TESTING_ONLY_GenericMode is not called: another library in this process "
      "uses the key, or this libtorch dropped it");
}

DeferredScope::~DeferredScope() {
  recording.reset();
  if (!tape_->draws) return;
  auto generator = at::detail::getDefaultCPUGenerator();
  std::lock_guard lock(generator.mutex());
  at::check_generator<at::CPUGeneratorImpl>(generator)->random();  // the next module has other values
}

OrdinaryScope::OrdinaryScope() : ordinary_(kDeferredKey) {}

bool is_deferring() { return recording != nullptr; }

at::Tensor deferred_from(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides, at::ScalarType dtype,
                         at::Device device, ReadElements read) {
  const OrdinaryScope ordinary;
  const at::Tensor tensor = at::empty_strided(sizes, strides, at::TensorOptions().dtype(dtype).device(at::kMeta));
  tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl()->set_data_ptr_noswap(
      at::DataPtr(nullptr, new Source{std::move(read), device}, &delete_context<Source>, at::kMeta));
  return tensor;
}

const ReadElements* reader_of(const at::Tensor& tensor) {
  const Source* source = context_of<Source>(tensor);
  return source == nullptr ? nullptr : &source->read;
}

at::Device device_of_values(const at::Tensor& tensor) {
  if (const auto* source = context_of<Source>(tensor)) return source->device;
  const auto* recorded = context_of<TapeStorage>(tensor);
  return recorded != nullptr ? recorded->device : tensor.device();
}

void replay_deferred(const std::vector<std::vector<at::Tensor>>& batches,
                     const std::function<void(size_t, const std::vector<at::Tensor>&)>& ready) {
  struct Wanted {
    size_t batch, number;
    Tape::View view;
  };
  using Key = std::pair<const Tape*, size_t>;  // {tape, index of one of its storages}
  at::NoGradGuard no_grad;
  std::vector<std::shared_ptr<Tape>> tapes;  // in order of first appearance
  std::multimap<Key, Wanted> wanted;
  std::vector<std::vector<at::Tensor>> values(batches.size());
  std::vector<size_t> missing;
  for (size_t batch = 0; batch < batches.size(); ++batch) {
    values[batch].resize(batches[batch].size());
    missing.push_back(batches[batch].size());
    for (size_t number = 0; number < batches[batch].size(); ++number) {
      const at::Tensor& tensor = batches[batch][number];
      if (context_of<Source>(tensor) != nullptr) {
        --missing[batch];
        continue;
      }
      const TapeStorage* known = context_of<TapeStorage>(tensor);
      require(known != nullptr, "replay_deferred: a tensor of shape ", tensor.sizes(), " is not deferred");
      if (std::ranges::find(tapes, known->tape) == tapes.end()) tapes.push_back(known->tape);
      wanted.emplace(Key(known->tape.get(), known->storage), Wanted{batch, number, view_of(tensor, *known)});
    }
  }
  auto hand_over = [&](size_t batch) {
    for (size_t number = 0; number < batches[batch].size(); ++number)
      if (const Source* source = context_of<Source>(batches[batch][number]))
        values[batch][number] = read_all(batches[batch][number], *source);
    ready(batch, std::exchange(values[batch], {}));
  };
  for (size_t batch = 0; batch < batches.size(); ++batch)
    if (missing[batch] == 0) hand_over(batch);
  for (const auto& tape : tapes) {
    for (Replay replay(tape); !replay.done();) {
      std::set<size_t> complete;
      replay.step([&](size_t storage, const at::Tensor& tensor) {
        for (auto [entry, end] = wanted.equal_range(Key(tape.get(), storage)); entry != end; ++entry) {
          const auto& [batch, number, view] = entry->second;
          values[batch][number] = view_in(tensor, view);
          if (--missing[batch] == 0) complete.insert(batch);
        }
      });
      for (const size_t batch : complete) hand_over(batch);
    }
  }
}

// Replaces the data through the TensorImpl, because set_data() cannot change the device type.
void fill_deferred(const at::Tensor& tensor, const at::Tensor& values) {
  tensor.unsafeGetTensorImpl()->shallow_copy_from(values.getIntrusivePtr());
}

}  // namespace tessera::internal

namespace tessera {
using namespace internal;

bool is_deferred(const at::Tensor& tensor) {
  return context_of<TapeStorage>(tensor) != nullptr || context_of<Source>(tensor) != nullptr;
}

void materialize(torch::nn::Module& module) {
  std::vector<at::Tensor> tensors;
  for (const auto& list : {module.parameters(), module.buffers()})
    std::ranges::copy_if(list, std::back_inserter(tensors), &is_deferred);
  replay_deferred({tensors}, [&](size_t, const std::vector<at::Tensor>& values) {
    for (size_t i = 0; i < values.size(); ++i) fill_deferred(tensors[i], values[i]);
  });
}

}  // namespace tessera
