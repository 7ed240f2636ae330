// The comparison with Python's wrappers, without those: what it runs of ours, its verdict, and where it writes.

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <sstream>

#include "tests/support/built.h"
#include "tests/support/child_process.h"

namespace {

namespace fs = std::filesystem;
using tessera::testing::ChildProcess;
using tessera::testing_support::built;

std::string text_of(const fs::path& file) {
  std::ifstream stream(file);
  std::ostringstream text;
  text << stream.rdbuf();
  return text.str();
}

TEST(Compare, AQuickRunHasAVerdictAndLeavesTheDocumentationAsItIs) {
  const fs::path page = built(BENCHMARKS_PAGE);
  const fs::path out = fs::temp_directory_path() / ("tessera_compare_" + std::to_string(::getpid()));
  const fs::path build = fs::path(built(TRAIN_STEP_EXECUTABLE)).parent_path().parent_path();
  const std::string before = text_of(page);
  ChildProcess child({"python3", built(COMPARE_SCRIPT), "--build", build, "--quick", "--models", "deep", "--programs",
                      "tessera fsdp", "--rounds", "1", "--out", out});
  EXPECT_EQ(child.wait(std::chrono::seconds(300)), 0) << child.output();
  const std::string verdict = text_of(out / "verdict.md");
  for (const char* subject : {"deep, 2 ranks: step / (computing + moving)", "a unit among 10,", "a unit among 1000,"}) {
    EXPECT_NE(verdict.find(subject), std::string::npos) << subject << " in\n" << verdict;
    EXPECT_NE(child.output().find(subject), std::string::npos) << subject << " in\n" << child.output();
  }
  EXPECT_TRUE(fs::exists(out / "results.json"));
  EXPECT_FALSE(fs::exists(out / "docs")) << "no page of a few programs";
  EXPECT_TRUE(text_of(page) == before);
  fs::remove_all(out);
}

}  // namespace
