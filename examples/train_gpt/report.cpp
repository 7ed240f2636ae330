#include "report.h"

#include <algorithm>
#include <cmath>
#include <ostream>

#include "format.h"

namespace train_gpt {
namespace {

constexpr size_t kLabelColumns = 12;
constexpr size_t kFigureColumns = 12;
constexpr size_t kTextColumns = 76;
constexpr size_t kShownRanks = 8;

void line(std::ostream& out, const std::string& label, const std::string& text) {
  out << "  " << left(label, kLabelColumns) << text << "\n";
}

// AdamW keeps two moments of each parameter.
MemoryUse unsharded_use(int64_t parameter_bytes) {
  return {.parameter_bytes = parameter_bytes, .grad_bytes = parameter_bytes, .optimizer_bytes = 2 * parameter_bytes};
}

int64_t kept_bytes(const MemoryUse& use) { return use.parameter_bytes + use.grad_bytes + use.optimizer_bytes; }

std::string row(const std::string& label, const MemoryUse& use, const MemoryUse& whole) {
  std::string text = "  " + left(label, kLabelColumns);
  for (const int64_t bytes : {use.parameter_bytes, use.grad_bytes, use.optimizer_bytes, kept_bytes(use)}) {
    text += right(mib(bytes), kFigureColumns);
  }
  const double share = 100.0 * static_cast<double>(kept_bytes(use)) / static_cast<double>(kept_bytes(whole));
  text += right(fixed(share, 0) + "%", 8);
  for (const int64_t bytes : {use.peak_gathered_bytes, use.peak_bucket_bytes}) {
    text += right(bytes == 0 ? "-" : mib(bytes), kFigureColumns);
  }
  return text + "\n";
}

MemoryUse largest(const std::vector<MemoryUse>& ranks) {
  MemoryUse most;
  for (const auto& use : ranks) {
    most.parameter_bytes = std::max(most.parameter_bytes, use.parameter_bytes);
    most.grad_bytes = std::max(most.grad_bytes, use.grad_bytes);
    most.optimizer_bytes = std::max(most.optimizer_bytes, use.optimizer_bytes);
    most.peak_gathered_bytes = std::max(most.peak_gathered_bytes, use.peak_gathered_bytes);
    most.peak_bucket_bytes = std::max(most.peak_bucket_bytes, use.peak_bucket_bytes);
  }
  return most;
}

std::string with_perplexity(double loss) { return fixed(loss, 4) + "   (perplexity " + fixed(std::exp(loss), 2) + ")"; }

}  // namespace

void print_header(std::ostream& out, const TrainOptions& options, const Corpus& corpus, const RunFacts& facts) {
  const auto& model = options.model;
  line(out, "model",
       "GPT of " + std::to_string(model.layers) + " layers x " + std::to_string(model.width) + ", " +
           std::to_string(model.heads) + " heads, context " + std::to_string(model.context) + ": " +
           grouped(facts.parameters_numel) + " parameters" + (model.tie ? ", tied" : ""));
  if (facts.adapters_numel > 0)
    line(out, "adapters",
         "of rank " + std::to_string(options.lora_rank) + ": " + grouped(facts.adapters_numel) +
             " parameters are trained, beside frozen weights" +
             (options.base == BaseFormat::kFull ? "" : std::string(" in ") + name_of(options.base)));
  line(out, "layout",
       facts.layout + ", " + std::to_string(facts.threads) + (facts.threads == 1 ? " thread" : " threads") + " a rank");
  line(out, "data", printable(corpus.description));
  line(out, "",
       grouped(static_cast<int64_t>(corpus.train().size())) + " tokens to train, " +
           grouped(static_cast<int64_t>(corpus.validation().size())) + " to validate, vocabulary of " +
           std::to_string(corpus.vocabulary.size()) + (corpus.vocabulary.is_text() ? " bytes" : " ids"));
  line(out, "steps",
       grouped(options.steps) + " of " + grouped(facts.tokens_per_step) + " tokens (" + std::to_string(facts.ranks) +
           (facts.ranks == 1 ? " rank x " : " ranks x ") + std::to_string(options.batch) + " sequences" +
           (options.accumulate > 1 ? " x " + std::to_string(options.accumulate) + " accumulated" : "") + ")");
  line(out, "unigram", "validation loss " + fixed(facts.unigram_loss, 4) + ", the one to beat");
  out << std::endl;
}

void print_memory_table(std::ostream& out, const std::vector<MemoryUse>& ranks, int64_t unsharded_parameter_bytes) {
  out << "  " << left("MiB", kLabelColumns);
  for (const char* title : {"parameters", "gradients", "optimizer", "kept"}) out << right(title, kFigureColumns);
  out << right("of all", 8) << right("gathered", kFigureColumns) << right("reducing", kFigureColumns) << "\n";
  const auto whole = unsharded_use(unsharded_parameter_bytes);
  out << row("unsharded", whole, whole);
  const auto shown = std::min(ranks.size(), kShownRanks);
  for (size_t rank = 0; rank < shown; ++rank) out << row("rank " + std::to_string(rank), ranks[rank], whole);
  if (ranks.size() > shown) out << row("at most", largest(ranks), whole);
  out << "  gathered: full parameters of the units in use, the most at one time; reducing: their "
         "gradients\n\n";
}

void print_result(std::ostream& out, const RunResult& result) {
  line(out, "trained", "in " + duration(result.train_s));
  line(out, "losses", "training   " + with_perplexity(result.train_loss));
  line(out, "", "validation " + with_perplexity(result.val_loss));
  line(out, "",
       "unigram    " + with_perplexity(result.unigram_loss) + "   validation is " +
           fixed(result.val_loss / result.unigram_loss, 2) + " of it");
  out << std::endl;
}

void print_sample(std::ostream& out, const std::string& text) {
  out << "  sample, generated by the model as it lies on the ranks:\n\n"
      << wrapped(printable(text.substr(std::min(text.find_first_not_of('\n'), text.size()))), kTextColumns, "    ")
      << std::endl;
}

}  // namespace train_gpt
