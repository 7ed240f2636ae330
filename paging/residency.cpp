#include "tessera/paging/residency.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/neg.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/strides.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/jit/serialization/pickler_helper.h>
#include <torch/library.h>

#include <algorithm>
#include <stdexcept>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "tessera/paging/keyed_view.h"
#include "tessera/paging/recomputes_later.h"
#include "tessera/paging/stand_in.h"

namespace tessera {

// libtorch keeps this key for wrappers with a boxed fallback and does not use it itself. The one
// place where it is named.
#define TESSERA_PAGED_KEY TESTING_ONLY_GenericWrapper
static constexpr auto kPagedKey = c10::DispatchKey::TESSERA_PAGED_KEY;

bool is_paged(const at::Tensor& tensor) { return tensor.defined() && tensor.key_set().has(kPagedKey); }

namespace {

// Marks a storage as a page's: the context behind this deleter is a std::shared_ptr<State>.
void delete_state(void* context) { delete static_cast<std::shared_ptr<Page::State>*>(context); }

Page::State* state_of(const at::Tensor& tensor) {
  const at::DataPtr& pointer = tensor.unsafeGetTensorImpl()->unsafe_storage().data_ptr();
  if (pointer.get_deleter() != &delete_state) return nullptr;
  return static_cast<std::shared_ptr<Page::State>*>(pointer.get_context())->get();
}

// Operators that neither read nor write data of their tensor arguments, nor check them against the bounds of their
// storage, as even views do. _backward and set_data do a lot of other things.
using Names = std::unordered_set<std::string_view>;
const Names kMetadataOnly = {"aten::detach",
                             "aten::detach_",
                             "aten::alias",
                             "aten::requires_grad_",
                             "aten::retain_grad",
                             "aten::set_data",
                             "aten::_backward",
                             "aten::is_leaf",
                             "aten::output_nr",
                             "aten::_version",
                             "aten::data",
                             "aten::is_same_size",
                             "aten::_has_compatible_shallow_copy_type"};

bool is_metadata_only(const c10::FunctionSchema& schema) {
  // None of these makes a fresh tensor: most operators are told apart without a look-up by name.
  const auto& returns = schema.returns();
  const bool makes_tensor =
      !returns.empty() && returns[0].alias_info() == nullptr && returns[0].type()->kind() == c10::TypeKind::TensorType;
  return (!makes_tensor || schema.name() == "aten::data") && kMetadataOnly.contains(schema.name());
}

bool is_written_to(const c10::Argument& argument) {
  const auto* alias = argument.alias_info();
  if (alias == nullptr) return false;
  return alias->isWrite() || std::ranges::any_of(alias->containedTypes(), &c10::AliasInfo::isWrite);  // of lists
}

// Calls visit(state, tensor, is_written) for each argument that is a view of a page.
template <class Visit>
void for_each_paged(const c10::FunctionSchema& schema, const torch::jit::Stack& stack, Visit visit) {
  auto look = [&](const at::Tensor& tensor, const c10::Argument& argument) {
    if (!is_paged(tensor)) return;
    if (Page::State* state = state_of(tensor)) visit(*state, tensor, is_written_to(argument));
  };
  const auto& arguments = schema.arguments();
  const auto values = torch::jit::last(stack, arguments.size());
  for (size_t i = 0; i < arguments.size(); ++i) {
    const c10::IValue& value = values[i];
    if (value.isTensor()) {
      look(value.toTensor(), arguments[i]);
    } else if (value.isTensorList() || value.isOptionalTensorList()) {
      for (const c10::IValue& element : value.toListRef())
        if (element.isTensor()) look(element.toTensor(), arguments[i]);
    }
  }
}

// Tells each pager about the pages of its own that the operator needs, all together.
void report(const c10::FunctionSchema& schema, const torch::jit::Stack& stack) {
  std::vector<Page*> pages;
  for_each_paged(schema, stack, [&](Page::State& state, const at::Tensor&, bool) {
    if (!state.is_always_there() && !state.stand_in && std::ranges::find(pages, state.page) == pages.end())
      pages.push_back(state.page);
  });
  while (!pages.empty()) {
    Pager* pager = pages.front()->pager();
    const auto others =
        std::stable_partition(pages.begin(), pages.end(), [&](Page* page) { return page->pager() == pager; });
    pager->use({pages.begin(), others});
    pages.erase(pages.begin(), others);
  }
}

struct PagedIn {
  at::ScalarType from{}, to{};  // activations to be converted, if these differ
  bool is_done = false;         // by the pager, in the operator's place
  bool has_stand_ins = false;
};

// The current stream, as a number.
int64_t stream_on(at::Device device) { return c10::impl::VirtualGuardImpl(device.type()).getStream(device).id(); }

PagedIn page_in(const c10::FunctionSchema& schema, const torch::jit::Stack& stack) {
  const auto mode = current_grad_mode();
  bool all_current = true;
  PagedIn result;
  for_each_paged(schema, stack, [&](Page::State& state, const at::Tensor& tensor, bool is_written) {
    if (state.stand_in) {
      if (is_written)
        throw std::logic_error(schema.name() + " would change '" + state.name + "', which is " +
                               state.stand_in->what_it_is() + ": only its values can be used");
      result.has_stand_ins = true;
      return;
    }
    Pager* pager = state.pager.load(std::memory_order_relaxed);
    if (pager == nullptr && state.is_always_there()) return;
    if (pager == nullptr)
      throw std::logic_error(schema.name() + " was given a parameter of " + state.name +
                             ", whose FullyShardedDataParallel no longer exists");
    if (is_written && !state.writable) {
      if (!pager->refuse(*state.page, tensor, schema.name())) return;
      result.is_done = true;
    }
    if (is_written) ++state.writes;
    if (is_written && state.told_of_writes != nullptr) state.told_of_writes->before_write(state.id_told);
    if (state.is_always_there()) return;
    if (state.activations && !schema.is_mutable()) result.from = *state.activations, result.to = tensor.scalar_type();
    all_current =
        all_current && state.current.load(std::memory_order_relaxed) == mode && !state.is_stale() &&
        (state.device.is_cpu() || state.current_stream.load(std::memory_order_relaxed) == stream_on(state.device));
  });
  if (!all_current && !result.is_done) report(schema, stack);
  return result;
}

// Converts the tensors among the last `count` values; recorded by autograd. Returns whether there were any.
bool convert(torch::jit::Stack& stack, size_t count, at::ScalarType from, at::ScalarType to) {
  bool any = false;
  auto converted = [&](const at::Tensor& tensor) {
    if (!tensor.defined() || tensor.scalar_type() != from) return tensor;
    any = true;
    return tensor.to(to);
  };
  for (auto value = stack.end() - static_cast<std::ptrdiff_t>(count); value != stack.end(); ++value) {
    if (value->isTensor()) {
      *value = converted(value->toTensor());
    } else if (value->isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value->toTensorVector()) list.push_back(converted(tensor));
      *value = std::move(list);
    }
  }
  return any;
}

bool returns_views(const c10::FunctionSchema& schema) {
  return std::ranges::any_of(schema.returns(), [](const auto& result) { return result.alias_info() != nullptr; });
}

// The forms of a linear layer: which argument is what, and whether its weight is transposed.
struct LinearForm {
  std::string_view name;
  std::ptrdiff_t input, weight, bias;  // -1: none
  bool is_transposed;
};
constexpr LinearForm kLinearForms[] = {{"aten::linear", 0, 1, 2, false},
                                       {"aten::matmul", 0, 1, -1, true},
                                       {"aten::mm", 0, 1, -1, true},
                                       {"aten::addmm", 1, 2, 0, true}};

// What a stand-in computes itself; undefined if it is nothing of that kind.
at::Tensor computed_by_stand_in(const c10::FunctionSchema& schema, torch::jit::Stack::const_iterator arguments) {
  if (schema.name() == "aten::t") {
    const at::Tensor& tensor = arguments[0].toTensor();
    const at::Tensor view = stand_in_view(stand_in_of(tensor), state_of(tensor)->name, tensor.device(),
                                          tensor.scalar_type(), {tensor.size(1), tensor.size(0)});
    state_of(view)->stands_transposed = !state_of(tensor)->stands_transposed;
    return view;
  }
  if (schema.name() == "aten::batch_norm") {
    for (std::ptrdiff_t i = 1; i <= 4; ++i)
      if (arguments[i].isTensor())
        if (const auto stand_in = stand_in_of(arguments[i].toTensor()))
          return stand_in->batch_norm(arguments[0].toTensor(), arguments[5].toBool(), arguments[6].toDouble(),
                                      arguments[7].toDouble());
    return {};
  }
  const auto form = std::ranges::find(kLinearForms, std::string_view(schema.name()), &LinearForm::name);
  if (form == std::end(kLinearForms) || !schema.overload_name().empty()) return {};
  const at::Tensor &input = arguments[form->input].toTensor(), &weight = arguments[form->weight].toTensor();
  const auto stand_in = stand_in_of(weight);
  const bool has_factors = form->bias == 0 && (arguments[3].toScalar().toDouble() != 1 ||  //
                                               arguments[4].toScalar().toDouble() != 1);
  if (!stand_in || stand_in_of(input) || has_factors || input.dim() == 0 ||
      state_of(weight)->stands_transposed != form->is_transposed)
    return {};
  const bool has_bias = form->bias >= 0 && arguments[form->bias].isTensor();
  return stand_in->linear(input, has_bias ? arguments[form->bias].toTensor() : at::Tensor());
}

// Calls the operator with what stand-ins compute in the place of theirs.
void call_with_values(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const size_t count = op.schema().arguments().size();
  const auto arguments = stack->end() - static_cast<std::ptrdiff_t>(count);
  if (at::Tensor result = computed_by_stand_in(op.schema(), arguments); result.defined()) {
    torch::jit::drop(*stack, count);
    return torch::jit::push(*stack, std::move(result));
  }
  auto replaced = [&](const at::Tensor& tensor) {
    const auto stand_in = stand_in_of(tensor);
    if (!stand_in) return tensor;
    const at::Tensor values = stand_in->values_for(op.schema().name());
    return state_of(tensor)->stands_transposed ? values.t() : values;
  };
  for (auto value = arguments; value != stack->end(); ++value) {
    if (value->isTensor()) {
      *value = replaced(value->toTensor());
    } else if (value->isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value->toTensorVector()) list.push_back(replaced(tensor));
      *value = std::move(list);
    } else if (value->isOptionalTensorList()) {
      throw std::logic_error(op.schema().name() + " with a stand-in among its indices");
    }
  }
  op.callBoxed(stack);
}

