#include "tessera/paging/residency.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/neg.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/jit/serialization/pickler_helper.h>
#include <torch/library.h>

#include <algorithm>
#include <stdexcept>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "tessera/paging/recompute.h"

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

// Operators that neither read nor write data of their tensor arguments, nor check them against the
// bounds of their storage, as even views do. _backward and set_data do a lot of other things.
bool is_metadata_only(const c10::FunctionSchema& schema) {
  static const std::unordered_set<std::string_view> names = {"aten::detach",
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
  // None of these makes a fresh tensor: most operators are told apart without a look-up by name.
  const auto& returns = schema.returns();
  const bool makes_tensor =
      !returns.empty() && returns[0].alias_info() == nullptr && returns[0].type()->kind() == c10::TypeKind::TensorType;
  return (!makes_tensor || schema.name() == "aten::data") && names.contains(schema.name());
}

bool is_written_to(const c10::Argument& argument) {
  const auto* alias = argument.alias_info();
  if (alias == nullptr) return false;
  const auto& contained = alias->containedTypes();  // of lists
  return alias->isWrite() ||
         std::any_of(contained.begin(), contained.end(), [](const auto& type) { return type.isWrite(); });
}

// Calls visit(state, tensor, is_written) for each argument that is a view of a page.
template <class Visit>
void for_each_paged(const c10::FunctionSchema& schema, const torch::jit::Stack& stack, Visit visit) {
  auto look = [&](const at::Tensor& tensor, const c10::Argument& argument) {
    if (!is_paged(tensor)) return;
    Page::State* state = state_of(tensor);
    if (state == nullptr) return;
    visit(*state, tensor, is_written_to(argument));
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
  std::vector<std::pair<Pager*, std::vector<Page*>>> needed;
  for_each_paged(schema, stack, [&](Page::State& state, const at::Tensor&, bool) {
    if (state.is_always_there()) return;
    Pager* pager = state.pager.load();
    auto entry = std::find_if(needed.begin(), needed.end(), [&](const auto& other) { return other.first == pager; });
    if (entry == needed.end()) entry = needed.insert(needed.end(), {pager, {}});
    auto& pages = entry->second;
    if (std::find(pages.begin(), pages.end(), state.page) == pages.end()) pages.push_back(state.page);
  });
  for (const auto& [pager, pages] : needed) pager->use(pages);
}

// Activations of one dtype that are to be of another.
struct Conversion {
  at::ScalarType from, to;
};

struct PagedIn {
  std::optional<Conversion> conversion;
  bool is_done = false;  // by the pager, in the operator's place
};

PagedIn page_in(const c10::FunctionSchema& schema, const torch::jit::Stack& stack) {
  const auto mode = mode_of_use();
  bool all_current = true, is_done = false;
  std::optional<Conversion> conversion;
  for_each_paged(schema, stack, [&](Page::State& state, const at::Tensor& tensor, bool is_written) {
    Pager* pager = state.pager.load(std::memory_order_relaxed);
    if (pager == nullptr && state.is_always_there()) return;
    if (pager == nullptr)
      throw std::logic_error(schema.name() + " was given a parameter of " + state.name +
                             ", whose FullyShardedDataParallel no longer exists");
    if (is_written && !state.writable) {
      pager->refuse(*state.page, tensor, schema.name());
      is_done = true;
    }
    if (is_written) ++state.writes;
    if (state.is_always_there()) return;
    if (state.activations && !schema.is_mutable()) conversion = {*state.activations, tensor.scalar_type()};
    all_current = all_current && state.current.load(std::memory_order_relaxed) == mode && !state.is_stale();
  });
  if (!all_current && !is_done) report(schema, stack);
  return {conversion, is_done};
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
  return std::any_of(schema.returns().begin(), schema.returns().end(),
                     [](const c10::Argument& result) { return result.alias_info() != nullptr; });
}

// Sees every operator that has a view of a page among its arguments, above autograd.
void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto below = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kPagedKey);
  // What it calls in turn is looked at for itself.
  if (is_metadata_only(op.schema())) {
    op.redispatchBoxed(below, stack);
    return;
  }
  const auto [conversion, is_done] = page_in(op.schema(), *stack);
  if (is_done) return;  // zero_() returns its argument, which the stack holds
  const bool converts = conversion && !returns_views(op.schema()) &&
                        convert(*stack, op.schema().arguments().size(), conversion->from, conversion->to);
  if (op.schema().getNamespace() == "aten") {
    // The operator's arguments are resident until it returns: no need to look at its parts.
    c10::impl::ExcludeDispatchKeyGuard once(kPagedKey);
    op.redispatchBoxed(below, stack);
  } else {
    op.redispatchBoxed(below, stack);  // a user's kernel may use parameters that are not among its arguments
  }
  if (converts) convert(*stack, op.schema().returns().size(), conversion->to, conversion->from);
}

