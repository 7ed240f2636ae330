// Runs `tessera plan` as a user does.
#include <nlohmann/json.hpp>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <sstream>

#include <tessera/plan.h>
#include "tests/plan/page.h"
#include "tests/plan/script.h"
#include "tests/support/built.h"
#include "tests/support/child_process.h"
#include "tests/support/free_port.h"
#include "tests/support/reference.h"
#include "tests/support/temporary_folder.h"

namespace tessera::plan_command_test {
using namespace internal;
namespace {

using namespace testing_support;
using nlohmann::json;

std::pair<int, std::string> plan(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), {tessera::testing_support::built(TESSERA_COMMAND), "plan"});
  tessera::testing_support::ChildProcess child(arguments);
  const int code = child.wait();
  return {code, child.output()};
}

TEST(PlanCommand, CountsCopiesOfAnElasticRun) {
  const auto with = [](std::vector<std::string> more) {
    more.insert(more.begin(),
                {"--model", "gpt:layers=2,width=128,heads=2,vocab=500,sequence=32", "--gpus", "4", "--memory", "1GB"});
    return plan(std::move(more)).second;
  };
  EXPECT_EQ(with({}).find("copies"), std::string::npos);
  expect_contains(with({"--elastic"}), "copies");
  expect_contains(with({"--elastic"}), "this rank's part and those of 1 other rank, of two steps");
  expect_contains(with({"--elastic=100000"}), "those of 3 other ranks, of two steps");
  const json one = json::parse(with({"--elastic", "--json"})), two = json::parse(with({"--elastic=2", "--json"}));
  for (size_t i = 0; i < one.size(); ++i) {
    EXPECT_GT(one[i]["copies_bytes"], 0);
    EXPECT_EQ(2 * two[i]["copies_bytes"].get<int64_t>(), 3 * one[i]["copies_bytes"].get<int64_t>());
  }
  expect_contains(with({"--elastic", "--host-memory", "1MB"}), "not the host");
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
  const auto [bare_code, bare] = plan({"--model", model, "--gpus", "4", "--memory", "8"});
  EXPECT_EQ(bare_code, 2) << bare;
  expect_contains(bare, "memory '8', expected a number of bytes with a unit, as 80GiB");
  const json all = json::parse(plan({"--model", model, "--gpus", "4", "--memory", "1KB", "--json"}).second);
  ASSERT_EQ(all.size(), 20U);
  for (const json& choice : all) EXPECT_FALSE(choice["recommended"].get<bool>());
  EXPECT_GT(all[0]["bytes"]["optimizer"].get<int64_t>(), 3 * all[1]["bytes"]["optimizer"].get<int64_t>());
  expect_contains(plan({"--model", model, "--gpus", "1", "--memory", "64MiB"}).second, "of a step on 1 rank, of 64.0");
  const auto [missing, why] = plan({"--model", "model.pt2", "--gpus", "4", "--memory", "1GB"});
  EXPECT_EQ(missing, 2);
  expect_contains(why, "model.pt2");
  const auto [searched, table] = plan({"--model", model, "--gpus", "64", "--memory", "5MiB", "--search"});
  EXPECT_EQ(searched, 0) << table;
  expect_contains(table, "choices tried");
  expect_contains(table, "recommended");
  expect_contains(plan({"--model", model, "--memory", "1GB"}).second, "--gpus is missing");
  const auto [help_code, help] = plan({"--help"});
  EXPECT_EQ(help_code, 0);
  for (const char* part : {"tessera plan --model", "--link", "400Gb/s", "head_dim"}) expect_contains(help, part);
  for (const char* part : {"PATH is a checkpoint", "--tolerance"})
    EXPECT_EQ(help.find(part), std::string::npos) << help;
}

