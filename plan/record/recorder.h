#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <tessera/plan/run_record.h>
#include "core/memory/memory_kind_scope.h"

namespace tessera::internal {

// While it is a thread's current recorder, records the memory of the tensors that the thread creates. Produces a
// RunRecord. The first recorder of a process permanently installs an allocator. Other threads must not create tensors
// during the installation. Any thread may free recorded blocks, even after the recording.
//
// Without data, allocates blocks of kMappedBytes or more as mapped pages, which read as zeros and use no memory until a
// write. A block that is marked as void has no valid values.
class Recorder : public std::enable_shared_from_this<Recorder> {
 public:
  static constexpr size_t kMappedBytes = size_t{64} << 10;
  // Floating-point tensors up to this size keep their values, unless an operator writes void values to them.
  static constexpr int64_t kSmallBytes = 4096;

  static std::shared_ptr<Recorder> make(bool with_data);
  static Recorder* current();  // null if the thread has no current recorder

  class Current {  // in its scope, sets the thread's current recorder; throws std::logic_error if the thread has one
   public:
    explicit Current(std::shared_ptr<Recorder> recorder);
    ~Current();
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;

   private:
    std::shared_ptr<Recorder> recorder_;
  };

  bool has_data() const { return has_data_; }
  // Returns whether recording is paused, because the thread runs inside a communicator.
  static bool is_paused() { return MemoryKindScope::current() == MemoryKind::kTransport; }

  // Sets the names of parameters. Identifies a parameter and its views by storage (the page of a sharded parameter) and
  // byte range.
  void name_parameters(const std::vector<std::pair<std::string, at::Tensor>>& parameters);

  // The dispatcher's fallback in dry_operators.cpp calls these functions.
  void set_unit(const std::string& name);
  void set_module_of(const at::Tensor& tensor);  // a no-op except for named parameters and their views
  void begin_operator(std::string name);
  void end_operator(int64_t flop, int64_t bytes, c10::ScalarType dtype, double seconds, double processor_s);
  void read_value(const std::string& operation);

  size_t add_collective(RecordedCollective collective);  // returns the collective's index in the record
  void add_wait(size_t collective);                      // a no-op after finish()
  void end_step();
  RunRecord finish();  // Must be called once, before the tensors that outlive the last step are freed.

  // Return whether a tensor's memory is void (see the class), or make it void. Memory of a device is never void.
  static bool is_void(const at::Tensor& tensor);
  void make_void(const at::Tensor& tensor);

  // The allocator calls these functions. allocated() returns the block's number, which is the argument of freed().
  int64_t allocated(int64_t bytes);
  void freed(int64_t block);

 private:
  explicit Recorder(bool has_data) : has_data_(has_data) {}

  struct Block {
    int64_t bytes = 0;
    MemoryKind kind = MemoryKind::kUnknown;
    int step = 0;
    bool in_backward = false;
    int64_t made_at = 0, freed_at = -1;  // indices in events_; -1 means never freed
    int64_t operator_made = -1;          // the allocating operator: 1 is the first; -1 means none
    bool is_scratch = false;
  };
  struct Event {
    int64_t block;
    bool is_made;
    size_t operators;  // number of operators called before the event
  };
  void decide_kinds();
  int module_now();  // returns the module to which the next operator belongs
  struct NamedParameter {
    int64_t begin, end;  // byte offsets in the storage
    int module;
  };

  const bool has_data_;
  std::mutex mutex_;  // needed because any thread may free blocks
  std::vector<Block> blocks_;
  std::vector<Event> events_;
  std::vector<int64_t> backwards_;   // index in events_ at the start of each backward
  std::vector<int64_t> steps_ends_;  // index in events_ at the end of each step
  std::map<std::string, int> unit_numbers_;
  RunRecord record_;
  std::map<const void*, std::vector<NamedParameter>> named_;  // parameters of each storage, sorted by `begin`
  std::map<uint64_t, int> module_of_node_;                    // maps an autograd node's sequence number to a module
  int unit_ = 0;
  int module_ = 0;
  int step_ = 0;
  bool was_in_backward_ = false;
  bool inside_operator_ = false;
  bool is_finished_ = false;
  std::set<const void*> void_outside_;  // addresses of void memory that other allocators have allocated
};

}  // namespace tessera::internal
