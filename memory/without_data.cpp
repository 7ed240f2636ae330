#include "tessera/memory/without_data.h"

#include <utility>

namespace tessera {

static thread_local bool without_data = false;

WithoutDataScope::WithoutDataScope() : before_(std::exchange(without_data, true)) {}
WithoutDataScope::~WithoutDataScope() { without_data = before_; }
bool is_without_data() { return without_data; }

}  // namespace tessera
