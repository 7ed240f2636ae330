// The `tessera` command: looks at checkpoints, and makes others of them.

#include <boost/program_options.hpp>
#include <exception>
#include <iostream>

#include "commands.h"

namespace {

namespace po = boost::program_options;

struct Command {
  const char* name;
  const char* arguments;
  const char* what;
  size_t paths;
  int (*run)(const Arguments&);
};

constexpr Command kCommands[] = {
    {"inspect", "PATH [--slices]", "names, shapes, dtypes, bytes, and where each slice lies", 1, inspect},
    {"verify", "DIR", "checksums, headers, coverage; exit code 1 if anything is wrong", 1, verify},
    {"consolidate", "DIR FILE [--state] [--max-file-bytes N]", "to full safetensors files", 2, consolidate},
    {"reshard", "DIR NEW_DIR --ranks N", "to a checkpoint as N ranks would write it", 2, reshard},
    {"diff", "A B", "what differs between two; exit code 1 if anything does", 2, diff},
};

void print_help(const po::options_description& options) {
  std::cout << "Usage: tessera COMMAND ...\n\n";
  for (const auto& command : kCommands)
    std::cout << "  tessera " << command.name << " " << command.arguments << "\n      " << command.what << "\n";
  std::cout << "\nPATH is a checkpoint, a folder of them (the newest is taken), or full safetensors files;\n"
               "DIR a checkpoint or such a folder.\n\n"
            << options << "\nExit codes: 0; 1 if damage or differences were found; 2 for errors.\n";
}

int run(int argc, char** argv) {
  Arguments arguments;
  std::string name;
  std::vector<std::string> paths;
  po::options_description options("Options");
  options.add_options()("help,h", "this text")("json", po::bool_switch(&arguments.json), "print JSON")(
      "slices", po::bool_switch(&arguments.slices), "inspect: every slice")("state", po::bool_switch(&arguments.state),
                                                                            "consolidate: the optimizer's tensors too")(
      "ranks", po::value(&arguments.ranks), "reshard: by how many ranks")(
      "max-file-bytes", po::value(&arguments.max_file_bytes),
      "consolidate: several files of at most N bytes, with an index");
  po::options_description all;
  all.add(options).add_options()("command", po::value(&name))("path", po::value(&paths));
  po::positional_options_description positions;
  positions.add("command", 1).add("path", -1);
  po::variables_map values;
  po::store(po::command_line_parser(argc, argv).options(all).positional(positions).run(), values);
  po::notify(values);
  if (values.count("help") > 0 || name.empty() || name == "help") {
    print_help(options);
    return name.empty() && values.count("help") == 0 ? 2 : 0;
  }
  for (const auto& command : kCommands) {
    if (name != command.name) continue;
    if (paths.size() != command.paths) throw po::error("expected: tessera " + name + " " + command.arguments);
    auto only_for = [&](const char* option, const char* of) {
      if (values.count(option) > 0 && !values[option].defaulted() && name != of)
        throw po::error(std::string("--") + option + " is for `tessera " + of + "`");
    };
    only_for("ranks", "reshard");
    only_for("max-file-bytes", "consolidate");
    if (arguments.slices && name != "inspect") throw po::error("--slices is for `tessera inspect`");
    if (arguments.state && name != "consolidate") throw po::error("--state is for `tessera consolidate`");
    if (name == "reshard" && values.count("ranks") == 0) throw po::error("--ranks is missing");
    arguments.paths.assign(paths.begin(), paths.end());
    return command.run(arguments);
  }
  throw po::error("there is no command '" + name + "'; `tessera --help` lists them");
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const std::exception& error) {
    std::cerr << "tessera: " << error.what() << "\n";
    return 2;
  }
}
