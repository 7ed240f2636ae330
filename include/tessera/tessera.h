#pragma once

// Includes all that a training program needs. Start with docs/guide.md, then <tessera/fsdp.h>. Two further headers are
// included on demand: <tessera/exported.h> (models exported from Python) and <tessera/plan.h> (dry runs and plans).

#include <tessera/activation_offload.h>
#include <tessera/adafactor.h>
#include <tessera/adamw_8bit.h>
#include <tessera/checkpoint.h>
#include <tessera/checkpointed.h>
#include <tessera/communicator.h>
#include <tessera/ddp.h>
#include <tessera/deferred.h>
#include <tessera/distributed_sampler.h>
#include <tessera/ema.h>
#include <tessera/event_writer.h>
#include <tessera/folder_lock.h>
#include <tessera/fsdp.h>
#include <tessera/full_file.h>
#include <tessera/fused_optimizers.h>
#include <tessera/host_adam.h>
#include <tessera/host_results.h>
#include <tessera/lamb.h>
#include <tessera/launch.h>
#include <tessera/lbfgs.h>
#include <tessera/lion.h>
#include <tessera/memory_cache.h>
#include <tessera/muon.h>
#include <tessera/oss.h>
#include <tessera/parameter_groups.h>
#include <tessera/peak_memory.h>
#include <tessera/quantize_linears.h>
#include <tessera/schedule_free.h>
#include <tessera/sdp.h>
#include <tessera/sharded_grad_scaler.h>
#include <tessera/step_in_backward.h>
#include <tessera/sync_batch_norm.h>
#include <tessera/uneven_data.h>
#include <tessera/wait_report.h>
#include <tessera/wrap.h>
#include <tessera/zero.h>
