// This machine's GPUs in place of the simulation: see accelerator.h. For the simulation's own files.
#pragma once

#include "tests/support/gpu/gpu_support.h"

namespace tessera::accelerator {
using namespace internal;

// Null: the accelerator is simulated. Loads the library at the first call.
const GpuSupport* gpus();
// Must be called once, before the first tensor on a GPU. Makes results reproducible, and disables TF32.
void prepare_gpus();
void synchronize_gpus();
// Return and reset the count of host synchronisations that libtorch or Tessera requested from CUDA.
int64_t host_waits_of_gpu(int device);
void reset_host_waits_of_gpus();
// Page-locked memory in use.
int64_t page_locked_bytes_of_gpus();

}  // namespace tessera::accelerator
