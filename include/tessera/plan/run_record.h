#pragma once

#include <c10/core/ScalarType.h>

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <tessera/plan/memory_kind.h>

namespace tessera {

// Returns whether memory of this kind belongs to tensors. The scratch memory of kernels, the memory of communicators,
// and disk space do not.
inline bool is_tensors(MemoryKind kind) {
  return kind != MemoryKind::kScratch && kind != MemoryKind::kTransport && kind != MemoryKind::kDisk;
}

// Bytes by kind of memory.
struct BytesByKind {
  std::array<int64_t, kMemoryKinds> bytes{};

  int64_t operator[](MemoryKind kind) const { return bytes[static_cast<size_t>(kind)]; }  // bytes of one kind
  int64_t& operator[](MemoryKind kind) { return bytes[static_cast<size_t>(kind)]; }       // bytes of one kind, mutable
  int64_t tensors() const;                              // sum over the kinds for which is_tensors() is true
  bool operator==(const BytesByKind&) const = default;  // compares every kind
};

// A call of an operator, as dispatched below autograd, and the memory in use until the next call.
struct RecordedOperator {
  std::string name;  // "aten::addmm"
  int unit = 0;      // index in RunRecord::units: the unit of the last used parameter
  // Index in RunRecord::modules: the module of the last used parameter. In backward: the module of the forward operator
  // whose gradient this operator computes.
  int module = 0;
  int step = 0;              // 0: the constructor; 1: the first step
  bool in_backward = false;  // includes recomputation
  int64_t flop = 0;          // multiplications and additions of a matrix product, convolution or attention; otherwise 0
  // Bytes read and written: each input once, and each output. Excludes scratch memory.
  int64_t bytes = 0;
  c10::ScalarType dtype = c10::ScalarType::Undefined;  // dtype of the first floating-point input or output
  double seconds = 0;                                  // wall-clock time of the kernel; 0 in a dry run
  double processor_s = 0;                              // processor time of the kernel on the calling thread
  BytesByKind live;                                    // memory in use when the next operator is called
};

// A wait for a collective. After the wait, the rank uses the collective's result.
struct RecordedWait {
  int step = 0;
  size_t operators = 0;    // operators called before the wait
  size_t collectives = 0;  // collectives started before the wait
};

// Returns "constructor" for 0, otherwise "step 1", "step 2", ...
std::string name_of_step(int step);

// A collective that this rank took part in.
struct RecordedCollective {
  std::string operation;  // "all-gather"
  std::string what;       // "unit 'blocks.3'"
  int ranks = 0;          // number of ranks in the group
  int64_t bytes = 0;      // bytes of the full tensor
  int step = 0;
  size_t operators = 0;  // operators called before the collective's start
  int root = 0;          // for operations with a root: the root's rank in the group
  // The world ranks of the group's members, shared by all collectives of the group; null: all ranks.
  std::shared_ptr<const std::vector<int>> members;
  std::optional<RecordedWait> wait;  // empty: never awaited
};

// The operators of one rank's run, and the memory of its tensors after each operator. The run is real (record_run()) or
// has no data (dry_run()). Real runs and dry runs have equal counts.
//
// Bytes are those that storages request from the allocator. If a tensor's kind is unknown at its creation, the tensor's
// lifetime decides the kind. A tensor created in forward is an activation if it exists when a backward begins. A tensor
// created in backward that outlives the step is a gradient. Tensors that exist from the first step to the end are
// optimizer state. Tensors that have existed since the constructor are parameters or buffers.
struct RunRecord {
  std::vector<std::string> units;  // names; the first is "", for operators before the use of any parameter
  // Dotted names of submodules. The first is "": the root module, and operators before the use of a named parameter.
  std::vector<std::string> modules;
  std::vector<RecordedOperator> operators;
  std::vector<RecordedCollective> collectives;
  BytesByKind peak;                   // memory by kind when tensors() was largest
  size_t peak_at = 0;                 // index of the operator at the peak
  BytesByKind end;                    // memory after the last step, while the model exists
  BytesByKind most;                   // the maximum of each kind over the run
  int64_t scratch = 0;                // largest memory that one operator allocated and freed; 0 in a dry run
  int64_t flop = 0;                   // FLOP in the last step
  std::vector<int64_t> flop_by_unit;  // FLOP in the last step, by index in `units`
  // Dry run only: the operators that read a missing value and received 0, each once for each unit.
  std::vector<std::string> stand_ins;

  int64_t peak_bytes() const { return peak.tensors(); }  // bytes of tensors at the peak
  // Returns the place of the peak: "step 2, in backward, at aten::mm of unit 'blocks.3', in blocks.3.mlp.up". Returns
  // "" if the record has no operators.
  std::string peak_place() const;
  int64_t collective_bytes(int step) const;  // bytes of the full tensors in a step's collectives
  // Returns a summary in several lines of text: the peak, its content and place, FLOP and collectives.
  std::string summary() const;
};

}  // namespace tessera
