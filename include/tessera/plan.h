#pragma once

// Dry runs, recorded runs, and plans of memory and time: docs/plan.md.

#include <tessera/plan/decoder.h>
#include <tessera/plan/dry_run.h>
#include <tessera/plan/memory_plan.h>
#include <tessera/plan/planned_memory.h>
#include <tessera/plan/run_record.h>
#include <tessera/plan/timeline_page.h>
