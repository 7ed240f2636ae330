#pragma once

#include <tessera/communicator.h>

namespace tessera {

// How many ranks still have data, for loops over parts of unequal length, since a rank that leaves the loop early ends
// the group (torch's Join). Collective, one number. To use all data, ranks without any go on with any batch and a loss
// of 0, and the gradients, averages over all ranks, are rescaled to averages over those with data:
//
//   while (int active = tessera::ranks_with_data(*comm, loader.has_next())) {
//     const bool own = loader.has_next();
//     auto loss = loss_of(fsdp(own ? batch = loader.next() : batch));
//     (loss * (own ? double(comm->size()) / active : 0.0)).backward();
//     ...
//   }
//
// To stop where the first rank ends: while (ranks_with_data(*comm, has_next) == comm->size()).
int ranks_with_data(Communicator& comm, bool has_data);

}  // namespace tessera
