// Runs zero_recipe and stages as a user does.

#include <gtest/gtest.h>

#include <map>
#include <nlohmann/json.hpp>
#include <sstream>

#include "tests/support/built.h"
#include "tests/support/child_process.h"
#include "tests/support/matrix.h"

namespace {

using tessera::testing_support::built;
using tessera::testing_support::ChildProcess;
using tessera::testing_support::has_full_matrix;
using tessera::testing_support::of_matrix;

std::string run(const std::vector<std::string>& command, int expected_code = 0) {
  ChildProcess child(command);
  EXPECT_EQ(child.wait(std::chrono::seconds(200)), expected_code) << child.output();
  return child.output();
}

TEST(ZeroRecipe, AllStagesTrainAlikeAndNeedLessAndLess) {
  const int64_t width = has_full_matrix() ? 2000 : 1000;
  std::map<std::string, nlohmann::json> lines;
  std::istringstream output(run({built(ZERO_RECIPE_EXECUTABLE), "--json", "--width", std::to_string(width)}));
  for (std::string line; std::getline(output, line);) {
    const auto figures = nlohmann::json::parse(line);
    lines[figures["wrapper"]] = figures;
  }
  ASSERT_EQ(lines.size(), 4u);
  const int64_t model_bytes = 20 * (width * width + width) * 4;
  for (const auto& [wrapper, figures] : lines) {
    EXPECT_EQ(figures["after_model_bytes"], model_bytes) << wrapper;
    EXPECT_LT(figures["after_wrap_bytes"].get<double>(), 1.1 * model_bytes)
        << wrapper << ": no second copy of the model";
    EXPECT_EQ(figures["param_sum"], lines["adam"]["param_sum"]) << wrapper;
    for (const auto& sum : figures["param_sums"]) EXPECT_EQ(sum, figures["param_sum"]) << wrapper;
  }
  // In multiples of the model's bytes; the states alone are 4, 3, 2.5 and 2.
  const std::map<std::string, double> most{{"adam", 4.37}, {"oss", 3.18}, {"sdp", 2.68}, {"fsdp", 2.18}};
  for (const auto& [wrapper, models] : most)
    EXPECT_LE(lines[wrapper]["after_step_bytes"].get<double>(), models * static_cast<double>(model_bytes)) << wrapper;
  EXPECT_LT(lines["sdp"]["before_step_bytes"], lines["oss"]["before_step_bytes"]);
  EXPECT_LT(lines["fsdp"]["before_step_bytes"], lines["sdp"]["before_step_bytes"]);
}

std::string losses(const std::string& output) {
  std::istringstream lines(output);
  std::string steps;
  for (std::string line; std::getline(lines, line);)
    if (line.starts_with("step ")) steps += line + "\n";
  return steps;
}

TEST(Stages, HaveTheSameLossesAndPredictSharded) {
  for (const char* ranks : of_matrix<const char*>({"1", "3"}, {"2"})) {
    const auto expected = losses(run({built(STAGES_EXECUTABLE), "--ranks", ranks, "--stage", "0"}));
    EXPECT_NE(expected.find("step  20"), std::string::npos) << expected;
    const bool is_alone = ranks == std::string("1") && !has_full_matrix();
    for (const char* stage : is_alone ? std::vector{"3"} : std::vector{"1", "2", "3"}) {
      const auto output = run({built(STAGES_EXECUTABLE), "--ranks", ranks, "--stage", stage});
      EXPECT_EQ(losses(output), expected) << "stage " << stage << ", ranks " << ranks;
      EXPECT_NE(output.find("100.0 % of 200"), std::string::npos) << output;
    }
  }
}

TEST(Examples, MistakesEndWithAMessage) {
  EXPECT_NE(run({built(STAGES_EXECUTABLE), "--stage", "4"}, 2).find("--stage must be at most 3"), std::string::npos);
  EXPECT_NE(run({built(STAGES_EXECUTABLE), "--batch", "9000000000000000000"}, 2).find("--batch must be at most"),
            std::string::npos);
  EXPECT_NE(run({built(ZERO_RECIPE_EXECUTABLE), "--width", "4611686018427387904"}, 2).find("--width must be at most"),
            std::string::npos);
  EXPECT_NE(run({built(ZERO_RECIPE_EXECUTABLE), "--wrapper", "ddp"}, 2).find("must be adam, oss, sdp or fsdp"),
            std::string::npos);
}

}  // namespace
