// The pre-tokenizers' regular expressions: what they cut a text into is that text.
#include "models/text/pre_tokenizer.h"

#include "base/status.h"
#include "base/utf8.h"
#include "tests/fuzz/fuzz_input.h"
#include "tests/fuzz/fuzz_target.h"

namespace treadle {
namespace {

void Run(std::string_view bytes) {
  static const std::vector<PreTokenizer> made = [] {
    std::vector<PreTokenizer> all;
    for (const PreTokenizerRow& row : PreTokenizerRows()) {
      if (row.name == row.splits) all.push_back(*PreTokenizer::Create(row.name));
    }
    return all;
  }();
  if (FindInvalidUtf8(bytes) != std::string_view::npos) return;
  for (const PreTokenizer& one : made) {
    std::vector<std::string_view> words;
    TREADLE_CHECK(one.Split(bytes, &words).ok());
    const char* end = bytes.data();
    for (const std::string_view word : words) {
      TREADLE_CHECK(word.data() == end && (!word.empty() || bytes.empty()));
      end += word.size();
    }
    TREADLE_CHECK(end == bytes.data() + bytes.size());
  }
}

std::vector<std::string> Seeds() {
  return {"I'll say: it's 1234567 o'clock,\r\n\n  don't WE'VE \tyou\xc2\xa0 ",
          "\xe4\xb8\xad\xe6\x96\x87 \xc3\xa9t\xc3\xa9 e\xcc\x81 \xd9\xa1\xd9\xa2 "
          "\xf0\x9f\x98\x80\xf0\x9f\x8f\xbd \xe1\xa0\x8e \xe2\x80\xa8 \xe3\x80\x80",
          std::string(300, ' ') + "a" + std::string(300, '\n') + std::string(300, '!')};
}

}  // namespace

const FuzzTarget kPreTokenizerTarget = {"pre_tokenizer", 2048, Seeds, Run};

}  // namespace treadle