// Sees every operator that has a view of a page among its arguments, above autograd.
void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto below = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kPagedKey);
  // What it calls in turn is looked at for itself.
  if (is_metadata_only(op.schema())) return op.redispatchBoxed(below, stack);
  const auto [from, to, is_done, has_stand_ins] = page_in(op.schema(), *stack);
  if (has_stand_ins) return call_with_values(op, stack);
  if (is_done) return;  // zero_() returns its argument, which the stack holds
  const bool converts =
      from != to && !returns_views(op.schema()) && convert(*stack, op.schema().arguments().size(), from, to);
  {
    // An operator of torch's: its arguments are resident until it returns, no need to look at its parts. A user's
    // kernel may use parameters that are not among its arguments.
    std::optional<c10::impl::ExcludeDispatchKeyGuard> once;
    if (op.schema().getNamespace() == "aten") once.emplace(kPagedKey);
    op.redispatchBoxed(below, stack);
  }
  if (converts) convert(*stack, op.schema().returns().size(), to, from);
}

TORCH_LIBRARY_IMPL(_, TESSERA_PAGED_KEY, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

}  // namespace

std::shared_ptr<StandIn> stand_in_of(const at::Tensor& tensor) {
  const Page::State* state = is_paged(tensor) ? state_of(tensor) : nullptr;
  return state == nullptr ? nullptr : state->stand_in;
}

