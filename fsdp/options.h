#pragma once

#include <cstdint>

#include "tessera/flat/unit_plan.h"

namespace tessera {

struct FsdpOptions {
  // Which modules become units (see WrapPolicy). Empty: the whole model is one unit.
  WrapPolicy auto_wrap;

  // true: a unit's parameters are released after its forward and gathered again in backward
  // (ZeRO-3: 1.5 times DDP's traffic, least memory). false: they stay from forward until backward
  // has all of the unit's gradients (ZeRO-2's traffic; memory of the whole model), and after an
  // evaluation until the next backward ends.
  bool reshard_after_forward = true;

  // How many units ahead of the one in use are gathered, in forward and in backward, in the order
  // seen in the iteration before. 0: none. Costs one gathered unit of memory each.
  int prefetch = 1;

  // How many units, the most recently used ones, stay gathered while the next is in use. 2 keeps
  // two units that are used in turn from evicting each other.
  int keep_recent = 2;

  // Take parameters and buffers from rank 0 at construction. false: the caller promises that
  // they are the same on all ranks already.
  bool sync_module_states = true;
};

}  // namespace tessera
