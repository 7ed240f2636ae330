#include "tessera/paging/disk_pager.h"

#include <ATen/ops/from_blob.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace tessera {
namespace {

const DiskPagerOptions& checked(const DiskPagerOptions& options) {
  auto require = [](bool holds, const char* field, int64_t value, const char* expected) {
    if (!holds)
      throw std::invalid_argument(std::string("DiskPagerOptions::") + field + " is " + std::to_string(value) +
                                  ", expected " + expected);
  };
  require(options.buffer_bytes >= File::kBlockBytes, "buffer_bytes", options.buffer_bytes, "a block of 4096 or more");
  require(options.read_ahead >= 0, "read_ahead", options.read_ahead, "0 or more");
  require(options.threads >= 1, "threads", options.threads, "1 or more");
  return options;
}

void throw_offload_error(const FileFailure& failure) {
  const std::string where = "offload directory '" + failure.path.string() + "'";
  if (failure.action == FileAction::kClaim && !failure.problem.empty())
    throw std::runtime_error(where + " " + failure.problem);
  const char* operation = "use";
  if (failure.action == FileAction::kCreate) operation = "cannot make a file";
  if (failure.action == FileAction::kClaim) operation = "cannot claim space";
  if (failure.action == FileAction::kRead) operation = failure.problem.empty() ? "read" : "read past the end";
  if (failure.action == FileAction::kWrite) operation = "write";
  throw std::runtime_error(where + ": " + operation + ": " + failure.reason());
}

// Direct access wants memory aligned to blocks, which a buffer's is not.
int64_t with_alignment(int64_t bytes) { return bytes + File::kBlockBytes; }

at::Tensor aligned_part(const at::Tensor& buffer, int64_t bytes) {
  const auto address = reinterpret_cast<uintptr_t>(buffer.const_data_ptr());
  const auto skip = static_cast<int64_t>((File::kBlockBytes - address % File::kBlockBytes) % File::kBlockBytes);
  return buffer.narrow(0, skip, bytes);
}

}  // namespace

File offload_file(const std::string& directory) { return File::create_unnamed(directory, &throw_offload_error); }

DiskPager::DiskPager(DiskPagerOptions options)
    : options_(checked(options)), file_(offload_file(options.directory)), buffers_(at::kCPU), queue_(options.threads) {}

DiskPager::~DiskPager() {
  std::lock_guard lock(mutex_);
  for (Entry& entry : entries_) {
    entry.page->detach();
    if (entry.transfer.valid()) entry.transfer.wait();
  }
}

at::Tensor DiskPager::make(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype,
                           const std::string& name) {
  std::lock_guard lock(mutex_);
  int64_t numel = 1;
  for (const int64_t size : sizes) numel *= size;
  Entry entry;
  entry.bytes = File::whole_blocks(std::max<int64_t>(numel * static_cast<int64_t>(c10::elementSize(dtype)), 1));
  if (with_alignment(entry.bytes) > options_.buffer_bytes)
    throw std::runtime_error(name + " takes " + std::to_string(with_alignment(entry.bytes)) +
                             " bytes in memory when it is used, and the buffers of the disk tier hold " +
                             std::to_string(options_.buffer_bytes) + " (DiskPagerOptions::buffer_bytes)");
  entry.offset = file_.extend(entry.bytes);
  entry.page = std::make_unique<Page>(this, static_cast<int>(entries_.size()), name, at::kCPU);
  entry.page->set_writable(true);
  const at::Tensor view = entry.page->view(dtype, sizes, strides, 0);
  entries_.push_back(std::move(entry));
  return view;
}

DiskPager* DiskPager::of(const at::Tensor& tensor) {
  Page* page = page_of(tensor);
  return page == nullptr ? nullptr : dynamic_cast<DiskPager*>(page->pager());
}

DiskPager::Entry& DiskPager::entry_of(const at::Tensor& tensor, int* index) {
  Page* page = page_of(tensor);
  if (page == nullptr || page->pager() != this) throw std::logic_error("a tensor that is not of this disk pager");
  if (index != nullptr) *index = page->id();
  return entries_[page->id()];
}

