#include "tessera/comm/text_exchange.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>

namespace tessera {

std::vector<std::string> exchange_texts(Communicator& comm, const std::string& text, const std::string& what) {
  c10::InferenceMode quiet;
  const auto options = at::TensorOptions().device(comm.device());
  at::Tensor lengths = at::empty({comm.size()}, options.dtype(at::kLong));
  comm.all_gather(lengths, at::full({1}, static_cast<int64_t>(text.size()), lengths.options()), {}, what).wait();
  lengths = lengths.cpu();
  const std::vector<int64_t> counts(lengths.const_data_ptr<int64_t>(), lengths.const_data_ptr<int64_t>() + comm.size());
  int64_t total = 0;
  for (const int64_t count : counts) total += count;
  if (total == 0) return std::vector<std::string>(counts.size());

  at::Tensor own = at::empty({static_cast<int64_t>(text.size())}, at::kByte);
  std::copy(text.begin(), text.end(), own.mutable_data_ptr<uint8_t>());
  at::Tensor all = at::empty({total}, options.dtype(at::kByte));
  comm.all_gather(all, own.to(comm.device()), counts, what).wait();
  all = all.cpu();
  std::vector<std::string> texts;
  const auto* begin = reinterpret_cast<const char*>(all.const_data_ptr<uint8_t>());
  for (const int64_t count : counts) {
    texts.emplace_back(begin, begin + count);
    begin += count;
  }
  return texts;
}

}  // namespace tessera
