#include "options.h"

#include <algorithm>
#include <boost/program_options.hpp>
#include <iostream>

namespace train_step {
namespace {

namespace po = boost::program_options;

void check_choice(const char* flag, const std::string& value, const std::vector<std::string>& choices) {
  if (std::find(choices.begin(), choices.end(), value) != choices.end()) return;
  std::string text;
  for (const auto& choice : choices) text += (text.empty() ? "" : choice == choices.back() ? " or " : ", ") + choice;
  throw po::error(std::string("--") + flag + " must be " + text + ", got '" + value + "'");
}

void check_least(const char* flag, int64_t value, int64_t least) {
  if (value < least)
    throw po::error(std::string("--") + flag + " must be at least " + std::to_string(least) + ", got " +
                    std::to_string(value));
}

// Replaces sizes of 0 by those of docs/benchmarks.md.
void fill_in(Options& options) {
  struct Sizes {
    const char* model;
    int64_t batch, layers, width;
  };
  for (const Sizes& sizes : {Sizes{"gpt", 4, 6, 384}, Sizes{"deep", 8, 48, 512}, Sizes{"recipe", 20, 20, 2000},
                             Sizes{"mlp", 16, 2, 256}, Sizes{"archive", 4, 1, 1}}) {
    if (options.model != sizes.model) continue;
    if (options.batch == 0) options.batch = sizes.batch;
    if (options.layers == 0) options.layers = sizes.layers;
    if (options.width == 0) options.width = sizes.width;
  }
}

void check(const Options& options) {
  check_choice("model", options.model, {"gpt", "deep", "recipe", "mlp", "archive"});
  if ((options.model == "archive") == options.archive.empty() || (options.model == "archive") == options.unit.empty())
    throw po::error("--model archive, --archive and --unit go together");
  check_choice("wrapper", options.wrapper, {"local", "ddp", "oss", "sdp", "fsdp"});
  check_choice("optimizer", options.optimizer, {"adam", "sgd"});
  check_least("ranks", options.ranks, 1);
  check_least("batch", options.batch, 1);
  check_least("steps", options.steps, 1);
  check_least("warmup", options.warmup, 0);
  check_least("threads", options.threads, 1);
  check_least("layers", options.layers, 1);
  check_least("width", options.width, 1);
  check_least("heads", options.heads, 1);
  check_least("context", options.context, 1);
  check_least("vocabulary", options.vocabulary, 2);
  check_least("prefetch", options.prefetch, 0);
  if (options.model == "mlp" && (options.layers != 2 || options.width != 256))
    throw po::error("--layers and --width: the mlp is 256-128-10, as in examples/stages; take deep for other sizes");
  if (options.model == "gpt" && options.width % options.heads != 0)
    throw po::error("--width " + std::to_string(options.width) + " does not divide into --heads " +
                    std::to_string(options.heads));
}

}  // namespace

std::optional<Options> parse(int argc, char** argv) {
  Options options;
  std::string dtype = "float32", wire = "exact";
  bool no_reshard = false, whole = false;
  po::options_description all("train_step: measures time, memory and traffic of one training step");
  all.add_options()("help,h", "this text")("model", po::value(&options.model)->default_value(options.model),
                                           "gpt, deep, recipe, mlp or archive")(
      "archive", po::value(&options.archive),
      "of --model archive: a file of torch.export.save(), which maps tokens to a loss")(
      "unit", po::value(&options.unit), "of --model archive: the class of its layers, such as LlamaDecoderLayer")(
      "wrapper", po::value(&options.wrapper)->default_value(options.wrapper),
      "local (each rank by itself), ddp, oss (with ddp), sdp (with oss) or fsdp")(
      "optimizer", po::value(&options.optimizer)->default_value(options.optimizer), "adam (fused) or sgd")(
      "ranks", po::value(&options.ranks)->default_value(options.ranks),
      "processes to start; a launcher's number takes precedence")(
      "batch", po::value(&options.batch),
      "rows, or sequences, of each rank; default: gpt 4, deep 8, recipe 20, mlp 16, archive 4")(
      "steps", po::value(&options.steps)->default_value(options.steps), "timed steps")(
      "warmup", po::value(&options.warmup)->default_value(options.warmup), "steps before the timed ones")(
      "threads", po::value(&options.threads)->default_value(options.threads), "intra-operator threads of each rank")(
      "dtype", po::value(&dtype)->default_value(dtype), "float32 or bfloat16: parameters, gradients and computation")(
      "layers", po::value(&options.layers),
      "or --count: blocks of gpt (6), linear layers of deep (48) and recipe (20)")(
      "width", po::value(&options.width), "features: gpt 384, deep 512, recipe 2000")(
      "heads", po::value(&options.heads)->default_value(options.heads), "of gpt")(
      "context", po::value(&options.context)->default_value(options.context), "tokens in a sequence of gpt or archive")(
      "vocabulary", po::value(&options.vocabulary)->default_value(options.vocabulary), "of gpt or archive")(
      "prefetch", po::value(&options.prefetch)->default_value(options.prefetch), "of fsdp: units gathered ahead")(
      "wire", po::value(&wire)->default_value(wire),
      "exact or int8: format of fsdp's parameters and gradients, and of sdp's gradients, in messages")(
      "no-reshard", po::bool_switch(&no_reshard), "of fsdp: units stay gathered from forward to backward")(
      "whole", po::bool_switch(&whole),
      "of fsdp: build the whole model on each rank, then shard it; default: unit by unit")(
      "json", po::bool_switch(&options.json), "one line of JSON instead of text");
  po::variables_map values;
  std::vector<std::string> arguments(argv + 1, argv + argc);
  for (auto& argument : arguments)  // --count is a second name of --layers, for which Boost has no feature
    if (argument == "--count" || argument.starts_with("--count=")) argument.replace(0, 7, "--layers");
  po::store(po::command_line_parser(arguments).options(all).run(), values);
  po::notify(values);
  if (values.count("help") > 0) {
    std::cout << all;
    return std::nullopt;
  }
  check_choice("dtype", dtype, {"float32", "bfloat16"});
  check_choice("wire", wire, {"exact", "int8"});
  options.int8_wire = wire == "int8";
  if (options.int8_wire && options.wrapper != "fsdp" && options.wrapper != "sdp")
    throw po::error("--wire int8 goes with --wrapper fsdp or sdp, got '" + options.wrapper + "'");
  options.dtype = dtype == "float32" ? at::kFloat : at::kBFloat16;
  options.reshard = !no_reshard;
  options.deferred = !whole;
  for (const char* flag : {"batch", "layers", "width"})
    if (values.count(flag) > 0) check_least(flag, values[flag].as<int64_t>(), 1);
  if (options.model == "archive" && values.count("layers") + values.count("width") > 0)
    throw po::error("--layers and --width are the archive's own");
  fill_in(options);
  check(options);
  return options;
}

}  // namespace train_step
