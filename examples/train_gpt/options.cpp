#include "options.h"

#include <algorithm>
#include <boost/program_options.hpp>
#include <cmath>

#include <ostream>
#include <sstream>
#include <string_view>

namespace train_gpt {

extern const char* const kDefaultData;  // a path of this tree: examples/CMakeLists.txt

namespace {

namespace po = boost::program_options;

constexpr OptimizerKind kOptimizers[] = {OptimizerKind::kAdamW, OptimizerKind::kAdamW8bit, OptimizerKind::kMuon,
                                         OptimizerKind::kLion,  OptimizerKind::kAdafactor, OptimizerKind::kScheduleFree,
                                         OptimizerKind::kLamb,  OptimizerKind::kSgd};
constexpr int kHelpColumns = 110;
constexpr int kNameColumns = 34;

constexpr const char* kUsage = R"(Trains a GPT on text, its state sharded over ranks.

  train_gpt --demo --ranks 2            two processes of this machine, about a minute
  torchrun --no-python --nproc-per-node 4 train_gpt --data my.txt
  srun -n 16 train_gpt ...              or mpirun: any launcher's ranks are found

A step trains on ranks * batch * accumulate sequences. Runs with the same product and seed see the
same sequences, so their losses agree to rounding whatever the number of ranks.

)";

std::string text_of(double value) {
  std::ostringstream text;
  text << value;
  return text.str();
}

po::typed_value<double>* real(double* value) {
  return po::value(value)->default_value(*value, text_of(*value))->value_name("X");
}

template <class Integer>
po::typed_value<Integer>* number(Integer* value) {
  return po::value(value)->default_value(*value)->value_name("N");
}

po::typed_value<bool>* boolean(bool* value) {
  return po::value(value)->default_value(*value, *value ? "true" : "false")->value_name("BOOL");
}

// What needs a second look after parsing.
struct RawOptions {
  std::string data, out, wrapper, wire = "exact", offload, offload_directory, optimizer, quantize;
  int ranks = 0;
  int64_t warmup = 0, val_every = 0, report_every = 0;
};

// clang-format off: the tables of options
po::options_description section(const char* title) {
  return po::options_description(title, kHelpColumns, kHelpColumns - kNameColumns);
}

po::options_description describe_files(TrainOptions& options, RawOptions& raw) {
  auto files = section("Files");
  files.add_options()(
      "data",
      po::value(&raw.data)->default_value(options.data.string(), "the shipped text")->value_name("PATH"),
      "a text file, a directory of them, SQuAD's .json, or a .bin file of 16-bit token ids")(
      "out", po::value(&raw.out)->default_value(options.out.string())->value_name("DIR"),
      "where metrics.jsonl and losses.svg go")(
      "tensorboard", po::value(&options.tensorboard)->value_name("DIR"),
      "also write losses, speed, memory and waits of all ranks for TensorBoard, each run in a file of its own in this folder")(
      "report-every", po::value(&raw.report_every)->value_name("N"),
      "steps between reports of which rank the others wait for, and in what; 0: none; not given: 10 with "
      "--tensorboard, else none");
  return files;
}

po::options_description describe_ranks(TrainOptions& options, RawOptions& raw) {
  auto ranks = section("Ranks");
  ranks.add_options()(
      "ranks", po::value(&raw.ranks)->value_name("N"),
      "start N processes of this machine; under a launcher, the number of ranks to insist on")(
      "wrapper", po::value(&raw.wrapper)->default_value(name_of(options.wrapper))->value_name("KIND"),
      "local: one process; ddp: every rank holds everything; split over ranks: oss optimizer state, sdp "
      "and gradients, fsdp and parameters")(
      "prefetch", number(&options.prefetch), "fsdp: units gathered ahead of the one in use")(
      "reshard-after-forward", boolean(&options.reshard_after_forward),
      "fsdp: release each unit between its forward and its backward")(
      "wire", po::value(&raw.wire)->default_value(raw.wire)->value_name("HOW"),
      "exact, or int8: fsdp's parameters and gradients, and sdp's gradients, travel in 8 bit, for slow links")(
      "offload", po::value(&raw.offload)->default_value(name_of(options.offload))->value_name("WHERE"),
      "none; cpu: oss, sdp and fsdp keep what they split in host memory and step there; disk: fsdp, in a file")(
      "offload-directory", po::value(&raw.offload_directory)->value_name("DIR"),
      "disk: a folder on a local disk; not given: OUT")(
      "threads", number(&options.threads),
      "threads of each rank; 0: the machine's cores divided by its ranks");
  return ranks;
}

po::options_description describe_model(TrainOptions& options) {
  auto model = section("Model");
  model.add_options()("layers", number(&options.model.layers), "transformer blocks")(
      "width", number(&options.model.width), "features per token")("heads", number(&options.model.heads),
                                                                   "attention heads; must divide the width")(
      "context", number(&options.model.context), "tokens per sequence")(
      "tie", po::bool_switch(&options.model.tie), "use the token embedding as the head's weight");
  return model;
}

po::options_description describe_training(TrainOptions& options, RawOptions& raw) {
  auto training = section("Training");
  training.add_options()("batch", number(&options.batch),
                         "sequences per rank and step (per micro-batch, when accumulating)")(
      "accumulate", number(&options.accumulate), "micro-batches whose gradients are added up for a step")(
      "steps", number(&options.steps), "optimizer steps")(
      "seed", number(&options.seed), "of the parameters, the order of the data and the sample")(
      "optimizer", po::value(&raw.optimizer)->default_value(name_of(options.optimizer))->value_name("KIND"),
      "adamw, adamw8bit, muon, lion, adafactor, schedulefree, lamb or sgd; each has a learning rate of its own that "
      "suits it: docs/optimizers.md")(
      "ema", real(&options.ema),
      "decay of an average of the weights, which validation, sample and export then take, as 0.999; 0: none")(
      "lr", real(&options.lr),
      "learning rate after the warm-up; it falls to a tenth along a cosine (schedulefree: stays)")(
      "warmup", po::value(&raw.warmup)->value_name("N"), "steps of linear warm-up; not given: steps / 20")(
      "weight-decay", real(&options.weight_decay), "of matrices only")(
      "clip", real(&options.clip), "largest norm of the gradient; 0: off")(
      "val-every", po::value(&raw.val_every)->value_name("N"),
      "steps between validations; 0: only after the last; not given: steps / 10")(
      "val-batches", number(&options.val_batches),
      "how many steps' worth of sequences validate, or all if there are fewer");
  return training;
}

po::options_description describe_checkpoints(TrainOptions& options) {
  auto checkpoints = section("Checkpoints");
  checkpoints.add_options()("save-every", number(&options.save_every),
                            "steps between checkpoints, under OUT/checkpoints, saved in the background; 0: none")(
      "keep", number(&options.keep), "how many of them stay, the newest")(
      "resume", po::value(&options.resume)->value_name("auto|DIR"),
      "go on from the newest checkpoint, if there is one, or from this one; any number of ranks and any wrapper, "
      "with the same data, seed and ranks * batch * accumulate; more --steps make the run longer")(
      "allow-changes", po::bool_switch(&options.allow_changes),
      "resume with this command line's lr, warmup, weight-decay, clip and ema where the checkpoint's differ")(
      "import-gpt2", po::value(&options.import_gpt2)->value_name("DIR"),
      "start from the weights of a Hugging Face GPT-2 (config.json, model.safetensors) of the same sizes")(
      "export-gpt2", po::value(&options.export_gpt2)->value_name("DIR"),
      "at the end, write the weights as a Hugging Face GPT-2");
  return checkpoints;
}

po::options_description describe_adapters(TrainOptions& options, RawOptions& raw) {
  auto adapters = section("Adapters");
  adapters.add_options()("lora", number(&options.lora_rank),
                         "train adapters of this rank beside the blocks' linear layers, and nothing else of the model "
                         "that --import-gpt2 brings; 0: train the model. An export has them in its weights")(
      "quantize", po::value(&raw.quantize)->default_value(name_of(options.base))->value_name("FORMAT"),
      "lora: keep the weights beside which they are as they were loaded (none), in 4 bit (nf4) or in 8 (int8)");
  return adapters;
}

po::options_description describe_sample(TrainOptions& options) {
  auto sample = section("Sample");
  sample.add_options()("sample", number(&options.sample), "tokens to generate at the end; 0: none")(
      "prompt", po::value(&options.prompt)->value_name("TEXT"),
      "what it continues (token ids for .bin data)")("temperature", real(&options.temperature),
                                                     "0: the likeliest token always")(
      "top-k", number(&options.top_k), "draw from the k likeliest tokens; 0: from all");
  return sample;
}

po::options_description describe(TrainOptions& options, RawOptions& raw) {
  auto all = section("General");
  all.add_options()("help,h", "show this, with the defaults (with --demo: its own)")(
      "demo", "other defaults: a model that two cores train in about a minute")(
      "plan", po::bool_switch(&options.plan),
      "print what memory each of --ranks would take, by kind, as a dry run tells it, and end");
  all.add(describe_files(options, raw)).add(describe_ranks(options, raw)).add(describe_model(options));
  all.add(describe_training(options, raw)).add(describe_checkpoints(options));
  all.add(describe_adapters(options, raw)).add(describe_sample(options));
  return all;
}
// clang-format on

Wrapper parse_wrapper(const std::string& name) {
  for (const auto wrapper : {Wrapper::kLocal, Wrapper::kDdp, Wrapper::kOss, Wrapper::kSdp, Wrapper::kFsdp}) {
    if (name == name_of(wrapper)) return wrapper;
  }
  throw OptionsError("--wrapper must be local, ddp, oss, sdp or fsdp, got '" + name + "'");
}

bool parse_wire(const std::string& name, Wrapper wrapper) {
  if (name != "exact" && name != "int8") throw OptionsError("--wire must be exact or int8, got '" + name + "'");
  if (name == "int8" && wrapper != Wrapper::kFsdp && wrapper != Wrapper::kSdp)
    throw OptionsError(std::string("--wire int8 is for --wrapper sdp and fsdp, not ") + name_of(wrapper));
  return name == "int8";
}

OptimizerKind parse_optimizer(const std::string& name) {
  for (const auto kind : kOptimizers) {
    if (name == name_of(kind)) return kind;
  }
  throw OptionsError("--optimizer must be adamw, adamw8bit, muon, lion, adafactor, schedulefree, lamb or sgd, got '" +
                     name + "'");
}

Offload parse_offload(const std::string& name) {
  for (const auto offload : {Offload::kNone, Offload::kCpu, Offload::kDisk}) {
    if (name == name_of(offload)) return offload;
  }
  throw OptionsError("--offload must be none, cpu or disk, got '" + name + "'");
}

BaseFormat parse_quantize(const std::string& name) {
  for (const auto format : {BaseFormat::kFull, BaseFormat::kNf4, BaseFormat::kInt8}) {
    if (name == name_of(format)) return format;
  }
  throw OptionsError("--quantize must be none, nf4 or int8, got '" + name + "'");
}

bool given(const po::variables_map& values, const char* name) {
  return values.count(name) > 0 && !values[name].defaulted();
}

void check_at_least(const char* name, int64_t value, int64_t least) {
  if (value >= least) return;
  throw OptionsError("--" + std::string(name) + " must be at least " + std::to_string(least) + ", got " +
                     std::to_string(value));
}

void check_not_negative(const char* name, double value) {
  if (value >= 0.0 && std::isfinite(value)) return;
  throw OptionsError("--" + std::string(name) + " must be a number of at least 0, got " + text_of(value));
}

void check_ranges(const TrainOptions& options) {
  if (options.ranks) check_at_least("ranks", *options.ranks, 1);
  check_at_least("prefetch", options.prefetch, 0);
  check_at_least("threads", options.threads, 0);
  check_at_least("layers", options.model.layers, 1);
  check_at_least("width", options.model.width, 1);
  check_at_least("heads", options.model.heads, 1);
  check_at_least("context", options.model.context, 1);
  check_at_least("batch", options.batch, 1);
  check_at_least("accumulate", options.accumulate, 1);
  check_at_least("steps", options.steps, 1);
  check_at_least("seed", options.seed, 0);
  check_at_least("warmup", options.warmup_steps(), 0);
  check_at_least("val-every", options.validation_interval(), 0);
  check_at_least("val-batches", options.val_batches, 1);
  check_at_least("save-every", options.save_every, 0);
  check_at_least("keep", options.keep, 1);
  check_at_least("sample", options.sample, 0);
  check_at_least("top-k", options.top_k, 0);
  check_at_least("lora", options.lora_rank, 0);
  check_at_least("report-every", options.report_interval(), 0);
  if (!(options.ema >= 0.0 && options.ema < 1.0))
    throw OptionsError("--ema must be 0 or more and below 1, got " + text_of(options.ema));
  check_not_negative("lr", options.lr);
  check_not_negative("weight-decay", options.weight_decay);
  check_not_negative("clip", options.clip);
  check_not_negative("temperature", options.temperature);
}

// Options that contradict each other, or that would have no effect.
void check_together(const TrainOptions& options, const po::variables_map& values) {
  const auto& model = options.model;
  if (model.width % model.heads != 0) {
    throw OptionsError("--width " + std::to_string(model.width) + " does not divide into --heads " +
                       std::to_string(model.heads));
  }
  if (options.warmup_steps() > options.steps) {
    throw OptionsError("--warmup " + std::to_string(options.warmup_steps()) + " is more than --steps " +
                       std::to_string(options.steps));
  }
  if (options.wrapper == Wrapper::kLocal && options.ranks.value_or(1) > 1) {
    throw OptionsError("--wrapper local is one process, but --ranks is " + std::to_string(*options.ranks));
  }
  for (const char* name : {"prefetch", "reshard-after-forward"}) {
    if (options.wrapper != Wrapper::kFsdp && given(values, name)) {
      throw OptionsError("--" + std::string(name) + " is for --wrapper fsdp, not " + name_of(options.wrapper));
    }
  }
  const bool splits =
      options.wrapper == Wrapper::kOss || options.wrapper == Wrapper::kSdp || options.wrapper == Wrapper::kFsdp;
  if ((options.offload == Offload::kCpu && !splits) ||
      (options.offload == Offload::kDisk && options.wrapper != Wrapper::kFsdp)) {
    throw OptionsError(std::string("--offload ") + name_of(options.offload) + " is for --wrapper " +
                       (options.offload == Offload::kDisk ? "fsdp" : "oss, sdp and fsdp") + ", not " +
                       name_of(options.wrapper));
  }
  if (options.offload != Offload::kDisk && given(values, "offload-directory")) {
    throw OptionsError("--offload-directory has no effect without --offload disk");
  }
  for (const char* name : {"prompt", "temperature", "top-k"}) {
    if (options.sample == 0 && given(values, name)) {
      throw OptionsError("--" + std::string(name) + " has no effect with --sample 0");
    }
  }
  if (options.save_every == 0 && given(values, "keep")) throw OptionsError("--keep has no effect without --save-every");
  if (options.allow_changes && options.resume.empty())
    throw OptionsError("--allow-changes has no effect without --resume");
  if (given(values, "tensorboard") && options.tensorboard.empty())
    throw OptionsError("--tensorboard is empty: name a folder");
  if (given(values, "resume") && options.resume.empty()) throw OptionsError("--resume is empty: auto or a directory");
  if (options.temperature == 0.0 && given(values, "top-k")) {
    throw OptionsError("--top-k has no effect with --temperature 0");
  }
}

void check_adapters(const TrainOptions& options) {
  if (options.lora_rank == 0 && options.base != BaseFormat::kFull)
    throw OptionsError(std::string("--quantize ") + name_of(options.base) +
                       " is for the frozen base of adapters: it needs --lora");
  // Blocks that were drawn at random, and stay as they are, learn next to nothing.
  if (options.lora_rank > 0 && options.import_gpt2.empty())
    throw OptionsError("--lora " + std::to_string(options.lora_rank) +
                       " trains adapters beside weights that stay: name them with --import-gpt2");
}

bool has_demo(int argc, const char* const* argv) {
  return std::any_of(argv, argv + argc, [](const char* argument) { return std::string_view(argument) == "--demo"; });
}

po::variables_map parse(int argc, const char* const* argv, const po::options_description& description) {
  namespace style = po::command_line_style;
  po::variables_map values;
  try {
    const po::positional_options_description none;
    po::store(po::command_line_parser(argc, argv)
                  .options(description)
                  .positional(none)
                  .style(style::unix_style & ~style::allow_guessing)
                  .run(),
              values);
    po::notify(values);
  } catch (const po::error& error) {
    throw OptionsError(error.what());
  }
  return values;
}

}  // namespace

