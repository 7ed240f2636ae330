// Runs the examples of docs/guide.md as a user does, and checks their output.

#include <gtest/gtest.h>

#include <signal.h>

#include <filesystem>
#include <map>
#include <regex>
#include <sstream>
#include <string>
#include <vector>

#include "tests/support/built.h"
#include "tests/support/child_process.h"
#include "tests/support/free_port.h"
#include "tests/support/temporary_folder.h"

namespace {

using tessera::testing_support::built;
using tessera::testing_support::ChildProcess;

std::string run_example(const std::string& example, std::vector<std::string> arguments,
                        const ChildProcess::Environment& environment = {}) {
  arguments.insert(arguments.begin(), built(EXAMPLES_FOLDER) + "/" + example);
  ChildProcess child(arguments, environment);
  EXPECT_EQ(child.wait(), 0) << child.output();
  return child.output();
}

// The output at 2 ranks, of one run for all tests.
const std::string& output_of(const std::string& example) {
  static std::map<std::string, std::string> outputs;
  const auto [output, is_new] = outputs.try_emplace(example);
  if (is_new) output->second = run_example(example, {});
  return output->second;
}

// The printed losses by step.
std::map<int, double> losses_by_step(const std::string& output) {
  static const std::regex line("step (\\d+): loss ([^\n]*)");
  std::map<int, double> by_step;
  for (std::sregex_iterator match(output.begin(), output.end(), line), end; match != end; ++match)
    by_step[std::stoi((*match)[1])] = std::stod((*match)[2]);
  return by_step;
}

void expect_same(const std::map<int, double>& actual, const std::map<int, double>& expected) {
  for (const auto& [step, loss] : expected) {
    ASSERT_TRUE(actual.contains(step)) << step;
    EXPECT_NEAR(actual.at(step), loss, 1e-4 * loss) << "step " << step;
  }
}

// All numbers in the lines that match `pattern`, a line each.
std::vector<std::vector<int64_t>> numbers_in(const std::string& output, const std::string& pattern) {
  const std::regex wanted(pattern);
  std::istringstream lines(output);
  std::vector<std::vector<int64_t>> rows;
  std::smatch match;
  for (std::string line; std::getline(lines, line);) {
    if (!std::regex_match(line, match, wanted)) continue;
    rows.emplace_back();
    for (size_t i = 1; i < match.size(); ++i) rows.back().push_back(std::stoll(match[i]));
  }
  return rows;
}

TEST(GuideExamples, AllWrappersHaveTheLossesOfOneProcess) {
  const auto expected = losses_by_step(run_example("ddp", {"--ranks", "1"}));
  ASSERT_EQ(expected.size(), 5u);
  EXPECT_LT(expected.at(19), 0.8 * expected.at(0));
  for (const std::string example : {"ddp", "sdp", "fsdp", "offload"}) {
    SCOPED_TRACE(example);
    expect_same(losses_by_step(output_of(example)), expected);
  }
  expect_same(losses_by_step(run_example("fsdp", {"--ranks", "3"})), expected);
}

// A wrong argument neither starts ranks nor makes a folder of its name.
TEST(GuideExamples, WrongArgumentsPrintTheUsage) {
  const tessera::testing_support::TemporaryFolder folder;
  std::vector<std::vector<std::string>> commands;
  for (const std::string example : {"ddp", "sdp", "fsdp", "offload"})
    for (const std::string ranks : {"0", "-1", "x", "99999999999", "4294967297", "2x", " 1", ""})
      commands.push_back({example, "--ranks", ranks});
  for (const std::string example : {"fsdp", "classifier", "physics", "reinforcement"})
    commands.insert(commands.end(), {{example, "--help"}, {example, "a", "b", "c", "d"}});
  const auto out = (folder / "out").string();
  commands.insert(commands.end(), {{"fsdp", "--ranks"},
                                   {"checkpoint", "--ranks", "2"},
                                   {"checkpoint", out, "x"},
                                   {"checkpoint", out, "1x"},
                                   {"checkpoint", "", "1"},
                                   {"checkpoint", out, "1", "--ranks", "1x"},
                                   {"checkpoint", out, "99999999999999999999"},
                                   {"checkpoint", out, "10", "--ranks", "0"},
                                   {"classifier", out, "2", "4"},
                                   {"classifier", out, "0"},
                                   {"classifier", out, "1x"},
                                   {"classifier", "", "1"},
                                   {"physics", "1", "1x"},
                                   {"reinforcement", "1x"},
                                   {"physics", "x"}});
  for (auto command : commands) {
    const std::string usage = "usage: " + command[0] + " ";
    command[0] = built(EXAMPLES_FOLDER) + "/" + command[0];
    ChildProcess child(command);
    EXPECT_EQ(child.wait(), 2) << usage << child.output();
    EXPECT_EQ(child.output().find(usage), 0U) << child.output();
  }
  for (const std::string example : {"stages", "zero_recipe"}) {
    ChildProcess child({built(EXAMPLES_FOLDER) + "/" + example, "extra"});
    EXPECT_EQ(child.wait(), 2) << child.output();
    EXPECT_NE(child.output().find("too many positional options"), std::string::npos) << child.output();
  }
  EXPECT_FALSE(std::filesystem::exists(out));
}

TEST(GuideExamples, AWrongLauncherEnvironmentIsOneLine) {
  for (const ChildProcess::Environment& wrong :
       {ChildProcess::Environment{{"RANK", "x"}, {"WORLD_SIZE", "1"}}, ChildProcess::Environment{{"RANK", "0"}}}) {
    ChildProcess child({built(EXAMPLES_FOLDER) + "/ddp"}, wrong);
    EXPECT_EQ(child.wait(), 1);
    EXPECT_EQ(child.output().find("ddp: tessera::init: "), 0U) << child.output();
    EXPECT_EQ(child.output().find("terminate"), std::string::npos) << child.output();
  }
}

TEST(GuideExamples, EachRankKeepsItsShare) {
  const auto kept = numbers_in(output_of("fsdp"), "rank (\\d): keeps (\\d+) of (\\d+) bytes of parameters, .*");
  ASSERT_EQ(kept.size(), 2u);
  for (const auto& rank : kept) EXPECT_LT(rank[1], 0.51 * static_cast<double>(rank[2]));
  const auto owned = numbers_in(output_of("sdp"), "rank (\\d): owns (\\d+) of (\\d+) parameters");
  ASSERT_EQ(owned.size(), 2u);
  EXPECT_EQ(owned[0][1] + owned[1][1], owned[0][2]);
}

TEST(GuideExamples, JoinTheRanksOfALauncher) {
  const auto port = std::to_string(tessera::testing_support::free_port());
  const auto output = run_example(
      "fsdp", {}, {{"RANK", "0"}, {"WORLD_SIZE", "1"}, {"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", port}});
  EXPECT_EQ(numbers_in(output, "rank (\\d): keeps .*").size(), 1u) << output;
}

TEST(GuideExamples, ACheckpointOfTwoRanksLoadsOnThree) {
  const tessera::testing_support::TemporaryFolder folder;
  const auto interrupted = (folder.path() / "interrupted").string(), whole = (folder.path() / "whole").string();
  const auto expected = losses_by_step(run_example("checkpoint", {whole, "40", "--ranks", "1"}));
  ASSERT_EQ(expected.size(), 8u);
  run_example("checkpoint", {interrupted, "20"});
  const auto output = run_example("checkpoint", {interrupted, "40", "--ranks", "3"});
  EXPECT_NE(output.find("loaded step-20\n"), std::string::npos) << output;
  const auto resumed = losses_by_step(output);
  EXPECT_EQ(resumed.size(), 4u) << "steps 20 to 35";
  for (const auto& [step, loss] : resumed) EXPECT_NEAR(loss, expected.at(step), 1e-4 * loss) << "step " << step;
  EXPECT_TRUE(std::filesystem::exists(interrupted + "/model.safetensors"));
}

TEST(GuideExamples, CtrlCSavesACheckpoint) {
  const tessera::testing_support::TemporaryFolder folder;
  const auto out = (folder / "out").string();
  ChildProcess endless({built(EXAMPLES_FOLDER) + "/checkpoint", out, "100000000"});
  ASSERT_TRUE(endless.await("step 5: loss", 1)) << endless.output();
  ::kill(endless.pid(), SIGINT);
  EXPECT_EQ(endless.wait(), 128 + SIGINT) << endless.output();
  const auto last = losses_by_step(endless.output()).rbegin()->first;
  const auto resumed = run_example("checkpoint", {out, std::to_string(last + 20)});
  const auto loaded = resumed.find("loaded step-");
  ASSERT_NE(loaded, std::string::npos) << resumed;
  EXPECT_GT(std::stoi(resumed.substr(loaded + 12)), last);
}

}  // namespace
