#include "models/text/tokenizer.h"

#include <limits>

#include "base/status.h"
#include "models/text/bpe_tokenizer.h"
#include "models/text/unicode.h"

namespace treadle {
namespace {

// Tokens of real vocabularies have some hundred bytes at most; what a tokenizer prepares for one
// may cost the square of its length.
constexpr size_t kMaxToken = 4096;  // bytes

absl::Status CheckLengths(const TokenizerSpec& spec) {
  for (size_t id = 0; id < spec.tokens.size(); ++id) {
    if (const size_t bytes = spec.tokens[id].text.size(); bytes > kMaxToken) {
      return InvalidArgument("tokenizer: token ", id, " has ", bytes, " bytes, expected at most ",
                             kMaxToken);
    }
  }
  return absl::OkStatus();
}

absl::Status CheckIds(const TokenizerSpec& spec) {
  const auto size = static_cast<int64_t>(spec.tokens.size());
  if (size == 0) return InvalidArgument("tokenizer: the vocabulary is empty");
  if (size > std::numeric_limits<int32_t>::max()) {
    return InvalidArgument("tokenizer: ", size, " tokens, expected at most 2^31 - 1");
  }
  const auto check = [size](const char* name, int32_t id) {
    if (id >= -1 && id < size) return absl::OkStatus();
    return InvalidArgument("tokenizer: ", name, " id ", id, " is outside the vocabulary of ", size);
  };
  TREADLE_RETURN_IF_ERROR(check("BOS", spec.bos));
  TREADLE_RETURN_IF_ERROR(check("EOS", spec.eos));
  TREADLE_RETURN_IF_ERROR(check("unknown", spec.unknown));
  TREADLE_RETURN_IF_ERROR(check("padding", spec.padding));
  for (int32_t id : spec.end_ids) TREADLE_RETURN_IF_ERROR(check("end", id));
  if (spec.add_bos && spec.bos < 0) {
    return InvalidArgument("tokenizer: it adds a BOS token, but none is named");
  }
  if (spec.add_eos && spec.eos < 0) {
    return InvalidArgument("tokenizer: it adds an EOS token, but none is named");
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<Tokenizer>> Tokenizer::Create(TokenizerSpec spec) {
  TREADLE_RETURN_IF_ERROR(CheckIds(spec));
  TREADLE_RETURN_IF_ERROR(CheckLengths(spec));
  switch (spec.model) {
    case TokenizerSpec::Model::kByteLevelBpe:
      return CreateByteLevelBpe(std::move(spec));
    case TokenizerSpec::Model::kSentencePiece:
      return CreateSentencePieceBpe(std::move(spec));
  }
  return Internal("tokenizer: model ", static_cast<int>(spec.model));
}

absl::Status Tokenizer::CheckText(std::string_view text) {
  if (text.size() > std::numeric_limits<int32_t>::max() / 2) {
    return InvalidArgument("text of ", text.size(), " bytes is too long to tokenize");
  }
  const size_t invalid = FindInvalidUtf8(text);
  if (invalid != std::string_view::npos) {
    return InvalidArgument("text is not valid UTF-8 at byte ", invalid);
  }
  return absl::OkStatus();
}

bool Tokenizer::Emits(int32_t id, bool special) const {
  if (id < 0 || id >= size()) return false;
  switch (spec_.tokens[static_cast<size_t>(id)].kind) {
    case TokenKind::kControl:
    case TokenKind::kUnknown:
      return special;
    case TokenKind::kUnused:
      return false;
    default:
      return true;
  }
}

std::string Tokenizer::Decode(std::span<const int32_t> ids, bool special, size_t most) const {
  StreamDecoder decoder(*this, special, /*continues_text=*/false);
  std::string text;
  for (size_t i = 0; i < ids.size() && text.size() <= most; ++i) text += decoder.Push(ids[i]);
  return text + decoder.Finish();
}

StreamDecoder::StreamDecoder(const Tokenizer& tokenizer, bool special, bool continues_text)
    : tokenizer_(tokenizer),
      special_(special),
      strip_space_(!continues_text && tokenizer.spec().add_space_prefix &&
                   tokenizer.spec().model == TokenizerSpec::Model::kSentencePiece) {}

std::string StreamDecoder::Push(int32_t id) {
  std::string bytes = tokenizer_.TokenBytes(id, special_);
  if (bytes.empty()) return "";
  if (strip_space_ && bytes.front() == ' ') bytes.erase(0, 1);
  strip_space_ = false;
  pending_ += bytes;
  return TakeComplete();
}

std::string StreamDecoder::TakeComplete() {
  std::string complete;
  std::string_view rest = pending_;
  for (;;) {
    const Utf8Front front = ReadUtf8(rest);
    if (front.kind == Utf8Front::Kind::kCharacter) {
      complete += rest.substr(0, front.length);
    } else if (front.kind == Utf8Front::Kind::kInvalid) {
      AppendReplacement(front.length, &complete);
    } else {
      break;
    }
    rest.remove_prefix(front.length);
  }
  pending_ = std::string(rest);
  return complete;
}

std::string StreamDecoder::Finish() {
  std::string out;
  if (!pending_.empty()) AppendReplacement(pending_.size(), &out);
  pending_.clear();
  return out;
}

void StreamDecoder::AppendReplacement(size_t bytes, std::string* out) const {
  const bool each = tokenizer_.spec().model == TokenizerSpec::Model::kSentencePiece;
  for (size_t i = 0; i < (each ? bytes : 1); ++i) *out += kReplacementCharacter;
}

}  // namespace treadle
