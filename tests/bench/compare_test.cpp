// The comparison with Python's wrappers, without Python: the commands that it runs, its verdict, its output files.

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <sstream>

#include "tests/support/built.h"
#include "tests/support/child_process.h"

namespace {

namespace fs = std::filesystem;
using tessera::testing_support::built;
using tessera::testing_support::ChildProcess;

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
  EXPECT_NE(verdict.find("without a wrapper"), std::string::npos) << verdict;
  EXPECT_TRUE(fs::exists(out / "results.json"));
  EXPECT_FALSE(fs::exists(out / "docs")) << "no page of a few programs";
  EXPECT_TRUE(text_of(page) == before);
  fs::remove_all(out);
}

// Our wrappers run in each round; of a stage's peers, only the two fastest that train correctly.
TEST(Compare, LaterRoundsHaveTheFastestPeersOfAStage) {
  const std::string script = R"(
import compare
def took(step_s, loss=1.0): return [{"round": 1, "step_s_median": step_s, "losses": [loss]}]
runs = {"deep/2/tessera ddp": took(1), "deep/2/ddp": took(3), "deep/2/zero1": took(5), "deep/2/fairscale_sdp": took(3),
        "deep/2/deepspeed1": took(1, loss=2), "deep/2/deepspeed2": took(4), "deep/2/fsdp1": took(2), "deep/4/fsdp2": took(1),
        "deep/2/deepspeed3": [{"round": 1, "error": "ended"}]}
again = [program for program in [*compare.PROGRAMS, compare.LIMIT] if compare.runs_again({"runs": runs}, "deep", 2, program)]
print([program for program in again if not program.startswith("tessera ")])
assert sum(program.startswith("tessera ") for program in again) == 5
)";
  const fs::path folder = fs::path(built(COMPARE_SCRIPT)).parent_path();
  ChildProcess child({"python3", "-c", "import sys; sys.path.insert(0, '" + folder.string() + "')\n" + script});
  EXPECT_EQ(child.wait(), 0) << child.output();
  EXPECT_EQ(child.output(), "['ddp', 'fairscale_sdp', 'deepspeed2', 'fsdp1', 'limits']\n");
}

}  // namespace
