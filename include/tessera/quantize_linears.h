#pragma once

#include <torch/nn/module.h>
#include <torch/ordered_dict.h>

#include <cstdint>
#include <string>
#include <vector>

#include <tessera/wrap.h>

namespace tessera {

// In what form a frozen weight is kept.
enum class WeightFormat : uint8_t {
  kFull,  // as it is
  // 4 bit, QLoRA's NormalFloat (Dettmers et al., 2023): blocks of 64 elements, each the nearest of 16 quantiles of the
  // normal distribution times the block's largest absolute value, which is fp32: 4.5 bits an element.
  kNf4,
  // As kNf4, with those values in 8 bit themselves, as bitsandbytes has it (its dynamic map, blocks of 256, less their
  // mean): 4.13 bits an element.
  kNf4Double,
  kInt8,  // blocks of 64 elements: 8.5 bits an element
};

// A low-rank adapter beside a frozen weight (Hu et al., 2021): y = W x + alpha / rank * B A dropout(x).
struct LoraOptions {
  int64_t rank = 0;    // 0: none
  double alpha = 16;   // see above
  double dropout = 0;  // of the adapter's input, while the module trains
};

// How quantize_linears() changes the layers that it takes.
struct QuantizeOptions {
  WeightFormat format = WeightFormat::kNf4Double;
  LoraOptions lora{};  // rank 0: no adapters
  // Which of the Linear layers, as a policy of units names modules; asked with the weight's number of elements. Empty:
  // all.
  WrapPolicy which{};
  // Freezes what else the model has, so that the adapters alone are trained (QLoRA); false: leaves it as it is.
  bool freeze_others = true;
};

// Turns the weights of torch::nn::Linear layers, wherever they are (members of a type of yours, Sequential, AnyModule,
// ModuleList, the model itself, an ExportedModule's linear nodes), into frozen ones of `format`, with LoRA adapters
// beside them. No module changes its type: `weight` stands for its values from then on, read only, and computes with
// the adapter where a Linear's forward() uses it. Returns the layers' names, in order.
//
//   tessera::quantize_linears(*model, {.lora = {.rank = 16}});
//   tessera::FullyShardedDataParallel fsdp(model, comm, {.auto_wrap = ...});
//   torch::optim::AdamW optimizer(fsdp.parameters(), 1e-4);  // what is frozen has no gradients
//
// Parameters are then "<layer>.weight", [encoded_bytes()] uint8, frozen; "<layer>.lora_a", [rank, in], and
// "<layer>.lora_b", [out, rank], of the weight's dtype. They are sharded, gathered and saved as any other, the first in
// its bytes. Before wrapping, on the device where it trains, once. Adapters begin at 0: ranks need the same seed only
// without sync_module_states.
//
// In deferred(), after the model has been built, nothing is read, computed or allocated until the model is wrapped, and
// then a weight at a time. Weights that each rank reads for itself (load_exported()) may be quantized after deferred(),
// too; a rank reads all of those of which it keeps a part.
//
// A layer that is decoded in forward is decoded again in backward; nothing of it is kept in between. Convert the model
// (to()) before: bytes that were converted are refused when they are used. clone() of a layer is not supported.
//
// Not collective. Throws std::invalid_argument, with nothing changed, for a model with none of these layers, and one by
// name that is tied, paged, not of floating-point type or quantized already, or was written down by a deferred() that
// has ended; for options that cannot be meant.
std::vector<std::string> quantize_linears(torch::nn::Module& module, const QuantizeOptions& options = {});

// Computes with weights that have the adapters in them, decoded and kept for it, in evaluation; a module that trains
// meanwhile throws std::logic_error. Values that are loaded or stepped after it are not in them: merge anew.
// unmerge_adapters() takes them out again: the bits of before. Not collective but under FullyShardedDataParallel, where
// each rank then has the merged weights in full.
void merge_adapters(torch::nn::Module& module);
// See merge_adapters().
void unmerge_adapters(torch::nn::Module& module);

// What full_state_dict() or named_parameters() of such a model has, as the model had it before quantize_linears(),
// under its names, with the adapters in the weights if `with_adapters`: to be saved, or loaded into an ordinary model.
// `module` says what is what. Throws std::invalid_argument for names that are missing. Not collective.
torch::OrderedDict<std::string, at::Tensor> dequantized_state(const torch::nn::Module& module,
                                                              const torch::OrderedDict<std::string, at::Tensor>& state,
                                                              bool with_adapters = true);

}  // namespace tessera