// ---- states --------------------------------------------------------------------------------------

bool DiskPager::is_evictable(int index) const {
  if (entries_[index].holds > 0) return false;
  return std::none_of(in_use_.begin(), in_use_.end(), [&](const auto& thread) {
    return std::find(thread.second.begin(), thread.second.end(), index) != thread.second.end();
  });
}

void DiskPager::drop(Entry& entry) {
  entry.data.reset();
  entry.buffer.reset();
  entry.state = State::kOnDisk;
}

void DiskPager::touch(int index) {
  recent_.remove(index);
  recent_.push_back(index);
}

// Sends the least recently used one that may go on its way; false if there is none.
bool DiskPager::evict_one() {
  const auto oldest = std::find_if(recent_.begin(), recent_.end(), [&](int index) { return is_evictable(index); });
  if (oldest == recent_.end()) return false;
  const int index = *oldest;
  recent_.erase(oldest);
  Entry& entry = entries_[index];
  const bool is_changed =
      std::exchange(entry.seen_writes, entry.page->writes()) != entry.page->writes() || entry.is_changed;
  entry.page->take_back();
  if (!is_changed) {
    drop(entry);
    return true;
  }
  entry.is_changed = entry.is_zero = false;
  entry.state = State::kWriting;
  entry.transfer = queue_.add([this, data = entry.data.const_data_ptr(), bytes = entry.bytes, offset = entry.offset] {
    file_.write(data, bytes, offset);
    written_bytes_ += bytes;
  });
  writing_.push_back(index);
  return true;
}

// What was read for nothing, it seems.
bool DiskPager::forget_one_read_ahead() {
  const auto oldest = std::find_if(reading_.begin(), reading_.end(), [&](int index) { return is_evictable(index); });
  if (oldest == reading_.end()) return false;
  Entry& entry = entries_[*oldest];
  reading_.erase(oldest);
  entry.transfer.wait();
  drop(entry);
  return true;
}

// A failed write leaves the data where they are: in memory, and changed.
void DiskPager::finish_write(int index) {
  std::erase(writing_, index);
  Entry& entry = entries_[index];
  try {
    entry.transfer.get();
  } catch (...) {
    entry.state = State::kResident;
    entry.is_changed = true;
    entry.page->lend(entry.data);
    touch(index);
    throw;
  }
  drop(entry);
}

// False if there is no room without waiting, or none at all.
bool DiskPager::make_room(int64_t bytes, bool may_wait) {
  const int64_t limit = options_.buffer_bytes;
  auto has_room = [&] { return buffer_bytes() + with_alignment(bytes) <= limit; };
  while (!has_room()) {
    if (!writing_.empty() && (may_wait || entries_[writing_.front()].transfer.wait_for(std::chrono::seconds(0)) ==
                                              std::future_status::ready)) {
      finish_write(writing_.front());
    } else if (!may_wait || !(evict_one() || forget_one_read_ahead())) {
      return false;
    }
  }
  return true;
}

void DiskPager::start_read(int index) {
  Entry& entry = entries_[index];
  entry.buffer = buffers_.take(with_alignment(entry.bytes), at::kByte);
  entry.data = aligned_part(entry.buffer, entry.bytes);
  entry.state = State::kReading;
  reading_.push_back(index);
  entry.transfer = queue_.add([this, data = entry.data.mutable_data_ptr(), bytes = entry.bytes, offset = entry.offset,
                               is_zero = entry.is_zero] {
    if (is_zero) {
      std::memset(data, 0, bytes);
    } else {
      file_.read(data, bytes, offset);
      read_bytes_ += bytes;
    }
  });
}

