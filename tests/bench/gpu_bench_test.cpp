// bench/gpu/run.py without a GPU and without PyTorch: the programs run, and the table is written where it belongs.
#include <gtest/gtest.h>

#include <filesystem>

#include "tests/support/built.h"
#include "tests/support/child_process.h"
#include "tests/support/temporary_folder.h"

namespace tessera::gpu_bench_test {
namespace {

using testing_support::built;
using testing_support::ChildProcess;
using testing_support::file_bytes;

const std::string kBegin = "<!-- bench/gpu: begin -->\n", kEnd = "<!-- bench/gpu: end -->\n";

std::vector<std::string> command(const std::filesystem::path& page) {
  const auto build = std::filesystem::path(built(GPU_BENCH_EXECUTABLE)).parent_path().parent_path();
  return {"python3",    built(GPU_BENCH_SCRIPT),
          "--build",    build.string(),
          "--python",   "",
          "--device",   "cpu",
          "--tiny",     "--write",
          page.string()};
}

TEST(GpuBench, WritesMeasuredRowsBetweenTheMarkers) {
  const testing_support::TemporaryFolder folder;
  const auto page = folder.write("page.md", "before\n" + kBegin + "old\n" + kEnd + "after\n");
  ChildProcess run(command(page));
  ASSERT_EQ(run.wait(std::chrono::seconds(240)), 0) << run.output();
  EXPECT_EQ(run.printed("not measured: "), 0) << run.output();
  const std::string text = file_bytes(page);
  EXPECT_TRUE(text.starts_with("before\n" + kBegin + "No GPU, no PyTorch, ")) << text;
  EXPECT_TRUE(text.ends_with(kEnd + "after\n")) << text;
  for (const char* row :
       {"| GPT-2 124M, FSDP | Tessera FSDP | ", "| GPT-2 124M, FSDP | Tessera FSDP, no reshard | ",
        "| GPT-2 124M, whole replicas under autocast | Tessera DDP | ",
        "| GPT-2 124M, whole replicas under autocast | Tessera OSS + SDP | ", "| GPT-2 1.6B, FSDP | Tessera FSDP | ",
        "| 200 x Linear(512), FSDP | Tessera FSDP | ", "| 24 x Linear(4096), FSDP, offload | Tessera FSDP | "})
    EXPECT_NE(text.find(row), std::string::npos) << row << " is not in " << text;
  EXPECT_EQ(text.find("| FSDP2 |"), std::string::npos) << "it was not measured";
  EXPECT_EQ(text.find("llm.c"), std::string::npos) << "its shapes were not run";
}

TEST(GpuBench, LeavesAPageWithoutMarkers) {
  const testing_support::TemporaryFolder folder;
  const auto page = folder.write("page.md", "no markers\n");
  ChildProcess run(command(page));
  EXPECT_EQ(run.wait(), 1) << run.output();
  EXPECT_EQ(run.printed("must have the lines"), 1) << run.output();
  EXPECT_EQ(file_bytes(page), "no markers\n");
}

TEST(GpuBench, ThePageHasTheMarkers) {
  const std::string text = file_bytes(built(GPU_PAGE));
  EXPECT_NE(text.find(kBegin), std::string::npos);
  EXPECT_NE(text.find(kEnd), std::string::npos);
}

}  // namespace
}  // namespace tessera::gpu_bench_test
