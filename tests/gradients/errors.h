#pragma once

#include <gtest/gtest.h>

#include <string>

namespace tessera::gradients_test {

// The text of the Error that `body` throws, "" if it throws nothing.
template <class Error, class Body>
std::string error_of(Body body) {
  try {
    body();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

inline void expect_contains(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << "'" << text << "' does not contain '" << part << "'";
}

}  // namespace tessera::gradients_test
