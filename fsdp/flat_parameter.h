#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <tessera/communicator.h>
#include "core/gradients/gradient_buffer.h"
#include "core/layout/flat_layout.h"
#include "core/layout/geometry.h"
#include "core/layout/int8_blocks.h"
#include "core/layout/shard_mark.h"
#include "core/layout/unit_plan.h"
#include "core/paging/residency.h"

namespace tessera::internal {

// In what floating-point parameters differ from plain sharding over all ranks.
struct FlatParameterOptions {
  // Gathered parameters, and so what is computed with them and their gradients, are of this type; the shards stay in
  // the parameters' own. Ignored for full_precision parameters and integers.
  std::optional<at::ScalarType> gather_dtype;
  // Gradients are reduced in this type. Empty: gather_dtype.
  std::optional<at::ScalarType> reduce_dtype;
  // How parameters travel in gathers for use: in blocks where they would be cast, and there are other ranks.
  WireFormat wire = WireFormat::kDtype;
  // The ranks that hold the same part in the other copies of the model, this one among them. With
  // `sync_module_states`, values come from the first rank of the first copy. Outlives the constructor only.
  Communicator* replicas = nullptr;
  // Where the shard and its gradient lie, if not on the communicator's device: called for a tensor
  // [numel] in host memory. Empty: on the device.
  using Memory = std::function<at::Tensor(int64_t numel, at::ScalarType dtype)>;
  Memory shard_memory;
  Memory grad_memory;
  // Hears of writes to the shard, and is asked about those that are not allowed (set_shard_writable) unless it is on a
  // disk. Outlives the flat parameter.
  Pager* pager = nullptr;
  int page_id = 0;
  Memory low_precision_memory;  // for the copy of a shard in host memory that is cast; empty: shard_memory
};

// The parameters of a unit that have one dtype and are all trainable or all frozen, as one: a flat buffer, of which
// this rank keeps an even part, and the same of gradients. Used by one thread at a time, under no autograd.
class FlatParameter {
 public:
  // Takes this rank's part of the parameters' values: rank 0's if `sync_module_states`, else its own. Collective
  // if `sync_module_states`. The parameters themselves stay as they are. `name` is for errors ("unit 'blocks.3'").
  FlatParameter(std::string name, std::vector<PlannedParameter> parameters, Communicator& comm, bool sync_module_states,
                const FlatParameterOptions& options = {});

  const std::string& name() const { return name_; }
  const std::vector<PlannedParameter>& parameters() const { return parameters_; }
  const std::vector<ParameterGeometry>& geometries() const { return geometries_; }
  const ParameterGeometry& geometry(size_t parameter) const { return geometries_[parameter]; }
  const FlatLayout& layout() const { return layout_; }
  at::ScalarType dtype() const { return dtype_; }                // of the shard and its gradient
  at::ScalarType gather_dtype() const { return gather_dtype_; }  // of the parameters in use
  at::ScalarType reduce_dtype() const { return reduce_dtype_; }
  bool is_cast() const { return gather_dtype_ != dtype_; }
  int64_t full_bytes() const { return bytes(layout_.full_numel(), gather_dtype_); }
  int64_t bucket_bytes() const { return bytes(layout_.full_numel(), reduce_dtype_); }
  int64_t shard_bytes() const { return bytes(layout_.shard_numel(), dtype_); }
  bool has_low_precision_copy() const { return low_precision_ != nullptr; }
  int64_t unsharded_bytes() const { return bytes(layout_.parameters_numel(), dtype_); }

  // This rank's part of the flat buffer, [layout().shard_numel()].
  const at::Tensor& shard() const { return shard_; }
  // The page that the shard is a view of, which counts writes to it. set_shard_writable(false) has operators that
  // write to it refused.
  const Page& shard_page() const { return *page_of(shard_); }
  void set_shard_writable(bool writable) { page_of(shard_)->set_writable(writable); }
  // The same by parameter: 1-D leaves, views of shard(), what users and optimizers hold.
  std::vector<at::Tensor>& parameter_shards() { return parameter_shards_; }
  // Whether it still is that view: set_data() gives it another.
  bool is_shard_home(size_t parameter) const;

  // The view of a parameter in a flat buffer of layout().full_numel() elements, in its own shape.
  at::Tensor view_in(const at::Tensor& full, size_t parameter) const {
    return internal::view_in(full, geometries_[parameter], layout_.offset(static_cast<int64_t>(parameter)));
  }

  // Starts filling `full`, of any dtype, with every rank's shard, cast before it travels. A shard in
  // host memory is copied to the device first.
  Pending gather(const at::Tensor& full, Communicator& comm) const;

  // The encoded bytes of a shard; 0 if shards are sent as they are.
  int64_t encoded_bytes() const { return encoded_bytes_; }
  // Starts gathering encoded shards into `wire`, [size() * encoded_bytes()] uint8. `shard` is on the device, of any
  // dtype. After the exchange decode() must be called, which decodes this rank's shard too: all ranks get equal values.
  Pending gather_encoded(const at::Tensor& wire, const at::Tensor& shard, Communicator& comm) const;
  void decode(const at::Tensor& wire, const at::Tensor& full) const;

  // What travels of a shard in host memory, in gather_dtype(): the shard itself, or its copy in 16
  // bit, brought up to date if the shard was written by someone who did not write the copy.
  const at::Tensor& link_source();

  // That copy as it is; undefined without one.
  at::Tensor low_precision_values() const { return low_precision_ ? low_precision_->values : at::Tensor(); }

  // Where reduced gradients become those of parameter_shards().
  GradientBuffer& gradient() { return *gradient_; }
  const GradientBuffer& gradient() const { return *gradient_; }

 private:
  static int64_t bytes(int64_t numel, at::ScalarType dtype) {
    return numel * static_cast<int64_t>(c10::elementSize(dtype));
  }
  void make_shard(Communicator& comm, bool sync_module_states, const FlatParameterOptions& options);
  void read_own_parts(const at::Tensor& shard) const;
  void make_parameter_shards(at::Device device, const FlatParameterOptions::Memory& grad_memory);
  at::Tensor own_part_of(const at::Tensor& full) const {
    return full.narrow(0, layout_.shard(rank_).begin, layout_.shard_numel());
  }
  at::Tensor part_of(const at::Tensor& shard, size_t parameter) const;
  std::string shard_label(size_t parameter) const;
  LowPrecisionPart low_precision_part(size_t parameter) const;

  const std::string name_;
  std::vector<PlannedParameter> parameters_;
  const std::vector<ParameterGeometry> geometries_;
  const at::ScalarType dtype_;
  const at::ScalarType gather_dtype_;
  const at::ScalarType reduce_dtype_;
  const FlatLayout layout_;
  const int rank_;
  const bool is_on_host_;
  const std::shared_ptr<const WireCodec> codec_;
  const int64_t encoded_bytes_;
  at::Tensor shard_;
  std::shared_ptr<LowPrecisionCopy> low_precision_;  // of a shard in host memory that is cast for use
  std::vector<at::Tensor> parameter_shards_;
  std::unique_ptr<Page> shard_page_;  // that counts writes to the shard; null on a disk, which has pages of its own
  std::unique_ptr<GradientBuffer> gradient_;
};

// Splits a unit's parameters into those of each flat parameter: by dtype, those of full precision from those that are
// cast, and frozen from trainable, so that frozen parameters cost no gradient memory. In order of first appearance.
std::vector<std::vector<PlannedParameter>> split_into_flat_parameters(const PlannedUnit& unit);

}  // namespace tessera::internal
