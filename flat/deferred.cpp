#include "tessera/flat/deferred.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/GradMode.h>
#include <torch/library.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <unordered_map>
#include <utility>

namespace tessera {

// libtorch keeps this key for modes with a boxed fallback and does not use it itself. The one place
// where it is named.
#define TESSERA_DEFERRED_KEY TESTING_ONLY_GenericMode
static constexpr auto kDeferredKey = c10::DispatchKey::TESSERA_DEFERRED_KEY;

// What a constructor did, in order. It holds no tensor that it made, only their descriptions: the
// tensors hold the tape.
class Tape {
 public:
  // A view of one of the storages that the tape knows.
  struct Place {
    size_t storage;
    std::vector<int64_t> sizes, strides;
    int64_t offset;
    at::ScalarType dtype;
  };
  struct Call {
    c10::OperatorHandle op;
    torch::jit::Stack arguments;                                              // tensors of the tape left out
    std::vector<std::pair<size_t, Place>> places;                             // by argument
    std::vector<std::pair<size_t, std::vector<std::optional<Place>>>> lists;  // the same for lists of tensors
    std::vector<std::optional<size_t>> made;                                  // by result: the storage, if it is new
  };

  std::vector<Call> calls;
  std::vector<size_t> last_use;  // by storage: the call
  at::Tensor generator_state;    // of the default CPU generator at the beginning
};

namespace {

// What a storage of the tape points to.
struct Ticket {
  std::shared_ptr<Tape> tape;
  size_t storage;
};
void delete_ticket(void* context) { delete static_cast<Ticket*>(context); }

const Ticket* ticket_of(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_meta() || !tensor.has_storage()) return nullptr;
  const at::DataPtr& pointer = tensor.unsafeGetTensorImpl()->unsafe_storage().data_ptr();
  return pointer.get_deleter() == &delete_ticket ? static_cast<Ticket*>(pointer.get_context()) : nullptr;
}

thread_local std::shared_ptr<Tape> recording;

Tape::Place place_of(const at::Tensor& tensor, const Ticket& ticket) {
  return {ticket.storage, tensor.sizes().vec(), tensor.strides().vec(), tensor.storage_offset(), tensor.scalar_type()};
}

void note_use(Tape& tape, size_t storage) { tape.last_use[storage] = tape.calls.size(); }

// Takes the tape's tensors out of the arguments, and gives the operator meta stand-ins for others.
// Returns whether the call concerns the tape.
bool take_arguments(Tape& tape, Tape::Call& call, torch::jit::Stack& stack, size_t count) {
  bool concerns = false;
  const size_t first = stack.size() - count;
  for (size_t i = 0; i < count; ++i) {
    c10::IValue& value = stack[first + i];
    if (value.isTensor()) {
      if (const Ticket* ticket = ticket_of(value.toTensor())) {
        concerns = true;
        call.places.emplace_back(i, place_of(value.toTensor(), *ticket));
        call.arguments[i] = c10::IValue();
        note_use(tape, ticket->storage);
      }
    } else if (value.isTensorList()) {
      std::vector<std::optional<Tape::Place>> places;
      c10::List<at::Tensor> others;
      bool any = false;
      for (const at::Tensor& tensor : value.toTensorVector()) {
        const Ticket* ticket = ticket_of(tensor);
        any = any || ticket != nullptr;
        places.push_back(ticket != nullptr ? std::optional(place_of(tensor, *ticket)) : std::nullopt);
        others.push_back(ticket != nullptr ? at::Tensor() : tensor);
        if (ticket != nullptr) note_use(tape, ticket->storage);
      }
      if (!any) continue;
      concerns = true;
      call.lists.emplace_back(i, std::move(places));
      call.arguments[i] = std::move(others);
    }
  }
  return concerns;
}

// Ordinary tensors cannot be mixed with meta ones: the recording needs their shapes alone.
void substitute_meta(torch::jit::Stack& stack, size_t count) {
  auto stand_in = [](const at::Tensor& tensor) {
    return tensor.defined() && !tensor.is_meta() && tensor.dim() > 0
               ? at::empty_like(tensor, tensor.options().device(at::kMeta))
               : tensor;
  };
  for (size_t i = stack.size() - count; i < stack.size(); ++i) {
    if (stack[i].isTensor()) stack[i] = stand_in(stack[i].toTensor());
  }
}

std::optional<size_t> give_ticket(const std::shared_ptr<Tape>& tape, const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_meta() || ticket_of(tensor) != nullptr) return std::nullopt;
  const size_t storage = tape->last_use.size();
  tape->last_use.push_back(tape->calls.size());
  tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl()->set_data_ptr_noswap(
      at::DataPtr(nullptr, new Ticket{tape, storage}, &delete_ticket, at::kMeta));
  return storage;
}

