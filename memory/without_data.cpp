#include "tessera/memory/without_data.h"

#include <utility>

namespace tessera {

static thread_local bool without_data = false;
static thread_local bool wait_for_transfers = false;

WithoutDataScope::WithoutDataScope() : before_(std::exchange(without_data, true)) {}
WithoutDataScope::~WithoutDataScope() { without_data = before_; }
bool is_without_data() { return without_data; }

WaitForTransfersScope::WaitForTransfersScope() : before_(std::exchange(wait_for_transfers, true)) {}
WaitForTransfersScope::~WaitForTransfersScope() { wait_for_transfers = before_; }
bool waits_for_transfers() { return wait_for_transfers; }

}  // namespace tessera
