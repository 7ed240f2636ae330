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

// Records the memory of the tensors that one thread creates, and produces a RunRecord. Active while it is that thread's
// current recorder. The first recorder of a process installs an allocator permanently; no other thread may create
// tensors meanwhile. Blocks may be freed by any thread, also after the recording.
//
// Without data, blocks of kMappedBytes or more are only addresses: pages that read as zeros and use memory only if code
// that bypasses the dispatcher writes to them. Each block records whether its values are valid or void.
class Recorder : public std::enable_shared_from_this<Recorder> {
 public:
  static constexpr size_t kMappedBytes = size_t{64} << 10;
  // smaller floating-point tensors have values until a void one is written to them
  static constexpr int64_t kSmallBytes = 4096;

  static std::shared_ptr<Recorder> make(bool with_data);
  static Recorder* current();  // null: none

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

  // Called by the operators' fallback.
  void set_unit(const std::string& name);
  void set_module_of(const at::Tensor& tensor);  // if it is a named parameter or a view of one
  void begin_operator(std::string name);
  void end_operator(int64_t flop, int64_t bytes, c10::ScalarType dtype, double seconds, double processor_s);
  void read_value(const std::string& operation);

  size_t add_collective(RecordedCollective collective);  // returns its index in the record, for add_wait()
  void add_wait(size_t collective);                      // a no-op once the record is finished
  void end_step();
  RunRecord finish();  // Call once, before freeing the tensors that count as left at the end.

  // Return whether a tensor's values are void, and mark them void.
  static bool is_void(const at::Tensor& tensor);
  void make_void(const at::Tensor& tensor);

  // Called by the allocator.
  int64_t allocated(int64_t bytes);
  void freed(int64_t block);

 private:
  explicit Recorder(bool has_data) : has_data_(has_data) {}

  struct Block {
    int64_t bytes = 0;
    MemoryKind kind = MemoryKind::kUnknown;
    int step = 0;
    bool in_backward = false;
    int64_t made_at = 0, freed_at = -1;  // events; -1: never
    int64_t operator_made = -1;          // the operator that created it; -1: none
    bool is_scratch = false;
  };
  struct Event {
    int64_t block;
    bool is_made;
    size_t operators;  // called before
  };
  void decide_kinds();
  int module_now();  // of the operator that begins
  struct NamedParameter {
    int64_t begin, end;  // in bytes of the storage
    int module;
  };

  const bool has_data_;
  std::mutex mutex_;  // blocks are freed by any thread
  std::vector<Block> blocks_;
  std::vector<Event> events_;
  std::vector<int64_t> backwards_;   // events at which a backward begins
  std::vector<int64_t> steps_ends_;  // events
  std::map<std::string, int> unit_numbers_;
  RunRecord record_;
  std::map<const void*, std::vector<NamedParameter>> named_;  // by storage, then by begin
  std::map<uint64_t, int> module_of_node_;                    // by autograd's sequence number
  int unit_ = 0;
  int module_ = 0;
  int step_ = 0;
  bool was_in_backward_ = false;
  bool inside_operator_ = false;
  bool is_finished_ = false;
  std::set<const void*> void_outside_;  // void memory of other allocators
};

}  // namespace tessera::internal
