#include "core/paging/residency.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/library.h>

#include <algorithm>
#include <stdexcept>
#include <typeinfo>
#include <utility>

#include "core/paging/boxed_tensors.h"
#include "core/paging/keyed_view.h"
#include "core/paging/page_views.h"
#include "core/paging/stand_in.h"

namespace tessera::internal {

namespace {

// The storage of a page. Never changes the state, so that threads may find it while the pager moves the memory.
struct PageStorage final : c10::StorageImpl {
  explicit PageStorage(std::shared_ptr<Page::State> page)
      : StorageImpl(use_byte_size_t(), 0, {nullptr, page->device}, /*allocator=*/nullptr, /*resizable=*/false),
        state(std::move(page)) {}
  const std::shared_ptr<Page::State> state;
};

}  // namespace

Page::State* page_state_of(const at::Tensor& view) {
  const c10::StorageImpl* storage = view.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  if (storage == nullptr || typeid(*storage) != typeid(PageStorage)) return nullptr;
  return static_cast<const PageStorage*>(storage)->state.get();
}

Page::Page(Pager* pager, int id, std::string name, at::Device device) : id_(id), state_(std::make_shared<State>()) {
  state_->pager = pager;
  state_->page = this;
  state_->name = std::move(name);
  state_->device = device;
  storage_ = c10::Storage(c10::make_intrusive<PageStorage>(state_));
}

Page::~Page() {
  if (is_attached() && !state_->is_always_there()) detach();
  detach_pager();
}

bool Page::holds(const at::Tensor& view) const {
  return view.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl() == storage_.unsafeGetStorageImpl();
}

void Page::set_data(void* data, size_t bytes) {
  storage_.unsafeGetStorageImpl()->set_data_ptr_noswap({data, state_->device});
  storage_.set_nbytes(bytes);
}

at::Tensor Page::view(at::ScalarType dtype, at::IntArrayRef sizes, at::IntArrayRef strides,
                      int64_t storage_offset) const {
  const at::TensorOptions options = at::TensorOptions().device(storage_.device()).dtype(dtype);
  return keyed_view(c10::Storage(storage_), kPagedKey, at::empty({0}, options), storage_offset, sizes, strides);
}

void Page::attach_permanently(at::Tensor buffer) {
  attach(buffer);
  tell_of_writes(*pager(), id_);
  state_->permanent = std::move(buffer);
}

void Page::attach(at::Tensor buffer) {
  set_data(buffer.mutable_data_ptr(), buffer.nbytes());
  buffer_ = std::move(buffer);
}

at::Tensor Page::detach() {
  set_current(GradMode::kNone);
  set_data(nullptr, 0);
  return std::exchange(buffer_, at::Tensor());
}

void Page::set_current(GradMode mode) {
  if (!state_->device.is_cpu() && mode != GradMode::kNone) state_->current.stream = current_stream_on(state_->device);
  state_->current.mode.store(mode, std::memory_order_relaxed);
}

bool is_paged(const at::Tensor& tensor) { return tensor.defined() && tensor.key_set().has(kPagedKey); }

Page* page_of(const at::Tensor& tensor) {
  const Page::State* state = is_paged(tensor) ? page_state_of(tensor) : nullptr;
  return state == nullptr || state->pager.load() == nullptr ? nullptr : state->page;
}

bool has_lost_its_pager(const at::Tensor& tensor) {
  const Page::State* state = is_paged(tensor) ? page_state_of(tensor) : nullptr;
  return state != nullptr && state->pager.load() == nullptr && !state->is_always_there();
}

void before_write(const at::Tensor& tensor) {
  if (page_of(tensor) == nullptr) return;
  const auto& listener = page_state_of(tensor)->write_listener;
  if (listener.pager != nullptr) listener.pager->before_write(listener.id);
}

void note_write(const at::Tensor& tensor) {
  if (Page* page = page_of(tensor)) page->note_write();
}

bool note_write_if_empty(const at::Tensor& parameter) {
  if (parameter.numel() > 0) return false;
  note_write(parameter);
  return true;
}

namespace {

// Calls visit(state, tensor, is_written) for each view of a page among the arguments.
template <class Visit>
void for_each_paged(const c10::FunctionSchema& schema, const torch::jit::Stack& stack, Visit visit) {
  const auto& arguments = schema.arguments();
  const auto values = torch::jit::last(stack, arguments.size());
  for (size_t i = 0; i < arguments.size(); ++i)
    for_each_boxed_tensor(values[i], [&](const at::Tensor& tensor) {
      if (!is_paged(tensor)) return;
      if (Page::State* state = page_state_of(tensor)) visit(*state, tensor, is_written_to(arguments[i]));
    });
}

using Uses = std::vector<std::shared_ptr<void>>;  // results of Pager::use()

// Calls Pager::use() once for each pager, with all of the pager's pages that are among the arguments.
void report(const c10::FunctionSchema& schema, const torch::jit::Stack& stack, Uses& uses) {
  std::vector<Page*> pages;
  for_each_paged(schema, stack, [&](Page::State& state, const at::Tensor&, bool) {
    if (!state.is_always_there() && !state.stand_in.values && std::ranges::find(pages, state.page) == pages.end())
      pages.push_back(state.page);
  });
  while (!pages.empty()) {
    Pager* pager = pages.front()->pager();
    const auto others =
        std::stable_partition(pages.begin(), pages.end(), [&](Page* page) { return page->pager() == pager; });
    if (auto use = pager->use({pages.begin(), others})) uses.push_back(std::move(use));
    pages.erase(pages.begin(), others);
  }
}

struct PagedIn {
  at::ScalarType from{}, to{};  // dtypes between which activations are converted; equal: no conversion
  bool is_done = false;         // whether the pager did the operator's work
  bool has_stand_ins = false;
  Uses uses;
};

PagedIn page_in(const c10::FunctionSchema& schema, const torch::jit::Stack& stack) {
  const auto mode = current_grad_mode();
  bool all_current = true;
  PagedIn result;
  for_each_paged(schema, stack, [&](Page::State& state, const at::Tensor& tensor, bool is_written) {
    if (state.stand_in.values) {
      if (is_written)
        throw std::logic_error(schema.name() + " would change '" + state.name + "', which is " +
                               state.stand_in.values->what_it_is() + ": only its values can be used");
      result.has_stand_ins = true;
      return;
    }
    Pager* pager = state.pager.load(std::memory_order_relaxed);
    if (pager == nullptr && state.is_always_there()) return;
    if (pager == nullptr)
      throw std::logic_error(schema.name() + " was given a parameter of " + state.name +
                             ", whose FullyShardedDataParallel no longer exists: keep the wrapper while the module is "
                             "used, or take full_state_dict() before it ends");
    if (is_written && !state.writable) {
      if (!pager->refuse(*state.page, tensor, schema.name())) return;
      result.is_done = true;
    }
    if (is_written) ++state.writes;
    if (const auto& listener = state.write_listener; is_written && listener.pager != nullptr)
      listener.pager->before_write(listener.id);
    if (state.is_always_there()) return;
    if (state.activations && !schema.is_mutable()) result.from = *state.activations, result.to = tensor.scalar_type();
    all_current = all_current && state.current.mode.load(std::memory_order_relaxed) == mode && !state.is_stale() &&
                  (state.device.is_cpu() ||
                   state.current.stream.load(std::memory_order_relaxed) == current_stream_on(state.device));
  });
  if (!all_current && !result.is_done) report(schema, stack, result.uses);
  return result;
}

// Converts tensors of dtype `from` among the last `count` values to `to`. Autograd records the conversions. Returns
// whether any tensor was converted.
bool convert(torch::jit::Stack& stack, size_t count, at::ScalarType from, at::ScalarType to) {
  bool any = false;
  auto converted = [&](const at::Tensor& tensor) {
    if (!tensor.defined() || tensor.scalar_type() != from) return tensor;
    any = true;
    return tensor.to(to);
  };
  for (auto value = stack.end() - static_cast<std::ptrdiff_t>(count); value != stack.end(); ++value)
    replace_boxed_tensors(*value, converted);
  return any;
}

// Called above autograd for every operator that has a view of a page among its arguments.
void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto below = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kPagedKey);
  // A metadata-only operator may call other operators, which reach this fallback themselves.
  if (is_metadata_only(op.schema())) return op.redispatchBoxed(below, stack);
  if (sets_another_dtype(op, *stack)) {
    const at::Tensor source = torch::jit::pop(*stack).toTensor();
    return stack->back().toTensor().set_data(source);  // the pager finds and checks the change
  }
  const auto [from, to, is_done, has_stand_ins, uses] = page_in(op.schema(), *stack);
  if (has_stand_ins) return call_with_stand_ins(op, stack);
  if (is_done) return;  // zero_() returns its argument, which is on the stack
  const bool converts =
      from != to && !returns_views(op.schema()) && convert(*stack, op.schema().arguments().size(), from, to);
  {
    // While an aten operator runs, its arguments stay attached, so nested operators need no check. A user's kernel may
    // use parameters that are not among its arguments, so its nested operators are checked.
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

Page::GradMode current_grad_mode() {
  const bool in_backward = torch::autograd::get_current_graph_task_id() != -1;
  if (c10::GradMode::is_enabled() || RecomputesLater::in_effect())
    return in_backward ? Page::GradMode::kRecomputing : Page::GradMode::kRecording;
  return in_backward ? Page::GradMode::kInBackward : Page::GradMode::kNotRecording;
}

}  // namespace tessera::internal