at::Tensor stand_in_view(std::shared_ptr<StandIn> stand_in, const std::string& name, at::Device device,
                         at::ScalarType dtype, at::IntArrayRef sizes) {
  Page page(nullptr, 0, name, device);
  const at::Tensor view = page.view(dtype, sizes, c10::contiguous_strides(sizes), 0);
  Page::State* state = state_of(view);
  state->stand_in = std::move(stand_in);
  state->page = nullptr;
  return view;
}

Page* page_of(const at::Tensor& tensor) {
  const Page::State* state = is_paged(tensor) ? state_of(tensor) : nullptr;
  return state == nullptr || state->pager.load() == nullptr ? nullptr : state->page;
}

bool has_lost_its_pager(const at::Tensor& tensor) {
  const Page::State* state = is_paged(tensor) ? state_of(tensor) : nullptr;
  return state != nullptr && state->pager.load() == nullptr && !state->is_always_there();
}

void Page::set_current(GradMode mode) {
  if (!state_->device.is_cpu() && mode != GradMode::kNone) state_->current_stream = stream_on(state_->device);
  state_->current.store(mode, std::memory_order_relaxed);
}

void before_write(const at::Tensor& tensor) {
  if (page_of(tensor) == nullptr) return;
  if (const Page::State* state = state_of(tensor); state->told_of_writes != nullptr)
    state->told_of_writes->before_write(state->id_told);
}

