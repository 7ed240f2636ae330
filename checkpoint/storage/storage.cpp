#include "checkpoint/storage/storage.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <stdexcept>

namespace tessera::internal {
namespace {

struct Registered {
  std::mutex mutex;
  std::map<std::string, MakeStorage> by_scheme;
};
Registered& registered() {
  static Registered all;
  return all;
}

}  // namespace

void register_storage(const std::string& scheme, MakeStorage make) {
  const std::lock_guard lock(registered().mutex);
  registered().by_scheme.emplace(scheme, make);
}

void Storage::refuse(const std::filesystem::path& path, FileAction action, std::string problem) const {
  throw_with(fail_, {path, action, 0, std::move(problem)});
}

std::string scheme_of(const std::filesystem::path& path) {
  const std::string& text = path.native();
  const size_t end = text.find("://");
  if (end == std::string::npos || end == 0) return "";
  const auto plain = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '+' || c == '-';
  };
  return std::all_of(text.begin(), text.begin() + static_cast<std::ptrdiff_t>(end), plain) ? text.substr(0, end) : "";
}

std::unique_ptr<Storage> make_storage(const std::filesystem::path& path, ThrowFailure fail) {
  const std::string scheme = scheme_of(path);
  if (scheme.empty()) return make_local_storage(fail);
  if (scheme == "memory") return make_memory_storage(fail);
  if (scheme == "s3") return make_s3_storage(fail);
  {
    const std::lock_guard lock(registered().mutex);
    if (const auto found = registered().by_scheme.find(scheme); found != registered().by_scheme.end())
      return found->second(fail);
  }
  throw std::invalid_argument(
      "'" + path.string() +
      "' is on a storage that is not known: expected a local path, s3:// or memory:// (in small letters)");
}

}  // namespace tessera::internal