TEST(PlanCommand, MistakesNameTheOption) {
  const std::string model = "gpt:layers=2,width=128,heads=2,vocab=500,sequence=32";
  std::vector<std::pair<std::map<std::string, std::string>, std::string>> wrong = {
      {{{"--link", "0B"}}, "--link '0B' a second, expected more than 0"},
      {{{"--link", "400"}}, "--link '400', expected bytes or bits a second with a unit, as 50GB/s"},
      {{{"--latency", "-1us"}}, "--latency '-1us', expected a time"},
      {{{"--host-link", "1 apple"}}, "--host-link '1 apple'"},
      {{{"--host-latency", "1"}}, "--host-latency '1'"},
      {{{"--operator-time", "nan"}}, "--operator-time 'nan'"},
      {{{"--flops-fp32", "0"}}, "--flops-fp32 '0'"},
      {{{"--flops", "1x"}, {"--memory-bandwidth", "1GB"}}, "--flops '1x'"},
      {{{"--memory-bandwidth", "-1"}}, "--memory-bandwidth '-1'"},
      {{{"--memory", "0"}}, "--memory '0', expected a number of bytes"},
      {{{"--host-memory", "8"}}, "--host-memory '8'"},
      {{{"--elastic", "-1"}}, "--elastic is -1, expected 0 to"},
      {{{"--gpus", "0"}}, "--gpus is 0, expected 1 to 1000000"},
      {{{"--gpus", "100000000"}}, "--gpus is 100000000, expected 1 to 1000000"},
      {{{"--ranks-per-host", "0"}}, "--ranks-per-host is 0, expected 1 to"},
      {{{"--batch", "0"}}, "--batch is 0, expected 1 to"},
      {{{"--sequence", "-1"}}, "--sequence is -1, expected 1 to"},
      {{{"--model", "gpt:layers=2,layers=3"}}, "'layers=3', expected layers, width"},
      {{{"--model", "gpt:tie=1,tie=0"}}, "at most once"},
      {{{"--model", "gpt:layers=1,heads=1,width=4611686018427387904"}}, "no choice can be run: Storage size"},
      {{{"--model", "gpt:layers=1,vocab=9223372036854775807"}}, "no choice can be run: "},
  };
  for (const char* option :
       {"--model", "--memory", "--gpu", "--html", "--speed", "--flops", "--measured", "--host-memory"})
    wrong.push_back({{{option, ""}}, std::string(option) + " is empty"});
  for (const auto& [given, message] : wrong) {
    std::map<std::string, std::string> options = {{"--model", model}, {"--gpus", "4"}, {"--memory", "64MiB"}};
    for (const auto& [option, value] : given) options[option] = value;
    std::vector<std::string> arguments;
    for (const auto& [option, value] : options) {
      arguments.push_back(value.empty() ? option : option + "=" + value);
      if (value.empty()) arguments.emplace_back();
    }
    const auto [code, text] = plan(arguments);
    EXPECT_EQ(code, 2) << message << ": " << text;
    expect_contains(text, message);
  }
}

TEST(PlanCommand, TakesAFolderWithAConfig) {
  const TemporaryFolder folder;
  const std::string path = folder.path().string();
  const auto of = [&](const std::string& model) {
    return plan({"--model", model, "--gpus", "2", "--memory", "64MiB", "--sequence", "16"});
  };
  expect_contains(of(path).second, "config.json cannot be read");
  std::ofstream(folder / "config.json") << R"({"model_type":"gpt2","n_layer":2,"n_embd":64,"n_head":2,)"
                                        << R"("n_positions":32,"vocab_size":100})";
  const auto [code, text] = of(path);
  EXPECT_EQ(code, 0) << text;
  expect_contains(text, "recommended");
  EXPECT_EQ(text, of((folder / "config.json").string()).second);
  const auto [unknown, why] = plan({"--model", path + "/none", "--gpus", "2", "--memory", "64MiB"});
  EXPECT_EQ(unknown, 2);
  for (const char* part : {"gpt:name=number", "config.json", ".pt2"}) expect_contains(why, part);
}

// `make plan-page` opens it in a browser.
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

