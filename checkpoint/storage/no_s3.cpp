// Replaces s3_storage.cpp in builds without libcurl.
#include <stdexcept>

#include "checkpoint/storage/storage.h"

namespace tessera::internal {

std::unique_ptr<Storage> make_s3_storage(ThrowFailure) {
  throw std::invalid_argument(
      "s3:// is not in this build of Tessera: libcurl 7.88 or newer was not found (libcurl4-openssl-dev)");
}

}  // namespace tessera::internal
