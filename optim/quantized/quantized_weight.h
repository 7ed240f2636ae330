#pragma once

#include <torch/nn/module.h>

#include <memory>
#include <string>
#include <vector>

#include "core/paging/stand_in.h"
#include "optim/quantized/weight_format.h"

namespace tessera::internal {

// Stands in for a Linear's weight. Decodes the weight's values for each operator that uses handle(). If an adapter is
// not merged, operators other than at::linear throw std::logic_error. Backward of at::linear decodes the values again.
// The encoded bytes are a parameter of the module, so wrappers shard, unshard and save them like other parameters.
class QuantizedWeight : public StandIn, public std::enable_shared_from_this<QuantizedWeight> {
 public:
  // Replaces the [rows, columns] parameter `name` of `owner` by its frozen encoded bytes. With kFull, only freezes it.
  // If lora.rank > 0, registers an adapter. `fqn` names the weight in errors.
  static std::shared_ptr<QuantizedWeight> make(torch::nn::Module& owner, const std::string& name, std::string fqn,
                                               WeightFormat format, const LoraOptions& lora);

  // Returns the tensor to use as the weight: [rows, columns], in the weight's dtype.
  at::Tensor handle();

  const std::string& fqn() const { return fqn_; }
  WeightFormat format() const { return format_; }
  at::IntArrayRef sizes() const { return sizes_; }
  // Returns "lora_a" for "a". If the weight's name is not "weight", the result begins with that name and "_".
  std::string adapter_name(const char* which) const {
    return (name_ == "weight" ? "lora_" : name_ + "_lora_") + std::string(which);
  }
  bool has_adapter() const { return a_.defined(); }
  bool is_merged() const { return merged_.defined(); }

  // Return the weight, [rows, columns] in its dtype, with or without the adapter. The first overload reads this
  // object's tensors. The second overload reads its arguments: the same tensors from a state dictionary.
  at::Tensor values(bool with_adapter) const { return values(bytes_, a_, b_, with_adapter); }
  at::Tensor values(const at::Tensor& bytes, const at::Tensor& a, const at::Tensor& b, bool with_adapter) const;
  void merge();
  void unmerge() { merged_.reset(); }

  at::Tensor values_for(const std::string& operation) const override;
  at::Tensor linear(const at::Tensor& input, const at::Tensor& bias) override;
  const char* what_it_is() const override { return "quantized"; }

  // Returns the decoded weight, [rows, columns], without the adapter.
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
  at::Tensor bytes_;   // the registered parameter
  at::Tensor a_, b_;   // adapter: [rank, columns] and [rows, rank]
  at::Tensor merged_;  // weight and adapter in one, from merge(); undefined if not merged
};

}  // namespace tessera::internal