// Recommends the fastest plan that fits; the page draws its step.
TEST(PlanCommand, SaysTheTimeOfAStep) {
  const TemporaryFolder folder;
  const std::string page = (folder / "page.html").string();
  const std::vector<std::string> common = {
      "--model", "gpt:layers=2,width=128,heads=2,vocab=500,sequence=32", "--gpus", "4", "--memory", "64MiB"};
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.begin(), common.begin(), common.end());
    return plan(more);
  };
  const std::vector<std::string> fast = {
      "--flops", "1TFLOP/s", "--memory-bandwidth", "10GB/s", "--link", "8Gb/s", "--json", "--html", page};
  const json all = json::parse(with(fast).second);
  double fastest_s = 1e9, recommended_s = 0;
  for (const json& choice : all) {
    const auto step_s = choice["step_s"].get<double>();
    EXPECT_NEAR(choice["tokens_per_s"].get<double>() * step_s, 4 * 32, 1e-6);  // a sequence a rank
    EXPECT_NEAR(choice["compute_s"].get<double>() + choice["exposed_s"].get<double>(), step_s, 1e-9);
    fastest_s = std::min(fastest_s, step_s);
    if (choice["recommended"].get<bool>()) recommended_s = step_s;
  }
  EXPECT_EQ(recommended_s, fastest_s);
  const json time = data_of_page(file_bytes(page))["time"];
  EXPECT_NEAR(time["total_ms"].get<double>(), recommended_s * 1e3, 1e-6);
  EXPECT_EQ(time["lanes"][0]["lane"], "compute");
  EXPECT_EQ(time["lanes"].size(), 2U);
  expect_contains(with({"--flops", "1e12", "--memory-bandwidth", "10GB", "--link", "8Gbit"}).second, "tokens/s");
  expect_contains(with({"--flops", "1e12"}).second, "--flops without --memory-bandwidth");
  expect_contains(with({"--speed", (folder / "none.json").string()}).second, "none.json");
  // Memory is planned although the times are not.
  for (const auto& [given, missing] : std::map<std::string, std::string>{
           {"--flops 1e12 --memory-bandwidth 1GB", "bytes a second between ranks of a host (--link, or --host-link)"},
           {"--link 400Gbit", "FLOP a second (--flops)"},
           {"--memory-bandwidth 1GB", "FLOP a second (--flops)"},
           {"--gpu h100 --ranks-per-host 2", "bytes a second between hosts (--link)"}}) {
    std::istringstream words(given);
    const auto [code, text] = with({std::istream_iterator<std::string>(words), std::istream_iterator<std::string>()});
    EXPECT_EQ(code, 0) << text;
    expect_contains(text, "No times of steps, because these are not known: " + missing);
    expect_contains(text, "recommended");
  }
  expect_contains(with({"--flops", "1e12", "--memory-bandwidth", "1GB", "--link", "1GB", "--host-link", "2GB"}).second,
                  "all 4 ranks are on one host of 8");
}

TEST(PlanCommand, KnowsCardsByName) {
  const auto with = [&](std::vector<std::string> more) {
    std::vector<std::string> all = {"--model", "gpt:layers=2,width=128,heads=2,vocab=500,sequence=32", "--gpus", "4"};
    all.insert(all.end(), more.begin(), more.end());
    return plan(all);
  };
  const auto [code, text] = with({"--gpu", "H100"});
  EXPECT_EQ(code, 0) << text;
  expect_contains(text, "MiB at the peak of a step on each of 4 ranks, of 76293.9\n");  // 80 GB of the data sheet
  expect_contains(text, "tokens/s");
  expect_contains(with({"--gpu", "l40s", "--memory", "40GiB"}).second, "each of 4 ranks, of 40960.0\n");
  const auto step_s = [&](std::vector<std::string> more) {
    more.emplace_back("--json");
    return json::parse(with(more).second)[9]["step_s"].get<double>();
  };
  const double fast_s = step_s({"--gpu", "h100"});
  EXPECT_GT(step_s({"--gpu", "l4"}), fast_s);
  EXPECT_GT(step_s({"--gpu", "h100", "--flops", "1e12"}), fast_s);
  EXPECT_GT(step_s({"--gpu", "h100", "--link", "1GB"}), fast_s);
  expect_contains(with({"--gpu", "h99"}).second, "--gpu h99: expected one of a10, a100,");
  expect_contains(with({}).second, "--memory is missing");
  expect_contains(with({"--gpu", "h100", "--speed", "x"}).second, "--speed and --gpu");
}

