#include "core/memory/without_data.h"

namespace tessera::internal {

static thread_local bool without_data = false;
static thread_local bool wait_for_transfers = false;

WithoutDataScope::WithoutDataScope() : scope_(without_data, true) {}
bool is_without_data() { return without_data; }

WaitForTransfersScope::WaitForTransfersScope() : scope_(wait_for_transfers, true) {}
bool waits_for_transfers() { return wait_for_transfers; }

}  // namespace tessera::internal
