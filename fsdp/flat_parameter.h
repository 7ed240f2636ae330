#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <tessera/communicator.h>
#include "core/gradients/gradient_bucket.h"
#include "core/layout/flat_layout.h"
#include "core/layout/geometry.h"
#include "core/layout/int8_blocks.h"
#include "core/layout/shard_mark.h"
#include "core/layout/unit_plan.h"
#include "core/paging/residency.h"
#include "core/runtime/copy_engine.h"
#include "offload/disk/disk_pager.h"

namespace tessera::internal {

// How a flat parameter is stored, gathered and reduced. The dtypes below apply to floating-point parameters only.
struct FlatParameterOptions {
  // The dtype of unsharded parameters, and so of computation and gradients. Shards always have the parameters' own
  // dtype. Empty, or for full_precision parameters: their own dtype.
  std::optional<at::ScalarType> gather_dtype;
  // The dtype in which gradients are reduced. Empty: gather_dtype.
  std::optional<at::ScalarType> reduce_dtype;
  // The wire format of unsharding all-gathers. Ignored for full_precision parameters, and in groups of one rank.
  WireFormat wire = WireFormat::kDtype;
  // The group of ranks that hold this shard in all copies of the model; null if there is one copy. Only the constructor
  // uses this group: with `sync_module_states`, all copies receive the values of the first copy's rank 0.
  Communicator* replicas = nullptr;
  // Allocates a tensor [numel] in host memory. An empty shard_memory or grad_memory means device memory.
  using Memory = std::function<at::Tensor(int64_t numel, at::ScalarType dtype)>;
  Memory shard_memory;
  Memory grad_memory;
  // Receives before_write() before writes to the shard, and refuse() for writes that set_shard_writable(false) forbids.
  // If the shard is on disk, the DiskPager receives refuse() instead. Must outlive the flat parameter.
  Pager* pager = nullptr;
  int page_id = 0;
  Memory low_precision_memory;  // allocates the gather_dtype copy of a host shard; empty: shard_memory
};

// The names, shapes and dtypes of parameters that share one flat buffer, and the layout of the buffer over ranks. A
// value type: uses no communicator. The parameters have one dtype, and all are trainable or all are frozen.
class FlatSpec {
 public:
  FlatSpec(std::string name, std::vector<PlannedParameter> parameters, int rank, int world_size,
           std::optional<at::ScalarType> gather_dtype, std::optional<at::ScalarType> reduce_dtype);

  const std::string& name() const { return name_; }
  const std::vector<PlannedParameter>& parameters() const { return parameters_; }
  const std::vector<ParameterGeometry>& geometries() const { return geometries_; }
  const ParameterGeometry& geometry(size_t parameter) const { return geometries_[parameter]; }
  const FlatLayout& layout() const { return layout_; }
  int rank() const { return rank_; }
  at::ScalarType dtype() const { return dtype_; }                // dtype of the shard and its gradient
  at::ScalarType gather_dtype() const { return gather_dtype_; }  // dtype of unsharded parameters
  at::ScalarType reduce_dtype() const { return reduce_dtype_; }
  bool is_cast() const { return gather_dtype_ != dtype_; }
  int64_t full_bytes() const { return bytes(layout_.full_numel(), gather_dtype_); }
  int64_t bucket_bytes() const { return bytes(layout_.full_numel(), reduce_dtype_); }
  int64_t shard_bytes() const { return bytes(layout_.shard_numel(), dtype_); }
  int64_t unsharded_bytes() const { return bytes(layout_.parameters_numel(), dtype_); }

  // Returns a parameter's part of `full`, [layout().full_numel()], as a view with the parameter's shape.
  at::Tensor view_in(const at::Tensor& full, size_t parameter) const {
    return internal::view_in(full, geometries_[parameter], layout_.offset(static_cast<int64_t>(parameter)));
  }
  // Returns this rank's part of `full`, [layout().full_numel()], as a view.
  at::Tensor own_part_of(const at::Tensor& full) const {
    return full.narrow(0, layout_.shard(rank_).begin, layout_.shard_numel());
  }
  // Returns this rank's part of a parameter as a 1-D view of `shard`, [layout().shard_numel()].
  at::Tensor part_of(const at::Tensor& shard, size_t parameter) const;
  std::string shard_label(size_t parameter) const;  // for errors: "parameter 'fc.weight' on rank 1"

 protected:
  static int64_t bytes(int64_t numel, at::ScalarType dtype) {
    return numel * static_cast<int64_t>(c10::elementSize(dtype));
  }
  std::vector<PlannedParameter> parameters_;

 private:
  const std::string name_;
  const std::vector<ParameterGeometry> geometries_;
  const at::ScalarType dtype_;
  const at::ScalarType gather_dtype_;
  const at::ScalarType reduce_dtype_;
  const int rank_;
  const FlatLayout layout_;
};

// The parameters of a unit that share one flat buffer. Each rank stores an equal part of the buffer (the shard) and the
// part's gradient. Used by one thread at a time, without autograd.
class FlatParameter : public FlatSpec {
 public:
  // Copies this rank's part of the parameters' values into a shard. With `sync_module_states`, copies rank 0's values
  // instead, and is collective. Does not change the parameters. `name` is for errors ("unit 'blocks.3'").
  FlatParameter(std::string name, std::vector<PlannedParameter> parameters, Communicator& comm, bool sync_module_states,
                const FlatParameterOptions& options = {});

  const at::Tensor& shard() const { return shard_; }  // this rank's part of the flat buffer, [layout().shard_numel()]
  // Returns the page of the shard. The page counts writes. After set_shard_writable(false), writes by operators throw.
  const Page& shard_page() const { return *shard_page_; }
  void set_shard_writable(bool writable) { shard_page_->set_writable(writable); }
  // Returns each parameter's part of the shard: 1-D leaf tensors, views of shard(), for users and optimizers.
  std::vector<at::Tensor>& parameter_shards() { return parameter_shards_; }
  // Whether a parameter's shard is still a view of shard(). False after the user's set_data().
  bool is_shard_attached(size_t parameter) const;