void DiskPager::require_resident(int index) {
  Entry& entry = entries_[index];
  if (entry.state == State::kResident) return touch(index);
  if (entry.state == State::kWriting) {  // it comes back before it has gone
    std::erase(writing_, index);
    entry.state = State::kResident;
    entry.page->lend(entry.data);
    touch(index);
    try {
      entry.transfer.get();
    } catch (...) {
      entry.is_changed = true;
      throw;
    }
    return;
  }
  if (entry.state == State::kOnDisk) {
    if (!make_room(entry.bytes, /*may_wait=*/true))
      throw std::runtime_error(entry.page->name() + " needs " + std::to_string(entry.bytes) +
                               " bytes of the disk tier's buffers, which hold " +
                               std::to_string(options_.buffer_bytes) +
                               ", all in use at once: raise buffer_bytes, or take an optimizer that steps "
                               "one parameter at a time (HostAdamW)");
    start_read(index);
  }
  std::erase(reading_, index);
  try {
    entry.transfer.get();
  } catch (...) {
    drop(entry);
    throw;
  }
  entry.state = State::kResident;
  entry.page->lend(entry.data);
  touch(index);
  if (last_loaded_ >= 0 && last_loaded_ != index) entries_[last_loaded_].next = index;
  last_loaded_ = index;
}

// What is read ahead takes room from what was not used for long, but never waits for a disk.
void DiskPager::foretell(int index) {
  for (int ahead = 0; ahead < options_.read_ahead; ++ahead) {
    index = entries_[index].next;
    if (index < 0) return;
    if (entries_[index].state != State::kOnDisk) continue;
    if (buffer_bytes() + with_alignment(entries_[index].bytes) > options_.buffer_bytes) evict_one();
    if (!make_room(entries_[index].bytes, /*may_wait=*/false)) return;
    start_read(index);
  }
}

// ---- what callers see ----------------------------------------------------------------------------

void DiskPager::use(const std::vector<Page*>& pages) {
  std::lock_guard lock(mutex_);
  c10::InferenceMode ordinary(false);
  at::NoGradGuard no_grad;
  std::vector<int>& mine = in_use_[std::this_thread::get_id()];
  mine.clear();
  for (Page* page : pages) mine.push_back(page->id());
  for (const int index : std::vector<int>(mine)) require_resident(index);
  foretell(mine.back());
}

void DiskPager::refuse(const Page& page, const at::Tensor&, const std::string& operation) {
  throw std::logic_error(operation + " may not write to " + page.name());
}

DiskPager::Hold DiskPager::hold(const at::Tensor& tensor, bool writes) {
  std::lock_guard lock(mutex_);
  c10::InferenceMode ordinary(false);
  at::NoGradGuard no_grad;
  in_use_.erase(std::this_thread::get_id());  // this thread's last operator is over
  Hold hold;
  Entry& entry = entry_of(tensor, &hold.page_);
  require_resident(hold.page_);
  ++entry.holds;
  entry.is_changed = entry.is_changed || writes;
  if (writes) entry.page->note_write();
  hold.pager_ = this;
  auto* first = static_cast<char*>(entry.data.mutable_data_ptr()) +
                tensor.storage_offset() * static_cast<int64_t>(tensor.element_size());
  hold.values_ =
      at::from_blob(first, tensor.sizes(), tensor.strides(), at::TensorOptions().dtype(tensor.scalar_type()));
  foretell(hold.page_);
  return hold;
}

void DiskPager::Hold::release() {
  if (auto* pager = std::exchange(pager_, nullptr)) {
    std::lock_guard lock(pager->mutex_);
    --pager->entries_[page_].holds;
    values_.reset();
  }
}

DiskPager::Hold& DiskPager::Hold::operator=(Hold&& other) noexcept {
  release();
  pager_ = std::exchange(other.pager_, nullptr);
  page_ = other.page_;
  values_ = std::move(other.values_);
  return *this;
}

void DiskPager::read_ahead(const at::Tensor& tensor) {
  std::lock_guard lock(mutex_);
  int index = -1;
  Entry& entry = entry_of(tensor, &index);
  if (entry.state != State::kOnDisk) return;
  if (buffer_bytes() + with_alignment(entry.bytes) > options_.buffer_bytes) evict_one();
  if (make_room(entry.bytes, /*may_wait=*/false)) start_read(index);
}

int64_t DiskPager::disk_bytes() const {
  std::lock_guard lock(mutex_);
  return file_.bytes();
}

int64_t DiskPager::buffer_bytes() const { return buffers_.lent_bytes(); }
int64_t DiskPager::peak_buffer_bytes() const { return buffers_.peak_lent_bytes(); }

}  // namespace tessera
