#pragma once

#include <c10/core/ScalarType.h>

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <tessera/memory_kind.h>

namespace tessera {

// Whether memory of this kind is tensors': all but what kernels and communicators take for a moment, and what is on a
// disk.
inline bool is_tensors(MemoryKind kind) {
  return kind != MemoryKind::kScratch && kind != MemoryKind::kTransport && kind != MemoryKind::kDisk;
}

// Bytes of tensors by kind.
struct BytesByKind {
  std::array<int64_t, kMemoryKinds> bytes{};

  // Of one kind.
  int64_t operator[](MemoryKind kind) const { return bytes[static_cast<size_t>(kind)]; }
  // The same, to be changed.
  int64_t& operator[](MemoryKind kind) { return bytes[static_cast<size_t>(kind)]; }
  // Of all kinds that are is_tensors().
  int64_t tensors() const;
  // Whether every kind has the same.
  bool operator==(const BytesByKind&) const = default;
};

// An operator that was called, below autograd, and what lives once it has returned.
struct RecordedOperator {
  std::string name;  // "aten::addmm"
  int unit = 0;      // of RunRecord::units: that of the parameters used last
  // Of RunRecord::modules: that of the parameter used last or, in backward, where the operator was called whose
  // gradient this is of.
  int module = 0;
  int step = 0;              // 0: the constructor; 1: the first step
  bool in_backward = false;  // what is computed again for backward is in it
  int64_t flop = 0;          // multiplications and additions of a matrix product, a convolution or attention; else 0
  // Read and written: each tensor that it is given once, and each that it makes or writes to. Not scratch.
  int64_t bytes = 0;
  c10::ScalarType dtype = c10::ScalarType::Undefined;  // of the first floating-point tensor that it is given or makes
  double seconds = 0;                                  // of its kernel, by the clock; 0 in a dry run
  double processor_s = 0;                              // the same of the calling thread's processor
  BytesByKind live;                                    // when the next one is called
};

// When a rank waited for a collective: from then on it needs the result.
struct RecordedWait {
  int step = 0;
  size_t operators = 0;    // how many operators were called before
  size_t collectives = 0;  // how many collectives were started before
};

// "constructor" for 0, else "step 1".
std::string name_of_step(int step);

// What this rank took part in.
struct RecordedCollective {
  std::string operation;  // "all-gather"
  std::string what;       // "unit 'blocks.3'"
  int ranks = 0;          // of the group
  int64_t bytes = 0;      // of the full tensor
  int step = 0;
  size_t operators = 0;  // how many operators were called before it was started
  int root = 0;          // of the group, where one rank sends to all others or they to it
  // The group's ranks as numbered in the world, shared by all collectives of a group; null: all ranks of the world.
  std::shared_ptr<const std::vector<int>> members;
  std::optional<RecordedWait> wait;  // none: nobody waited
};

// What one rank of a run did, and which memory its tensors took: a timeline in operators. Of a run with data
// (record_run()) or of one without (dry_run()), in which the same is counted.
//
// Bytes are those that tensors' storages ask of the allocator. Kinds that nobody can tell when a tensor is made are
// found when it goes: what an operator makes in forward is an activation if it is there when a backward begins; what
// one makes in backward and outlives the step is a gradient; what stays from the first step to the end is the
// optimizer's, and what the constructor leaves a parameter or buffer.
struct RunRecord {
  std::vector<std::string> units;  // names; the first is "" for what comes before any parameter is used
  // Dotted names of submodules; the first is "" for what is in none, or in a model whose parameters nobody has named.
  std::vector<std::string> modules;
  std::vector<RecordedOperator> operators;
  std::vector<RecordedCollective> collectives;
  BytesByKind peak;     // when the sum of tensors() was largest
  size_t peak_at = 0;   // the operator
  BytesByKind end;      // after the last step, with the model still there
  BytesByKind most;     // the most of each kind at any time, one kind for itself
  int64_t scratch = 0;  // the most that one operator took and gave back; a run without data does not know it
  int64_t flop = 0;     // of the last step
  std::vector<int64_t> flop_by_unit;  // of the last step, as `units`
  // Without data: which operators asked for a value and got 0, each with the unit it was in, once.
  std::vector<std::string> stand_ins;

  // peak.tensors()
  int64_t peak_bytes() const { return peak.tensors(); }
  // Where the peak is: "step 2, in backward, at aten::mm of unit 'blocks.3', in blocks.3.mlp.up"; "" without operators.
  std::string peak_place() const;
  // Of the full tensors of a step's collectives.
  int64_t collective_bytes(int step) const;
  // The peak, what is in it and where it is, FLOP and collectives, in a few lines of text.
  std::string summary() const;
};

}  // namespace tessera
