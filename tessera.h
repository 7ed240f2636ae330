#pragma once

// All of Tessera's public surface. Where to start reading: docs/, then fsdp/fully_sharded_data_parallel.h.

#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/full_file.h"
#include "tessera/comm/communicator.h"
#include "tessera/comm/launch.h"
#include "tessera/comm/uneven_data.h"
#include "tessera/flat/checkpointed.h"
#include "tessera/flat/deferred.h"
#include "tessera/flat/peak_memory.h"
#include "tessera/flat/unit_plan.h"
#include "tessera/fsdp/fully_sharded_data_parallel.h"
#include "tessera/offload/host_adam.h"
#include "tessera/optim/fused_adam.h"
#include "tessera/optim/lamb.h"
#include "tessera/optim/parameter_groups.h"
#include "tessera/optim/sharded_grad_scaler.h"
#include "tessera/oss/oss.h"
#include "tessera/sdp/distributed_data_parallel.h"
#include "tessera/sdp/sharded_data_parallel.h"
#include "tessera/zero/zero.h"