TORCH_LIBRARY_IMPL(_, TESSERA_PAGED_KEY, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

}  // namespace

Page* page_of(const at::Tensor& tensor) {
  Page::State* state = is_paged(tensor) ? state_of(tensor) : nullptr;
  return state == nullptr || state->pager.load() == nullptr ? nullptr : state->page;
}

bool has_lost_its_pager(const at::Tensor& tensor) {
  const Page::State* state = is_paged(tensor) ? state_of(tensor) : nullptr;
  return state != nullptr && state->pager.load() == nullptr && !state->is_always_there();
}

void note_write(const at::Tensor& tensor) {
  if (Page* page = page_of(tensor)) page->note_write();
}

Page::Use mode_of_use() {
  if (!c10::GradMode::is_enabled() && !recomputes_later()) return Page::Use::kNotRecording;
  return torch::autograd::get_current_graph_task_id() == -1 ? Page::Use::kRecording : Page::Use::kRecomputing;
}

Page::Page(Pager* pager, int id, std::string name, at::Device device) : id_(id), state_(std::make_shared<State>()) {
  state_->pager = pager;
  state_->page = this;
  state_->name = std::move(name);
  storage_ = c10::Storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), 0,
      at::DataPtr(nullptr, new std::shared_ptr<State>(state_), &delete_state, device),
      /*allocator=*/nullptr, /*resizable=*/false));
}

Page::~Page() {
  if (is_lent() && !state_->is_always_there()) take_back();
  detach();
}

bool Page::holds(const at::Tensor& view) const {
  return view.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl() == storage_.unsafeGetStorageImpl();
}

at::DataPtr Page::pointer_to(void* data) const {
  return {data, new std::shared_ptr<State>(state_), &delete_state, storage_.device()};
}

at::Tensor Page::view(at::ScalarType dtype, at::IntArrayRef sizes, at::IntArrayRef strides,
                      int64_t storage_offset) const {
  const at::TensorOptions options = at::TensorOptions().device(storage_.device()).dtype(dtype);
  const at::Tensor like = at::empty({0}, options);  // for the keys of an ordinary tensor of this kind
  auto view = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage_),
                                                       like.key_set() | c10::DispatchKeySet(kPagedKey), like.dtype());
  view.unsafeGetTensorImpl()->set_storage_offset(storage_offset);
  view.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  return view;
}

void Page::give_away(at::Tensor buffer) {
  lend(buffer);
  state_->given_away = std::move(buffer);
}

void Page::lend(at::Tensor buffer) {
  auto* storage = storage_.unsafeGetStorageImpl();
  storage->set_data_ptr_noswap(pointer_to(buffer.mutable_data_ptr()));
  storage->set_nbytes(buffer.nbytes());
  buffer_ = std::move(buffer);
}

at::Tensor Page::take_back() {
  set_current(Use::kNone);
  auto* storage = storage_.unsafeGetStorageImpl();
  storage->set_data_ptr_noswap(pointer_to(nullptr));
  storage->set_nbytes(0);
  return std::exchange(buffer_, at::Tensor());
}

void Page::detach() { state_->pager = nullptr; }

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
    [[noreturn]] void refuse(const Page& page, const at::Tensor&, const std::string&) override {
      throw std::logic_error(page.name());
    }
  };
  static const bool works = [] {
    watch_pickling();
    Probe probe;
    Page page(&probe, 0, "a probe", at::kCPU);
    page.lend(at::zeros({1}));
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
