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

// The parts of a URI "s3://bucket/some/key". The key does not end with '/', and may be empty.
struct S3Location {
  std::string bucket;
  std::string key;
};
// Parses a URI. Throws std::invalid_argument if the URI has no bucket.
S3Location s3_location(const std::string& uri);

struct S3Request {
  std::string method;  // "GET", "HEAD", "PUT", "POST" or "DELETE"
  S3Location location;
  std::vector<std::pair<std::string, std::string>> query;  // sorted by name
  std::string range;                                       // byte range of a GET ("0-1023"); "" for the whole object
  std::string_view body;                                   // body of a PUT or POST
  // Memory of target_bytes bytes for the body of a 206 answer. If null, the body is stored in S3Response::body.
  char* target = nullptr;
  int64_t target_bytes = 0;
};

struct S3Response {
  long status = 0;
  std::string body;
  int64_t body_bytes = 0;
  std::map<std::string, std::string> headers;  // names in lower case
};

// A request that failed, after any retries.
class S3Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The service sent no usable answer, so the error does not mean that the object is damaged.
class S3Unanswered : public S3Error {
 public:
  using S3Error::S3Error;
};

// Sends signed requests over persistent connections. Thread-safe. Retries transient failures: connections that fail,
// break or stall, truncated answers, the statuses 408, 429 and 5xx, and RequestTimeout. Makes at most AWS_MAX_ATTEMPTS
// attempts, by default 10. The pause between them doubles from 0.1 s up to 20 s, and is shortened by a random part.
class S3Client {
 public:
  // Reads settings from environment variables. Throws std::invalid_argument for a missing credential or invalid number.
  S3Client();
  ~S3Client();
  S3Client(const S3Client&) = delete;
  S3Client& operator=(const S3Client&) = delete;

  // Returns an answer with status 2xx, 404 or, for a range outside the object, 416. Throws S3Unanswered for others.
  S3Response send(const S3Request& request) const;

 private:
  struct Connections;
  struct Connection;
  std::string url(const S3Request& request) const;
  void set_request(Connection& own, const S3Request& request) const;
  S3Response send_once(const S3Request& request, std::string& fault) const;

  std::string endpoint_;  // "" means Amazon's own endpoint
  std::string region_, key_id_, secret_, token_;
  int attempts_ = 10;
  long stall_seconds_ = 30;
  std::unique_ptr<Connections> connections_;
};

// Returns the text of each element <tag>...</tag>, with XML's five predefined entities (such as "&lt;") replaced.
std::vector<std::string> xml_texts(const std::string& xml, const std::string& tag);
// Decodes URL escapes: both "%20" and "+" become ' '.
std::string percent_decoded(std::string text);

}  // namespace tessera::internal
