// The `tessera` command: inspects and transforms checkpoints, plans the memory and time of a training, and merges
// traces.

#include <algorithm>
#include <boost/program_options.hpp>
#include <cstdio>
#include <exception>
#include <iostream>
#include <stdexcept>
#include <string>
#include <vector>

#include "commands.h"
#include "gpu_cards.h"

namespace {

namespace po = boost::program_options;

struct Command {
  std::string name;  // one word or two
  std::string arguments;
  std::string what;
  size_t paths;                      // number of paths; the minimum number if `arguments` ends in "..."
  std::vector<std::string> options;  // names of the command's options, without those of all commands
  int (*run)(const Arguments&);

  bool has(const std::string& option) const {
    return std::find(options.begin(), options.end(), option) != options.end();
  }
  bool reads_checkpoints() const { return run != plan && run != calibrate && run != merge_trace_files; }
};

const std::vector<Command>& commands() {
  static const std::vector<Command> all = {
      {"inspect",
       "PATH [--slices]",
       "prints names, shapes, dtypes and bytes, and with --slices the place of each slice",
       1,
       {"slices"},
       inspect},
      {"verify", "DIR", "checks checksums, headers and coverage; exit code 1 for damage", 1, {}, verify},
      {"consolidate",
       "DIR FILE [--state] [--max-file-bytes N]",
       "writes whole tensors to one safetensors file, or to several with an index",
       2,
       {"state", "max-file-bytes"},
       consolidate},
      {"reshard", "DIR NEW_DIR --ranks N", "writes the checkpoint as N ranks would save it", 2, {"ranks"}, reshard},
      {"diff",
       "A B [--tolerance X] [--parameters]",
       "compares two checkpoints; exit code 1 if they differ",
       2,
       {"tolerance", "parameters"},
       diff},
      {"plan",
       "--model gpt:layers=80,width=8192,heads=64 | config.json | model.pt2 --gpus N {--gpu h100 | --memory 80GiB} "
       "[--link 400Gbit --latency 10us] [--search] [--html FILE] [--speed FILE | --flops 300TFLOP/s "
       "--memory-bandwidth 3TB/s]",
       "predicts each rank's memory for each stage and option, and recommends options that fit; with a speed, also "
       "predicts the time of a step",
       0,
       {"model", "gpus",     "memory",    "gpu",          "sequence",         "batch",
        "html",  "speed",    "flops",     "flops-fp32",   "memory-bandwidth", "operator-time",
        "link",  "latency",  "host-link", "host-latency", "ranks-per-host",   "host-memory",
        "draw",  "measured", "search",    "elastic"},
       plan},
      {"calibrate",
       "-o speed.json [--ranks N] [--threads N] [--quick] [--speed machine.json]",
       "measures this machine's CPUs and the links of its ranks, for plan --speed; with --speed, started by a launcher "
       "with one rank on each of several hosts, measures the link between the hosts",
       0,
       {"output", "ranks", "threads", "quick", "speed"},
       calibrate},
      {"trace merge",
       "OUT IN...",
       "merges the traces of several hosts on one clock, for Perfetto and chrome://tracing",
       2,
       {},
       merge_trace_files},
  };
  return all;
}

const Command& command_of(const std::string& name) {
  for (const auto& command : commands())
    if (command.name == name) return command;
  for (const auto& command : commands())
    if (command.name.starts_with(name + " "))
      throw po::error("expected: tessera " + command.name + " " + command.arguments);
  throw po::error("there is no command '" + name + "'; `tessera --help` lists them");
}

// Removes the command's one or two words from the beginning of `words`. Returns the command's name.
std::string take_command(std::vector<std::string>& words) {
  std::string name = words[0];
  words.erase(words.begin());
  const bool has_two_words = std::any_of(commands().begin(), commands().end(),
                                         [&](const Command& each) { return each.name.starts_with(name + " "); });
  if (has_two_words && !words.empty()) {
    name += " " + words[0];
    words.erase(words.begin());
  }
  return name;
}

bool is_for_all(const std::string& option) {
  return std::none_of(commands().begin(), commands().end(), [&](const Command& each) { return each.has(option); });
}

// Returns the commands with this option, for example "`tessera reshard` and `tessera calibrate`".
std::string commands_with(const std::string& option) {
  std::string text;
  for (const auto& command : commands())
    if (command.has(option)) text += (text.empty() ? "`tessera " : " and `tessera ") + command.name + "`";
  return text;
}

void print_usage(const Command& command) {
  std::cout << "  tessera " << command.name << " " << command.arguments << "\n      " << command.what << "\n";
}

void print_commands() {
  std::cout << "Usage: tessera COMMAND ...\n\nCommands:\n";
  for (const auto& command : commands())
    std::cout << "  " << command.name << std::string(14 - command.name.size(), ' ') << command.what << "\n";
  std::cout << "\n`tessera help COMMAND` lists the options of a command.\n";
}

// Prints the help of one command, or of all commands if `name` is empty.
void print_help(const std::string& name, const po::options_description& options) {
  po::options_description shown("Options");
  std::vector<const Command*> about;  // "trace": all commands with this first word
  for (const auto& command : commands())
    if (command.name == name || command.name.starts_with(name + " ")) about.push_back(&command);
  if (name.empty()) {
    print_commands();
  } else {
    if (about.empty()) about.push_back(&command_of(name));  // throws
    std::cout << "Usage:\n\n";
    for (const Command* command : about) print_usage(*command);
  }
  for (const auto& option : options.options())
    if (is_for_all(option->long_name()) ||
        std::ranges::any_of(about, [&](const Command* command) { return command->has(option->long_name()); }))
      shown.add(option);
  if (name.empty() || std::ranges::any_of(about, [](const Command* command) { return command->reads_checkpoints(); }))
    std::cout << "\nPATH is a checkpoint, a folder of checkpoints (its newest is used), or full safetensors files.\n"
                 "DIR is a checkpoint or a folder of checkpoints.\n";
  std::cout << "\n" << shown << "\nExit codes: 0; 1 if damage or differences were found; 2 for errors.\n";
}

int run_command(const std::string& name, const po::variables_map& values, const std::vector<std::string>& paths,
                Arguments arguments) {
  const Command& command = command_of(name);
  const bool takes_more = command.arguments.ends_with("...");
  if (takes_more ? paths.size() < command.paths : paths.size() != command.paths)
    throw po::error("expected: tessera " + name + " " + command.arguments);
  for (const auto& other : commands())
    for (const auto& option : other.options)
      if (!command.has(option) && values.count(option) > 0 && !values[option].defaulted())
        throw po::error("--" + option + " is for " + commands_with(option));
  for (const auto& [option, value] : values)
    if (const auto* text = boost::any_cast<std::string>(&value.value()); text != nullptr && text->empty())
      throw po::error("--" + option + " is empty; `tessera " + name + " --help` says what it takes");
  if (std::ranges::find(paths, "") != paths.end())
    throw po::error("a path is empty, expected: tessera " + name + " " + command.arguments);
  const std::string with_default = command.run == calibrate ? "ranks" : "";
  for (const char* required : {"ranks", "model", "gpus", "output"})
    if (command.has(required) && values.count(required) == 0 && required != with_default)
      throw po::error(std::string("--") + required + " is missing; `tessera " + name + " --help` lists the options");
  arguments.paths.assign(paths.begin(), paths.end());
  return command.run(arguments);
}

void add_speed_options(po::options_description& options, Arguments& arguments) {
  auto add = options.add_options();
  SpeedArguments& speed = arguments.speed;
  add("speed", po::value(&speed.file),
      "plan: a file of `tessera calibrate`; the options below replace single values. calibrate: such a file, to which "
      "the link between hosts is added");
  add("gpu", po::value(&speed.gpu),
      ("plan: each rank's GPU; its data sheet gives memory, speed and link, as upper bounds. The options below replace "
       "single values. One of " +
       gpu_card_names())
          .c_str());
  add("flops", po::value(&speed.flops), "plan: FLOP per second of a rank, for example 300TFLOP/s");
  add("flops-fp32", po::value(&speed.flops_fp32), "plan: FLOP per second of a rank in fp32; default: --flops");
  add("memory-bandwidth", po::value(&speed.bandwidth),
      "plan: bytes per second of a rank's memory, for example 3e12 or 3TB/s");
  add("operator-time", po::value(&speed.operator_time), "plan: overhead of each operator, for example 5us; default: 0");
  add("link", po::value(&speed.link),
      "plan: bandwidth of each rank to other hosts, for example 400Gb/s or 50GB/s; also within a host, if "
      "no other value is given");
  add("latency", po::value(&speed.latency), "plan: latency between hosts, for example 10us; default: 0");
  add("host-link", po::value(&speed.host_link), "plan: bandwidth of each rank within its host, for example 450GB/s");
  add("host-latency", po::value(&speed.host_latency), "plan: latency within a host; default: 0");
  add("output,o", po::value(&arguments.out), "calibrate: the speed file to write");
  add("threads", po::value(&arguments.threads), "calibrate: intra-operator threads of each rank; default: 1");
  add("quick", po::bool_switch(&arguments.quick), "calibrate: fewer sizes and repetitions");
}

void add_plan_options(po::options_description& options, Arguments& arguments) {
  auto add = options.add_options();
  add("model", po::value(&arguments.model),
      "plan: gpt: or llama: with layers, width, heads, kv_heads, head_dim, mlp, vocab, sequence, batch, tie; or "
      "Hugging Face's config.json of GPT-2, Llama, Mistral, Qwen2 or Qwen3, or its folder; or an archive of "
      "torch.export (.pt2)");
  add("gpus", po::value(&arguments.gpus), "plan: number of ranks, one for each GPU");
  add("memory", po::value(&arguments.memory), "plan: memory of each rank, for example 80GiB; default: that of --gpu");
  add("sequence", po::value(&arguments.sequence),
      "plan: tokens of an item; default: the context of config.json, or the archive's exported length");
  add("batch", po::value(&arguments.batch),
      "plan: items of a rank in a step; default: 1, or the archive's exported batch");
  add("ranks-per-host", po::value(&arguments.ranks_per_host),
      "plan: number of ranks on a host; default: that of the calibration, or 8");
  add("host-memory", po::value(&arguments.host_memory),
      "plan: memory of each host for offload and copies, for example 1.5TB; default: not checked");
  add("elastic", po::value(&arguments.copies)->implicit_value(1, "1"),
      "plan: also the memory of an elastic run's copies; N: copies of each rank's part; default: 1");
  add("search", po::bool_switch(&arguments.search), "plan: also tries units, hybrid sharding, prefetching and offload");
  add("html", po::value(&arguments.html), "plan: file for a page that draws the memory of a step by operator");
  add("draw", po::value(&arguments.draw),
      "plan: number of the table's line to draw, from 1; default: the recommended line");
  add("measured", po::value(&arguments.measured),
      "plan: a TESSERA_TRACE file of a run with the drawn line's options, to draw beside the prediction");
}

int run(int argc, char** argv) {
  Arguments arguments;
  std::vector<std::string> words;  // the command and its paths
  po::options_description options;
  auto add = options.add_options();
  add("help,h", "print this text, or the options of a command");
  add("version", "print the version of Tessera");
  add("json", po::bool_switch(&arguments.json), "print JSON");
  add("slices", po::bool_switch(&arguments.slices), "inspect: print every slice");
  add("state", po::bool_switch(&arguments.state), "consolidate: also write the optimizer's tensors");
  add("ranks", po::value(&arguments.ranks),
      "reshard: number of ranks of the new checkpoint; calibrate: number of concurrent ranks, default: 2");
  add("max-file-bytes", po::value(&arguments.max_file_bytes),
      "consolidate: write several files of at most this size, with an index");
  add("tolerance", po::value(&arguments.tolerance), "diff: ignore differences up to this value");
  add_plan_options(options, arguments);
  add_speed_options(options, arguments);
  add("parameters", po::bool_switch(&arguments.parameters), "diff: compare parameters only, not optimizer or extra");
  po::options_description all;
  all.add(options).add_options()("word", po::value(&words));
  po::variables_map values;
  po::store(po::command_line_parser(argc, argv)
                .options(all)
                .positional(po::positional_options_description().add("word", -1))
                .run(),
            values);
  po::notify(values);
  if (values.count("version") > 0) {
    std::cout << "tessera " << TESSERA_VERSION << "\n";
    return 0;
  }
  const bool is_help_command = !words.empty() && words[0] == "help";
  if (is_help_command) words.erase(words.begin());
  if (is_help_command || values.count("help") > 0 || words.empty()) {
    const std::string about = words.empty() ? "" : take_command(words);
    if (is_help_command && !words.empty())
      throw po::error("help takes one command, got '" + about + "' and '" + words[0] + "'");
    print_help(about, options);
    return is_help_command || values.count("help") > 0 ? 0 : 2;
  }
  const std::string name = take_command(words);
  return run_command(name, values, words, arguments);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const int code = run(argc, argv);
    // Throws if output was lost, for example on a full disk.
    std::cout.flush();
    if (!std::cout || std::fflush(stdout) != 0 || std::ferror(stdout) != 0)
      throw std::runtime_error("standard output could not be written");
    return code;
  } catch (const std::exception& error) {
    std::cerr << "tessera: " << error.what() << "\n";
    return 2;
  }
}
