#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace tessera::internal {

// "s3://bucket/some/key"; the key has no '/' at either end and may be empty.
struct S3Location {
  std::string bucket;
  std::string key;
};
// Throws std::invalid_argument for any other text.
S3Location s3_location(const std::string& uri);

struct S3Request {
  std::string method;  // "GET", "HEAD", "PUT", "POST", "DELETE"
  S3Location location;
  std::vector<std::pair<std::string, std::string>> query;  // sorted by name
  std::string range;                                       // "0-1023" in a GET; "": all
  std::string_view body;                                   // in a PUT or POST
  // Receives the body of a 206, up to target_bytes; null: S3Response::body receives it.
  char* target = nullptr;
  int64_t target_bytes = 0;
};

struct S3Response {
  long status = 0;
  std::string body;
  int64_t body_bytes = 0;
  std::map<std::string, std::string> headers;  // names in lower case
};

// The final error of the service or the network, after all attempts. status 0: no answer.
class S3Error : public std::runtime_error {
 public:
  S3Error(long status, const std::string& what) : std::runtime_error(what), status_(status) {}
  long status() const { return status_; }

 private:
  const long status_;
};

// The object could not be read now; it may be undamaged.
class S3Unanswered : public S3Error {
 public:
  using S3Error::S3Error;
};

// Sends signed requests over persistent connections. Retries transient failures: no, broken or stalled connections,
// truncated answers, 408, 429, 5xx. Pauses double from 0.1 s to 20 s, minus a random part; makes AWS_MAX_ATTEMPTS
// attempts in all, 10 by default. Thread-safe.
class S3Client {
 public:
  // Reads the environment. Throws std::invalid_argument for a missing credential.
  S3Client();
  ~S3Client();
  S3Client(const S3Client&) = delete;
  S3Client& operator=(const S3Client&) = delete;

  // Returns answers 2xx and 404. Throws S3Error for a range outside the object (416), S3Unanswered for all others.
  S3Response send(const S3Request& request) const;

 private:
  struct Connections;
  struct Connection;
  std::string url(const S3Request& request) const;
  void set_request(Connection& own, const S3Request& request) const;
  S3Response send_once(const S3Request& request, std::string& fault) const;

  std::string endpoint_;  // "" for Amazon's own
  std::string region_, key_id_, secret_, token_;
  int attempts_ = 10;
  long stall_seconds_ = 30;
  std::unique_ptr<Connections> connections_;
};

// Returns the text of each <tag>...</tag>, with entities resolved.
std::vector<std::string> xml_texts(const std::string& xml, const std::string& tag);
// Decodes escapes: "%20" is ' '.
std::string percent_decoded(std::string text);

}  // namespace tessera::internal
