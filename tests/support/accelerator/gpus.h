// The GPUs of the machine in the simulation's place: see accelerator.h. Of the simulation's own files alone.
#pragma once

#include "tests/support/gpu/gpu_support.h"

namespace tessera::accelerator {
using namespace internal;

// Null: the accelerator is simulated. Loads the library at the first call.
const GpuSupport* gpus();
// Once, before the first tensor there: what is computed does not depend on the run, nor on TF32.
void prepare_gpus();
void synchronize_gpus();
// Of all devices since the last reset: synchronisations of the host that libtorch or Tessera asked of CUDA.
int64_t host_waits_of_gpu(int device);
void reset_host_waits_of_gpus();
// In use, of page-locked memory.
int64_t page_locked_bytes_of_gpus();

}  // namespace tessera::accelerator
