// Compiled only with TESSERA_CUDA. NVTX 3 is header-only, and calls the profiler under which the process runs, if any.
#include <c10/util/env.h>
#include <nvtx3/nvToolsExt.h>

#include "core/trace/ranges.h"

namespace tessera::internal {
namespace {

class NvtxRanges final : public RangeSink {
 public:
  NvtxRanges() : domain_(nvtxDomainCreateA("tessera")) {}
  void push(const std::string& name) override {
    const auto attributes = named(name);
    nvtxDomainRangePushEx(domain_, &attributes);
  }
  void pop() override { nvtxDomainRangePop(domain_); }
  uint64_t start(const std::string& name) override {
    const auto attributes = named(name);
    return nvtxDomainRangeStartEx(domain_, &attributes);
  }
  void end(uint64_t id) override { nvtxDomainRangeEnd(domain_, id); }

 private:
  // Returns the attributes of a range. They borrow `name`, which the profiler copies when it receives them.
  static nvtxEventAttributes_t named(const std::string& name) {
    nvtxEventAttributes_t attributes{};
    attributes.version = NVTX_VERSION;
    attributes.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
    attributes.messageType = NVTX_MESSAGE_TYPE_ASCII;
    attributes.message.ascii = name.c_str();
    return attributes;
  }

  nvtxDomainHandle_t const domain_;
};

}  // namespace

RangeSink* RangeSink::from_environment() noexcept {
  if (c10::utils::check_env("TESSERA_NVTX") != true) return nullptr;
  return new NvtxRanges;  // never destroyed, because destructors of static objects may end ranges
}

}  // namespace tessera::internal
