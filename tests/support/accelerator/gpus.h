// The machine's GPUs in place of the simulation (accelerator.h). Internal to this folder.
#pragma once

#include "tests/support/gpu/gpu_support.h"

namespace tessera::accelerator {
using namespace internal;

// Returns the functions of the loaded library, or null if the accelerator is simulated. The first call loads it.
const GpuSupport* gpus();
// Must be called once, before the first tensor on a GPU. Makes results reproducible, and disables TF32.
void prepare_gpus();
void synchronize_gpus();
// Return and reset the count of host synchronisations that libtorch or Tessera requested from CUDA.
int64_t host_waits_of_gpu(int device);
void reset_host_waits_of_gpus();
// Returns the bytes of page-locked memory in use.
int64_t page_locked_bytes_of_gpus();

}  // namespace tessera::accelerator
