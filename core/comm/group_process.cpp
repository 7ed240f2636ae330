#include "core/comm/group_process.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <unistd.h>

#include <algorithm>
#include <mutex>
#include <new>
#include <span>

#include <tessera/errors.h>
#include "core/runtime/guarded_by.h"

namespace tessera::internal {

GroupProcess::GroupProcess() : pid_(::getpid()) {}

bool GroupProcess::is_this() const { return pid_ == ::getpid(); }

void GroupProcess::require_this(std::string_view what) const {
  if (!is_this())
    throw CommError(c10::str(what, ": process ", ::getpid(), " is a child (fork) of process ", pid_,
                             ", to which the group belongs"));
}

namespace {

std::mutex counting;
int live_groups TESSERA_GUARDED_BY(counting) = 0;
void (*after_last_group)() TESSERA_GUARDED_BY(counting) = nullptr;  // no destructor: a static group may end later

}  // namespace

LiveGroup::LiveGroup() {
  std::lock_guard lock(counting);
  ++live_groups;
}

LiveGroup::~LiveGroup() {
  void (*due)() = nullptr;
  {
    std::lock_guard lock(counting);
    if (--live_groups == 0) due = std::exchange(after_last_group, nullptr);
  }
  if (due != nullptr) due();
}

void call_after_last_group(void (*act)()) {
  std::lock_guard lock(counting);
  after_last_group = act;
}

std::string ranks_text(const std::vector<int>& ranks) {
  constexpr size_t kMostNamed = 8;
  const size_t named = std::min(ranks.size(), kMostNamed);
  const std::string more = ranks.size() > named ? c10::str(" and ", ranks.size() - named, " more") : "";
  return c10::str(ranks.size() == 1 ? "rank " : "ranks ", c10::Join(", ", std::span(ranks).first(named)), more);
}

std::string text_of(const std::exception_ptr& exception) {
  if (!exception) return "std::terminate() was called";
  try {
    std::rethrow_exception(exception);
  } catch (const c10::Error& error) {
    const std::string text = error.what_without_backtrace();
    return text.substr(0, text.find("\nException raised"));
  } catch (const std::bad_alloc&) {
    return "out of memory";
  } catch (const std::exception& error) {
    const std::string text = error.what();
    return text.empty() ? "an error without a message" : text;
  } catch (...) {
    return "an exception of unknown type";
  }
}

}  // namespace tessera::internal
