// Measures a training step under a wrapper: time, memory of a rank, and bytes sent. Rank 0 prints one line per run.
// measure.h describes the fields.
//
//   train_step --model gpt --wrapper fsdp --ranks 2 --json
#include <torch/torch.h>

#include <boost/program_options.hpp>
#include <cstdio>
#include <iostream>

#include <tessera/tessera.h>
#include "measure.h"
#include "options.h"

namespace {

void print(const nlohmann::ordered_json& line) {
  const auto mib = [&](const char* field) { return line[field].get<double>() / (1 << 20); };
  std::printf(
      "%s, %s, %d ranks: median %.1f ms a step (slowest rank; min %.1f), of which waiting %.1f; processor %.1f\n",
      line["model"].get<std::string>().c_str(), line["wrapper"].get<std::string>().c_str(), line["ranks"].get<int>(),
      line["step_s_median"].get<double>() * 1e3, line["step_s_min"].get<double>() * 1e3,
      line["comm_wait_s"].get<double>() * 1e3, line["cpu_s"].get<double>() * 1e3);
  std::printf(
      "held, MiB: parameters %.1f, gradients %.1f, optimizer %.1f, gathered at most %.1f, buckets at most %.1f; RSS "
      "%.1f, at most %.1f\n",
      mib("param_bytes"), mib("grad_bytes"), mib("optimizer_bytes"), mib("peak_gathered_bytes"),
      mib("peak_bucket_bytes"), mib("rss_before_bytes"), mib("rss_peak_bytes"));
  std::printf(
      "sent a step: %.1f MiB, %.3f of the parameters; %.0f collectives; %.0f page faults; loss %.6f, parameter sum "
      "%.9g\n",
      mib("sent_bytes"), line["sent_bytes"].get<double>() / line["model_bytes"].get<double>(),
      line["collectives"].get<double>(), line["page_faults"].get<double>(), line["loss"].get<double>(),
      line["param_sum"].get<double>());
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const auto options = train_step::parse(argc, argv);
    if (!options) return 0;
    if (!tessera::launched() && options->ranks > 1) return tessera::spawn_local(options->ranks, argc, argv);
    at::set_num_threads(options->threads);
    const auto comm = tessera::init();
    const auto line = train_step::measure(*options, comm);
    if (comm->rank() == 0) options->json ? void(std::cout << line.dump() << std::endl) : print(line);
    return 0;
  } catch (const boost::program_options::error& error) {
    std::cerr << "train_step: " << error.what() << "\n";
    return 2;
  } catch (const std::exception& error) {
    std::cerr << "train_step: " << error.what() << "\n";
    return 1;
  }
}
