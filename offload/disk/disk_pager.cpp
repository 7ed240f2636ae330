#include "offload/disk/disk_pager.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <utility>

#include "core/memory/without_data.h"
#include "core/runtime/require.h"

namespace tessera::internal {
namespace {

const DiskPagerOptions& checked(const DiskPagerOptions& options) {
  require(options.buffer_bytes >= File::kBlockBytes, "DiskPagerOptions::buffer_bytes is ", options.buffer_bytes,
          ", expected a block of 4096 or more");
  require(options.read_ahead >= 0, "DiskPagerOptions::read_ahead is ", options.read_ahead, ", expected 0 or more");
  require(options.threads >= 1, "DiskPagerOptions::threads is ", options.threads, ", expected 1 or more");
  return options;
}

// Direct I/O needs block-aligned memory. A buffer may begin unaligned, so it is one block larger than its data.
int64_t with_alignment(int64_t bytes) { return bytes + File::kBlockBytes; }

at::Tensor aligned_part(const at::Tensor& buffer, int64_t bytes) {
  const auto address = reinterpret_cast<uintptr_t>(buffer.const_data_ptr());
  const auto skip = static_cast<int64_t>((File::kBlockBytes - address % File::kBlockBytes) % File::kBlockBytes);
  return buffer.narrow(0, skip, bytes);
}

}  // namespace

DiskPager::DiskPager(DiskPagerOptions options)
    : options_(checked(options)),
      space_(options.directory),
      waits_(waits_for_transfers()),
      buffers_(at::kCPU, MemoryKind::kHost),
      queue_(options.threads) {}

DiskPager::~DiskPager() {
  std::lock_guard lock(mutex_);
  for (Entry& entry : entries_) {
    if (entry.page) entry.page->detach_pager();
    if (entry.transfer.valid()) entry.transfer.wait();
  }
}

at::Tensor DiskPager::make(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype,
                           const std::string& name) {
  std::lock_guard lock(mutex_);
  const int64_t numel = c10::multiply_integers(sizes);
  Entry entry;
  entry.bytes = File::whole_blocks(std::max<int64_t>(numel * static_cast<int64_t>(c10::elementSize(dtype)), 1));
  if (with_alignment(entry.bytes) > options_.buffer_bytes)
    throw std::runtime_error(name + " takes " + std::to_string(with_alignment(entry.bytes)) +
                             " bytes in memory when it is used, and the buffers of the disk tier hold " +
                             std::to_string(options_.buffer_bytes) + " (FsdpOptions::offload.disk_buffer_bytes)");
  reclaim(entry.bytes);
  entry.offset = space_.claim(entry.bytes);
  if (vacant_.empty()) {
    vacant_.push_back(static_cast<int>(entries_.size()));
    entries_.emplace_back();
  }
  const int id = vacant_.back();
  entry.page = std::make_unique<Page>(this, id, name, at::kCPU);
  entry.page->set_writable(true);
  vacant_.pop_back();
  at::Tensor tensor = entry.page->view(dtype, sizes, strides, 0);
  entry.storage.emplace(tensor.storage().getWeakStorageImpl());
  entries_[id] = std::move(entry);
  return tensor;
}

// Must be called before `needed_bytes` are claimed for a new tensor. If new tensors have taken 1/16 of the file since
// the last search, searches all entries, and frees those whose tensors were released. So n new tensors cost O(n).
void DiskPager::reclaim(int64_t needed_bytes) {
  made_bytes_ += needed_bytes;
  if (made_bytes_ < space_.claimed_bytes() / 16) return;
  made_bytes_ = 0;
  const auto is_gone = [](const Entry* entry) {
    return entry != nullptr && entry->page && entry->holds == 0 && entry->storage->use_count() == 1;
  };
  if (std::ranges::none_of(entries_, [&](const Entry& entry) { return is_gone(&entry); })) return;
  if (is_gone(last_loaded_)) last_loaded_ = nullptr;
  for (Entry& entry : entries_)
    if (is_gone(entry.next)) entry.next = nullptr;
  for (size_t id = 0; id < entries_.size(); ++id) {
    Entry& entry = entries_[id];
    if (!is_gone(&entry)) continue;
    take_out(entry);
    if (entry.transfer.valid()) entry.transfer.wait();
    space_.free(entry.offset, entry.bytes);
    entry = Entry();
    vacant_.push_back(static_cast<int>(id));
  }
}

DiskPager* DiskPager::of(const at::Tensor& tensor) {
  Page* page = page_of(tensor);
  return page == nullptr ? nullptr : dynamic_cast<DiskPager*>(page->pager());
}

DiskPager::Entry& DiskPager::entry_of(const at::Tensor& tensor) {
  Page* page = page_of(tensor);
  if (page == nullptr || page->pager() != this) throw std::logic_error("a tensor that is not of this disk pager");
  return entries_[page->id()];
}

// ---- states --------------------------------------------------------------------------------------

void DiskPager::make_resident(Entry& entry) {
  entry.state = State::kResident;
  entry.page->attach(entry.data);
  move_to(recent_, entry);
}

void DiskPager::drop(Entry& entry) {
  entry.data.reset();
  entry.buffer.reset();
  entry.state = State::kOnDisk;
}

// Makes an entry the last of a list. Each operator may move entries, so the cost must not grow with the lists.
void DiskPager::move_to(std::list<Entry*>& list, Entry& entry) {
  take_out(entry);
  entry.place = list.insert(list.end(), &entry);
  entry.list = &list;
}

void DiskPager::take_out(Entry& entry) {
  if (std::list<Entry*>* list = std::exchange(entry.list, nullptr)) list->erase(entry.place);
}

// Removes and returns the first entry that is not held; null if there is none.
DiskPager::Entry* DiskPager::take_idle(std::list<Entry*>& entries) {
  const auto oldest = std::ranges::find(entries, 0, &Entry::holds);
  if (oldest == entries.end()) return nullptr;
  Entry* entry = *oldest;
  take_out(*entry);
  return entry;
}

// Evicts the least recently used idle entry; returns false if there is none.
bool DiskPager::evict_one() {
  Entry* entry = take_idle(recent_);
  if (entry == nullptr) return false;
  const uint32_t writes = entry->page->writes();
  const bool is_changed = std::exchange(entry->seen_writes, writes) != writes || entry->is_changed;
  entry->page->detach();
  if (!is_changed) {
    drop(*entry);
    return true;
  }
  entry->is_changed = entry->is_zero = false;
  entry->state = State::kWriting;
  entry->transfer = start_transfer([this, data = entry->data.const_data_ptr(), entry] {
    space_.file()->write(data, entry->bytes, entry->offset);
    written_bytes_ += entry->bytes;
  });
  move_to(writing_, *entry);
  return true;
}

// Starts a read or write on the queue's threads; a no-op in a dry run.
std::future<void> DiskPager::start_transfer(std::function<void()> transfer) {
  if (space_.file() == nullptr) {
    std::promise<void> nothing;
    nothing.set_value();
    return nothing.get_future();
  }
  std::future<void> end = queue_.add(std::move(transfer));
  if (waits_) end.wait();
  return end;
}

// Evicts one tensor that was read ahead but not used; returns false if there is none.
bool DiskPager::forget_one_read_ahead() {
  Entry* entry = take_idle(reading_);
  if (entry == nullptr) return false;
  entry->transfer.wait();
  drop(*entry);
  return true;
}

// Blocks until the write ends. Keeps the data in memory if `is_wanted`. If the write failed, keeps the data and throws.
void DiskPager::finish_write(Entry& entry, bool is_wanted) {
  take_out(entry);
  std::exception_ptr failure;
  try {
    entry.transfer.get();
  } catch (...) {
    failure = std::current_exception();
  }
  if (!failure && !is_wanted) return drop(entry);
  entry.is_changed = failure != nullptr;
  make_resident(entry);
  if (failure) std::rethrow_exception(failure);
}

bool DiskPager::has_room(int64_t bytes) const {
  return buffer_bytes() + with_alignment(bytes) <= options_.buffer_bytes;
}

// Makes room for `bytes` in the buffers; returns false if it cannot. Evicts tensors and blocks only if `may_wait`.
bool DiskPager::make_room(int64_t bytes, bool may_wait) {
  while (!has_room(bytes)) {
    if (!writing_.empty() &&
        (may_wait || writing_.front()->transfer.wait_for(std::chrono::seconds(0)) == std::future_status::ready)) {
      finish_write(*writing_.front(), /*is_wanted=*/false);
    } else if (!may_wait || !(evict_one() || forget_one_read_ahead())) {
      return false;
    }
  }
  return true;
}

void DiskPager::start_read(Entry& entry) {
  entry.buffer = buffers_.take(with_alignment(entry.bytes), at::kByte);
  entry.data = aligned_part(entry.buffer, entry.bytes);
  entry.state = State::kReading;
  move_to(reading_, entry);
  entry.transfer = start_transfer([this, data = entry.data.mutable_data_ptr(), &entry, is_zero = entry.is_zero] {
    if (is_zero) {
      std::memset(data, 0, entry.bytes);
    } else {
      space_.file()->read(data, entry.bytes, entry.offset);
      read_bytes_ += entry.bytes;
    }
  });
}

void DiskPager::require_resident(Entry& entry) {
  if (entry.state == State::kResident) return move_to(recent_, entry);
  if (entry.state == State::kWriting) return finish_write(entry, /*is_wanted=*/true);
  if (entry.state == State::kOnDisk) {
    if (!make_room(entry.bytes, /*may_wait=*/true))
      throw std::runtime_error(
          entry.page->name() + " needs " + std::to_string(entry.bytes) +
          " bytes of the disk tier's buffers, which hold " + std::to_string(options_.buffer_bytes) +
          ", all in use at once: raise OffloadOptions::disk_buffer_bytes, or take an optimizer that steps "
          "one parameter at a time (HostAdamW)");
    start_read(entry);
  }
  take_out(entry);
  try {
    entry.transfer.get();
  } catch (...) {
    drop(entry);
    throw;
  }
  make_resident(entry);
  if (last_loaded_ != nullptr && last_loaded_ != &entry) last_loaded_->next = &entry;
  last_loaded_ = &entry;
}

// Starts reading a tensor. Evicts at most one tensor, and does not block for writes. Returns false if memory is short.
bool DiskPager::start_read_if_room(Entry& entry) {
  if (entry.state != State::kOnDisk) return true;
  if (!has_room(entry.bytes)) evict_one();
  if (!make_room(entry.bytes, /*may_wait=*/false)) return false;
  start_read(entry);
  return true;
}

void DiskPager::foretell(const Entry& entry) {
  Entry* next = entry.next;
  for (int ahead = 0; ahead < options_.read_ahead && next != nullptr && start_read_if_room(*next); ++ahead)
    next = next->next;
}

std::shared_ptr<void> DiskPager::use(const std::vector<Page*>& pages) {
  auto used = std::make_shared<std::vector<std::shared_ptr<Entry>>>();  // destroyed after `lock` if this throws
  std::lock_guard lock(mutex_);
  c10::InferenceMode ordinary(false);
  at::NoGradGuard no_grad;
  for (Page* page : pages) used->push_back(held(entries_[page->id()]));
  for (const auto& entry : *used) require_resident(*entry);
  foretell(*used->back());
  return used;
}

bool DiskPager::refuse(const Page& page, const at::Tensor&, const std::string& operation) {
  throw std::logic_error(operation + " may not write to " + page.name() +
                         " inside summon_full_params(), whose full parameters would not follow: leave the scope first");
}

DiskPager::Hold DiskPager::hold(const at::Tensor& tensor, bool writes) {
  Hold hold;  // destroyed after `lock` if an exception is thrown
  std::lock_guard lock(mutex_);
  c10::InferenceMode ordinary(false);
  at::NoGradGuard no_grad;
  Entry& entry = entry_of(tensor);
  require_resident(entry);
  entry.is_changed = entry.is_changed || writes;
  if (writes) entry.page->note_write();
  auto* first = static_cast<char*>(entry.data.mutable_data_ptr()) +
                tensor.storage_offset() * static_cast<int64_t>(tensor.element_size());
  hold.entry_ = held(entry);
  hold.values_ =
      at::from_blob(first, tensor.sizes(), tensor.strides(), at::TensorOptions(at::kCPU).dtype(tensor.scalar_type()));
  foretell(entry);
  return hold;
}

// Keeps the entry's data in memory while the result exists. The destructor of the result locks the mutex.
std::shared_ptr<DiskPager::Entry> DiskPager::held(Entry& entry) {
  ++entry.holds;
  return {&entry, [this](Entry* held) {
            std::lock_guard lock(mutex_);
            --held->holds;
          }};
}

at::Tensor DiskPager::make_spool(int64_t bytes) const {
  const auto options = at::TensorOptions(at::kCPU).dtype(at::kByte);
  if (space_.file() == nullptr) return at::empty({bytes}, options);
  const auto memory = offload_file(options_.directory).map_new(File::whole_blocks(bytes));
  return at::from_blob(memory.get(), {bytes}, [memory](void*) {}, options);
}

void DiskPager::read_ahead(const at::Tensor& tensor) {
  std::lock_guard lock(mutex_);
  start_read_if_room(entry_of(tensor));
}

int64_t DiskPager::disk_bytes() const {
  std::lock_guard lock(mutex_);
  return space_.claimed_bytes();
}

int64_t DiskPager::buffer_bytes() const { return buffers_.lent_bytes(); }
int64_t DiskPager::peak_buffer_bytes() const { return buffers_.peak_lent_bytes(); }

}  // namespace tessera::internal
