#pragma once

#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>

namespace tessera::testing_support {

// The data that a timeline page draws.
inline nlohmann::json data_of_page(const std::string& page) {
  const std::string begin = "id=\"data\">";
  const size_t at = page.find(begin);
  if (at == std::string::npos) throw std::runtime_error("the page has no data");
  return nlohmann::json::parse(page.substr(at + begin.size(), page.find("</script>", at) - at - begin.size()));
}

}  // namespace tessera::testing_support
