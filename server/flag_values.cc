#include "server/flag_values.h"

#include <algorithm>
#include <bit>
#include <charconv>
#include <cmath>
#include <initializer_list>
#include <optional>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/number.h"
#include "base/quoted.h"
#include "base/status.h"
#include "models/checkpoints/model_path.h"
#include "net/address.h"
#include "scheduler/policy.h"

namespace treadle {
namespace {

struct Unit {
  const char* suffix;
  double factor;
};

// A number >= 0 with one of the units' suffixes.
absl::StatusOr<double> ParseWithUnit(const std::string& text, std::initializer_list<Unit> units,
                                     const char* expected) {
  double value = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  const std::string suffix(stop, end);
  for (const Unit& unit : units) {
    if (error == std::errc() && suffix == unit.suffix && std::isfinite(value) && value >= 0 &&
        value * unit.factor < 9e18) {
      return value * unit.factor;
    }
  }
  return InvalidArgument("is '", text, "', expected ", expected);
}

std::string Joined(const std::vector<std::string_view>& words, const char* between) {
  std::string all;
  for (const std::string_view word : words) all += Str(all.empty() ? "" : between, word);
  return all;
}

using ParseWords = std::function<absl::StatusOr<Words>(const std::string&)>;

FlagValue List(Words ServeOptions::*field, ParseWords parse, std::string schema = kAnyText) {
  const auto show = [](const Words& list) { return ShowText(absl::StrJoin(list, ",")); };
  FlagValue value = Value<Words>(field, std::move(parse), show, std::move(schema));
  value.list = true;
  return value;
}

// Words that all are `right`, or none; `expected` is for the error.
ParseWords Each(bool (*right)(const std::string&), std::string expected) {
  return [=](const std::string& text) -> absl::StatusOr<Words> {
    if (text.empty() || text == "none") return Words();
    Words words = absl::StrSplit(text, ',');
    const auto wrong = std::ranges::find_if_not(words, right);
    if (wrong == words.end()) return words;
    return InvalidArgument("has ", Quoted(*wrong), ", expected ", expected);
  };
}

bool IsModelName(const std::string& name) {
  const auto printable = [](unsigned char c) { return c > ' ' && c != 0x7f; };
  return !name.empty() && name.size() <= kMaxModelName && std::ranges::all_of(name, printable);
}

bool IsLora(const std::string& lora) {
  const size_t sign = lora.find('=');
  return sign != lora.npos && sign > 0 && sign + 1 < lora.size();
}

bool IsOrigin(const std::string& origin) {
  const size_t host = origin.find("://");
  return origin == "*" || (host != 0 && host != origin.npos && host + 3 < origin.size() &&
                           origin.find_first_of("/ \t\"'", host + 3) == origin.npos);
}

// Each is host:port or unix:path.
absl::StatusOr<Words> ParseWorkers(const std::string& text) {
  const Words workers = absl::StrSplit(text, ',');
  for (const std::string& worker : workers) {
    if (!worker.starts_with("unix:") || worker.size() == 5) {
      TREADLE_ASSIGN_OR_RETURN(const Address address, ParseAddress(worker));
      if (address.port == 0) {
        return InvalidArgument("address is '", worker,
                               "', expected the port of a worker that listens");
      }
    }
    if (std::ranges::count(workers, worker) > 1) {
      return InvalidArgument("has ", worker, " twice; a worker is one stage");
    }
  }
  return workers;
}

}  // namespace

absl::StatusOr<int64_t> ParseSize(const std::string& text) {
  TREADLE_ASSIGN_OR_RETURN(
      const double bytes,
      ParseWithUnit(text, {{"", 1}, {"K", 0x1p10}, {"M", 0x1p20}, {"G", 0x1p30}, {"T", 0x1p40}},
                    "a size such as 512M or 2G"));
  return static_cast<int64_t>(bytes);
}

absl::StatusOr<std::chrono::milliseconds> ParseDuration(const std::string& text) {
  TREADLE_ASSIGN_OR_RETURN(const double ms,
                           ParseWithUnit(text, {{"ms", 1}, {"s", 1e3}, {"m", 6e4}, {"h", 3.6e6}},
                                         "a time such as 30s, 500ms or 2m"));
  if (ms > 1e11) return InvalidArgument("is '", text, "', expected at most three years");
  return std::chrono::milliseconds(static_cast<int64_t>(ms));
}

FlagValue Integer(int64_t ServeOptions::*field, int64_t low, int64_t high, std::string zero) {
  const bool automatic = zero == "auto";
  const auto parse = [=](const std::string& text) -> absl::StatusOr<int64_t> {
    if (automatic && text == zero) return 0;
    const std::optional<int64_t> value = NumberIn<int64_t>(text);
    if (value && *value >= low && *value <= high) return *value;
    return InvalidArgument("is '", text, "', expected ", automatic ? "auto or " : "",
                           "a whole number from ", low, " to ", high);
  };
  const auto show = [zero](int64_t value) { return value == 0 ? zero : std::to_string(value); };
  return Value<int64_t>(
      field, parse, show,
      Str(R"({"type": "integer", "minimum": )", low, R"(, "maximum": )", high, "}"), "N");
}

FlagValue Size(int64_t ServeOptions::*field, int64_t low, int64_t high, std::string expected,
               std::string zero) {
  const bool automatic = zero == "auto";
  const auto parse = [=](const std::string& text) -> absl::StatusOr<int64_t> {
    if (automatic && text == zero) return 0;
    absl::StatusOr<int64_t> value = ParseSize(text);
    if (value.ok() && *value >= low && *value <= high) return value;
    return InvalidArgument("is '", text, "', expected ", automatic ? "auto or " : "", expected);
  };
  const auto show = [zero](int64_t value) { return value == 0 ? zero : ShowBytes(value); };
  std::string schema = R"({"type": "string", "pattern": "^[0-9]+(\\.[0-9]+)?[KMGT]?$"})";
  if (automatic) schema = Str(R"({"anyOf": [{"enum": ["auto"]}, )", schema, "]}");
  return Value<int64_t>(field, parse, show, std::move(schema), "SIZE");
}

FlagValue Duration(std::chrono::milliseconds ServeOptions::*field) {
  const auto show = [](std::chrono::milliseconds time) {
    const int64_t ms = time.count();
    return ms % 1000 == 0 ? Str(ms / 1000, "s") : Str(ms, "ms");
  };
  return Value<std::chrono::milliseconds>(
      field, ParseDuration, show,
      R"({"type": "string", "pattern": "^[0-9]+(\\.[0-9]+)?(ms|s|m|h)$"})", "TIME");
}

std::string ShowText(const std::string& text) { return text.empty() ? "none" : text; }

FlagValue Text(std::string ServeOptions::*field, std::string schema) {
  const auto parse = [](const std::string& text) { return text; };
  return Value<std::string>(field, parse, ShowText, std::move(schema));
}

FlagValue Listen(std::string ServeOptions::*field, bool optional) {
  const auto parse = [optional](const std::string& text) -> absl::StatusOr<std::string> {
    if (optional && (text.empty() || text == "none")) return "none";
    TREADLE_RETURN_IF_ERROR(ParseAddress(text).status());
    return text;
  };
  return Value<std::string>(field, parse, ShowText, kAnyText, "ADDRESS");
}

FlagValue PageSize(int64_t ServeOptions::*field) {
  const auto parse = [](const std::string& text) -> absl::StatusOr<int64_t> {
    const std::optional<int64_t> size = NumberIn<int64_t>(text);
    const bool in_range = size && *size >= 16 && *size <= 4096;
    if (in_range && std::has_single_bit(static_cast<uint64_t>(*size))) return *size;
    return InvalidArgument("is '", text, "', expected a ",
                           in_range ? "power of two" : "whole number", " from 16 to 4096");
  };
  return Value<int64_t>(field, parse, Str<int64_t>,
                        R"({"enum": [16, 32, 64, 128, 256, 512, 1024, 2048, 4096]})", "N");
}

FlagValue PolicyName(std::string ServeOptions::*field) {
  const auto parse = [](const std::string& text) -> absl::StatusOr<std::string> {
    const auto policy = Policy::Create(text);
    if (policy.ok()) return text;
    return InvalidArgument("is '", text, "': ", std::string(policy.status().message()));
  };
  return Value<std::string>(field, parse, ShowText, EnumSchema(Policy::Names()),
                            EnumType(Policy::Names()));
}

FlagValue Weights(WeightPlan ServeOptions::*field) {
  const auto parse = [](const std::string& text) -> absl::StatusOr<WeightPlan> {
    auto plan = WeightPlan::Parse(text);
    if (!plan.ok()) return InvalidArgument("has ", std::string(plan.status().message()));
    return plan;
  };
  const auto show = [](const WeightPlan& plan) { return plan.empty() ? "as stored" : plan.text(); };
  return Value<WeightPlan>(field, parse, show);
}

FlagValue OutlierThreshold(std::optional<float> ServeOptions::*field) {
  const auto parse = [](const std::string& text) -> absl::StatusOr<std::optional<float>> {
    constexpr float kMaxValue = 1e6f;
    const std::optional<float> value = NumberIn<float>(text);
    if (value && *value >= 0 && *value <= kMaxValue) return value;
    return InvalidArgument("is '", text, "', expected a number from 0 to ", kMaxValue);
  };
  const auto show = [](const std::optional<float>& threshold) {
    return threshold ? Str(*threshold) : "the model's, else 6";
  };
  return Value<std::optional<float>>(
      field, parse, show, R"({"type": "number", "minimum": 0, "maximum": 1000000})", "NUMBER");
}

FlagValue Sha256Digits(std::string ServeOptions::*field) {
  const auto parse = [](const std::string& text) -> absl::StatusOr<std::string> {
    const std::string digits = absl::AsciiStrToLower(text);
    if (digits.size() == 64 && digits.find_first_not_of("0123456789abcdef") == digits.npos) {
      return digits;
    }
    return InvalidArgument("is '", text, "', expected 64 hexadecimal digits");
  };
  return Value<std::string>(field, parse, ShowText);
}

FlagValue FolderAndSize(FolderSpace ServeOptions::*field) {
  const auto parse = [](const std::string& text) -> absl::StatusOr<FolderSpace> {
    if (text.empty() || text == "none") return FolderSpace();
    const size_t colon = text.rfind(':');
    const auto bytes = ParseSize(colon == text.npos ? "" : text.substr(colon + 1));
    if (colon != text.npos && colon > 0 && bytes.ok() && *bytes > 0) {
      return FolderSpace{.folder = text.substr(0, colon), .bytes = *bytes};
    }
    return InvalidArgument("is '", text, "', expected FOLDER:SIZE such as /var/cache/treadle:20G");
  };
  const auto show = [](const FolderSpace& space) {
    return ShowText(space.folder.empty() ? "" : Str(space.folder, ":", ShowBytes(space.bytes)));
  };
  return Value<FolderSpace>(
      field, parse, show,
      R"({"type": "string", "pattern": "^/[^ ]*[^ /]:[0-9]+([.][0-9]+)?[KMGT]?$"})");
}

FlagValue SpeculateValue() {
  static constexpr std::string_view kDraft = "draft:";
  const auto read = [](ServeOptions& options, const std::string& text) -> absl::Status {
    const bool draft = text.starts_with(kDraft) && text.size() > kDraft.size();
    const auto word = ValueOf(kSpeculate, text);
    if (!draft && text != "auto" && (!word || *word == Speculate::kDraft)) {
      return InvalidArgument("is '", text, "', expected auto, off, ngram or draft:MODEL");
    }
    options.speculate = draft ? Speculate::kDraft : word;
    options.draft_model = draft ? text.substr(kDraft.size()) : "";
    return absl::OkStatus();
  };
  const auto show = [](const ServeOptions& options) {
    if (!options.speculate) return std::string("auto");
    return options.speculate == Speculate::kDraft
               ? Str(kDraft, options.draft_model)
               : std::string(WordOf(kSpeculate, *options.speculate));
  };
  return {.read = read,
          .show = show,
          .schema = R"({"type": "string", "pattern": "^(auto|off|ngram|draft:[^ ]+)$"})"};
}

FlagValue WorkerAddresses(Words ServeOptions::*field) { return List(field, ParseWorkers); }

FlagValue ModelNames(Words ServeOptions::*field) {
  return List(field,
              Each(IsModelName, Str("names of 1 to ", kMaxModelName,
                                    " bytes without spaces, and commas between them")),
              R"({"type": "string", "pattern": "^[^ ]+$"})");
}

FlagValue Loras(Words ServeOptions::*field) {
  return List(field, Each(IsLora, "NAME=PATH, and commas between them"),
              R"({"type": "string", "pattern": "^(none|[^ =]+=/[^ ]+)$"})");
}

FlagValue Origins(Words ServeOptions::*field) {
  const ParseWords parse = Each(IsOrigin, "https://host, http://host:port, or *");
  return List(
      field, [parse](const std::string& text) { return parse(absl::AsciiStrToLower(text)); },
      R"({"type": "string", "pattern": "^([*]|[a-z]+://[^ ]+)$"})");
}

absl::Status ExpectedOneOf(const std::vector<std::string_view>& words, const std::string& text) {
  return InvalidArgument("is '", text, "', expected ", Joined(words, " or "));
}

std::string EnumSchema(const std::vector<std::string_view>& words) {
  return Str(R"({"enum": [")", Joined(words, R"(", ")"), R"("]})");
}

std::string EnumType(const std::vector<std::string_view>& words) {
  return Str("{", Joined(words, ","), "}");
}

std::string ShowBytes(int64_t bytes) {
  constexpr int64_t kMebi = 1 << 20;
  return bytes % kMebi == 0 ? Str(bytes / kMebi, "M") : std::to_string(bytes);
}

}  // namespace treadle
