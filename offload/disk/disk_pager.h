#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <future>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "core/memory/counted_buffers.h"
#include "core/paging/residency.h"
#include "core/runtime/task_queue.h"
#include "offload/disk/disk_space.h"

namespace tessera::internal {

struct DiskPagerOptions {
  std::string directory;                      // an existing folder, on a local SSD
  int64_t buffer_bytes = int64_t{256} << 20;  // the most host memory for what is not on the disk alone
  int read_ahead = 3;                         // how many tensors are read before they are asked for
  int threads = 4;                            // reads and writes under way at a time
};

// Tensors whose data lie on a disk and come into memory when an operator uses them (ZeRO-Infinity's
// NVMe tier, Rajbhandari et al., 2021, with Tessera's paging in place of module hooks).
//
//   kOnDisk -> kReading -> kResident -> (changed) kWriting -> kOnDisk
//
// The tensors that were not used for longest go when room is needed, those that changed by a write that nobody waits
// for. What is used next is foretold from what followed last time, and read ahead. Operators may use and change the
// tensors as any others; code that takes pointers holds them first. Data exist in one file without a name (DiskSpace),
// where a tensor has its space from when it is made until it is gone. In a dry run there is no file, and nothing moves.
//
// Thread-safe. Tensors that outlive the pager throw std::logic_error when they are used.
class DiskPager : public Pager {
  struct Entry;

 public:
  // Throws std::invalid_argument for options out of range, std::runtime_error for a directory where
  // no file can be made.
  explicit DiskPager(DiskPagerOptions options);
  ~DiskPager() override;

  // A tensor of zeros on the disk. `name` is for errors. Throws std::runtime_error if the disk is full,
  // or the tensor larger than all buffers.
  at::Tensor make(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype, const std::string& name);

  // The pager of a tensor, if it lies on a disk, else null.
  static DiskPager* of(const at::Tensor& tensor);

  // While it lives, the data stay in memory. Move-only.
  class Hold {
   public:
    // The same elements as an ordinary tensor.
    const at::Tensor& values() const { return values_; }
    void release() { *this = Hold(); }

   private:
    friend class DiskPager;
    struct Release {
      DiskPager* pager;
      void operator()(Entry* entry) const;
    };
    std::unique_ptr<Entry, Release> entry_;
    at::Tensor values_;
  };
  // Waits for the data. `writes`: they may change before the hold ends. Throws std::runtime_error if the
  // buffers are all held, or the disk fails.
  Hold hold(const at::Tensor& tensor, bool writes);

  // Starts to read the data, if there is room for them; returns at once.
  void read_ahead(const at::Tensor& tensor);

  int64_t disk_bytes() const;    // claimed: of all tensors at the time when they were most
  int64_t buffer_bytes() const;  // host memory in use now
  int64_t peak_buffer_bytes() const;
  int64_t read_bytes() const { return read_bytes_; }  // moved so far
  int64_t written_bytes() const { return written_bytes_; }
  bool is_direct() const { return space_.file() != nullptr && space_.file()->is_direct(); }

  void use(const std::vector<Page*>& pages) override;
  [[noreturn]] bool refuse(const Page& page, const at::Tensor& view, const std::string& operation) override;

 private:
  enum class State { kOnDisk, kReading, kResident, kWriting };
  struct Entry {
    std::unique_ptr<Page> page;  // null: its tensor is gone, and the place is free
    std::optional<c10::weak_intrusive_ptr<c10::StorageImpl>> storage;  // the page's; its tensor and views hold it, too
    int64_t offset = 0;
    int64_t bytes = 0;    // whole blocks
    bool is_zero = true;  // never written: the disk has nothing yet
    State state = State::kOnDisk;
    at::Tensor buffer;  // counted
    at::Tensor data;    // the aligned part of it, [bytes] of kByte
    std::future<void> transfer;
    int holds = 0;
    bool is_changed = false;
    uint32_t seen_writes = 0;
    Entry* next = nullptr;  // what was loaded after it the last time
  };

  std::future<void> start_transfer(std::function<void()> transfer);
  void reclaim();
  Entry& entry_of(const at::Tensor& tensor);
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
  void touch(Entry& entry);

  const DiskPagerOptions options_;
  mutable std::mutex mutex_;
  DiskSpace space_;
  const bool waits_;  // for each transfer as it begins
  CountedBuffers buffers_;
  std::deque<Entry> entries_;                                    // by their page's id; they stay where they are
  std::vector<int> vacant_;                                      // of them, those without a page
  std::list<Entry*> recent_;                                     // resident, the latest last
  std::list<Entry*> reading_;                                    // ahead, and not used yet; the oldest first
  std::list<Entry*> writing_;                                    // the oldest first
  std::map<std::thread::id, std::vector<const Entry*>> in_use_;  // by a thread's last operator
  Entry* last_loaded_ = nullptr;
  std::atomic<int64_t> read_bytes_ = 0, written_bytes_ = 0;
  TaskQueue queue_;  // last: its threads use the rest
};

}  // namespace tessera::internal
