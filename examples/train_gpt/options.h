#pragma once

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <iosfwd>
#include <optional>
#include <string>

#include "examples/common/option_checks.h"
#include "examples/common/precision.h"
#include "gpt.h"

namespace train_gpt {

using examples::OptionsError;
using examples::Precision;

// The layout of the training state. kDdp to kFsdp are ZeRO stages 0 to 3, which shard nothing, then optimizer state,
// then also gradients, then also parameters.
enum class Wrapper { kLocal, kDdp, kOss, kSdp, kFsdp };

// The place of parameters and optimizer state that are not in use. kNone: the device of the rank.
enum class Offload { kNone, kCpu, kDisk };

enum class OptimizerKind { kAdamW, kAdamW8bit, kMuon, kLion, kAdafactor, kScheduleFree, kLamb, kSgd };

// The format of the frozen weights under adapters: as loaded, in 4 bits, or in 8 bits.
enum class BaseFormat { kFull, kNf4, kInt8 };

// The number of sequences per step after an elastic run has lost ranks: the same, or in proportion to the ranks.
enum class ElasticBatch { kKeep, kFollow };

const char* name_of(Wrapper wrapper);
const char* name_of(OptimizerKind optimizer);
const char* name_of(Offload offload);
const char* name_of(BaseFormat format);

// The command line. `train_gpt --help` describes each option.
struct TrainOptions {
  std::filesystem::path data;  // examples/data
  std::filesystem::path out = "out/train_gpt";
  std::optional<int> ranks;    // default: the launcher's number of ranks, or 1 without a launcher
  bool oversubscribe = false;  // allows more than 4 ranks a core
  bool elastic = false;        // survive the death of ranks
  ElasticBatch elastic_batch = ElasticBatch::kKeep;
  int64_t copy_every = 10;           // elastic: steps between copies of the state
  std::filesystem::path rendezvous;  // elastic: folder by which processes join (ElasticOptions::rendezvous)
  int restarts = 3;                  // elastic: maximum number of restarts of each rank
  bool plan = false;                 // print the memory that each rank would need; do not train

  Wrapper wrapper = Wrapper::kFsdp;
  int prefetch = 1;
  bool reshard_after_forward = true;
  bool int8_wire = false;  // collectives send 8-bit values; for kFsdp and kSdp only
  Offload offload = Offload::kNone;
  std::filesystem::path offload_directory;  // for kDisk only
  double device_fraction = 0;               // for kFsdp with offload only
  bool step_in_backward = false;            // for kFsdp with offload only
  bool capture = false;                     // replay each step as one CUDA graph
  int threads = 0;                          // intra-operator threads; 0: the number that tessera::init() sets
  examples::ComputeOptions compute;

  GptOptions model;  // the data determines the size of the vocabulary

  int64_t batch = 8;
  int64_t accumulate = 1;
  int64_t steps = 1000;
  int64_t seed = 1;
  OptimizerKind optimizer = OptimizerKind::kAdamW;
  double ema = 0;  // decay of the average of weights; 0: no average
  double lr = 1e-3;
  std::optional<int64_t> warmup;
  double weight_decay = 0.1;
  double clip = 1.0;

  std::optional<int64_t> val_every;
  int64_t val_batches = 8;

  int64_t save_every = 0;      // steps between checkpoints; 0: no checkpoints
  int64_t keep = 3;            // number of checkpoints that are kept
  std::string resume;          // "auto", a checkpoint's directory, or empty: start a new run
  bool allow_changes = false;  // lr, warmup, weight_decay, clip and ema may differ from those of the resumed run

  std::string import_gpt2;  // directory of a GPT-2 in Hugging Face's format, or empty
  std::string export_gpt2;  // directory in this format to write at the end, or empty

  int64_t lora_rank = 0;  // 0: no adapters, train the weights
  BaseFormat base = BaseFormat::kFull;

  std::string tensorboard;              // folder for TensorBoard's files, or empty
  std::optional<int64_t> report_every;  // steps between reports of waits; 0: no reports

  int64_t sample = 400;
  std::string prompt;
  double temperature = 0.8;
  int64_t top_k = 20;

  int64_t warmup_steps() const { return warmup.value_or(steps / 20); }
  int64_t report_interval() const { return report_every.value_or(tensorboard.empty() ? 0 : 10); }
  int64_t validation_interval() const { return val_every.value_or(std::max<int64_t>(1, steps / 10)); }
};

// Returns the default options with --demo.
TrainOptions demo_options();

// Parses a command line. With --help, writes the help text to `help` and returns nullopt. Throws OptionsError.
std::optional<TrainOptions> parse_options(int argc, const char* const* argv, std::ostream& help);

}  // namespace train_gpt
