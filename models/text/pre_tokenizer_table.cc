// The patterns and the names of pre-tokenizers. The patterns are those of the authors'
// tokenizer.json, the names and their flags those of GGUF's "tokenizer.ggml.pre" (llama.cpp,
// src/llama-vocab.cpp).
#include <algorithm>
#include <array>
#include <utility>

#include "base/nearest.h"
#include "base/quoted.h"
#include "base/status.h"
#include "models/text/pre_tokenizer.h"

namespace treadle {
namespace {

#define ENDINGS "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
#define GAP R"(\s*[\r\n]+|\s+(?!\S)|\s+)"
#define LLAMA3(digits) \
  ENDINGS R"(|[^\r\n\p{L}\p{N}]?\p{L}+|)" digits R"(| ?[^\s\p{L}\p{N}]+[\r\n]*|)" GAP
// A word may begin with one other character: letters that are not small, then some that are not
// capitals, or the reverse; and an English ending.
#define WORD(capitals, others, without)                                      \
  R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M})" without "]" capitals \
  R"([\p{Ll}\p{Lm}\p{Lo}\p{M})" without "]" others
#define NO_HAN R"(&&[^\p{Han}])"
// The same by what the classes are not: PCRE2 has no intersection, groups that repeat take it
// memory, and its \p{Han} holds what other scripts use too.
#define BUT_HAN(others) R"([^\p{sc:Han}\p{N}\p{P}\p{S}\p{Z}\p{C})" others "]"
#define WORD_BUT_HAN(capitals, others)                                                            \
  R"([^\r\n\p{L}\p{N}]?)" BUT_HAN(R"(\p{Ll})") capitals BUT_HAN(R"(\p{Lu}\p{Lt})") others ENDINGS \
      "?|"
#define KIMI(han, words) "[" han "]+|" words R"(\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|)" GAP
#define BLOOM R"( ?[^(\s|[.,!?…。，、।۔،])]+)"
#define EXAONE(words)                                 \
  ENDINGS R"(|[^\r\n\p{L}\p{N}]?)" words R"(|\p{N}|)" \
          R"( ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+)"
#define EXAONE_WORDS R"((?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+)"
#define SLASHES R"(| ?[^\s\p{L}\p{N}]+[\r\n/]*|)" GAP
// Cased letters, as DeepSeek's first tokenizer lists them.
// clang-format off
#define CASED_LETTERS \
  R"(\s?[A-Za-z)" \
  R"(µÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚ)" \
  R"(Ḁ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿ)" \
  R"(ⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃)" \
  R"(]+)"
// clang-format on
#define CHINESE "[一-龥ࠀ-一가-퟿]+"

struct Splits {
  std::string_view name;  // of the row of kRows whose authors cut so
  std::array<const char*, 6> patterns;
};

constexpr Splits kSplits[] = {
    {"gpt-2", {kGpt2Pattern}},
    {"smollm", {R"(\p{N})", kGpt2Pattern}},
    {"llama-bpe", {LLAMA3(R"(\p{N}{1,3})")}},
    {"minicpm5", {R"(\p{N}{1,3})", LLAMA3(R"(\p{N}+)")}},
    {"qwen2", {LLAMA3(R"(\p{N})")}},
    {"qwen35",
     {ENDINGS R"(|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|)" GAP}},
    {"seed-coder", {ENDINGS R"(|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|)" GAP}},
    {"bailingmoe",
     {R"('(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|)"
      R"(\s*[\r\n]|\s+(?!\S)|\s+)"}},
    {"exaone-moe", {EXAONE(EXAONE_WORDS)}},
    // OpenAI's o200k.
    {"gpt-4o",
     {WORD("*", "+", "") ENDINGS "?|" WORD("+", "*", "") ENDINGS R"(?|\p{N}{1,3})" SLASHES}},
    {"tekken", {WORD("*", "+", "") "|" WORD("+", "*", "") R"(|\p{N})" SLASHES}},
    {"kimi-k2",
     {KIMI(R"(\p{Han})", WORD("*", "+", NO_HAN) ENDINGS "?|" WORD("+", "*", NO_HAN) ENDINGS "?|")}},
    {"deepseek-llm",
     {"[\r\n]", CASED_LETTERS, R"(\s?[!-/:-~！-／：-～‘-‟　-。]+)", R"(\s+$)", CHINESE,
      R"(\p{N})"}},
    {"deepseek-coder", {"[\r\n]", R"(\s?\p{L}+)", R"(\s?\p{P}+)", CHINESE, R"(\p{N})"}},
    {"deepseek-v3",
     {R"(\p{N}{1,3})", "[一-龥぀-ゟ゠-ヿ]+",
      R"([!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|)"
      "[^\r\n"
      R"(\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[)"
      "\r\n"
      R"(]*|\s*[)"
      "\r\n"
      R"(]+|\s+(?!\S)|\s+)"}},
    {"bloom", {BLOOM}},
    {"viking", {BLOOM, R"(\p{N})"}},
    {"falcon", {R"([\p{P}$+<=>^`|~]+)", kGpt2Pattern}},
    {"default", {R"([\p{P}\$\+<=>\^~\|]+)", kGpt2Pattern, R"(\p{N}+)", "[0-9][0-9][0-9]"}},
};

