// PyTorch's recipe for its ZeroRedundancyOptimizer, in all ZeRO stages. Shows the memory that each stage saves, and
// that all stages compute the same parameters.
//
// Runs one step of Adam on twenty Linear(2000, 2000), or another --width, with random inputs and targets. Each rank
// prints the peak of its tensors' memory at four points, and the sum of the parameters.
#include <boost/program_options.hpp>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <string>
#include <vector>

#include <tessera/tessera.h>
#include <torch/torch.h>
#include "examples/common/option_checks.h"

namespace {

namespace po = boost::program_options;

constexpr int64_t kLayers = 20, kRows = 20;
const std::vector<std::string> kWrappers = {"adam", "oss", "sdp", "fsdp"};  // indexed by stage

struct Options {
  std::vector<std::string> wrappers = kWrappers;
  int ranks = 2;
  int64_t width = 2000;
  bool json = false;
};

// The results of one rank. Bytes are the peaks up to each point.
struct Figures {
  int64_t after_model_bytes = 0, after_wrap_bytes = 0, before_step_bytes = 0, after_step_bytes = 0;
  int64_t rss_peak_bytes = 0;
  double param_sum = 0;
};
constexpr int64_t kFigures = 6;

torch::nn::Sequential make_model(int64_t width) {
  torch::nn::Sequential model;
  for (int64_t layer = 0; layer < kLayers; ++layer) model->push_back(torch::nn::Linear(width, width));
  return model;
}

int64_t peak_resident_bytes() {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    if (word != "VmHWM:") continue;
    int64_t kib = 0;
    status >> kib;
    return kib * 1024;
  }
  return 0;
}

Figures run(int stage, int64_t width, const std::shared_ptr<tessera::Communicator>& comm) {
  Figures figures;
  tessera::PeakMemory memory;
  torch::manual_seed(0);
  auto module = make_model(width);
  figures.after_model_bytes = memory.peak_bytes();

  tessera::ZeroOptions options{.stage = stage};
  options.fsdp.auto_wrap = tessera::wrap_modules<torch::nn::LinearImpl>();
  auto model = tessera::zero(module, torch::optim::AdamOptions(0.01), comm, options);
  figures.after_wrap_bytes = memory.peak_bytes();

  const auto inputs = torch::randn({kRows, width}), targets = torch::randn({kRows, width});
  torch::mse_loss(model(inputs), targets).backward();
  figures.before_step_bytes = memory.peak_bytes();

  model.step();
  figures.after_step_bytes = memory.peak_bytes();
  figures.rss_peak_bytes = peak_resident_bytes();

  model.zero_grad();
  for (const auto& parameter : model.full_state_dict())
    figures.param_sum += parameter.value().sum(torch::kFloat64).item<double>();
  return figures;
}

std::vector<Figures> gather(const Figures& own, tessera::Communicator& comm) {
  const auto mine =
      torch::tensor({static_cast<double>(own.after_model_bytes), static_cast<double>(own.after_wrap_bytes),
                     static_cast<double>(own.before_step_bytes), static_cast<double>(own.after_step_bytes),
                     static_cast<double>(own.rss_peak_bytes), own.param_sum},
                    torch::kFloat64);
  const auto all = torch::empty({comm.size() * kFigures}, torch::kFloat64);
  comm.all_gather(all, mine, {}, "figures").wait();
  std::vector<Figures> figures;
  for (int rank = 0; rank < comm.size(); ++rank) {
    const double* f = all.const_data_ptr<double>() + rank * kFigures;
    figures.push_back({static_cast<int64_t>(f[0]), static_cast<int64_t>(f[1]), static_cast<int64_t>(f[2]),
                       static_cast<int64_t>(f[3]), static_cast<int64_t>(f[4]), f[5]});
  }
  return figures;
}

int64_t most(const std::vector<Figures>& ranks, int64_t Figures::*figure) {
  int64_t bytes = 0;
  for (const Figures& figures : ranks) bytes = std::max(bytes, figures.*figure);
  return bytes;
}

