// `tessera plan`, run as a user does.
#include <nlohmann/json.hpp>

#include <algorithm>

#include "tests/plan/page.h"
#include "tests/support/built.h"
#include "tests/support/child_process.h"
#include "tests/support/reference.h"
#include "tests/support/temporary_folder.h"

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
  const auto [missing, why] = plan({"--model", "model.pt2", "--gpus", "4", "--memory", "1GB"});
  EXPECT_EQ(missing, 2);
  expect_contains(why, "model.pt2");
  const auto [searched, table] = plan({"--model", model, "--gpus", "64", "--memory", "5MiB", "--search"});
  EXPECT_EQ(searched, 0) << table;
  expect_contains(table, "choices tried");
  expect_contains(table, "recommended");
  expect_contains(plan({"--model", model, "--memory", "1GB"}).second, "--gpus is missing");
}

// Opened in a browser by `make plan-page`.
TEST(PlanCommand, DrawsAPage) {
  const TemporaryFolder folder;
  const std::string path = (folder / "page.html").string();
  const std::vector<std::string> words = {
      "--model", "gpt:layers=2,width=128,heads=2,vocab=500,sequence=32", "--gpus", "4", "--memory", "64MiB", "--json",
      "--html"};
  auto with = [&](const std::string& file) {
    auto all = words;
    all.push_back(file);
    return plan(all);
  };
  const json choices = json::parse(with(path).second);
  const auto best = std::find_if(choices.begin(), choices.end(), [](const json& one) { return one["recommended"]; });
  ASSERT_NE(best, choices.end());
  const json data = data_of_page(file_bytes(path));
  EXPECT_EQ(data["peak"]["total"], (*best)["peak_bytes"]);
  EXPECT_EQ(data["options"], (*best)["options"]);
  EXPECT_EQ(data["memory"], 64 << 20);
  EXPECT_EQ(data["steps"].size(), 3U);
  const auto [code, text] = with((folder / "none/page.html").string());
  EXPECT_EQ(code, 2);
  expect_contains(text, "none/page.html: No such file or directory");
}

}  // namespace
}  // namespace tessera::plan_command_test
