#pragma once

// Includes every header that a training program needs. Start with docs/guide.md, then <tessera/fsdp.h>. Three headers
// must be included separately: <tessera/elastic.h> (surviving the death of ranks), <tessera/exported.h> (models
// exported from Python) and <tessera/plan.h> (dry runs and plans).

#include <tessera/activation_offload.h>
#include <tessera/autocast.h>
#include <tessera/checkpoint.h>
#include <tessera/checkpoint/full_file.h>
#include <tessera/checkpointed.h>
#include <tessera/communicator.h>
#include <tessera/ddp.h>
#include <tessera/deferred.h>
#include <tessera/distributed_sampler.h>
#include <tessera/event_writer.h>
#include <tessera/fsdp.h>
#include <tessera/host_results.h>
#include <tessera/launch.h>
#include <tessera/memory_cache.h>
#include <tessera/optim/adafactor.h>
#include <tessera/optim/adamw_8bit.h>
#include <tessera/optim/ema.h>
#include <tessera/optim/fused_optimizers.h>
#include <tessera/optim/host_adam.h>
#include <tessera/optim/lamb.h>
#include <tessera/optim/lbfgs.h>
#include <tessera/optim/lion.h>
#include <tessera/optim/lr_schedules.h>
#include <tessera/optim/muon.h>
#include <tessera/optim/parameter_groups.h>
#include <tessera/optim/schedule_free.h>
#include <tessera/optim/sharded_grad_scaler.h>
#include <tessera/optim/step_in_backward.h>
#include <tessera/oss.h>
#include <tessera/peak_memory.h>
#include <tessera/quantize_linears.h>
#include <tessera/sdp.h>
#include <tessera/sync_batch_norm.h>
#include <tessera/wait_report.h>
#include <tessera/wrap.h>
#include <tessera/zero.h>
