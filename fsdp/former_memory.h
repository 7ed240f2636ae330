#pragma once

#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <string>
#include <vector>

#include "core/layout/unit_plan.h"

namespace tessera::internal {

// The memory that parameters had before a wrapper gave them other. It goes with the last tensor over it, which is as a
// rule the parameter itself. But a view or detach() that somebody made before would show the values of then for ever,
// and in a module that uses it gradients would come to a weight that has nothing to do with them.
//
// Does not keep the memory. Of one thread.
class FormerMemory {
 public:
  // Parameters as they are before; those that are deferred have none.
  explicit FormerMemory(const std::vector<PlannedParameter>& parameters);

  // After the parameters have been given other memory: whoever reads or writes what is left gets an error (c10::Error)
  // that names the parameter. Left alone is memory that has more in it than parameters, a mapped file say.
  void refuse_use(const std::string& who, int rank) const;

 private:
  struct Memory {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    std::string fqn;  // of the first parameter in it
    size_t parameter_bytes = 0;
  };
  std::vector<Memory> memories_;
};

}  // namespace tessera::internal
