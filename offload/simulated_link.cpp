#include "tessera/offload/simulated_link.h"

#include <utility>

namespace tessera {
namespace {

thread_local const SimulatedLink* current_link = nullptr;

}  // namespace

SimulatedLinkScope::SimulatedLinkScope(SimulatedLink link)
    : link_(std::move(link)), before_(std::exchange(current_link, &link_)) {}
SimulatedLinkScope::~SimulatedLinkScope() { current_link = before_; }

const SimulatedLink* SimulatedLinkScope::current() { return current_link; }

}  // namespace tessera