// Draws a run's trace beside the matching line of the table.
TEST(PlanCommand, DrawsAMeasuredStepBesideThePredictedOne) {
  const TemporaryFolder folder;
  const std::string page = (folder / "page.html").string(), trace = (folder / "trace.json").string();
  {
    std::ofstream stream(trace);
    stream << R"([{"name":"tessera_trace","ph":"i","pid":0,"tid":0,"args":{"rank":0}})"
           << "\n";
    for (int step = 0; step < 3; ++step)
      for (const char* category : {"compute", "optimizer"})
        stream << R"(,{"name":"unit 'blocks.0'","cat":")" << category << R"(","ph":"X","pid":0,"tid":0,"ts":)"
               << 1000 * step + (category[0] == 'o' ? 600 : 0) << R"(,"dur":300})"
               << "\n";
  }
  const auto with = [&](std::vector<std::string> more) {
    std::vector<std::string> all = {"--model",
                                    "gpt:layers=2,width=64,heads=2,vocab=100,sequence=16",
                                    "--gpus",
                                    "2",
                                    "--memory",
                                    "64MiB",
                                    "--flops",
                                    "1e12",
                                    "--memory-bandwidth",
                                    "10GB",
                                    "--link",
                                    "8Gbit"};
    all.insert(all.end(), more.begin(), more.end());
    return plan(all);
  };
  const auto [code, text] = with({"--html", page, "--draw", "8", "--measured", trace});
  EXPECT_EQ(code, 0) << text;
  const json data = data_of_page(file_bytes(page));
  expect_contains(data["options"], ".stage = 3");
  EXPECT_NEAR(data["measured_time"]["total_ms"].get<double>(), 1, 1e-6);
  EXPECT_EQ(data["measured_time"]["steps"], 2);
  expect_contains(with({"--measured", trace}).second, "--html is missing");
  for (const char* line : {"0", "21"})
    expect_contains(with({"--html", page, "--draw", line}).second,
                    std::string("--draw is ") + line + ", expected a line of the table, 1 to 20");
}

// Hosts have eight ranks for bytes and for times, by default.
TEST(PlanCommand, HostsAreTheSameForBytesAndTimes) {
  const auto with = [&](std::vector<std::string> more) {
    std::vector<std::string> all = {"--model",  "gpt:layers=2,width=64,heads=2,vocab=100,sequence=16",
                                    "--gpus",   "16",
                                    "--memory", "64MiB",
                                    "--json",   "--flops",
                                    "1e12",     "--memory-bandwidth",
                                    "10GB",     "--link",
                                    "8Gbit"};
    all.insert(all.end(), more.begin(), more.end());
    return json::parse(plan(all).second)[9];  // stage 3
  };
  const json usual = with({}), said = with({"--ranks-per-host", "8"}), one = with({"--ranks-per-host", "16"}),
             fast = with({"--host-link", "800Gbit"});
  EXPECT_EQ(usual, said);
  EXPECT_GT(usual["between_hosts_bytes"], 0);
  EXPECT_EQ(one["between_hosts_bytes"], 0);
  EXPECT_LT(fast["step_s"].get<double>(), usual["step_s"].get<double>());
}

