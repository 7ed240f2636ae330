#pragma once

#include <torch/nn/module.h>

#include <memory>
#include <string>
#include <vector>

#include "core/paging/stand_in.h"
#include "optim/quantized/weight_format.h"

namespace tessera::internal {

// What stands where a Linear had its weight: operators that are given handle() are given the weight's values, decoded
// for them alone, and at::linear decodes them again in backward in the place of keeping them. The bytes are the
// module's own parameter, which wrappers shard, gather and save as any other.
class QuantizedWeight : public StandIn, public std::enable_shared_from_this<QuantizedWeight> {
 public:
  // Of `owner`'s parameter `name`, [rows, columns], which becomes the frozen bytes in place (kFull: stays, frozen);
  // registers `name`s adapters beside it. `fqn` is for errors.
  static std::shared_ptr<QuantizedWeight> make(torch::nn::Module& owner, const std::string& name, std::string fqn,
                                               WeightFormat format, const LoraOptions& lora);

  // The tensor for which it stands: [rows, columns], of the weight's dtype.
  at::Tensor handle();

  const std::string& fqn() const { return fqn_; }
  WeightFormat format() const { return format_; }
  at::IntArrayRef sizes() const { return sizes_; }
  // "lora_a" for "a"; of a weight that is not called "weight", with its name before.
  std::string adapter_name(const char* which) const {
    return (name_ == "weight" ? "lora_" : name_ + "_lora_") + std::string(which);
  }
  bool has_adapter() const { return a_.defined(); }
  bool is_merged() const { return merged_.defined(); }

  // [rows, columns] of the weight's dtype, with the adapter or without; `bytes`, `a` and `b` are its own, or what a
  // state dictionary has in their place.
  at::Tensor values(bool with_adapter) const { return values(bytes_, a_, b_, with_adapter); }
  at::Tensor values(const at::Tensor& bytes, const at::Tensor& a, const at::Tensor& b, bool with_adapter) const;
  void merge();
  void unmerge() { merged_.reset(); }

  // StandIn
  at::Tensor values_for(const std::string& operation) const override;
  at::Tensor linear(const at::Tensor& input, const at::Tensor& bias) override;
  const char* what_it_is() const override { return "quantized"; }

  // Decoded, [rows, columns].
  at::Tensor base(at::ScalarType dtype) const;

 private:
  QuantizedWeight(torch::nn::Module& owner, const std::string& name, std::string fqn, WeightFormat format,
                  const LoraOptions& lora);

  const std::weak_ptr<torch::nn::Module> owner_;
  const std::string name_, fqn_;
  const WeightFormat format_;
  const LoraOptions lora_;
  const std::vector<int64_t> sizes_;
  const at::ScalarType dtype_;
  at::Tensor bytes_;   // the parameter
  at::Tensor a_, b_;   // [rank, columns], [rows, rank]
  at::Tensor merged_;  // values with the adapter, while they are merged
};

}  // namespace tessera::internal
