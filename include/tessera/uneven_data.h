#pragma once

#include <tessera/communicator.h>

namespace tessera {

// Returns the number of ranks that still have data, for loops over parts of unequal length (torch's Join). A rank that
// leaves the loop early would end the group. Collective, one number. To use all data, ranks without data continue with
// any batch and a loss of 0, and the gradients, which are averages over all ranks, are rescaled:
//
//   while (int active = tessera::ranks_with_data(*comm, loader.has_next())) {
//     const bool own = loader.has_next();
//     auto loss = loss_of(fsdp(own ? batch = loader.next() : batch));
//     (loss * (own ? double(comm->size()) / active : 0.0)).backward();
//     ...
//   }
//
// To stop with the first rank: while (ranks_with_data(*comm, has_next) == comm->size()).
int ranks_with_data(Communicator& comm, bool has_data);

}  // namespace tessera
