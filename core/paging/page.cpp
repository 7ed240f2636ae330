#include "core/paging/page.h"

#include <ATen/ops/empty.h>

#include <utility>

#include "core/paging/keyed_view.h"
#include "core/paging/page_views.h"
#include "core/paging/residency.h"

namespace tessera::internal {
namespace {

// Marks a storage as a page's: the context of this deleter is a std::shared_ptr<State>.
void delete_state(void* context) { delete static_cast<std::shared_ptr<Page::State>*>(context); }

}  // namespace

Page::State* page_state_of(const at::Tensor& view) {
  const at::DataPtr& pointer = view.unsafeGetTensorImpl()->unsafe_storage().data_ptr();
  if (pointer.get_deleter() != &delete_state) return nullptr;
  return static_cast<std::shared_ptr<Page::State>*>(pointer.get_context())->get();
}

Page::Page(Pager* pager, int id, std::string name, at::Device device) : id_(id), state_(std::make_shared<State>()) {
  state_->pager = pager;
  state_->page = this;
  state_->name = std::move(name);
  state_->device = device;
  storage_ = c10::Storage(c10::Storage::use_byte_size_t(), 0, pointer_to(nullptr, device));
}

Page::~Page() {
  if (is_attached() && !state_->is_always_there()) detach();
  detach_pager();
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

// ---- queries about a tensor ---------------------------------------------------------------------

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

}  // namespace tessera::internal
