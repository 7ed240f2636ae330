#pragma once

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <vector>

#include <tessera/communicator.h>
#include "options.h"

namespace train_step {

// Runs the steps and returns the fields to print, complete on rank 0:
//
//   step_s_median, step_s_min   over steps, of the slowest rank in each
//   cpu_s                       processor time a step of all threads, the mean over ranks: depends less on
//                               other load than wall time
//   param_bytes, grad_bytes, optimizer_bytes, peak_gathered_bytes, peak_bucket_bytes
//                               memory of a rank after a step: the most over ranks
//   model_bytes                 parameters of the whole model
//   rss_before_bytes, rss_peak_bytes   resident memory before the model was built, and its peak;
//                               of the rank with the highest peak
//   sent_bytes, collectives     per step, the mean over ranks
//   comm_wait_s                 per step, the most over ranks
//   page_faults                 per step, the mean over ranks: pages that the kernel maps and clears
//   loss, losses                the last loss, and all from the first warm-up step on; mean over ranks
//   param_sum                   sum over all parameters in double, after all steps
//   step_s                      all timed steps
//
// Collective.
nlohmann::ordered_json measure(const Options& options, const std::shared_ptr<tessera::Communicator>& comm);

// User and system time of all threads of this process so far.
double cpu_seconds();

}  // namespace train_step
