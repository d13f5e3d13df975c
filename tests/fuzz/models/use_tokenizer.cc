#include "tests/fuzz/models/use_tokenizer.h"

#include <cstdint>

#include "base/status.h"
#include "base/utf8.h"

namespace treadle {

void UseTokenizer(const Tokenizer& tokenizer, std::string_view text) {
  const bool valid = FindInvalidUtf8(text) == std::string_view::npos;
  for (const bool special : {false, true}) {
    const auto ids = tokenizer.Encode(text, {.add_special = special, .parse_special = special});
    TREADLE_CHECK(valid || !ids.ok());
    if (!ids.ok()) continue;
    for (const int32_t id : *ids) TREADLE_CHECK(id >= 0 && id < tokenizer.size());
    const std::string decoded = tokenizer.Decode(*ids, special);
    TREADLE_CHECK(FindInvalidUtf8(decoded) == std::string::npos);
    StreamDecoder stream(tokenizer, special, /*continues_text=*/false);
    std::string streamed;
    for (const int32_t id : *ids) streamed += stream.Push(id);
    streamed += stream.Finish();
    TREADLE_CHECK(streamed == decoded);
  }
  for (const int32_t id : {INT32_MIN, -1, tokenizer.size(), INT32_MAX}) {
    TREADLE_CHECK(tokenizer.TokenBytes(id, true).empty());
  }
}

}  // namespace treadle
