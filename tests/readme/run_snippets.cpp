// Runs the documentation's C++ snippets, each in processes and a folder of its own:
//
//   run_snippets           all of them
//   run_snippets <key>     one of them; its key is "<page>: <its first line>"
//
// A snippet runs on two ranks over a store in a file, or as a world of one if it makes its own group. A snippet that
// cannot run here is in kCannotRun, and must fail with the error given there.

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "tests/readme/names.h"
#include "tests/support/built.h"
#include "tests/support/temporary_folder.h"

namespace in_documentation {
namespace {

using tessera::testing_support::file_bytes;
using tessera::testing_support::TemporaryFolder;

struct CannotRun {
  std::string key, reason, error;
};

const std::vector<CannotRun> kCannotRun = {
    {"docs/guide.md: auto comm = tessera::init({.backend = \"nccl\"});", "needs a GPU",
     "the NCCL backend for cuda:0 is not in this build"},
    {"docs/gpu.md: tessera::CapturedStep step(", "needs a GPU", "the wrapper's group is on the CPU"},
    {"docs/checkpoint.md: tessera::save_checkpoint(\"s3://bucket/run/step-000200\", fsdp, optimizer, {{\"step\", "
     "200}}, "
     "{.keep_last = 3});",
     "needs an S3 server", "AWS_ACCESS_KEY_ID"},
};

constexpr unsigned kSecondsOfSnippet = 60;

std::string key_of(const Snippet& snippet) {
  return snippet.page + ": " + snippet.text.substr(0, snippet.text.find('\n'));
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// Writes the files that snippets read: the archive of the guide's command, and weights as transformers saves them.
void write_llama() {
  std::filesystem::copy_file(tessera::testing_support::built(TESSERA_LLAMA_ARCHIVE), "llama.pt2");
  auto model = tessera::load_exported("llama.pt2", {.init = [](const std::string& fqn, at::Tensor& tensor) {
                                        fqn.ends_with("norm.weight") ? tensor.fill_(1) : tensor.normal_(0, 0.02);
                                      }});
  tessera::DistributedDataParallel whole(model,
                                         tessera::communicator_from(c10::make_intrusive<c10d::HashStore>(), 0, 1));
  std::filesystem::create_directory("llama");
  tessera::save_full("llama/model.safetensors", whole);
  std::ofstream index("llama/model.safetensors.index.json");
  index << R"({"metadata": {}, "weight_map": {)";
  const char* separator = "";
  for (const auto& parameter : model->named_parameters()) {
    index << separator << '"' << parameter.key() << R"(": "model.safetensors")";
    separator = ", ";
  }
  index << "}}";
}

// Runs the function in a child process, whose output is appended to `log`; returns its process id.
template <class Body>
pid_t start(const std::filesystem::path& log, Body body) {
  std::cout.flush();
  const pid_t child = fork();
  if (child < 0) throw std::runtime_error("fork failed");
  if (child != 0) return child;
  alarm(kSecondsOfSnippet);
  const int file = open(log.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600);
  dup2(file, STDOUT_FILENO);
  dup2(file, STDERR_FILENO);
  int status = 1;
  try {
    std::filesystem::current_path(log.parent_path());
    at::set_num_threads(1);
    status = body();
  } catch (const std::exception& error) {
    std::cerr << "error: " << error.what() << "\n";
  }
  std::cout.flush();
  std::cerr.flush();
  _exit(status);
}

bool succeeds(pid_t child) {
  int status = 0;
  if (waitpid(child, &status, 0) != child) throw std::runtime_error("waitpid failed");
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

// The ranks that a snippet's main() starts find their snippet by this variable. They have no arguments.
constexpr const char* kSnippetOfRanks = "TESSERA_TEST_SNIPPET";

// Returns the output if the snippet failed.
std::optional<std::string> error_of(const Snippet& snippet, const std::string& program) {
  const TemporaryFolder temporary;
  const std::filesystem::path log = temporary / "log";
  std::vector<pid_t> children;
  if (snippet.main != nullptr) {
    children.push_back(start(log, [&] {
      ::setenv(kSnippetOfRanks, key_of(snippet).c_str(), /*overwrite=*/1);
      std::string name = program;
      std::vector<char*> arguments{name.data(), nullptr};
      return snippet.main(1, arguments.data());
    }));
  } else {
    if (contains(snippet.text, "llama") && !succeeds(start(log, [] { return write_llama(), 0; })))
      return "write_llama() failed:\n" + file_bytes(log);
    const bool makes_group = contains(snippet.text, "init(") || contains(snippet.text, "tessera::Elastic ") ||
                             contains(snippet.text, "communicator_from");
    Setting setting{.world_size = makes_group ? 1 : 2, .wraps_model = contains(snippet.text, "comm")};
    for (; setting.rank < setting.world_size; ++setting.rank)
      children.push_back(start(log, [&] { return snippet.run(setting); }));
  }
  bool succeeded = true;
  for (const pid_t child : children) succeeded = succeeds(child) && succeeded;
  return succeeded ? std::nullopt : std::optional(file_bytes(log));
}

// Prints why the snippet's result is wrong, and returns false, unless it is right.
bool check(const Snippet& snippet, const std::string& program) {
  const std::string key = key_of(snippet);
  const auto listed =
      std::find_if(kCannotRun.begin(), kCannotRun.end(), [&](const auto& entry) { return entry.key == key; });
  const auto error = error_of(snippet, program);
  if (listed == kCannotRun.end()) {
    if (error) std::cout << "FAILED " << key << "\n" << *error << "\n";
    return !error;
  }
  std::cout << "cannot run (" << listed->reason << "): " << key << "\n";
  if (!error) std::cout << "FAILED: it ran, remove it from kCannotRun\n";
  if (error && !contains(*error, listed->error))
    std::cout << "FAILED: expected an error with '" << listed->error << "', got:\n" << *error << "\n";
  return error && contains(*error, listed->error);
}

// Checks all snippets, or those with the key `only`. Returns the exit code.
int run_all(const std::string& program, const std::string& only) {
  int failed = 0, started = 0, compiled = 0;
  std::set<std::string> keys;
  for (const Snippet& snippet : kSnippets) {
    const std::string key = key_of(snippet);
    keys.insert(key);
    if (!only.empty() && key != only) continue;
    if (snippet.run == nullptr && snippet.main == nullptr) {
      std::cout << "only compiled (a type or a template): " << key << "\n";
      ++compiled;
      continue;
    }
    ++started;
    if (!check(snippet, program)) ++failed;
  }
  for (const CannotRun& entry : kCannotRun) {
    if (keys.contains(entry.key)) continue;
    std::cout << "FAILED: there is no snippet '" << entry.key << "', remove it from kCannotRun\n";
    ++failed;
  }
  if (started + compiled == 0) {
    std::cout << "FAILED: there is no snippet '" << only << "'\n";
    ++failed;
  }
  std::cout << started << " snippets were started, " << compiled << " only compiled, " << failed << " failures\n";
  return failed == 0 ? 0 : 1;
}

}  // namespace
}  // namespace in_documentation

int main(int argc, char** argv) {
  using namespace in_documentation;
  const std::string only = argc == 2 ? argv[1] : "";
  if (!tessera::launched()) {
    unsetenv("AWS_ACCESS_KEY_ID");  // a snippet must not write to a bucket of the machine's
    return run_all(argv[0], only);
  }
  // A rank of a snippet's own main().
  const char* const key = std::getenv(kSnippetOfRanks);
  for (const Snippet& snippet : kSnippets)
    if (key != nullptr && key_of(snippet) == key && snippet.main != nullptr) return snippet.main(argc, argv);
  std::cerr << "there is no program '" << (key != nullptr ? key : "") << "'\n";
  return 2;
}