bool has_tensor_argument(const c10::FunctionSchema& schema) {
  return std::any_of(schema.arguments().begin(), schema.arguments().end(), [](const c10::Argument& argument) {
    const auto kind = argument.type()->kind();
    return kind == c10::TypeKind::TensorType ||
           (kind == c10::TypeKind::ListType &&
            argument.type()->castRaw<c10::ListType>()->getElementType()->kind() == c10::TypeKind::TensorType);
  });
}

void record(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard below(kDeferredKey);
  if (!recording) return op.callBoxed(stack);
  Tape& tape = *recording;
  const auto& schema = op.schema();
  const size_t count = schema.arguments().size();
  const auto arguments = torch::jit::last(*stack, count);
  Tape::Call call{op, torch::jit::Stack(arguments.begin(), arguments.end()), {}, {}, {}};

  const auto device = schema.argumentIndexWithName("device");
  const bool is_factory = device && !has_tensor_argument(schema);
  const bool concerns = take_arguments(tape, call, *stack, count);
  if (!is_factory && !concerns) return op.callBoxed(stack);  // of ordinary tensors alone
  if (device) {
    c10::IValue& target = torch::jit::peek(*stack, *device, count);
    // Options copied from a tensor that is deferred itself say meta.
    if (target.isDevice() && target.toDevice().is_meta()) call.arguments[*device] = c10::Device(c10::kCPU);
    if (is_factory || !target.isNone()) target = c10::Device(c10::kMeta);
  }
  if (concerns) substitute_meta(*stack, count);
  op.callBoxed(stack);
  for (const c10::IValue& result : torch::jit::last(*stack, schema.returns().size()))
    call.made.push_back(result.isTensor() ? give_ticket(recording, result.toTensor()) : std::nullopt);
  const auto dtype = schema.argumentIndexWithName("dtype");
  if (is_factory && dtype && call.arguments[*dtype].isNone())  // torch's default may be another later
    call.arguments[*dtype] = torch::jit::last(*stack, 1)[0].toTensor().scalar_type();
  tape.calls.push_back(std::move(call));
}

TORCH_LIBRARY_IMPL(_, TESSERA_DEFERRED_KEY, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&record>());
}

// Operators that draw without taking a generator use the default one: it is lent the tape's state.
std::mutex default_generator_mutex;

// Runs a tape.
class Replay {
 public:
  explicit Replay(std::shared_ptr<Tape> tape) : tape_(std::move(tape)), generator_(at::detail::createCPUGenerator()) {
    generator_.set_state(tape_->generator_state);
  }
  // Does the next call and frees what nobody needs after it; is_wanted(storage) says what somebody does.
  template <class IsWanted>
  void step(IsWanted is_wanted) {
    const Tape::Call& call = tape_->calls[next_];
    torch::jit::Stack stack = call.arguments;
    for (const auto& [argument, place] : call.places) stack[argument] = at(place);
    for (const auto& [argument, places] : call.lists) {
      c10::List<at::Tensor> list = stack[argument].toTensorList().copy();
      for (size_t i = 0; i < places.size(); ++i)
        if (places[i]) list.set(i, at(*places[i]));
      stack[argument] = std::move(list);
    }
    run(call, stack);
    for (size_t i = 0; i < call.made.size(); ++i)
      if (call.made[i]) real_[*call.made[i]] = stack[i].toTensor();
    stack.clear();
    std::erase_if(real_,
                  [&](const auto& entry) { return tape_->last_use[entry.first] <= next_ && !is_wanted(entry.first); });
    ++next_;
  }
  bool done() const { return next_ == tape_->calls.size(); }
  size_t next() const { return next_; }
  const Tape& tape() const { return *tape_; }
  at::Tensor at(const Tape::Place& place) const {
    return real_.at(place.storage).as_strided(place.sizes, place.strides, place.offset);
  }
  void drop(size_t storage) { real_.erase(storage); }

