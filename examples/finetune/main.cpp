// Trains a causal language model that Python exported, in any ZeRO stage. `make finetune` builds a small Llama with
// transformers, trains it here, and loads the result in transformers.
//
//   finetune --archive out/model.pt2 --weights out/initial --ids out/ids.safetensors --out out --stage 3 --ranks 2
//
// --ids is one long text, of which each step draws random windows. --rows are separate examples, padded and truncated
// by tools/tokenize_text.py, which are read in order. If the archive has adapters (tools/export_model.py --lora),
// --weights may be those of the model without adapters. Saves adapters also in peft's format, beside the whole model.

#include <ATen/CPUGeneratorImpl.h>

#include <algorithm>
#include <boost/program_options.hpp>
#include <cstdio>
#include <filesystem>
#include <iostream>
#include <limits>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include <tessera/checkpoint/full_file.h>
#include <tessera/errors.h>
#include <tessera/exported.h>
#include <tessera/tessera.h>
#include "examples/common/option_checks.h"
#include "examples/common/precision.h"

namespace {

namespace po = boost::program_options;
namespace fs = std::filesystem;
using Comm = std::shared_ptr<tessera::Communicator>;

struct Options {
  std::string archive, weights, ids, rows, out, resume, prompt;
  bool are_characters = false;
  std::vector<std::string> classes{"LlamaDecoderLayer"};
  int stage = 3, ranks = 2;
  int64_t steps = 200, batch = 4, length = 64, sample = 120, checkpoint_every = 0, log_every = 20;
  double lr = 1e-3, weight_decay = 0.01;
  bool checkpointed = false;
  examples::ComputeOptions compute;
};

tessera::NamedInputs as_inputs(const at::Tensor& ids, at::Device device) {
  const at::Tensor own = ids.to(device);
  return {{"input_ids", own}, {"attention_mask", torch::ones_like(own)}, {"labels", own}};
}

// Makes a rank's batch of each step.
class Batches {
 public:
  Batches(const Options& options, at::Device device) : options_(options), device_(device) {
    if (!options.ids.empty()) {
      ids_ = read_ids(options.ids, "ids", 1);
      if (ids_.numel() <= options.length)
        throw std::invalid_argument("--length is " + std::to_string(options.length) + ", and " + options.ids + " has " +
                                    std::to_string(ids_.numel()) + " ids, expected more");
      if (options.are_characters && ids_.max().item<int64_t>() > 127)
        throw std::invalid_argument(options.ids + " has the id " + std::to_string(ids_.max().item<int64_t>()) +
                                    ", and --characters says that all are ASCII");
      return;
    }
    for (const char* name : {"input_ids", "attention_mask", "labels"})
      rows_.push_back({name, read_ids(options.rows, name, 2)});
    for (const auto& [name, values] : rows_)
      if (values.sizes() != rows_.front().second.sizes())
        throw std::invalid_argument(c10::str(options.rows, ": '", name, "' is ", values.sizes(), ", and 'input_ids' ",
                                             rows_.front().second.sizes()));
    if (rows_.front().second.size(0) == 0) throw std::invalid_argument(options.rows + " has no rows");
    ids_ = rows_.front().second.flatten();
  }

  tessera::NamedInputs at_step(int64_t step, int rank, int ranks) const {
    const int64_t turn = step * ranks + rank;
    if (rows_.empty()) return as_inputs(windows(static_cast<uint64_t>(turn)), device_);
    const int64_t count = rows_.front().second.size(0);
    const at::Tensor chosen = torch::arange(turn * options_.batch, (turn + 1) * options_.batch).remainder(count);
    tessera::NamedInputs inputs;
    for (const auto& [name, values] : rows_) inputs.add(name, values.index_select(0, chosen).to(device_));
    return inputs;
  }
  // Returns the first tokens of the text, as the same input for models that are compared.
  at::Tensor line() const { return ids_.narrow(0, 0, std::min(options_.length, ids_.numel())).unsqueeze(0); }