// Patterns that mean something else to PCRE2, or take it too much time or memory for a long text,
// and what is compiled instead.
constexpr std::pair<std::string_view, const char*> kOwn[] = {
    {BLOOM, R"( ?[^(\s|.,!?…。，、।۔،)]+)"},
    {R"(\s+$)", R"((?<!\s)\s++$)"},
    {KIMI(R"(\p{Han})", WORD("*", "+", NO_HAN) ENDINGS "?|" WORD("+", "*", NO_HAN) ENDINGS "?|"),
     KIMI(R"(\p{sc:Han})", WORD_BUT_HAN("*", "+") WORD_BUT_HAN("+", "*"))},
    {EXAONE(EXAONE_WORDS), EXAONE(R"(\p{L}[\p{L}\p{M}]*+(?: \p{L}[\p{L}\p{M}]*+)*+)")},
};

// NFC is the authors' choice, which llama.cpp does not follow. A row that others share the splits
// with comes first.
using Row = PreTokenizerRow;
constexpr Row kRows[] = {
    {.name = "gpt-2", .splits = "gpt-2"},
    {.name = "smollm", .splits = "smollm"},
    {.name = "llama-bpe", .splits = "llama-bpe", .ignore_merges = true, .add_bos = true},
    {.name = "qwen2", .splits = "qwen2", .nfc = true},
    {.name = "qwen35", .splits = "qwen35", .nfc = true},
    {.name = "gpt-4o", .splits = "gpt-4o"},
    {.name = "tekken", .splits = "tekken", .ignore_merges = true, .add_bos = true},
    {.name = "olmo", .splits = "gpt-2", .nfc = true},  // GPT-NeoX's
    {.name = "bloom", .splits = "bloom"},
    {.name = "viking", .splits = "viking"},
    {.name = "falcon", .splits = "falcon"},
    {.name = "default", .splits = "default"},
    {.name = "deepseek-llm", .splits = "deepseek-llm"},
    {.name = "deepseek-coder", .splits = "deepseek-coder"},
    {.name = "deepseek-v3", .splits = "deepseek-v3"},
    {.name = "kimi-k2", .splits = "kimi-k2"},
    {.name = "minicpm5", .splits = "minicpm5", .ignore_merges = true},
    {.name = "seed-coder", .splits = "seed-coder"},
    {.name = "bailingmoe", .splits = "bailingmoe"},
    {.name = "exaone-moe", .splits = "exaone-moe"},
    {.name = "command-r", .splits = "smollm", .nfc = true},
    {.name = "stablelm2", .splits = "qwen2"},
    {.name = "dbrx", .splits = "llama-bpe"},
    {.name = "glm4", .splits = "llama-bpe", .ignore_merges = true},
    {.name = "llama3", .splits = "llama-bpe", .ignore_merges = true, .add_bos = true},
    {.name = "llama-v3", .splits = "llama-bpe", .ignore_merges = true, .add_bos = true},
    {.name = "falcon3", .splits = "llama-bpe", .ignore_merges = true, .add_bos = true},
    {.name = "falcon-h1", .splits = "llama-bpe", .ignore_merges = true, .add_bos = true},
    {.name = "pixtral", .splits = "llama-bpe", .ignore_merges = true, .add_bos = true},
    {.name = "midm-2.0", .splits = "llama-bpe", .ignore_merges = true, .add_bos = true},
    {.name = "lfm2", .splits = "llama-bpe", .ignore_merges = true, .add_bos = true},
    {.name = "glm5", .splits = "llama-bpe", .ignore_merges = true},
    {.name = "smaug-bpe", .splits = "llama-bpe"},
    {.name = "chatglm-bpe", .splits = "llama-bpe"},
    {.name = "deepseek-r1-qwen", .splits = "qwen2", .nfc = true},
    {.name = "megrez", .splits = "qwen2"},
    {.name = "kormo", .splits = "qwen2"},
    {.name = "hunyuan", .splits = "qwen2"},
    {.name = "solar-open", .splits = "qwen2"},
    {.name = "grok-2", .splits = "qwen2"},
    {.name = "llama4", .splits = "gpt-4o"},
    {.name = "kanana2", .splits = "gpt-4o"},
    {.name = "talkie", .splits = "gpt-4o"},
    {.name = "minimax-m2", .splits = "gpt-4o"},
    {.name = "mpt", .splits = "gpt-2", .nfc = true},
    {.name = "phi-2", .splits = "gpt-2"},
    {.name = "gigachat", .splits = "gpt-2"},
    {.name = "a.x-4.0", .splits = "gpt-2"},
    {.name = "mellum", .splits = "gpt-2"},
    {.name = "jais", .splits = "gpt-2"},
    {.name = "trillion", .splits = "gpt-2"},
    {.name = "granite-docling", .splits = "gpt-2"},
    {.name = "exaone4", .splits = "gpt-2"},
    {.name = "starcoder", .splits = "smollm"},
    {.name = "refact", .splits = "smollm"},
    {.name = "codeshell", .splits = "smollm"},
    {.name = "exaone", .splits = "smollm"},
    {.name = "minerva-7b", .splits = "smollm"},
    {.name = "mellum2", .splits = "smollm"},
    {.name = "poro-chat", .splits = "bloom"},
    {.name = "gpt3-finnish", .splits = "bloom"},
    {.name = "hunyuan-dense", .splits = "deepseek-v3"},
    {.name = "joyai-llm", .splits = "deepseek-v3"},
    {.name = "hy_v4", .splits = "deepseek-v3"},
    {.name = "bailingmoe2", .splits = "bailingmoe"},
    {.name = "llada-moe", .splits = "bailingmoe"},
};