// `tessera plan` reads the file of `tessera calibrate`. This machine's times are unknown, but must be plausible.
TEST(PlanCommand, TakesWhatCalibrateWrites) {
  const TemporaryFolder folder;
  const std::string file = (folder / "speed.json").string();
  tessera::testing_support::ChildProcess child(
      {tessera::testing_support::built(TESSERA_COMMAND), "calibrate", "-o", file, "--ranks", "1", "--quick"});
  EXPECT_EQ(child.wait(), 0) << child.output();
  expect_contains(child.output(), "written to " + file);
  const json speed = json::parse(file_bytes(file));
  for (const char* name : {"aten::mm", "aten::gelu", "aten::native_layer_norm_backward", "aten::_fused_adamw_"})
    EXPECT_TRUE(speed["operators"].contains(name)) << name;
  const auto step_s = [&](const std::vector<std::string>& more) {
    std::vector<std::string> arguments = {"--model",  "gpt:layers=2,width=128,heads=2,vocab=500,sequence=32",
                                          "--gpus",   "1",
                                          "--memory", "1GB",
                                          "--json",   "--speed",
                                          file};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return json::parse(plan(arguments).second)[0]["step_s"].get<double>();
  };
  const double as_measured = step_s({});
  EXPECT_GT(as_measured, 1e-4);
  EXPECT_LT(as_measured, 10);
  // Command-line values replace those of the file, single operators included.
  EXPECT_GT(step_s({"--flops", "1e7", "--memory-bandwidth", "1GB"}), 10 * as_measured);
}

// Two ranks of a launcher on this machine represent two hosts.
TEST(PlanCommand, CalibrateAddsTheLinkBetweenHosts) {
  const TemporaryFolder folder;
  const std::string command = tessera::testing_support::built(TESSERA_COMMAND);
  const std::string machine = (folder / "machine.json").string(), file = (folder / "all.json").string();
  tessera::testing_support::ChildProcess nowhere(
      {command, "calibrate", "--quick", "-o", (folder / "none/a.json").string()});
  EXPECT_EQ(nowhere.wait(), 2);
  expect_contains(nowhere.output(), "none/a.json cannot be written: No such file or directory");
  for (const std::string option : {"--ranks", "--threads"}) {
    tessera::testing_support::ChildProcess many({command, "calibrate", "--quick", "-o", file, option, "100000"});
    EXPECT_EQ(many.wait(), 2) << many.output();
    expect_contains(many.output(), option + " is 100000, expected 1 to");
  }
  EXPECT_EQ(nowhere.output().find("collectives"), std::string::npos) << "it has measured first";
  MachineSpeed measured = plan_tests::plain();
  measured.tcp = {1e-6, 2e9, 1e9};
  write_speed(measured, machine);

  tessera::testing_support::ChildProcess nobody({command, "calibrate", "--quick", "--speed", machine, "-o", file});
  EXPECT_EQ(nobody.wait(), 2);
  expect_contains(nobody.output(), "a launcher's group of one rank a host");

  std::vector<std::unique_ptr<tessera::testing_support::ChildProcess>> hosts;
  const std::string port = std::to_string(free_port());
  for (const char* rank : {"0", "1"})
    hosts.push_back(std::make_unique<tessera::testing_support::ChildProcess>(
        std::vector<std::string>{command, "calibrate", "--quick", "--speed", machine, "-o", file},
        tessera::testing_support::ChildProcess::Environment{{"RANK", rank},
                                                            {"WORLD_SIZE", "2"},
                                                            {"LOCAL_RANK", "0"},
                                                            {"LOCAL_WORLD_SIZE", "1"},
                                                            {"MASTER_ADDR", "127.0.0.1"},
                                                            {"MASTER_PORT", port},
                                                            {"TESSERA_PEER_MEMORY", "0"}}));
  for (const auto& each : hosts) EXPECT_EQ(each->wait(), 0) << each->output();
  expect_contains(hosts[0]->output(), "between 2 hosts");
  const json before = json::parse(file_bytes(machine)), speed = json::parse(file_bytes(file));
  EXPECT_GT(speed["between_hosts"]["bytes_per_s"].get<double>(), 1e6);
  EXPECT_EQ(speed["work"], before["work"]);
  EXPECT_NE(speed["tcp"], before["tcp"]);
}

}  // namespace
}  // namespace tessera::plan_command_test