 private:
  void run(const Tape::Call& call, torch::jit::Stack& stack) {
    const auto generator = call.op.schema().argumentIndexWithName("generator");
    if (generator) {
      if (stack[*generator].isNone()) stack[*generator] = generator_;
      return call.op.callBoxed(stack);
    }
    if (!call.op.hasTag(at::Tag::nondeterministic_seeded)) return call.op.callBoxed(stack);
    std::lock_guard lock(default_generator_mutex);
    at::Generator common = at::detail::getDefaultCPUGenerator();
    const at::Tensor before = common.get_state();
    common.set_state(generator_.get_state());
    call.op.callBoxed(stack);
    generator_.set_state(common.get_state());
    common.set_state(before);
  }

  const std::shared_ptr<Tape> tape_;
  at::Generator generator_;
  size_t next_ = 0;
  std::map<size_t, at::Tensor> real_;  // by storage: a tensor that has it
};

struct Wanted {
  size_t replay;
  Tape::Place place;
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
  if (!is_deferred(at::empty({0}))) {
    recording.reset();
    throw std::runtime_error(
        "Tessera's fallback for the dispatch key TESTING_ONLY_GenericMode is not called: another library in this "
        "process "
        "uses the key, or this libtorch dropped it");
  }
}

DeferredScope::~DeferredScope() { recording.reset(); }

bool is_deferred(const at::Tensor& tensor) { return ticket_of(tensor) != nullptr; }

void replay_deferred(const std::vector<std::vector<at::Tensor>>& groups,
                     const std::function<void(size_t, const std::vector<at::Tensor>&)>& ready) {
  at::NoGradGuard no_grad;
  std::vector<std::unique_ptr<Replay>> replays;  // one a tape, in order of first appearance
  std::unordered_map<const Tape*, size_t> known;
  std::vector<std::vector<Wanted>> wanted(groups.size());
  std::map<std::pair<size_t, size_t>, size_t> waiting;  // groups not ready, by replay and storage
  for (size_t group = 0; group < groups.size(); ++group) {
    for (const at::Tensor& tensor : groups[group]) {
      const Ticket* ticket = ticket_of(tensor);
      if (ticket == nullptr)
        throw std::invalid_argument("replay_deferred: a tensor of shape " + c10::str(tensor.sizes()) +
                                    " is not deferred");
      const auto [entry, is_new] = known.try_emplace(ticket->tape.get(), replays.size());
      if (is_new) replays.push_back(std::make_unique<Replay>(ticket->tape));
      wanted[group].push_back({entry->second, place_of(tensor, *ticket)});
      ++waiting[{entry->second, ticket->storage}];
    }
  }
  std::vector<bool> is_ready(groups.size(), false);
  auto hand_out = [&](size_t current) {
    for (size_t group = 0; group < groups.size(); ++group) {
      const bool complete = std::all_of(wanted[group].begin(), wanted[group].end(), [&](const Wanted& one) {
        return one.replay < current || (one.replay == current && replays[current]->tape().last_use[one.place.storage] <
                                                                     replays[current]->next());
      });
      if (is_ready[group] || !complete) continue;
      is_ready[group] = true;
      std::vector<at::Tensor> values;
      for (const Wanted& one : wanted[group]) values.push_back(replays[one.replay]->at(one.place));
      ready(group, values);
      values.clear();
      for (const Wanted& one : wanted[group])
        if (--waiting.at({one.replay, one.place.storage}) == 0) replays[one.replay]->drop(one.place.storage);
    }
  };
  for (size_t current = 0; current < replays.size(); ++current) {
    Replay& replay = *replays[current];
    hand_out(current);
    while (!replay.done()) {
      replay.step([&](size_t storage) {
        const auto entry = waiting.find({current, storage});
        return entry != waiting.end() && entry->second > 0;
      });
      hand_out(current);
    }
  }
  if (replays.empty()) hand_out(0);
}

// set_data() refuses to change the kind of device; the TensorImpl itself keeps its identity.
void fill_deferred(const at::Tensor& tensor, const at::Tensor& values) {
  tensor.unsafeGetTensorImpl()->shallow_copy_from(values.getIntrusivePtr());
}

void materialize(torch::nn::Module& module) {
  std::vector<at::Tensor> tensors;
  for (const auto& list : {module.parameters(), module.buffers()})
    for (const at::Tensor& tensor : list)
      if (is_deferred(tensor)) tensors.push_back(tensor);
  replay_deferred({tensors}, [&](size_t, const std::vector<at::Tensor>& values) {
    for (size_t i = 0; i < values.size(); ++i) fill_deferred(tensors[i], values[i]);
  });
}

}  // namespace tessera
