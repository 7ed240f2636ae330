#include "core/comm/group_process.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <unistd.h>

#include <tessera/errors.h>

namespace tessera::internal {

GroupProcess::GroupProcess() : pid_(::getpid()) {}

bool GroupProcess::is_this() const { return pid_ == ::getpid(); }

void GroupProcess::require_this(std::string_view what) const {
  if (!is_this())
    throw CommError(c10::str(what, ": process ", ::getpid(), " is a child (fork) of process ", pid_,
                             ", to which the group belongs"));
}

std::string text_of(const std::exception_ptr& exception) {
  if (!exception) return "std::terminate() was called";
  try {
    std::rethrow_exception(exception);
  } catch (const c10::Error& error) {
    const std::string text = error.what_without_backtrace();
    return text.substr(0, text.find("\nException raised"));
  } catch (const std::exception& error) {
    return error.what();
  } catch (...) {
    return "an exception of unknown type";
  }
}

}  // namespace tessera::internal
