#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <future>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "core/memory/counted_buffers.h"
#include "core/paging/residency.h"
#include "core/runtime/task_queue.h"
#include "offload/disk/disk_space.h"

namespace tessera::internal {

struct DiskPagerOptions {
  std::string directory;                      // an existing folder on a local SSD
  int64_t buffer_bytes = int64_t{256} << 20;  // limit of host memory for tensors in memory or in flight
  int read_ahead = 3;                         // number of tensors to read ahead
  int threads = 4;                            // number of concurrent reads and writes
};

// Keeps tensors on disk, and reads them into memory when an operator uses them. Implements ZeRO-Infinity's NVMe tier
// (Rajbhandari et al., 2021) with Tessera's paging instead of module hooks.
//
//   kOnDisk -> kReading -> kResident -> (changed) kWriting -> kOnDisk
//
// If memory is short, evicts the least recently used tensors; those that have changed are written back asynchronously.
// Predicts the next tensors from the previous order of loads, and reads them ahead. Operators may read and write the
// tensors like ordinary tensors. Code that uses pointers must hold() a tensor first. All data are in one unnamed file
// (DiskSpace). Frees the space of released tensors whenever new tensors have taken 1/16 of the file. A dry run has no
// file and moves no data.
//
// Is thread-safe. If a tensor outlives the pager, operators on it throw std::logic_error.
class DiskPager : public Pager {
  struct Entry;

 public:
  // Throws std::invalid_argument for options out of range, and std::runtime_error if it cannot create the file.
  explicit DiskPager(DiskPagerOptions options);
  ~DiskPager() override;

  // Creates a tensor of zeros on disk. `name` is for errors. Throws std::runtime_error if the disk is full, or if the
  // tensor is larger than the limit of host memory.
  at::Tensor make(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype, const std::string& name);

  // Returns the tensor's pager; null if the tensor is not on disk.
  static DiskPager* of(const at::Tensor& tensor);

  // Keeps the data of a tensor in memory while this object exists. Must not outlive the pager.
  class Hold {
   public:
    // Returns the elements as an ordinary tensor, which is valid until the hold ends.
    const at::Tensor& values() const { return values_; }
    void release() { *this = Hold(); }

   private:
    friend class DiskPager;
    std::shared_ptr<Entry> entry_;
    at::Tensor values_;
  };
  // Blocks until the data are in memory. `writes`: the caller may write until the hold ends. Throws std::runtime_error
  // if other tensors in use leave no room, or if the disk fails.
  Hold hold(const at::Tensor& tensor, bool writes);

  // Returns new memory of `bytes` bytes (above 0), mapped from a new unnamed file in the directory, so that the system
  // can page it out. Throws std::runtime_error if the disk is full. In a dry run, returns ordinary memory.
  at::Tensor make_spool(int64_t bytes) const;

  // Starts reading the tensor's data if host memory has room or the eviction of one tensor makes room. Does not block.
  // Throws std::runtime_error if an earlier write of an evicted tensor failed.
  void read_ahead(const at::Tensor& tensor);

  int64_t disk_bytes() const;    // size of the file; the file never shrinks
  int64_t buffer_bytes() const;  // host memory of the buffers in use
  int64_t peak_buffer_bytes() const;
  int64_t read_bytes() const { return read_bytes_; }  // total since construction
  int64_t written_bytes() const { return written_bytes_; }
  bool is_direct() const { return space_.file() != nullptr && space_.file()->is_direct(); }

  std::shared_ptr<void> use(const std::vector<Page*>& pages) override;
  [[noreturn]] bool refuse(const Page& page, const at::Tensor& view, const std::string& operation) override;

 private:
  enum class State { kOnDisk, kReading, kResident, kWriting };
  struct Entry {
    std::unique_ptr<Page> page;  // null if the tensor has been released; the entry is then vacant
    // The page's storage, which the tensor and its views own.
    std::optional<c10::weak_intrusive_ptr<c10::StorageImpl>> storage;
    int64_t offset = 0;
    int64_t bytes = 0;    // a multiple of File::kBlockBytes
    bool is_zero = true;  // true until the first write to disk: the file has no data yet
    State state = State::kOnDisk;
    at::Tensor buffer;  // from `buffers_`
    at::Tensor data;    // the aligned part of `buffer`, [bytes] of kByte
    std::future<void> transfer;
    int holds = 0;  // number of Hold objects and of operators that use the tensor now
    bool is_changed = false;
    uint32_t seen_writes = 0;
    std::list<Entry*>* list = nullptr;       // recent_, reading_ or writing_; null if the entry is in none
    std::list<Entry*>::iterator place = {};  // in `list`
    Entry* next = nullptr;                   // prediction: the tensor that was last loaded directly after this one
  };

  std::future<void> start_transfer(std::function<void()> transfer);
  void reclaim(int64_t needed_bytes);
  Entry& entry_of(const at::Tensor& tensor);
  std::shared_ptr<Entry> held(Entry& entry);
  void require_resident(Entry& entry);
  void make_resident(Entry& entry);
  void start_read(Entry& entry);
  bool start_read_if_room(Entry& entry);
  void foretell(const Entry& entry);
  bool has_room(int64_t bytes) const;
  bool make_room(int64_t bytes, bool may_wait);
  bool evict_one();
  bool forget_one_read_ahead();
  void finish_write(Entry& entry, bool is_wanted);
  Entry* take_idle(std::list<Entry*>& entries);
  void drop(Entry& entry);
  static void move_to(std::list<Entry*>& list, Entry& entry);
  static void take_out(Entry& entry);

  const DiskPagerOptions options_;
  mutable std::mutex mutex_;
  DiskSpace space_;
  const bool waits_;  // whether each transfer blocks until it completes
  CountedBuffers buffers_;
  std::deque<Entry> entries_;  // indexed by page id; addresses are stable
  std::vector<int> vacant_;    // indices of entries without a page
  int64_t made_bytes_ = 0;     // disk space of new tensors since reclaim() searched
  std::list<Entry*> recent_;   // resident; least recently used first
  std::list<Entry*> reading_;  // read ahead and not yet used; oldest first
  std::list<Entry*> writing_;  // being written; oldest first
  Entry* last_loaded_ = nullptr;
  std::atomic<int64_t> read_bytes_ = 0, written_bytes_ = 0;
  TaskQueue queue_;  // declared last, because its threads use the other members
};

}  // namespace tessera::internal
