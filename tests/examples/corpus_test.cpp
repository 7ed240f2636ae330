#include "data.h"

#include <gtest/gtest.h>

#include <cmath>

#include "tests/support/temporary_folder.h"

namespace train_gpt {
namespace {

using tessera::testing_support::kLfsPointer;
using tessera::testing_support::kLfsProblem;
using tessera::testing_support::TemporaryFolder;

using namespace std::string_literals;

std::string text_of(const Corpus& corpus) { return corpus.vocabulary.decode(corpus.tokens); }

template <class Value>
std::string bytes_of(const std::vector<Value>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(Value)};
}

std::string error_of(const std::filesystem::path& path) {
  try {
    read_corpus(path);
  } catch (const std::runtime_error& error) {
    EXPECT_NE(std::string(error.what()).find(path.string()), std::string::npos) << error.what();
    return error.what();
  }
  return "";
}

std::string llmc_header(int32_t version, int32_t tokens) {
  std::vector<int32_t> header(256, 0);
  header[0] = 20240520;
  header[1] = version;
  header[2] = tokens;
  return bytes_of(header);
}

TEST(Corpus, ATextFileHasTheBytesThatOccurAsVocabulary) {
  const TemporaryFolder folder;
  const auto corpus = read_corpus(folder.write("a.txt", "banana\nb\xc3\xa4\n"));
  EXPECT_EQ(corpus.vocabulary.size(), 6);  // \n a b n and two bytes
  EXPECT_EQ(text_of(corpus), "banana\nb\xc3\xa4\n");
  EXPECT_EQ(corpus.tokens.front(), 2);  // b, in byte order
}

TEST(Corpus, ADirectoryIsReadInTheOrderOfPaths) {
  const TemporaryFolder folder;
  folder.write("b.txt", "second\n");
  folder.write("a/z.md", "first");
  folder.write("c/squad.json", R"({"data": [{"paragraphs": [{"context": "third"}]}]})");
  folder.write("d.dat", "not\0text"s);
  folder.write(".hidden", "no");
  folder.write(".git/config", "no");
  const auto corpus = read_corpus(folder.path());
  EXPECT_EQ(text_of(corpus), "first\nsecond\nthird\n");
  EXPECT_NE(corpus.description.find("3 files; 1 binary left out"), std::string::npos) << corpus.description;
}

TEST(Corpus, SquadGivesEachContextOnce) {
  const TemporaryFolder folder;
  const auto file = folder.write("train.json", R"({"version": "v2.0", "data": [
      {"title": "x", "paragraphs": [{"context": "One.", "qas": []}, {"context": "Two."}]},
      {"title": "y", "paragraphs": [{"context": "One."}, {"context": "Three."}]}]})");
  EXPECT_EQ(text_of(read_corpus(file)), "One.\nTwo.\nThree.\n");
}

TEST(Corpus, TokenFilesBareAndWithHeader) {
  const TemporaryFolder folder;
  const std::vector<uint16_t> tokens = {5, 0, 50256, 7};
  const auto bare = read_corpus(folder.write("bare.bin", bytes_of(tokens)));
  EXPECT_EQ(bare.tokens, tokens);
  EXPECT_EQ(bare.vocabulary.size(), 50257);
  EXPECT_EQ(text_of(bare), "5 0 50256 7");
  EXPECT_EQ(read_corpus(folder.write("llmc.bin", llmc_header(1, 4) + bytes_of(tokens))).tokens, tokens);
}

TEST(Corpus, TheLargestTokenIdThatFits) {
  const TemporaryFolder folder;
  const auto corpus = read_corpus(folder.write("a.bin", bytes_of(std::vector<uint16_t>{65535, 1})));
  EXPECT_EQ(corpus.vocabulary.size(), 65536);
}

TEST(Corpus, ErrorsNameTheFileAndTheProblem) {
  const TemporaryFolder folder;
  EXPECT_NE(error_of(folder / "none.txt").find("does not exist"), std::string::npos);
  EXPECT_NE(error_of(folder.write("empty.txt", "")).find("no text"), std::string::npos);
  EXPECT_NE(error_of(folder.write("empty/b.dat", "\0"s).parent_path()).find("no text"), std::string::npos);
  EXPECT_NE(error_of(folder.write("odd.bin", "abc")).find("odd number"), std::string::npos);
  folder.write("links/a.txt", "text");
  std::filesystem::create_symlink("loop", folder / "links/loop");
  EXPECT_NE(error_of(folder / "links")
                .find("--data " + (folder / "links").string() + ": " + (folder / "links/loop").string() + ": "),
            std::string::npos);
  for (const char* name : {"pointer.txt", "pointer.bin", "pointer.json"})
    EXPECT_NE(error_of(folder.write(name, kLfsPointer)).find(kLfsProblem), std::string::npos) << name;
  EXPECT_NE(error_of(folder.write("none.bin", "")).find("no tokens"), std::string::npos);
  EXPECT_NE(error_of(folder.write("v7.bin", llmc_header(7, 1) + "abcd")).find("version 7"), std::string::npos);
  EXPECT_NE(error_of(folder.write("cut.bin", llmc_header(1, 9) + "ab")).find("says 9"), std::string::npos);
  EXPECT_NE(error_of(folder.write("head.bin", llmc_header(1, 9).substr(0, 100))).find("header"), std::string::npos);
  EXPECT_NE(error_of(folder.write("a.json", "{\"data\": 3}")).find("SQuAD"), std::string::npos);
  EXPECT_NE(error_of(folder.write("b.json", "{")).find("SQuAD"), std::string::npos);
}

TEST(Corpus, TheLastTenthValidates) {
  const TemporaryFolder folder;
  const auto corpus = read_corpus(folder.write("a.txt", std::string(95, 'a') + "bbbbbbbbbb"));
  EXPECT_EQ(corpus.train().size(), 95u);
  EXPECT_EQ(corpus.validation().size(), 10u);
  EXPECT_EQ(corpus.vocabulary.decode(corpus.validation()), "bbbbbbbbbb");
  EXPECT_NO_THROW(check_length(corpus, 9));
  EXPECT_THROW(check_length(corpus, 10), std::runtime_error);
}

TEST(Vocabulary, SaysWhatItCannotEncode) {
  const auto bytes = Vocabulary::of_bytes("ab\n");
  EXPECT_EQ(bytes.encode("ba"), (std::vector<uint16_t>{2, 1}));
  EXPECT_THROW(bytes.encode("c"), std::invalid_argument);
  EXPECT_EQ(bytes.start_token(), 0);
  const auto ids = Vocabulary::of_ids(10);
  EXPECT_EQ(ids.encode(" 3 9 "), (std::vector<uint16_t>{3, 9}));
  for (const char* wrong : {"10", "-1", "x", "1.5"}) EXPECT_THROW(ids.encode(wrong), std::invalid_argument);
}

TEST(UnigramLoss, IsTheCrossEntropyOfSmoothedCounts) {
  const std::vector<uint16_t> train = {0, 0, 0, 1, 1}, targets = {0, 1, 2};
  const double expected = -(std::log(4.0 / 8) + std::log(3.0 / 8) + std::log(1.0 / 8)) / 3;
  EXPECT_NEAR(unigram_loss(train, targets, 3), expected, 1e-12);
}

}  // namespace
}  // namespace train_gpt
