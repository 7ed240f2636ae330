#pragma once

namespace tessera {

// Whether the environment has `variable`=0, as users set it for what is on by itself. Any thread.
bool is_switched_off(const char* variable);

}  // namespace tessera