// Names of llama.cpp whose text is prepared in another way than by patterns that cut it.
constexpr std::pair<std::string_view, std::string_view> kOthers[] = {
    {"gemma4", "merges characters, not bytes"},
    {"granite-embed-multi-311m", "merges characters, not bytes"},
    {"sarvam-moe", "merges characters, not bytes"},
    {"whitespace", "merges characters, not bytes"},
    {"superbpe", "counts digits from the right"},
    {"tiny_aya", "counts digits from the right"},
    {"cohere2moe", "counts digits from the right"},
    {"afmoe", "counts digits from the right"},
};

}  // namespace

std::span<const PreTokenizerRow> PreTokenizerRows() { return kRows; }

absl::StatusOr<const PreTokenizerRow*> FindPreTokenizer(std::string_view name) {
  const auto found = std::ranges::find(kRows, name, &Row::name);
  if (found != std::end(kRows)) return &*found;
  for (const auto& [other, what] : kOthers) {
    if (other == name) return Unimplemented("pre-tokenizer '", name, "' ", what, ": not supported");
  }
  std::array<std::string_view, std::size(kRows)> names;
  std::ranges::transform(kRows, names.begin(), &Row::name);
  const auto nearest = names.begin() + 3;
  std::ranges::partial_sort(names, nearest, {},
                            [&](auto known) { return EditDistance(known, name); });
  return Unimplemented("pre-tokenizer ", Quoted(name), " is not one of the ", names.size(),
                       " known ones; nearest are '", names[0], "', '", names[1], "' and '",
                       names[2], "'");
}

std::vector<std::string> SplitPatterns(const PreTokenizerRow& row) {
  std::vector<std::string> patterns;
  for (const char* pattern : std::ranges::find(kSplits, row.splits, &Splits::name)->patterns) {
    if (pattern != nullptr) patterns.emplace_back(pattern);
  }
  return patterns;
}

const char* OwnPattern(const std::string& pattern) {
  const auto own = std::ranges::find(kOwn, pattern, [](const auto& pair) { return pair.first; });
  return own == std::end(kOwn) ? pattern.c_str() : own->second;
}

const PreTokenizerRow* PreTokenizerOf(const std::vector<std::string>& patterns, bool nfc,
                                      bool ignore_merges) {
  const PreTokenizerRow* best = nullptr;
  for (const Row& row : kRows) {
    if (SplitPatterns(row) != patterns) continue;
    // A row that normalizes differently is an answer only where no other is.
    const auto rank = [&](const Row* one) {
      return one == nullptr ? -1 : 2 * (one->nfc == nfc) + (one->ignore_merges == ignore_merges);
    };
    if (rank(&row) > rank(best)) best = &row;
  }
  return best;
}

}  // namespace treadle
