// The subset of libFuzzer's command line that `make attack` uses, for compilers without libFuzzer. Mutates the corpus
// at random (-seed) for -max_total_time seconds; does not measure coverage.
//
//   fuzzer -max_total_time=60 CORPUS_DIR

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes);

namespace {

std::string change(std::string text, const std::vector<std::string>& corpus, std::mt19937_64& random) {
  static const std::string kPieces[] = {
      "{", "}", "[", "]", "\"", ",", ":", "-1", "0", "18446744073709551615", "1e999", "null", "\\u0000", "\xff"};
  for (uint64_t times = 1 + random() % 6; times > 0; --times) {
    const size_t at = text.empty() ? 0 : random() % text.size();
    switch (random() % 6) {
      case 0:
        if (!text.empty()) text[at] = static_cast<char>(text[at] ^ (1 << random() % 8));
        break;
      case 1:
        text.insert(at, kPieces[random() % std::size(kPieces)]);
        break;
      case 2:
        text.erase(at, random() % 20);
        break;
      case 3:
        text.insert(at, text.substr(random() % (text.size() + 1), random() % 60));
        break;
      case 4:
        text.replace(at, random() % 8, std::to_string(random() >> random() % 64));
        break;
      default: {
        const std::string& other = corpus[random() % corpus.size()];
        text = text.substr(0, at) + other.substr(random() % (other.size() + 1));
      }
    }
  }
  return text;
}

}  // namespace

int main(int argc, char** argv) {
  int seconds = 60;
  uint64_t seed = 0;
  std::vector<std::string> corpus;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word.starts_with("-max_total_time=")) {
      seconds = std::stoi(word.substr(16));
    } else if (word.starts_with("-seed=")) {
      seed = std::stoull(word.substr(6));
    } else if (!word.starts_with("-")) {
      for (const auto& entry : std::filesystem::directory_iterator(word)) {
        std::ifstream file(entry.path(), std::ios::binary);
        corpus.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
      }
    }
  }
  if (corpus.empty()) return std::fprintf(stderr, "fuzzer: no corpus\n"), 2;
  std::mt19937_64 random(seed);
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(seconds);
  int64_t runs = 0;
  for (; std::chrono::steady_clock::now() < end; ++runs) {
    const std::string input = change(corpus[random() % corpus.size()], corpus, random);
    LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(input.data()), input.size());
  }
  std::printf("Done %lld runs in %d second(s)\n", static_cast<long long>(runs), seconds);
}