  // Returns the tensor that this rank sends in an all-gather into `full`, [layout().full_numel()] on the device. If the
  // shard must be cast or copied from the host, copies it into this rank's part of `full`; otherwise returns the shard.
  at::Tensor shard_for(const at::Tensor& full) const {
    if (full.scalar_type() == dtype() && !is_on_host_) return shard_;
    return own_part_of(full).copy_(shard_);
  }

  // Returns the number of bytes of an encoded shard; 0 if shards are sent unencoded.
  int64_t encoded_bytes() const { return encoded_bytes_; }
  // Starts an all-gather of encoded shards into `wire`, [comm.size() * encoded_bytes()] uint8. `shard` must be on the
  // device, and may have any floating-point dtype. After the all-gather, decode() must write `full`, including this
  // rank's part, so that all ranks have equal values.
  Pending gather_encoded(const at::Tensor& wire, const at::Tensor& shard, Communicator& comm) const {
    const at::Tensor own = wire.narrow(0, rank() * encoded_bytes_, encoded_bytes_);
    codec_->encode(shard, own);
    return comm.all_gather(wire, own, {}, name());
  }
  void decode(const at::Tensor& wire, const at::Tensor& full) const {
    for (int rank = 0; rank * encoded_bytes_ < wire.numel(); ++rank)
      codec_->decode(wire.narrow(0, rank * encoded_bytes_, encoded_bytes_),
                     full.narrow(0, layout().shard(rank).begin, layout().shard_numel()));
  }

  // For a shard in host memory, returns the tensor to copy to the device, in gather_dtype(): the shard or its
  // low-precision copy. Updates a stale copy first.
  const at::Tensor& link_source() {
    if (!low_precision_) return shard_;
    if (const uint32_t writes = shard_page().writes(); low_precision_->writes != writes) {
      low_precision_->values.copy_(shard_);
      low_precision_->writes = writes;
    }
    return low_precision_->values;
  }

  // Returns the low-precision copy, which may be stale; undefined if there is none.
  at::Tensor low_precision_values() const { return low_precision_ ? low_precision_->values : at::Tensor(); }

  // Returns the buffer that makes reduced gradients the `.grad` of parameter_shards().
  GradientBuffer& gradient() { return *gradient_; }
  const GradientBuffer& gradient() const { return *gradient_; }

 private:
  void make_shard(Communicator& comm, bool sync_module_states, const FlatParameterOptions& options);
  void read_own_parts(const at::Tensor& shard) const;
  void make_parameter_shards(at::Device device, const FlatParameterOptions::Memory& grad_memory);
  LowPrecisionPart low_precision_part(size_t parameter) const;

  const bool is_on_host_;
  const std::shared_ptr<const WireCodec> codec_;
  const int64_t encoded_bytes_;
  at::Tensor shard_;
  std::shared_ptr<LowPrecisionCopy> low_precision_;  // copy of a host shard in gather_dtype(); null if dtypes are equal
  std::vector<at::Tensor> parameter_shards_;
  std::unique_ptr<Page> own_page_;  // page of the shard; null if the shard is on disk: DiskPager owns that page
  Page* shard_page_ = nullptr;
  std::unique_ptr<GradientBuffer> gradient_;
};

// A flat parameter, the pages of its unsharded parameters, and its copy and all-gather in flight. Unit and the members
// of Unit use these fields.
struct PagedFlatParameter {
  FlatParameter flat;
  std::unique_ptr<Page> page;        // page of the unsharded parameters, in gather_dtype()
  std::unique_ptr<Page> exact_page;  // page of summoned parameters, in dtype(); null if no cast is needed
  std::unique_ptr<Page> host_page;   // page of parameters summoned to the host; null before the first summon
  uint32_t writes_before = 0;        // write count of the page in use, at the time of the summon
  size_t first_parameter = 0;        // index of its first parameter among all parameters of the model
  at::Tensor staging{};              // device copy of a shard in host memory, [shard_numel] of gather_dtype()
  Copy fetching{};                   // the copy into `staging`
  DiskPager::Hold held{};            // keeps a disk shard's values in memory while they are copied
  Pending gathering{};               // the all-gather in flight
  at::Tensor wire{};                 // the encoded bytes of all ranks, during an all-gather of encoded shards

  // Returns the page that the module's parameters view now.
  Page& page_in_use() const {
    if (host_page && host_page->is_attached()) return *host_page;
    return exact_page && exact_page->is_attached() ? *exact_page : *page;
  }
  // Makes the parameters views of page `to`, in `dtype`. Keeps the module's tensor objects, ties and requires_grad.
  void point_parameters(const Page& to, at::ScalarType dtype) const;
};

using FlatParameters = std::vector<std::unique_ptr<PagedFlatParameter>>;  // the flat parameters of one unit

// Splits a unit's parameters into groups, one for each flat parameter. The parameters of a group agree in dtype, full
// precision and requires_grad, so frozen parameters cost no gradient memory. Groups are in order of first appearance.
std::vector<std::vector<PlannedParameter>> split_into_flat_parameters(const PlannedUnit& unit);

// Splits the unit, copies its values to shards, and makes the module's parameters views of pages with id `index`.
// `name` is for errors. Collective if `sync_module_states`.
FlatParameters make_flat_parameters(const PlannedUnit& unit, const std::string& name, int index, Communicator& comm,
                                    bool sync_module_states, const FlatParameterOptions& options);

}  // namespace tessera::internal
