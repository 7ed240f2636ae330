// Runs the `tessera` command as a user does.
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>

#include <tessera/checkpoint/full_file.h>
#include "checkpoint/load/offline.h"
#include "tests/checkpoint/replicated.h"
#include "tests/support/built.h"
#include "tests/support/child_process.h"
#include "tests/support/reference.h"
#include "tests/support/temporary_folder.h"

namespace tessera::command_test {
using namespace internal;
namespace {

using namespace testing_support;
using nlohmann::json;

struct Ran {
  int code;
  std::string output;
};

Ran tessera_command(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), tessera::testing_support::built(TESSERA_COMMAND));
  tessera::testing_support::ChildProcess child(arguments);
  const int code = child.wait();
  return {code, child.output()};
}

class Command : public ::testing::Test {
 protected:
  Command() {
    on_ranks(3, [&](std::shared_ptr<Communicator> comm) {
      auto net =
          seeded(1, [] { return torch::nn::Sequential(torch::nn::Linear(200, 100), torch::nn::Linear(100, 7)); });
      FullyShardedDataParallel fsdp(net, comm, {.auto_wrap = wrap_modules<torch::nn::LinearImpl>()});
      torch::optim::AdamW optimizer(fsdp.parameters(), 0.5);
      fsdp(torch::ones({2, 200})).sum().backward();
      optimizer.step();
      save_checkpoint(folder_ / "a", fsdp, optimizer, {{"step", 4}});
    });
  }
  std::string at(const std::string& name) const { return (folder_ / name).string(); }
  TemporaryFolder folder_;
};

TEST_F(Command, InspectShowsNamesAndSlices) {
  const auto text = tessera_command({"inspect", at("a"), "--slices"});
  EXPECT_EQ(text.code, 0);
  for (const char* part :
       {"AdamW", "3 ranks", "\"step\":4", "exp_avg_sq", "[100, 200]", "rank-00002-0.safetensors", "78.1 KiB"})
    expect_contains(text.output, part);
  const json all = json::parse(tessera_command({"inspect", at("a"), "--json"}).output);
  EXPECT_EQ(all["world_size"], 3);
  EXPECT_EQ(all["tensors"]["optim.exp_avg.0.weight"]["shape"], json({100, 200}));
  EXPECT_EQ(all["optimizer"]["groups"][0]["options"]["lr"], 0.5);
}

TEST_F(Command, VerifyFindsDamage) {
  EXPECT_EQ(tessera_command({"verify", at("a")}).code, 0);
  std::filesystem::create_directories(folder_ / "run");
  std::filesystem::rename(folder_ / "a", folder_ / "run/step-1");
  EXPECT_EQ(tessera_command({"verify", at("run")}).code, 0);  // the newest in the folder
  std::fstream file(folder_ / "run/step-1/rank-00001-0.safetensors", std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(-100, std::ios::end);
  file.put('\x77');
  file.close();
  const auto damaged = tessera_command({"verify", at("run/step-1")});
  EXPECT_EQ(damaged.code, 1);
  expect_contains(damaged.output, "rank-00001-0.safetensors: tensor '");
  EXPECT_FALSE(json::parse(tessera_command({"verify", at("run/step-1"), "--json"}).output)["sound"].get<bool>());
}

// Files of ranks are parts of a checkpoint, not full files.
TEST_F(Command, DiffRefusesFoldersThatHaveLostTheirManifest) {
  namespace fs = std::filesystem;
  for (const char* name : {"b", "c"}) {
    fs::copy(folder_ / "a", folder_ / name, fs::copy_options::recursive);
    fs::remove(folder_ / name / kManifestName);
  }
  for (const auto& paths : {std::pair{"b", "c"}, std::pair{"a", "b"}, std::pair{"b", "a"}}) {
    const auto refused = tessera_command({"diff", at(paths.first), at(paths.second)});
    EXPECT_EQ(refused.code, 2);
    expect_contains(refused.output, "b: has the files of a checkpoint's ranks, but no tessera.json");
  }
  expect_contains(tessera_command({"inspect", at("b")}).output, "but no tessera.json");
}

TEST_F(Command, ReshardedIsTheSameAndSound) {
  for (const char* ranks : {"1", "2", "5"}) {
    EXPECT_EQ(tessera_command({"reshard", at("a"), at("b"), "--ranks", ranks}).output, "");
    EXPECT_EQ(tessera_command({"verify", at("b")}).code, 0);
    const auto same = tessera_command({"diff", at("a"), at("b")});
    EXPECT_EQ(same.code, 0) << same.output;
  }
  on_ranks(2, [&](std::shared_ptr<Communicator> comm) {
    auto net = torch::nn::Sequential(torch::nn::Linear(200, 100), torch::nn::Linear(100, 7));
    FullyShardedDataParallel fsdp(net, comm, {.auto_wrap = wrap_modules<torch::nn::LinearImpl>()});
    torch::optim::AdamW optimizer(fsdp.parameters(), 1);
    EXPECT_EQ(load_checkpoint(folder_ / "b", fsdp, optimizer)["step"], 4);
  });
  // A checkpoint can be resharded onto itself.
  EXPECT_EQ(tessera_command({"reshard", at("b"), at("b"), "--ranks", "3"}).code, 0);
  EXPECT_EQ(tessera_command({"diff", at("a"), at("b")}).code, 0);
  std::set<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder_.path())) names.insert(entry.path().filename());
  EXPECT_EQ(names, (std::set<std::string>{"a", "b"}));
}

