// Trains a causal language model that Python exported, with ZeRO of any stage: `make finetune` makes a small Llama with
// transformers, trains it here, and loads the result in transformers.
//
//   finetune --archive out/model.pt2 --weights out/initial --ids out/ids.safetensors --out out --stage 3 --ranks 2
//
// --ids is one long text, of which each step draws windows; --rows are examples of their own, padded and cut
// (tools/tokenize_text.py), taken in order.

#include <ATen/CPUGeneratorImpl.h>

#include <boost/program_options.hpp>
#include <cstdio>
#include <filesystem>
#include <iostream>
#include <string>
#include <vector>

#include "tessera/checkpoint/full_file.h"
#include "tessera/checkpoint/slice_reader.h"
#include "tessera/tessera.h"

namespace {

namespace po = boost::program_options;
namespace fs = std::filesystem;
using Comm = std::shared_ptr<tessera::Communicator>;

struct Options {
  std::string archive, weights, ids, rows, out, resume;
  std::vector<std::string> classes{"LlamaDecoderLayer"};
  int stage = 3, ranks = 2;
  int64_t steps = 200, batch = 4, length = 64, sample = 120, checkpoint_every = 0, log_every = 20;
  double lr = 1e-3, weight_decay = 0.01;
};

at::Tensor read_tensor(const std::string& file, const std::string& name) {
  const tessera::SavedTensors saved = tessera::find_full_tensors(file);
  const auto found = saved.tensors.find(name);
  if (found == saved.tensors.end()) throw std::invalid_argument(file + " has no tensor '" + name + "'");
  return tessera::SliceReader(saved).read(name, tessera::whole_box(found->second.shape));
}

tessera::NamedInputs as_inputs(const at::Tensor& ids) {
  return {{"input_ids", ids}, {"attention_mask", torch::ones_like(ids)}, {"labels", ids}};
}

// What a rank is given in a step.
class Batches {
 public:
  explicit Batches(const Options& options) : options_(options) {
    if (options.ids.empty() == options.rows.empty()) throw std::invalid_argument("give --ids or --rows, one of both");
    if (!options.ids.empty()) {
      ids_ = read_tensor(options.ids, "ids");
      return;
    }
    for (const char* name : {"input_ids", "attention_mask", "labels"})
      rows_.push_back({name, read_tensor(options.rows, name)});
    if (rows_.front().second.size(0) == 0) throw std::invalid_argument(options.rows + " has no rows");
    ids_ = rows_.front().second.flatten();
  }

  tessera::NamedInputs at_step(int64_t step, int rank, int ranks) const {
    const int64_t turn = step * ranks + rank;
    if (rows_.empty()) return as_inputs(windows(static_cast<uint64_t>(turn)));
    const int64_t count = rows_.front().second.size(0);
    const at::Tensor chosen = torch::arange(turn * options_.batch, (turn + 1) * options_.batch).remainder(count);
    tessera::NamedInputs inputs;
    for (const auto& [name, values] : rows_) inputs.add(name, values.index_select(0, chosen));
    return inputs;
  }
  // A line to compare models by.
  at::Tensor line() const { return ids_.narrow(0, 0, std::min(options_.length, ids_.numel())).unsqueeze(0); }

 private:
  // Of the text, at random places.
  at::Tensor windows(uint64_t seed) const {
    auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
    const at::Tensor starts =
        torch::randint(0, ids_.numel() - options_.length, {options_.batch, 1}, generator, torch::kLong);
    return ids_.index_select(0, (starts + torch::arange(options_.length)).flatten())
        .view({options_.batch, options_.length});
  }

