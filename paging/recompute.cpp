#include "tessera/paging/recompute.h"

#include <utility>

namespace tessera {

static thread_local bool later = false;

bool recomputes_later() { return later; }
RecomputesLater::RecomputesLater() : before_(std::exchange(later, true)) {}
RecomputesLater::~RecomputesLater() { later = before_; }

}  // namespace tessera