TrainOptions demo_options() {
  TrainOptions options;
  options.model.layers = 4;
  options.model.width = 128;
  options.model.heads = 4;
  options.model.context = 64;
  options.batch = 8;
  options.steps = 1100;
  options.lr = 4e-3;
  options.sample = 500;
  return options;
}

std::optional<TrainOptions> parse_options(int argc, const char* const* argv, std::ostream& help) {
  TrainOptions options = has_demo(argc, argv) ? demo_options() : TrainOptions();
  options.data = kDefaultData;
  RawOptions raw;
  const auto description = describe(options, raw);
  const auto values = parse(argc, argv, description);
  if (values.count("help") > 0) {
    help << kUsage << description << "\n";
    return std::nullopt;
  }
  options.data = raw.data;
  options.out = raw.out;
  options.wrapper = parse_wrapper(raw.wrapper);
  options.int8_wire = parse_wire(raw.wire, options.wrapper);
  options.offload = parse_offload(raw.offload);
  options.optimizer = parse_optimizer(raw.optimizer);
  options.base = parse_quantize(raw.quantize);
  options.offload_directory = given(values, "offload-directory") ? raw.offload_directory : options.out.string();
  if (given(values, "ranks")) options.ranks = raw.ranks;
  if (given(values, "warmup")) options.warmup = raw.warmup;
  if (given(values, "report-every")) options.report_every = raw.report_every;
  if (given(values, "val-every")) options.val_every = raw.val_every;
  check_ranges(options);
  check_together(options, values);
  check_adapters(options);
  return options;
}

}  // namespace train_gpt