void print_json(const std::string& wrapper, const std::vector<Figures>& ranks) {
  nlohmann::ordered_json line = {{"wrapper", wrapper},
                                 {"ranks", ranks.size()},
                                 {"after_model_bytes", most(ranks, &Figures::after_model_bytes)},
                                 {"after_wrap_bytes", most(ranks, &Figures::after_wrap_bytes)},
                                 {"before_step_bytes", most(ranks, &Figures::before_step_bytes)},
                                 {"after_step_bytes", most(ranks, &Figures::after_step_bytes)},
                                 {"rss_peak_bytes", most(ranks, &Figures::rss_peak_bytes)},
                                 {"param_sum", ranks[0].param_sum}};
  for (const Figures& figures : ranks) line["param_sums"].push_back(figures.param_sum);
  std::cout << line.dump() << std::endl;
}

void print_table(const std::string& wrapper, const std::vector<Figures>& ranks) {
  const auto mb = [](int64_t bytes) { return static_cast<double>(bytes) * 1e-6; };
  if (wrapper == kWrappers[0])
    std::printf("%-6s %5s %12s %12s %12s %12s %10s   %s\n", "", "rank", "after model", "after wrap", "before step",
                "after step", "peak RSS", "parameter sum");
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    const Figures& f = ranks[rank];
    std::printf("%-6s %5zu %9.1f MB %9.1f MB %9.1f MB %9.1f MB %7.0f MB   %.6f\n", rank == 0 ? wrapper.c_str() : "",
                rank, mb(f.after_model_bytes), mb(f.after_wrap_bytes), mb(f.before_step_bytes), mb(f.after_step_bytes),
                mb(f.rss_peak_bytes), f.param_sum);
  }
  std::fflush(stdout);
}

Options parse(int argc, char** argv) {
  Options options;
  po::options_description all("zero_recipe");
  all.add_options()("help", "this text")("ranks", po::value(&options.ranks)->default_value(options.ranks),
                                         "processes to start; a launcher's number takes precedence")(
      "wrapper", po::value(&options.wrappers)->composing(),
      "adam, oss, sdp or fsdp; may be repeated; all if not given")(
      "width", po::value(&options.width)->default_value(options.width), "features of each layer, in and out")(
      "json", po::bool_switch(&options.json), "print a line of JSON for each wrapper, with the maxima over ranks");
  options.wrappers.clear();
  po::variables_map values;
  po::store(po::command_line_parser(argc, argv).options(all).positional({}).run(), values);
  po::notify(values);
  if (values.count("help") > 0) {
    std::cout << all;
    std::exit(0);
  }
  if (options.wrappers.empty()) options.wrappers = kWrappers;
  for (const auto& wrapper : options.wrappers)
    if (std::find(kWrappers.begin(), kWrappers.end(), wrapper) == kWrappers.end())
      throw po::error("--wrapper must be adam, oss, sdp or fsdp, got '" + wrapper + "'");
  examples::check_ranges({{"ranks", options.ranks, 1, 1024}, {"width", options.width, 1, 1'000'000}});
  return options;
}

// Starts new processes for each wrapper, so that the peak of one wrapper does not include memory of another.
int run_each_by_itself(const Options& options, const char* program) {
  for (const auto& wrapper : options.wrappers) {
    std::vector<std::string> arguments{
        program,     "--ranks", std::to_string(options.ranks), "--width", std::to_string(options.width),
        "--wrapper", wrapper};
    if (options.json) arguments.emplace_back("--json");
    std::vector<char*> argv;
    for (auto& argument : arguments) argv.push_back(argument.data());
    if (const int code = tessera::spawn_local(options.ranks, static_cast<int>(argv.size()), argv.data()); code != 0)
      return code;
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  try {
    options = parse(argc, argv);
  } catch (const std::logic_error& error) {  // po::error or OptionsError
    std::cerr << "zero_recipe: " << error.what() << "\n";
    return 2;
  }
  return tessera::run_main([&] {
    if (!tessera::launched()) return run_each_by_itself(options, argv[0]);
    const auto comm = tessera::init();
    for (const auto& wrapper : options.wrappers) {
      const auto stage = std::find(kWrappers.begin(), kWrappers.end(), wrapper) - kWrappers.begin();
      const auto ranks = gather(run(static_cast<int>(stage), options.width, comm), *comm);
      if (comm->rank() == 0) options.json ? print_json(wrapper, ranks) : print_table(wrapper, ranks);
    }
    return 0;
  });
}
