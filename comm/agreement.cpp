#include "tessera/comm/agreement.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <sstream>
#include <stdexcept>

#include "tessera/comm/fingerprint.h"

namespace tessera {
namespace {

std::vector<int64_t> gather_numbers(Communicator& comm, int64_t number, const std::string& what) {
  at::Tensor own = at::full({1}, number, at::TensorOptions().dtype(at::kLong).device(comm.device()));
  at::Tensor all = at::empty({comm.size()}, own.options());
  comm.all_gather(all, own, {}, what).wait();
  all = all.cpu();
  return {all.const_data_ptr<int64_t>(), all.const_data_ptr<int64_t>() + comm.size()};
}

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

}  // namespace

std::vector<std::string> gather_texts(Communicator& comm, const std::string& text, const std::string& what) {
  c10::InferenceMode quiet;
  const auto counts = gather_numbers(comm, static_cast<int64_t>(text.size()), what);
  int64_t total = 0;
  for (int64_t count : counts) total += count;
  at::Tensor own = at::empty({static_cast<int64_t>(text.size())}, at::kByte);
  std::copy(text.begin(), text.end(), own.mutable_data_ptr<uint8_t>());
  at::Tensor all = at::empty({total}, at::TensorOptions().dtype(at::kByte).device(comm.device()));
  comm.all_gather(all, own.to(comm.device()), counts, what).wait();
  all = all.cpu();
  std::vector<std::string> texts;
  const auto* begin = reinterpret_cast<const char*>(all.const_data_ptr<uint8_t>());
  for (int64_t count : counts) {
    texts.emplace_back(begin, begin + count);
    begin += count;
  }
  return texts;
}

void require_agreement(Communicator& comm, const std::string& subject, const std::vector<std::string>& lines) {
  c10::InferenceMode quiet;
  Fingerprint fingerprint;
  for (const std::string& line : lines) fingerprint.add(line);
  const auto hashes = gather_numbers(comm, static_cast<int64_t>(fingerprint.value()), subject);
  const auto odd = std::find_if(hashes.begin(), hashes.end(), [&](int64_t hash) { return hash != hashes[0]; });
  if (odd == hashes.end()) return;

  std::ostringstream text;
  for (const std::string& line : lines) text << line << '\n';
  const auto texts = gather_texts(comm, text.str(), subject);
  const auto rank = odd - hashes.begin();
  const auto expected = split(texts[0]), got = split(texts[rank]);
  size_t line = 0;
  while (line < expected.size() && line < got.size() && expected[line] == got[line]) ++line;
  std::ostringstream message;
  message << "the ranks disagree about " << subject << ": rank 0 has '"
          << (line < expected.size() ? expected[line] : "nothing more") << "', rank " << rank << " has '"
          << (line < got.size() ? got[line] : "nothing more") << "'";
  throw std::invalid_argument(message.str());
}

}  // namespace tessera