void note_write(const at::Tensor& tensor) {
  if (Page* page = page_of(tensor)) page->note_write();
}

bool note_write_if_empty(const at::Tensor& parameter) {
  if (parameter.numel() > 0) return false;
  note_write(parameter);
  return true;
}

Page::GradMode current_grad_mode() {
  const bool in_backward = torch::autograd::get_current_graph_task_id() != -1;
  if (c10::GradMode::is_enabled() || RecomputesLater::in_effect())
    return in_backward ? Page::GradMode::kRecomputing : Page::GradMode::kRecording;
  return in_backward ? Page::GradMode::kInBackward : Page::GradMode::kNotRecording;
}

Page::Page(Pager* pager, int id, std::string name, at::Device device) : id_(id), state_(std::make_shared<State>()) {
  state_->pager = pager;
  state_->page = this;
  state_->name = std::move(name);
  state_->device = device;
  storage_ = c10::Storage(c10::Storage::use_byte_size_t(), 0, pointer_to(nullptr, device));
}

Page::~Page() {
  if (is_lent() && !state_->is_always_there()) take_back();
  detach();
}

bool Page::holds(const at::Tensor& view) const {
  return view.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl() == storage_.unsafeGetStorageImpl();
}

at::DataPtr Page::pointer_to(void* data, at::Device device) const {
  return {data, new std::shared_ptr<State>(state_), &delete_state, device};
}

void Page::set_data(void* data, size_t bytes) {
  auto* storage = storage_.unsafeGetStorageImpl();
  storage->set_data_ptr_noswap(pointer_to(data, storage->device()));
  storage->set_nbytes(bytes);
}

at::Tensor Page::view(at::ScalarType dtype, at::IntArrayRef sizes, at::IntArrayRef strides,
                      int64_t storage_offset) const {
  const at::TensorOptions options = at::TensorOptions().device(storage_.device()).dtype(dtype);
  return keyed_view(c10::Storage(storage_), kPagedKey, at::empty({0}, options), storage_offset, sizes, strides);
}

void Page::give_away(at::Tensor buffer) {
  lend(buffer);
  tell_of_writes(*pager(), id_);
  state_->given_away = std::move(buffer);
}

void Page::lend(at::Tensor buffer) {
  set_data(buffer.mutable_data_ptr(), buffer.nbytes());
  buffer_ = std::move(buffer);
}

at::Tensor Page::take_back() {
  set_current(GradMode::kNone);
  set_data(nullptr, 0);
  return std::exchange(buffer_, at::Tensor());
}

namespace {

// What libtorch's pickler asks of each tensor: torch::save() would write a page's views without their data.
void refuse_to_pickle(const at::Tensor& tensor, std::unordered_map<std::string, bool>&) {
  const Page* page = page_of(tensor);
  if (page == nullptr || tensor.storage().nbytes() > 0 || tensor.numel() == 0) return;
  throw std::logic_error("torch::save of a parameter of " + page->name() +
                         ", which is sharded: its data are not here. Save inside summon_full_params(), or with "
                         "save_full() or save_checkpoint()");
}

void watch_pickling() {
  auto& watchers = torch::jit::GetBackendMetaSerialization();
  for (const at::DeviceType device : {at::kCPU, at::kCUDA}) {
    auto& watcher = watchers[static_cast<size_t>(device)];
    if (!watcher) watcher.emplace(&refuse_to_pickle, [](const at::Tensor&, std::unordered_map<std::string, bool>&) {});
  }
}

}  // namespace

void require_residency() {
  struct Probe : Pager {
    bool used = false;
    void use(const std::vector<Page*>&) override { used = true; }
    [[noreturn]] bool refuse(const Page& page, const at::Tensor&, const std::string&) override {
      throw std::logic_error(page.name());
    }
  };
  static const bool works = [] {
    watch_pickling();
    Probe probe;
    Page page(&probe, 0, "a probe", at::kCPU);
    page.lend(at::zeros({1}, at::kCPU));
    at::AutoDispatchBelowADInplaceOrView quiet;
    at::neg(page.view(at::kFloat, {1}, {1}, 0));
    return probe.used;
  }();
  if (!works)
    throw std::runtime_error(
        "Tessera's fallback for the dispatch key TESTING_ONLY_GenericWrapper is not called: another library in this "
        "process uses the key, or this libtorch dropped it");
}

}  // namespace tessera
