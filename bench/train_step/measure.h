#pragma once

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <vector>

#include <tessera/communicator.h>
#include "options.h"

namespace train_step {

// Runs the steps and returns what is to be printed, complete on rank 0, the same bytes and sums
// wherever the fields say so:
//
//   step_s_median, step_s_min   over steps, of the slowest rank in each
//   cpu_s                       a step's processor time of all threads, the mean over ranks: less moved by
//                               what else the machine does than the time that passes
//   param_bytes, grad_bytes, optimizer_bytes, peak_gathered_bytes, peak_bucket_bytes
//                               held by a rank after a step: the most over ranks
//   model_bytes                 parameters of the whole model
//   rss_before_bytes, rss_peak_bytes   resident memory before there was a model, and the most since;
//                               of the rank with the highest peak
//   sent_bytes, collectives     a step's, the mean over ranks
//   comm_wait_s                 a step's, the most over ranks
//   page_faults                 a step's, the mean over ranks: each, memory that the kernel gives and clears
//   loss, losses                the last, and all from the first warm-up step on; mean over ranks
//   param_sum                   sum over all parameters in double, after all steps
//   step_s                      all timed steps
//
// Collective.
nlohmann::ordered_json measure(const Options& options, const std::shared_ptr<tessera::Communicator>& comm);

// Processor time of all threads of this process so far, in the kernel and outside.
double cpu_seconds();

}  // namespace train_step
