#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>

#include "report.h"
#include "tests/support/temporary_folder.h"

namespace train_gpt {
namespace {

int lines_of(const std::string& text) { return static_cast<int>(std::count(text.begin(), text.end(), '\n')); }

TEST(Format, Numbers) {
  EXPECT_EQ(grouped(0), "0");
  EXPECT_EQ(grouped(999), "999");
  EXPECT_EQ(grouped(1000), "1,000");
  EXPECT_EQ(grouped(-1234567), "-1,234,567");
  EXPECT_EQ(brief(12345), "12.3k");
  EXPECT_EQ(mib(3 << 19), "1.50");
  EXPECT_EQ(duration(59.6), "1:00");
  EXPECT_EQ(duration(3723), "1:02:03");
}

TEST(Format, ColumnsCountCharactersNotBytes) {
  EXPECT_EQ(columns_of("a━ä"), 3u);
  EXPECT_EQ(left("ä", 3), "ä  ");
  EXPECT_EQ(right("ä", 3), "  ä");
  EXPECT_EQ(cut("━━a", 2), "━━");
  EXPECT_EQ(cut("ab", 5), "ab");
}

TEST(Format, NothingThatWouldUpsetATerminal) {
  EXPECT_EQ(printable("a\x1b[2J\r\tb\n"), "a?[2J?\tb\n");
  EXPECT_EQ(printable("\xc3\xa4 \xc3 \xa4 \xff"), "\xc3\xa4 ? ? ?");
}

TEST(Format, WrapsBetweenWords) {
  EXPECT_EQ(wrapped("one two three\n\nfour", 8, "> "), "> one two\n> three\n\n> four\n");
}

TEST(Progress, WithoutATerminalAFewLinesAndNoEscapes) {
  std::ostringstream out;
  const auto progress = make_progress(out, /*terminal=*/false, 1000);
  for (int64_t step = 1; step <= 1000; ++step) progress->show({.step = step, .loss = 2.5, .tokens_per_s = 1500.0});
  progress->finish();
  EXPECT_GE(lines_of(out.str()), 10);
  EXPECT_LE(lines_of(out.str()), 25);
  EXPECT_EQ(out.str().find('\x1b'), std::string::npos);
  EXPECT_NE(out.str().find("step 1000/1000  loss 2.500  1.5k tokens/s"), std::string::npos) << out.str();
}

// Estimates from this process' steps: earlier ones may have taken another time.
TEST(Progress, ARunThatGoesOnShowsTheTimeThatItsOwnStepsTake) {
  std::ostringstream out;
  const auto progress = make_progress(out, /*terminal=*/false, 1000);
  const auto began = std::chrono::steady_clock::now();
  progress->show({.step = 949, .loss = 2.5});
  std::this_thread::sleep_for(std::chrono::milliseconds(60));
  progress->show({.step = 950, .loss = 2.5});
  const double step_s = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
  const auto text = out.str().substr(out.str().find("step  950/1000"));
  int minutes = -1, seconds = -1;
  ASSERT_EQ(std::sscanf(text.c_str() + text.find(" left") - 4, "%d:%d left", &minutes, &seconds), 2) << text;
  EXPECT_GE(60 * minutes + seconds, 2) << text;
  EXPECT_LE(60 * minutes + seconds, 50 * step_s + 1) << text;
}

TEST(Progress, OnATerminalItRedrawsTwoLines) {
  std::ostringstream out;
  const auto progress = make_progress(out, /*terminal=*/true, 3);
  progress->show({.step = 1, .loss = 3.0});
  progress->show({.step = 2, .loss = 2.0});  // too soon after the first to be drawn
  progress->show({.step = 3, .loss = 1.0});
  progress->finish();
  EXPECT_EQ(lines_of(out.str()), 3);
  EXPECT_NE(out.str().find("\x1b[1A"), std::string::npos);
}

TEST(LossPlot, DrawsEveryCurveWithFiniteCoordinates) {
  LossCurves curves{.unigram_loss = 3.0};
  for (int step = 1; step <= 5000; ++step) curves.train.push_back({static_cast<double>(step), 4.0 - step * 5e-4});
  curves.validation = {{2500, 2.8}, {5000, 1.6}};
  const auto svg = draw_losses(curves);
  EXPECT_NE(svg.find("unigram model 3.00"), std::string::npos);
  EXPECT_NE(svg.find("validation 1.60"), std::string::npos);
  EXPECT_NE(svg.find("5,000"), std::string::npos);
  EXPECT_EQ(svg.find("nan"), std::string::npos);
  EXPECT_EQ(svg.find("inf"), std::string::npos);
  EXPECT_LT(svg.size(), 60000u);
}

TEST(LossPlot, OneStepWithoutValidation) {
  const auto svg = draw_losses({.train = {{1, 3.0}}, .validation = {}, .unigram_loss = 3.0});
  EXPECT_EQ(svg.find("nan"), std::string::npos);
}

// A kill at any moment must leave the kept lines, so they are never written again.
TEST(MetricsLog, AResumeCutsTheFileAndAppends) {
  const tessera::testing_support::TemporaryFolder folder;
  const std::string kept = "{\"step\":1,\"loss\":4.0,\"note\":\"kept\"}\n{\"step\":2,\"loss\":3.0,\"val_loss\":3.5}\n";
  const auto text_of = [](const std::filesystem::path& path) {
    std::ifstream file(path);
    return std::string(std::istreambuf_iterator<char>(file), {});
  };
  for (const char* rest : {"", "{\"step\":3,\"loss\":2.0}\n", "{\"step\":2,", "{\"step\":2}\n", "[1]\n"}) {
    const auto path = folder.write("metrics.jsonl", kept + rest);
    std::filesystem::create_hard_link(path, folder / "the same file");
    {
      MetricsLog log(path, 2);
      EXPECT_EQ(text_of(path), kept) << rest;
      ASSERT_EQ(log.kept().size(), 2u) << rest;
      EXPECT_EQ(log.kept()[1].val_loss, 3.5);
      log.write({.step = 3, .loss = 2.5});
    }
    EXPECT_TRUE(text_of(path).starts_with(kept + "{\"step\":3,\"loss\":2.5,")) << text_of(path);
    EXPECT_EQ(text_of(folder / "the same file"), text_of(path));
    std::filesystem::remove(folder / "the same file");
  }
  const auto torn = folder.write("torn.jsonl", kept.substr(0, kept.size() - 1));  // without the last new line
  EXPECT_EQ(MetricsLog(torn, 9).kept().size(), 2u);
  EXPECT_EQ(text_of(torn), kept);
  EXPECT_TRUE(MetricsLog(torn, 0).kept().empty());
  EXPECT_EQ(text_of(torn), "");
  const std::string hurt = "{\"step\":1e300,\"loss\":4.0}\n\x01\xff\n{\"step\":7,\"loss\":4.0}\n" +
                           kept;  // lines before those of kept steps
  const auto damaged = folder.write("damaged.jsonl", hurt + "{\"step\":3,\"loss\":2.0}\n");
  EXPECT_EQ(MetricsLog(damaged, 2).kept().size(), 2u);
  EXPECT_EQ(text_of(damaged), hurt);
  ASSERT_EQ(::mkfifo((folder / "pipe.jsonl").c_str(), 0600), 0);
  EXPECT_THROW(MetricsLog(folder / "pipe.jsonl"), std::runtime_error);
}

}  // namespace
}  // namespace train_gpt
