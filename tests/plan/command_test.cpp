// `tessera plan`, run as a user does.
#include <nlohmann/json.hpp>

#include "tests/support/built.h"
#include "tests/support/child_process.h"
#include "tests/support/reference.h"

namespace tessera::plan_command_test {
namespace {

using namespace testing_support;
using nlohmann::json;

std::pair<int, std::string> plan(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), {tessera::testing_support::built(TESSERA_COMMAND), "plan"});
  tessera::testing::ChildProcess child(arguments);
  const int code = child.wait();
  return {code, child.output()};
}

TEST(PlanCommand, PrintsWhatFits) {
  const std::string model = "gpt:layers=2,width=128,heads=2,vocab=500,sequence=32";
  const auto [code, text] = plan({"--model", model, "--gpus", "64", "--memory", "64MiB"});
  EXPECT_EQ(code, 0) << text;
  expect_contains(text, "recommended");
  expect_contains(text, "tessera::ZeroOptions{.stage = ");
  const auto [json_code, output] = plan({"--model", model, "--gpus", "4", "--memory", "1kB", "--json"});
  EXPECT_EQ(json_code, 2) << output;
  expect_contains(output, "'1kB'");
  const json all = json::parse(plan({"--model", model, "--gpus", "4", "--memory", "1KB", "--json"}).second);
  ASSERT_EQ(all.size(), 14U);
  for (const json& choice : all) EXPECT_FALSE(choice["recommended"].get<bool>());
  EXPECT_GT(all[0]["bytes"]["optimizer"].get<int64_t>(), 3 * all[1]["bytes"]["optimizer"].get<int64_t>());
  EXPECT_EQ(plan({"--model", "model.pt2", "--gpus", "4", "--memory", "1GB"}).first, 2);
  expect_contains(plan({"--model", model, "--memory", "1GB"}).second, "--gpus is missing");
}

}  // namespace
}  // namespace tessera::plan_command_test
