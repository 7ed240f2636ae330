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
//   step_s_median, step_s_min   median and minimum, over steps, of the slowest rank's time
//   cpu_s                       processor time of all threads per step, the mean over ranks: depends less on
//                               other load than wall time
//   param_bytes, grad_bytes, optimizer_bytes, peak_gathered_bytes, peak_bucket_bytes
//                               memory of a rank after a step: the maximum over ranks
//   model_bytes                 parameters of the whole model
//   rss_before_bytes, rss_peak_bytes   resident memory before the model was built, and its peak;
//                               of the rank with the highest peak
//   sent_bytes, collectives     per step, the mean over ranks
//   comm_wait_s                 time in waits per step, the maximum over ranks
//   page_faults                 per step, the mean over ranks: pages that the kernel maps and clears
//   loss, losses                the last loss, and the losses of all steps with warm-up; means over ranks
//   param_sum                   sum over all parameters in double, after all steps
//   step_s                      the times of all timed steps, of the slowest rank
//
// Collective.
nlohmann::ordered_json measure(const Options& options, const std::shared_ptr<tessera::Communicator>& comm);

// Returns the user and system time of all threads of this process so far.
double cpu_seconds();

}  // namespace train_step
