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
  // 4 bit, QLoRA's NormalFloat (Dettmers et al., 2023): blocks of 64 elements, each the nearest of 16 quantiles of the
  // normal distribution times the block's largest absolute value, which is fp32: 4.5 bits an element.
  kNf4,
  // kNf4 with its scales in 8 bit, as in bitsandbytes (its dynamic map, blocks of 256, minus their mean): 4.13 bits an
  // element.
  kNf4Double,
  kInt8,  // blocks of 64 elements: 8.5 bits an element
};

// A low-rank adapter that is added to a frozen weight (Hu et al., 2021): y = W x + alpha / rank * B A dropout(x).
struct LoraOptions {
  int64_t rank = 0;    // 0: none
  double alpha = 16;   // the factor alpha of the formula
  double dropout = 0;  // of the adapter's input, while the module trains
};

// Options of quantize_linears().
struct QuantizeOptions {
  WeightFormat format = WeightFormat::kNf4Double;
  LoraOptions lora{};  // rank 0: no adapters
  // Selects Linear layers by name and numel of the weight, as a WrapPolicy selects modules. Empty: all.
  WrapPolicy which{};
  // Freezes all other parameters, so that only the adapters train (QLoRA); false: leaves them unchanged.
  bool freeze_others = true;
};

// Replaces the weights of torch::nn::Linear layers by frozen weights of `format`, with LoRA adapters. Finds layers
// anywhere: members of your own types, Sequential, AnyModule, ModuleList, the model itself, linear nodes of an
// ExportedModule. No module changes its type. `weight` becomes a read-only stand-in for the decoded values; a Linear's
// forward() computes with the adapter, too. Returns the layers' names, in order.
//
//   tessera::quantize_linears(*model, {.lora = {.rank = 16}});
//   tessera::FullyShardedDataParallel fsdp(model, comm, {.auto_wrap = ...});
//   torch::optim::AdamW optimizer(fsdp.parameters(), 1e-4);  // frozen parameters have no gradients
//
// The parameters become "<layer>.weight", [encoded_bytes()] uint8, frozen, and "<layer>.lora_a", [rank, in], and
// "<layer>.lora_b", [out, rank], in the weight's dtype. They are sharded, gathered and saved like other parameters.
// Must be called once, before wrapping, on the training device. Adapters start as a zero update, so ranks need equal
// seeds only without sync_module_states.
//
// If called inside deferred(), after the model is built, it reads, computes and allocates nothing; wrapping the model
// then does, one weight at a time. Weights that each rank reads for itself (load_exported()) may also be quantized
// after deferred(); a rank reads every weight of which it keeps a part.
//
// Backward decodes a layer again; no decoded values are kept between forward and backward. Convert the model with to()
// before, not after: the use of converted bytes throws. clone() of a layer is not supported.
//
// Is not collective. Throws std::invalid_argument, with nothing changed, if no layer is selected; if a layer, named in
// the error, is tied, paged, not of floating-point type, already quantized, or recorded by a deferred() that has ended;
// and for invalid options.
std::vector<std::string> quantize_linears(torch::nn::Module& module, const QuantizeOptions& options = {});

// Decodes the weights, adds the adapters and keeps the result for evaluation. A module that trains while merged throws
// std::logic_error. Values loaded or stepped afterwards are not included: call it again. unmerge_adapters() restores
// the previous bits. Is not collective, except under FullyShardedDataParallel, where each rank then holds the merged
// weights in full.
void merge_adapters(torch::nn::Module& module);
// Frees the values of merge_adapters().
void unmerge_adapters(torch::nn::Module& module);

// Returns the state that the model had before quantize_linears(), under its names, computed from `state`, the quantized
// model's full_state_dict() or named_parameters(). With `with_adapters`, the weights include the adapters. The result
// can be saved, or loaded into an ordinary model. `module` defines the layers and formats. Throws std::invalid_argument
// for missing names. Is not collective.
torch::OrderedDict<std::string, at::Tensor> dequantized_state(const torch::nn::Module& module,
                                                              const torch::OrderedDict<std::string, at::Tensor>& state,
                                                              bool with_adapters = true);

}  // namespace tessera