TEST_F(Command, ConsolidatedLoadsAndDiffSaysWhatChanged) {
  EXPECT_EQ(tessera_command({"consolidate", at("a"), at("m.safetensors")}).output, "");
  on_ranks(1, [&](std::shared_ptr<Communicator> comm) {
    auto net = torch::nn::Sequential(torch::nn::Linear(200, 100), torch::nn::Linear(100, 7));
    Replicated model(net.ptr(), comm);
    load_full(folder_ / "m.safetensors", model);
    const at::NoGradGuard no_grad;
    net->parameters()[1][3] += 2;
    save_full(folder_ / "n.safetensors", model);
  });
  const auto changed = tessera_command({"diff", at("m.safetensors"), at("n.safetensors")});
  EXPECT_EQ(changed.code, 1);
  EXPECT_EQ(changed.output, "0.bias: 1 elements differ, by 2 at most\n");
  EXPECT_EQ(tessera_command({"diff", at("m.safetensors"), at("n.safetensors"), "--tolerance", "1.5"}).code, 1);
  EXPECT_EQ(tessera_command({"diff", at("m.safetensors"), at("n.safetensors"), "--tolerance", "2.5"}).output,
            "the same\n");
  EXPECT_EQ(tessera_command({"diff", at("a"), at("m.safetensors"), "--parameters"}).output, "the same\n");
  EXPECT_EQ(tessera_command({"consolidate", at("a"), at("s.safetensors"), "--state", "--max-file-bytes", "50000"}).code,
            0);
  EXPECT_TRUE(std::filesystem::exists(folder_ / "s.safetensors.index.json"));
  expect_contains(tessera_command({"diff", at("a"), at("m.safetensors")}).output, "optim.exp_avg.0.bias: only in");
}

TEST_F(Command, DiffToleratesDifferencesOfComplexValues) {
  on_ranks(1, [&](std::shared_ptr<Communicator> comm) {
    auto net = std::make_shared<torch::nn::Module>("Wave");
    auto wave = net->register_parameter("wave", torch::full({3}, c10::complex<double>(1, 2), at::kComplexFloat));
    Replicated model(net, comm);
    save_checkpoint(folder_ / "one", model);
    const at::NoGradGuard no_grad;
    wave[1] += c10::complex<double>(3, 4);
    save_checkpoint(folder_ / "two", model);
  });
  const auto with = [&](double tolerance) {
    return diff_checkpoints(folder_ / "one", folder_ / "two", {.tolerance = tolerance});
  };
  EXPECT_TRUE(with(5.5).empty());
  for (const double tolerance : {0.0, 4.5}) {
    ASSERT_EQ(with(tolerance).size(), 1U);
    EXPECT_EQ(with(tolerance)[0].different_numel, 1);
    EXPECT_EQ(with(tolerance)[0].max_difference, 5);
  }
}

TEST_F(Command, DiffHoldsABlockAtATime) {
  on_ranks(2, [&](std::shared_ptr<Communicator> comm) {
    FullyShardedDataParallel fsdp(torch::nn::Linear(4096, 8192), comm);
    save_checkpoint(folder_ / "one", fsdp);
    const at::NoGradGuard no_grad;
    for (auto& shard : fsdp.parameters()) shard.add_(1);
    save_checkpoint(folder_ / "two", fsdp);
  });
  PeakMemory memory;
  const auto differences = diff_checkpoints(folder_ / "one", folder_ / "two", {.tolerance = 0.5});
  ASSERT_EQ(differences.size(), 2U);
  EXPECT_EQ(differences[1].different_numel, 4096 * 8192);
  EXPECT_LT(memory.peak_bytes(), 64 << 20) << "of 134 MB each";
}

TEST_F(Command, DiffOfParametersLeavesBuffersOutOfFullFilesToo) {
  on_ranks(2, [&](std::shared_ptr<Communicator> comm) {
    FullyShardedDataParallel fsdp(torch::nn::BatchNorm1d(3), comm);
    save_checkpoint(folder_ / "norm", fsdp);
    save_full(folder_ / "norm.safetensors", fsdp);
  });
  for (const auto& [a, b] : {std::pair(at("norm"), at("norm.safetensors")), {at("norm.safetensors"), at("norm")}})
    EXPECT_EQ(tessera_command({"diff", a, b, "--parameters"}).output, "the same\n");
}