  const Options& options_;
  at::Tensor ids_;
  std::vector<std::pair<std::string, at::Tensor>> rows_;
};

// Every rank computes, since parameters may be sharded; the most likely of a few, drawn alike everywhere.
template <class Model>
std::vector<int64_t> continued(Model& model, std::vector<int64_t> text, const Options& options) {
  const at::NoGradGuard no_grad;
  auto generator = at::make_generator<at::CPUGeneratorImpl>(3);
  while (static_cast<int64_t>(text.size()) < options.sample) {
    const auto count = std::min<int64_t>(options.length, static_cast<int64_t>(text.size()));
    const at::Tensor ids = torch::tensor(std::vector<int64_t>(text.end() - count, text.end())).unsqueeze(0);
    const at::Tensor logits = model(as_inputs(ids))["logits"].tensor().select(1, count - 1);
    const auto [values, tokens] = logits.topk(8);
    const at::Tensor chosen = torch::multinomial(values.softmax(-1), 1, false, generator);
    text.push_back(tokens.gather(1, chosen).template item<int64_t>());
  }
  return text;
}

// The ids of --ids are characters; those of --rows a tokenizer's, which tools/tokenize_text.py --decode reads.
template <class Model>
void print_sample(Model& model, const Batches& batches, const Options& options, bool prints) {
  const std::string prompt = "And Jesus said ";
  const at::Tensor line = batches.line().flatten();
  std::vector<int64_t> text(prompt.begin(), prompt.end());
  if (options.ids.empty())
    text.assign(line.const_data_ptr<int64_t>(), line.const_data_ptr<int64_t>() + line.numel() / 2);
  text = continued(model, std::move(text), options);
  if (!prints) return;
  if (!options.ids.empty())
    return static_cast<void>(std::printf("%s\n", std::string(text.begin(), text.end()).c_str()));
  for (const int64_t id : text) std::printf("%lld ", static_cast<long long>(id));
  std::printf("\n");
}

// For comparing with Python: what the trained model says about a line of the text.
template <class Model>
void write_logits(Model& model, const at::Tensor& ids, const fs::path& file, bool writes) {
  const at::NoGradGuard no_grad;
  const at::Tensor logits = model(as_inputs(ids))["logits"].tensor().contiguous();
  if (!writes) return;
  tessera::write_full(
      file, {{"ids", at::kLong, ids.sizes().vec(), {}}, {"logits", at::kFloat, logits.sizes().vec(), {}}},
      [&](const tessera::FullTensor& tensor) { return tensor.name == "ids" ? ids.contiguous() : logits; });
}

void train(const Options& options, const Comm& comm) {
  const Batches batches(options);
  auto build = [&] { return tessera::load_exported(options.archive, {.weights = options.weights}); };
  const auto module = options.stage == 3 ? tessera::deferred(build) : build();
  tessera::ZeroOptions zero{.stage = options.stage};
  zero.fsdp.auto_wrap = tessera::wrap_classes(options.classes);
  auto model =
      tessera::zero(module, torch::optim::AdamWOptions(options.lr).weight_decay(options.weight_decay), comm, zero);
  int64_t step = 0;
  if (!options.resume.empty())
    step = tessera::load_checkpoint(options.resume, model, model.optimizer()).at("step").get<int64_t>();

  while (step < options.steps) {
    const at::Tensor loss = model(batches.at_step(step, comm->rank(), comm->size()))["loss"].tensor();
    loss.backward();
    model.step();
    model.zero_grad();
    ++step;
    if (options.checkpoint_every > 0 && step % options.checkpoint_every == 0)
      tessera::save_checkpoint(fs::path(options.out) / "checkpoint", model, model.optimizer(), {{"step", step}});
    if (step % options.log_every != 0 && step != 1) continue;
    at::Tensor mean = loss.detach().clone();
    comm->all_reduce(mean, tessera::ReduceOp::kAverage, "the loss").wait();
    if (comm->rank() == 0) std::printf("step %4lld  loss %.4f\n", static_cast<long long>(step), mean.item<double>());
  }

  module->eval();
  print_sample(model, batches, options, comm->rank() == 0);
  if (comm->rank() == 0) fs::create_directories(fs::path(options.out) / "trained");
  comm->barrier();
  tessera::save_full(fs::path(options.out) / "trained/model.safetensors", model);
  write_logits(model, batches.line(), fs::path(options.out) / "logits.safetensors", comm->rank() == 0);
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  po::options_description described("Options");
  described.add_options()("help", "this text")                                                      //
      ("archive", po::value(&options.archive)->required(), "of tools/export_model.py")              //
      ("weights", po::value(&options.weights), "safetensors; the archive's own, if not given")      //
      ("ids", po::value(&options.ids), "a safetensors file with a text's 'ids'; or --rows")         //
      ("rows", po::value(&options.rows), "one with 'input_ids', 'attention_mask' and 'labels'")     //
      ("out", po::value(&options.out)->required(), "where results go")                              //
      ("resume", po::value(&options.resume), "a checkpoint to go on from")                          //
      ("classes", po::value(&options.classes)->multitoken(), "Python classes that become units")    //
      ("stage", po::value(&options.stage), "of ZeRO: 0 to 3")                                       //
      ("ranks", po::value(&options.ranks), "how many to start here, unless a launcher does")        //
      ("steps", po::value(&options.steps), "")("batch", po::value(&options.batch), "of each rank")  //
      ("length", po::value(&options.length), "of a window")("lr", po::value(&options.lr), "")       //
      ("weight-decay", po::value(&options.weight_decay), "0 makes AdamW Adam")                      //
      ("sample", po::value(&options.sample), "characters to write at the end")                      //
      ("log-every", po::value(&options.log_every), "steps: prints the loss")                        //
      ("checkpoint-every", po::value(&options.checkpoint_every), "steps; 0: never");
  try {
    po::variables_map values;
    po::store(po::parse_command_line(argc, argv, described), values);
    if (values.contains("help")) return std::cout << described, 0;
    po::notify(values);
    if (options.log_every < 1)
      throw std::invalid_argument("--log-every is " + std::to_string(options.log_every) + ", expected 1 or more");
    if (!tessera::launched() && options.ranks > 1) return tessera::spawn_local(options.ranks, argc, argv);
    train(options, tessera::init());
    return 0;
  } catch (const std::exception& error) {
    std::cerr << "finetune: " << error.what() << "\n";
    return 1;
  }
}
