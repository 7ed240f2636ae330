#pragma once

#include <torch/nn/module.h>
#include <torch/ordered_dict.h>

#include <cstdint>
#include <string>
#include <vector>

#include <tessera/wrap.h>

namespace tessera {

// The storage format of a frozen weight.
enum class WeightFormat : uint8_t {
  kFull,  // the weight's own dtype, not quantized
  // 4 bits: QLoRA's NormalFloat (Dettmers et al., 2023). An element is rounded to the nearest of 16 quantiles of the
  // normal distribution, times an fp32 scale for each block of 64 elements: 4.5 bits an element.
  kNf4,
  // kNf4 with scales of 8 bits, as in bitsandbytes: the scales minus their mean, in blocks of 256, by the dynamic map.
  // 4.13 bits an element.
  kNf4Double,
  kInt8,  // 8 bits; blocks of 64 elements with an fp32 scale: 8.5 bits an element
};

// A low-rank adapter that is added to a frozen weight (Hu et al., 2021): y = W x + alpha / rank * B A dropout(x).
struct LoraOptions {
  int64_t rank = 0;    // rank of the adapter; 0: no adapter
  double alpha = 16;   // the factor alpha of the formula
  double dropout = 0;  // probability of dropout in the adapter's input, in training mode
};

// Options of quantize_linears().
struct QuantizeOptions {
  WeightFormat format = WeightFormat::kNf4Double;
  LoraOptions lora{};  // rank 0: no adapters
  // Selects Linear layers by name and by the numel of their weights, like a policy for units. Empty: all layers.
  WrapPolicy which{};
  // true: freezes all other parameters, so that only the adapters train (QLoRA). false: leaves them unchanged.
  bool freeze_others = true;
};

// Replaces the weights of torch::nn::Linear layers by frozen weights of `format`, with LoRA adapters. Finds layers
// everywhere: members of a program's own modules, Sequential, AnyModule, ModuleList, the model itself, linear nodes of
// an ExportedModule. No module changes its type. `weight` becomes a read-only stand-in for the decoded values.
// forward() of a Linear also adds the adapter's result. Returns the layers' names, in order.
//
//   tessera::quantize_linears(*model, {.lora = {.rank = 16}});
//   tessera::FullyShardedDataParallel fsdp(model, comm, {.auto_wrap = ...});
//   torch::optim::AdamW optimizer(fsdp.parameters(), 1e-4);  // frozen parameters have no gradients
//
// The parameters become "<layer>.weight", frozen (1-D uint8: the encoded values; kFull: unchanged), and
// "<layer>.lora_a", [rank, in], and "<layer>.lora_b", [out, rank], in the weight's dtype. They are sharded, gathered
// and saved like other parameters. Must be called once, before wrapping, with the model on the training device. lora_a
// is random, and lora_b is zero. If sync_module_states is false, all ranks must therefore use equal seeds.
//
// If called inside deferred() after the model is built, allocates no memory. Wrapping the model then reads and
// quantizes one weight at a time. If each rank reads the weights itself (load_exported()), they may also be quantized
// after deferred() has ended. Each rank then reads every weight of which it keeps a part in full.
//
// Backward decodes a layer again, so no decoded values are kept after forward. Call to() before quantize_linears(): a
// layer whose encoded bytes were converted throws on use. clone() of a layer is not supported.
//
// Not collective. Throws std::invalid_argument, with nothing changed, for invalid options and if no layer is selected.
// Also throws it, naming the layer, for a weight that is tied, sharded, quantized, not finite or not floating-point, or
// in a module that no std::shared_ptr owns. After deferred() has ended, also throws it for a deferred weight that no
// file contains.
std::vector<std::string> quantize_linears(torch::nn::Module& module, const QuantizeOptions& options = {});

// Decodes the weights, adds the adapters, and keeps the results for evaluation. Until unmerge_adapters(), a forward in
// training mode, with gradients enabled, throws std::logic_error. After a load or step, the results are stale until
// this function is called again. unmerge_adapters() restores the previous bits. Collective only under
// FullyShardedDataParallel, where each rank then holds the merged weights in full.
void merge_adapters(torch::nn::Module& module);
// Frees the merged values. Layers then compute with the quantized weights and the adapters again.
void unmerge_adapters(torch::nn::Module& module);

// Returns the state that the model had before quantize_linears(), under the original names. Computes it from `state`,
// the quantized model's full_state_dict() or named_parameters(). If `with_adapters`, the weights include the adapters.
// The result can be saved, or loaded into an ordinary model. `module` defines the layers and formats. Throws
// std::invalid_argument if `state` lacks a name. Not collective.
torch::OrderedDict<std::string, at::Tensor> dequantized_state(const torch::nn::Module& module,
                                                              const torch::OrderedDict<std::string, at::Tensor>& state,
                                                              bool with_adapters = true);

}  // namespace tessera
