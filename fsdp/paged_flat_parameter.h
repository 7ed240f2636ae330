#pragma once

#include <memory>
#include <string>

#include <tessera/communicator.h>
#include "core/paging/residency.h"
#include "core/runtime/copy_engine.h"
#include "fsdp/flat_parameter.h"
#include "offload/disk/disk_pager.h"

namespace tessera::internal {

// A flat parameter that is paged: the module's parameters are views of a page, mostly of `page`. What is on its way to
// the page, or from it, lies here as well. Its unit says what happens when.
struct PagedFlatParameter {
  FlatParameter flat;
  std::unique_ptr<Page> page;
  // Where parameters are cast for use: what the module's parameters are views of while the unit is
  // pinned, in their own dtype. Else null.
  std::unique_ptr<Page> exact_page;
  // In host memory, what the parameters are views of while a unit of a device is pinned there. Null until then.
  std::unique_ptr<Page> host_page;
  uint32_t writes_before = 0;  // to the page in use, when the unit was pinned
  size_t first_parameter = 0;  // of its parameters, among the model's
  // Of a shard in host memory: the part of it on the device, while it comes there and is gathered.
  at::Tensor staging;  // [layout().shard_numel()] of gather_dtype()
  Copy fetching;
  DiskPager::Hold held;  // of a shard on the disk, while it is copied
  Pending gathering;
  at::Tensor wire;  // what is gathered of a flat parameter that travels in blocks; undefined else
  // This rank's part of what was gathered last, for the ranks of a secondary copy. It is what the shards are unless
  // `page` is stale.
  at::Tensor secondary;

  // What the module's parameters are views of now.
  Page& page_in_use() const {
    if (host_page && host_page->is_attached()) return *host_page;
    return exact_page && exact_page->is_attached() ? *exact_page : *page;
  }
  // Makes them views of another one. The module's members, ties and requires_grad stay.
  void point_parameters(const Page& to, at::ScalarType dtype) const;
  // "parameter 'fc.weight'", of which `view` is a view of `page`; "" if it is of none.
  std::string parameter_at(const at::Tensor& view) const;

  // Whether a parameter is the view that it was made.
  bool is_at_home(size_t parameter) const;
  // Whether the data that it was given instead can be its values.
  bool can_take(size_t parameter) const;
  // Copies that data into the shard (this rank's part), or into the page in use while the unit `is_pinned`, and makes
  // the parameter the view that it was.
  void bring_home(size_t parameter, bool is_pinned, int rank);
  // Throws std::logic_error if the parameter's shard, which users and optimizers hold, is not the view that it was made.
  void require_shard_at_home(size_t parameter, int rank) const;
};

}  // namespace tessera::internal
