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

// Records the memory of the tensors that one thread creates, and produces a RunRecord. Records while it is the thread's
// current recorder. The first recorder of a process permanently installs an allocator. Other threads must not create
// tensors during the installation. Any thread may free recorded blocks, also after the recording.
//
// Without data, blocks of kMappedBytes or more are mapped pages: they read as zeros, and use memory only once they are
// written to. Each block is marked as valid or void; a void block has no values.
class Recorder : public std::enable_shared_from_this<Recorder> {
 public:
  static constexpr size_t kMappedBytes = size_t{64} << 10;
  // Floating-point tensors of at most these bytes have values until a void tensor is written to them.
  static constexpr int64_t kSmallBytes = 4096;

  static std::shared_ptr<Recorder> make(bool with_data);
  static Recorder* current();  // null if the thread has none

  class Current {  // sets the thread's recorder; throws std::logic_error if one is set
   public:
    explicit Current(std::shared_ptr<Recorder> recorder);
    ~Current();
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;

   private:
    std::shared_ptr<Recorder> recorder_;
  };

  bool has_data() const { return has_data_; }
  // Returns whether the thread is inside a communicator, whose memory is not recorded.
  static bool is_paused() { return MemoryKindScope::current() == MemoryKind::kTransport; }

  // Sets the names of parameters. Identifies a parameter, and any view of it, by its storage (a sharded parameter's
  // page) and its bytes there.
  void name_parameters(const std::vector<std::pair<std::string, at::Tensor>>& parameters);

  // Called by the dispatcher's fallback in dry_operators.cpp.
  void set_unit(const std::string& name);
  void set_module_of(const at::Tensor& tensor);  // a no-op unless it is a named parameter or a view of one
  void begin_operator(std::string name);
  void end_operator(int64_t flop, int64_t bytes, c10::ScalarType dtype, double seconds, double processor_s);
  void read_value(const std::string& operation);

  size_t add_collective(RecordedCollective collective);  // returns its index in the record, for add_wait()
  void add_wait(size_t collective);                      // a no-op once the record is finished
  void end_step();
  RunRecord finish();  // Must be called once, while the tensors that outlive the last step exist.

  // is_void() returns whether a tensor's values are void. make_void() marks them void.
  static bool is_void(const at::Tensor& tensor);
  void make_void(const at::Tensor& tensor);

  // Called by the allocator. allocated() returns the number of the block, the argument of freed().
  int64_t allocated(int64_t bytes);
  void freed(int64_t block);

 private:
  explicit Recorder(bool has_data) : has_data_(has_data) {}

  struct Block {
    int64_t bytes = 0;
    MemoryKind kind = MemoryKind::kUnknown;
    int step = 0;
    bool in_backward = false;
    int64_t made_at = 0, freed_at = -1;  // indices in events_; -1: never freed
    int64_t operator_made = -1;          // number of the operator that allocated it, from 1; -1: none
    bool is_scratch = false;
  };
  struct Event {
    int64_t block;
    bool is_made;
    size_t operators;  // number of operators called until the event
  };
  void decide_kinds();
  int module_now();  // returns the module of the operator that begins
  struct NamedParameter {
    int64_t begin, end;  // byte offsets in the storage
    int module;
  };

  const bool has_data_;
  std::mutex mutex_;  // because any thread may free blocks
  std::vector<Block> blocks_;
  std::vector<Event> events_;
  std::vector<int64_t> backwards_;   // indices in events_ at which a backward begins
  std::vector<int64_t> steps_ends_;  // indices in events_ at which a step ends
  std::map<std::string, int> unit_numbers_;
  RunRecord record_;
  std::map<const void*, std::vector<NamedParameter>> named_;  // by storage; sorted by `begin`
  std::map<uint64_t, int> module_of_node_;                    // module, by the sequence number of an autograd node
  int unit_ = 0;
  int module_ = 0;
  int step_ = 0;
  bool was_in_backward_ = false;
  bool inside_operator_ = false;
  bool is_finished_ = false;
  std::set<const void*> void_outside_;  // addresses of void memory of other allocators
};

}  // namespace tessera::internal
