// Runs the examples that are whole programs for a few steps each.

#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <vector>

#include "tests/support/built.h"
#include "tests/support/child_process.h"
#include "tests/support/temporary_folder.h"

namespace {

using tessera::testing_support::built;
using tessera::testing_support::ChildProcess;
using tessera::testing_support::TemporaryFolder;

std::vector<std::string> command(const std::string& example, const std::vector<std::string>& arguments) {
  std::vector<std::string> all{built(EXAMPLES_FOLDER) + "/" + example};
  all.insert(all.end(), arguments.begin(), arguments.end());
  return all;
}

std::string output_of(const std::string& example, const std::vector<std::string>& arguments) {
  ChildProcess child(command(example, arguments));
  EXPECT_EQ(child.wait(), 0) << child.output();
  return child.output();
}

// The number after the last occurrence of `text`.
double number_after(const std::string& output, const std::string& text) {
  const auto at = output.rfind(text);
  if (at == std::string::npos) throw std::runtime_error("no '" + text + "' in " + output);
  return std::stod(output.substr(at + text.size()));
}

TEST(WholePrograms, TheClassifierLearnsAndContinuesInAnotherStage) {
  const TemporaryFolder folder;
  const auto saves = (folder.path() / "saves").string();
  EXPECT_NE(output_of("classifier", {saves, "2"}).find("epoch 1: accuracy "), std::string::npos);
  const auto output = output_of("classifier", {saves, "4", "3"});
  EXPECT_NE(output.find("continues in epoch 3\n"), std::string::npos) << output;
  EXPECT_GT(number_after(output, "epoch 4: accuracy "), 0.6) << output;  // of four classes
  for (const char* name : {"best", "last"}) EXPECT_TRUE(std::filesystem::exists(saves + "/" + name)) << name;
}

TEST(WholePrograms, CtrlCSavesTheClassifierWithinAnEpoch) {
  const TemporaryFolder folder;
  const auto saves = (folder.path() / "saves").string();
  {
    ChildProcess child(command("classifier", {saves, "1000"}));
    ASSERT_TRUE(child.await("epoch 1: accuracy ", 1)) << child.output();
    ::kill(child.pid(), SIGINT);
    EXPECT_EQ(child.wait(), 130) << child.output();
  }
  ASSERT_TRUE(std::filesystem::exists(saves + "/last"));
  const auto output = output_of("classifier", {saves, "1"});
  EXPECT_NE(output.find("continues in epoch "), std::string::npos) << output;
}

TEST(WholePrograms, ThePhysicsInformedNetworkSolvesItsEquation) {
  const auto output = output_of("physics", {"60", "6"});
  EXPECT_LT(number_after(output, "L-BFGS: loss "), number_after(output, "AdamW: loss "));
  EXPECT_LT(number_after(output, "largest error "), 0.05) << output;
}

TEST(WholePrograms, RanksReinforceWithUnequalData) {
  const auto output = output_of("reinforcement", {"12"});
  EXPECT_GT(number_after(output, "iteration 12: an episode takes "), 25) << output;  // a random policy: 22
}

}  // namespace