// A file name may hold any bytes, and JSON only text.
TEST_F(Command, PrintsJsonForAPathThatIsNoText) {
  std::filesystem::rename(at("a"), at("a\xff"));
  for (const std::vector<std::string>& arguments : {std::vector<std::string>{"verify", at("a\xff"), "--json"},
                                                    {"reshard", at("a\xff"), at("b"), "--ranks", "2", "--json"},
                                                    {"consolidate", at("a\xff"), at("c\xff"), "--json"}}) {
    const auto result = tessera_command(arguments);
    EXPECT_EQ(result.code, 0) << result.output;
    expect_contains(json::parse(result.output).dump(), "a\xef\xbf\xbd");  // U+FFFD
  }
}

TEST_F(Command, MistakesAreExplained) {
  ASSERT_EQ(tessera_command({"consolidate", at("a"), at("full.safetensors")}).code, 0);
  std::filesystem::create_directory(at("files"));
  std::filesystem::copy(at("full.safetensors"), at("files"));
  std::filesystem::create_directories(at("out/checkpoints"));
  std::filesystem::copy(at("a"), at("out/checkpoints/step-1"), std::filesystem::copy_options::recursive);
  const std::string inner = at("out/checkpoints") + " holds checkpoints";
  const std::pair<std::vector<std::string>, std::string> wrong[] = {
      {{"inspect", at("out")}, inner},
      {{"verify", at("out")}, inner},
      {{"diff", at("a"), at("out")}, inner},
      {{"bogus"}, "no command 'bogus'"},
      {{"inspect"}, "expected: tessera inspect PATH"},
      {{"inspect", at("none")}, "No such file"},
      {{"reshard", at("a"), at("b")}, "--ranks is missing; `tessera reshard --help` lists the options"},
      {{"trace"}, "expected: tessera trace merge OUT IN..."},
      {{"reshard", at("a"), at("b"), "--ranks", "0"}, "ranks is 0"},
      {{"verify", at("a"), "--ranks", "3"}, "--ranks is for `tessera reshard` and `tessera calibrate`"},
      {{"verify", at("a"), "--tolerance", "3"}, "--tolerance is for `tessera diff`\n"},
      {{"verify", at("full.safetensors")}, "`tessera inspect` and `tessera diff` take full safetensors files"},
      {{"reshard", at("files"), at("b"), "--ranks", "2"}, "`tessera inspect` and `tessera diff` take full"},
      {{"consolidate", at("full.safetensors"), at("b")}, "full.safetensors: is no checkpoint"},
      {{"inspect", at("a"), "--bogus"}, "bogus"},
      {{"verify", at("none")}, "there is no such directory"},
      {{"consolidate", at("a"), at("a/rank-00000-0.safetensors")}, "is in the checkpoint"},
      {{"diff", at("a"), at("a"), "--tolerance", "-1"}, "tolerance is -1"},
      {{"help", "bogus"}, "no command 'bogus'"},
      {{"help", "plan", "x"}, "help takes one command, got 'plan' and 'x'"},
      {{"inspect", ""}, "a path is empty, expected: tessera inspect PATH"},
      {{"consolidate", at("a"), ""}, "a path is empty"},
      {{"trace", "merge", "", at("a")}, "a path is empty"},
      {{}, "Usage"},
  };
  for (const auto& [arguments, message] : wrong) {
    const auto result = tessera_command(arguments);
    EXPECT_EQ(result.code, 2) << result.output;
    expect_contains(result.output, message);
  }
  expect_contains(tessera_command({"inspect", at("full.safetensors")}).output, " in 1 file\n");
  EXPECT_EQ(tessera_command({"verify", at("a")}).code, 0);  // none of them changed it
}

TEST_F(Command, TellsItsVersionAndHelp) {
  const auto version = tessera_command({"--version"});
  EXPECT_EQ(version.code, 0);
  EXPECT_EQ(version.output.rfind("tessera 0.", 0), 0U) << version.output;
  const auto whole = tessera_command({"--help"});
  EXPECT_EQ(whole.code, 0);
  EXPECT_LT(whole.output.find("\nCommands:\n  inspect "), whole.output.find("Options:")) << whole.output;
  for (const auto& arguments : {std::vector<std::string>{"help", "trace"}, {"trace", "--help"}}) {
    const auto help = tessera_command(arguments);
    EXPECT_EQ(help.code, 0) << help.output;
    expect_contains(help.output, "tessera trace merge OUT IN...");
  }
  for (const auto& arguments : {std::vector<std::string>{"help", "reshard"}, {"reshard", "--help"}}) {
    const auto help = tessera_command(arguments);
    EXPECT_EQ(help.code, 0);
    expect_contains(help.output, "tessera reshard DIR NEW_DIR --ranks N");
    expect_contains(help.output, "--json");
    EXPECT_EQ(help.output.find("consolidate"), std::string::npos) << help.output;
  }
}

TEST_F(Command, OutputThatCannotBeWrittenIsAnError) {
  tessera::testing_support::ChildProcess child(
      {"sh", "-c", tessera::testing_support::built(TESSERA_COMMAND) + " inspect '" + at("a") + "' > /dev/full"});
  EXPECT_EQ(child.wait(), 2);
  expect_contains(child.output(), "standard output could not be written");
}

}  // namespace
}  // namespace tessera::command_test
