#include <tessera/autocast.h>

#include <ATen/autocast_mode.h>
#include <c10/util/StringUtil.h>

#include <stdexcept>

namespace tessera {
namespace {

c10::ScalarType required(c10::ScalarType dtype) {
  if (dtype == at::kBFloat16 || dtype == at::kHalf || dtype == at::kFloat) return dtype;
  throw std::invalid_argument(c10::str("Autocast: dtype is ", dtype, ", expected BFloat16, Half or Float"));
}

}  // namespace

Autocast::Autocast(c10::DeviceType device, std::optional<c10::ScalarType> dtype, bool enabled,
                   std::optional<bool> caches)
    : device_(device),
      was_enabled_(at::autocast::is_autocast_enabled(device)),
      former_dtype_(at::autocast::get_autocast_dtype(device)),
      cached_(at::autocast::is_autocast_cache_enabled()) {
  const c10::ScalarType chosen = dtype ? required(*dtype) : former_dtype_;
  at::autocast::set_autocast_enabled(device, enabled);
  at::autocast::set_autocast_dtype(device, chosen);
  at::autocast::set_autocast_cache_enabled(caches.value_or(cached_));
  at::autocast::increment_nesting();
}

Autocast::~Autocast() {
  if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
  at::autocast::set_autocast_enabled(device_, was_enabled_);
  at::autocast::set_autocast_dtype(device_, former_dtype_);
  at::autocast::set_autocast_cache_enabled(cached_);
}

}  // namespace tessera
