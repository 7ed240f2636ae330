#include "core/comm/agreement.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <numeric>
#include <sstream>
#include <stdexcept>
#include <utility>

#include <tessera/host_results.h>
#include "core/comm/fingerprint.h"
#include "core/comm/reduced_report.h"

namespace tessera {
namespace internal {
namespace {

std::vector<int64_t> gather_numbers(Communicator& comm, int64_t number, const std::string& what) {
  const at::Tensor own = at::full({}, number, at::TensorOptions().dtype(at::kLong).device(comm.device()));
  const at::Tensor all = gather_to_host(comm, own, what);
  return {all.const_data_ptr<int64_t>(), all.const_data_ptr<int64_t>() + comm.size()};
}

}  // namespace

std::vector<std::string> gather_texts(Communicator& comm, const std::string& text, const std::string& what) {
  c10::InferenceMode quiet;
  const auto counts = gather_numbers(comm, static_cast<int64_t>(text.size()), what);
  at::Tensor own = at::empty({static_cast<int64_t>(text.size())}, at::TensorOptions(at::kCPU).dtype(at::kByte));
  std::ranges::copy(text, own.mutable_data_ptr<uint8_t>());
  own = own.to(comm.device());
  at::Tensor all = at::empty({std::accumulate(counts.begin(), counts.end(), int64_t{0})}, own.options());
  comm.all_gather(all, own, counts, what).wait();
  all = comm.to_host(all, what);
  std::vector<std::string> texts;
  const uint8_t* begin = all.const_data_ptr<uint8_t>();
  for (int64_t count : counts) texts.emplace_back(std::exchange(begin, begin + count), begin);
  return texts;
}

}  // namespace internal

void require_agreement(Communicator& comm, const std::string& subject, const std::vector<std::string>& lines) {
  c10::InferenceMode quiet;
  internal::Fingerprint fingerprint;
  for (const std::string& line : lines) fingerprint.add(line);
  internal::ReducedReport report(comm, fingerprint.value(), {}, subject);
  report.finish();
  if (!report.unlike_ranks()) return;

  std::string text;
  for (const std::string& line : lines) text += line + '\n';
  const auto texts = internal::gather_texts(comm, text, subject);
  const auto rank = std::ranges::find_if(texts, [&](const auto& other) { return other != texts[0]; }) - texts.begin();
  if (rank == static_cast<std::ptrdiff_t>(texts.size())) return report.require_alike(subject);
  std::istringstream expected(texts[0]), got(texts[rank]);
  std::string expected_line, got_line;
  while (expected_line == got_line && (expected || got)) {
    if (!std::getline(expected, expected_line)) expected_line = "nothing more";
    if (!std::getline(got, got_line)) got_line = "nothing more";
  }
  throw std::invalid_argument(c10::str("the ranks disagree about ", subject, ": rank 0 has '", expected_line,
                                       "', rank ", rank, " has '", got_line, "'"));
}

}  // namespace tessera