 private:
  static at::Tensor read_ids(const std::string& file, const std::string& name, int64_t dimensions) {
    at::Tensor ids = tessera::read_full(file, name);
    if (ids.scalar_type() != at::kLong || ids.dim() != dimensions)
      throw std::invalid_argument(c10::str(file, ": '", name, "' is ", ids.scalar_type(), " ", ids.sizes(),
                                           ", expected Long with a dim() of ", dimensions));
    return ids;
  }
  // Returns random windows of the text.
  at::Tensor windows(uint64_t seed) const {
    auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
    const at::Tensor starts =
        torch::randint(0, ids_.numel() - options_.length, {options_.batch, 1}, generator, torch::kLong);
    return ids_.index_select(0, (starts + torch::arange(options_.length)).flatten())
        .view({options_.batch, options_.length});
  }

  const Options& options_;
  const at::Device device_;
  at::Tensor ids_;
  std::vector<std::pair<std::string, at::Tensor>> rows_;
};

// Generates tokens, each drawn from the 8 most probable ones. Collective. All ranks draw the same tokens.
template <class Forward>
std::vector<int64_t> continued(const Forward& forward, std::vector<int64_t> text, const Options& options,
                               at::Device device) {
  const at::NoGradGuard no_grad;
  auto generator = at::make_generator<at::CPUGeneratorImpl>(3);
  for (int64_t drawn = 0; drawn < options.sample; ++drawn) {
    const auto count = std::min<int64_t>(options.length, static_cast<int64_t>(text.size()));
    const at::Tensor ids = torch::tensor(std::vector<int64_t>(text.end() - count, text.end())).unsqueeze(0);
    const at::Tensor logits = forward(as_inputs(ids, device))["logits"].tensor().select(1, count - 1).cpu();
    const auto [values, tokens] = logits.to(at::kFloat).topk(8);
    const at::Tensor chosen = torch::multinomial(values.softmax(-1), 1, false, generator);
    text.push_back(tokens.gather(1, chosen).template item<int64_t>());
  }
  return text;
}

// Continues the prompt, or without a prompt the beginning of the text. With --characters, prints text. Otherwise,
// prints ids for tools/tokenize_text.py --decode.
template <class Forward>
void print_sample(const Forward& forward, const Batches& batches, const Options& options, const Comm& comm) {
  if (options.sample == 0) return;
  const at::Tensor line = batches.line().flatten();
  std::vector<int64_t> text(options.prompt.begin(), options.prompt.end());
  if (text.empty())
    text.assign(line.const_data_ptr<int64_t>(), line.const_data_ptr<int64_t>() + (line.numel() + 1) / 2);
  text = continued(forward, std::move(text), options, comm->device());
  if (comm->rank() != 0) return;
  if (options.are_characters)
    return static_cast<void>(std::printf("%s\n", std::string(text.begin(), text.end()).c_str()));
  for (const int64_t id : text) std::printf("%lld ", static_cast<long long>(id));
  std::printf("\n");
}

// Adapters in peft's format.

constexpr const char* kPeft = "base_model.model.";

void erase_part(std::string& name, const std::string& part) {
  if (const size_t at = name.find(part); at != std::string::npos) name.erase(at, part.size());
}

// Returns a name without adapters: "lm_head.weight" for "base_model.model.lm_head.base_layer.weight".
std::string name_in_base(std::string name) {
  if (name.starts_with(kPeft)) name.erase(0, std::string(kPeft).size());
  erase_part(name, ".base_layer");
  return name;
}

tessera::ExportedOptions load_options(const Options& options, const Comm& comm) {
  tessera::ExportedOptions load{.device = comm->device(), .weights = options.weights};
  if (options.checkpointed) load.checkpointed = tessera::wrap_classes(options.classes);
  if (options.weights.empty()) return load;
  const auto saved = tessera::list_full(options.weights);
  const bool are_of_base =
      std::none_of(saved.begin(), saved.end(), [](const auto& tensor) { return tensor.name.starts_with(kPeft); });
  if (are_of_base) load.weight_name = name_in_base;
  return load;
}

// Saves the adapters, if any, under the names that PeftModel.from_pretrained() expects. Collective.
void save_adapters(const fs::path& folder, const fs::path& archive, tessera::ModelShards& model) {
  const auto is_of_adapter = [](const std::string& own) { return own.find(".lora_") != std::string::npos; };
  const auto shards = model.named_shards();
  if (std::none_of(shards.begin(), shards.end(), [&](const auto& shard) { return is_of_adapter(shard.fqn); })) return;
  const auto rename = [&](std::string name) {
    erase_part(name, ".default");
    return is_of_adapter(name) ? name : "";
  };
  tessera::save_full(folder / "adapter_model.safetensors", model, {.rename = rename});
  const fs::path config = archive.parent_path() / "adapter_config.json";  // written by tools/export_model.py
  if (model.comm()->rank() == 0 && fs::exists(config))
    fs::copy_file(config, folder / config.filename(), fs::copy_options::overwrite_existing);
}

// Writes the trained model's logits for `ids`, to compare them with those of Python.
template <class Forward>
void write_logits(const Forward& forward, const at::Tensor& ids, const fs::path& file, const Comm& comm) {
  const at::NoGradGuard no_grad;
  const at::Tensor logits =
      forward(as_inputs(ids, comm->device()))["logits"].tensor().to(at::kFloat).contiguous().cpu();
  if (comm->rank() != 0) return;
  tessera::write_full(
      file, {{"ids", at::kLong, ids.sizes().vec(), {}}, {"logits", at::kFloat, logits.sizes().vec(), {}}},
      [&](const tessera::FullTensor& tensor) { return tensor.name == "ids" ? ids.contiguous() : logits; });
}

void train(const Options& options, const Comm& comm) {
  const Batches batches(options, comm->device());
  const fs::path trained = fs::path(options.out) / "trained";
  if (comm->rank() == 0) fs::create_directories(trained);  // created first, so that an error precedes the training
  const examples::Precision precision = options.compute.precision_on(comm->device());
  if (comm->rank() == 0) std::printf("%s\n", examples::describe(comm->device().str(), precision).c_str());
  // Autocasts also in stage 3, because FSDP does not cast the exported graph's fp32 constants, such as masks.
  examples::Mixed mixed(precision, comm, /*autocasts=*/true);
  auto build = [&] { return tessera::load_exported(options.archive, load_options(options, comm)); };
  const auto module = options.stage == 3 ? tessera::deferred(build) : build();
  tessera::ZeroOptions zero{.stage = options.stage};
  zero.fsdp.auto_wrap = tessera::wrap_classes(options.classes);
  zero.fsdp.mixed_precision = mixed.of_units();
  auto model =
      tessera::zero(module, torch::optim::AdamWOptions(options.lr).weight_decay(options.weight_decay), comm, zero);
  const auto forward = [&](const tessera::NamedInputs& inputs) { return mixed.compute([&] { return model(inputs); }); };
  const auto state = mixed.scaler() == nullptr ? tessera::TrainingState{model, model.optimizer()}
                                               : tessera::TrainingState{model, model.optimizer(), *mixed.scaler()};
  int64_t step = 0;
  if (!options.resume.empty()) try {
      step = tessera::load_checkpoint(options.resume, state).at("step").get<int64_t>();
    } catch (const tessera::CheckpointError& error) {
      throw std::runtime_error(std::string("--resume: ") + error.what());
    }

  while (step < options.steps) {
    const at::Tensor loss = forward(batches.at_step(step, comm->rank(), comm->size()))["loss"].tensor();
    mixed.backward(loss);
    mixed.step(model.optimizer());
    model.zero_grad();
    ++step;
    if (options.checkpoint_every > 0 && step % options.checkpoint_every == 0)
      tessera::save_checkpoint(fs::path(options.out) / "checkpoint", state, {{"step", step}});
    if (step % options.log_every != 0 && step != 1) continue;
    const at::Tensor mean =
        tessera::reduce_to_host(*comm, loss.detach().to(at::kFloat, /*non_blocking=*/false, /*copy=*/true),
                                tessera::ReduceOp::kAverage, "the loss");
    if (comm->rank() == 0) std::printf("step %4lld  loss %.4f\n", static_cast<long long>(step), mean.item<double>());
  }

  tessera::save_full(trained / "model.safetensors", model);
  save_adapters(trained, options.archive, model);
  module->eval();
  print_sample(forward, batches, options, comm);
  write_logits(forward, batches.line(), fs::path(options.out) / "logits.safetensors", comm);
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  const auto number = [](auto& value) {
    return po::value(&value)->default_value(value, (std::ostringstream() << value).str())->value_name("N");
  };
  po::options_description described("Options");
  described.add_options()("help", "this text")                                                     //
      ("archive", po::value(&options.archive)->required(), "written by tools/export_model.py")     //
      ("weights", po::value(&options.weights), "safetensors of the base; default: the archive's")  //
      ("ids", po::value(&options.ids), "a safetensors file with a text's 'ids'; or --rows")        //
      ("rows", po::value(&options.rows), "a file with 'input_ids', 'attention_mask', 'labels'")    //
      ("out", po::value(&options.out)->required(), "the folder of results")                        //
      ("resume", po::value(&options.resume), "a checkpoint to continue from")                      //
      ("classes", po::value(&options.classes)->multitoken(),
       "Python classes that become units; default: LlamaDecoderLayer")                                              //
      ("stage", number(options.stage), "ZeRO stage, 0 to 3")                                                        //
      ("ranks", number(options.ranks), "processes to start, without a launcher")                                    //
      ("steps", number(options.steps), "the last step")("batch", number(options.batch), "rows of each rank")        //
      ("length", number(options.length), "tokens in a window")("lr", number(options.lr), "learning rate of AdamW")  //
      ("weight-decay", number(options.weight_decay), "0: Adam")                                                     //
      ("sample", number(options.sample), "number of ids to generate at the end; 0: no sample")                      //
      ("characters", po::bool_switch(&options.are_characters), "the ids are ASCII: print text")                     //
      ("prompt", po::value(&options.prompt), "start of the sample, with --characters")                              //
      ("log-every", number(options.log_every), "steps between printed losses")                                      //
      ("checkpoint-activations", po::bool_switch(&options.checkpointed),
       "keep the inputs of each of --classes only, and compute them again in backward")  //
      ("checkpoint-every", number(options.checkpoint_every), "steps; 0: never");
  examples::describe_device(described, options.compute);
  examples::describe_precision(described, options.compute);
  try {
    po::variables_map values;
    po::store(po::command_line_parser(argc, argv).options(described).positional({}).run(), values);
    if (values.contains("help")) return std::cout << described, 0;
    po::notify(values);
    examples::refuse_empty(values);
    constexpr int64_t kMost = std::numeric_limits<int>::max();
    examples::check_ranges({{"stage", options.stage, 0, 3},
                            {"ranks", options.ranks, 1, kMost},
                            {"steps", options.steps, 0, kMost},
                            {"batch", options.batch, 1, kMost},
                            {"length", options.length, 1, kMost},
                            {"sample", options.sample, 0, kMost},
                            {"log-every", options.log_every, 1, kMost},
                            {"checkpoint-every", options.checkpoint_every, 0, kMost}});
    examples::check_not_negative("lr", options.lr);
    examples::check_not_negative("weight-decay", options.weight_decay);
    if (options.ids.empty() == options.rows.empty()) throw std::invalid_argument("give --ids or --rows, one of both");
    if (!options.prompt.empty() && !options.are_characters)
      throw std::invalid_argument("--prompt is text, and only with --characters it is known what its ids are");
  } catch (const std::exception& error) {
    std::cerr << "finetune: " << error.what() << "\n";
    return 2;
  }
  return tessera::run_main([&] {
    if (!tessera::launched() && options.ranks > 1) return tessera::spawn_local(options.ranks, argc, argv);
    train(options, tessera::init({.device = options.compute.device_of_ranks()}));
    return 0;
  });
}
