// Names of what Quantize makes.
#include <charconv>

#include "base/status.h"
#include "kernels/formats/quantizers.h"

namespace treadle {
namespace {

constexpr std::string_view kKnown =
    "int8, nf4, fp4, nf4-dq, fp4-dq (with :BLOCK), fp8, q8_0, q5_0, q5_1, q4_0, q4_1, q6_k, q5_k, "
    "q4_k, q3_k, iq4_nl, iq4_xs, f32, f16, bf16, "
    "kbit-{int,dynamic,quantile}BITS, kbit-floatBITSeEXPONENT and kbit-e2m1 (with :BLOCK)";
constexpr int64_t kDefaultBlock = 64;

struct CodebookName {
  std::string_view name;
  QuantizeSpec::Codebook codebook;
};
constexpr CodebookName kCodebooks[] = {
    {"int", QuantizeSpec::Codebook::kInt},
    {"float", QuantizeSpec::Codebook::kFloat},
    {"dynamic", QuantizeSpec::Codebook::kDynamic},
    {"quantile", QuantizeSpec::Codebook::kQuantile},
};

absl::Status Unknown(std::string_view text) {
  return InvalidArgument("cannot make weights '", text, "': expected one of ", kKnown);
}

// A decimal number and nothing else; -1 otherwise.
int64_t Number(std::string_view text) {
  int64_t value = -1;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size() && value >= 0 ? value : -1;
}

bool EatSuffix(std::string_view suffix, std::string_view& text) {
  if (!text.ends_with(suffix)) return false;
  text.remove_suffix(suffix.size());
  return true;
}

absl::StatusOr<int64_t> ParseBlock(std::string_view whole, std::string_view text, int64_t most) {
  const int64_t block = Number(text);
  if (block < 32 || block > most || (block & (block - 1)) != 0) {
    return InvalidArgument("'", whole, "': blocks of '", text,
                           "' weights, expected a power of two from 32 to ", most);
  }
  return block;
}

// Parses what follows "kbit-", without the block: sets format, codebook and exponent bits.
absl::Status ParseKBit(std::string_view whole, std::string_view text, QuantizeSpec& spec) {
  if (text == "e2m1") {
    spec.format = FindWeightFormat("kbit4");
    spec.codebook = QuantizeSpec::Codebook::kE2M1;
    spec.name = "kbit-e2m1";
    return absl::OkStatus();
  }
  const CodebookName* found = nullptr;
  for (const CodebookName& row : kCodebooks) {
    if (text.starts_with(row.name)) found = &row;
  }
  if (found == nullptr) return Unknown(whole);
  text.remove_prefix(found->name.size());
  spec.codebook = found->codebook;
  std::string_view exponent;
  if (spec.codebook == QuantizeSpec::Codebook::kFloat) {
    const size_t e = text.find('e');
    if (e == std::string_view::npos) {
      return InvalidArgument("'", whole, "': no exponent bits, expected one like kbit-float4e2");
    }
    exponent = text.substr(e + 1);
    text = text.substr(0, e);
  }
  const int64_t bits = Number(text);
  if (bits < 3 || bits > 8) {
    return InvalidArgument("'", whole, "': '", text, "' bits, expected 3 to 8");
  }
  spec.format = FindWeightFormat(Str("kbit", bits));
  spec.name = Str("kbit-", found->name, bits);
  if (spec.codebook != QuantizeSpec::Codebook::kFloat) return absl::OkStatus();
  const int64_t exponent_bits = Number(exponent);
  if (exponent_bits < 1 || exponent_bits > bits - 1) {
    return InvalidArgument("'", whole, "': '", exponent, "' exponent bits of ", bits,
                           ", expected 1 to ", bits - 1);
  }
  spec.exponent_bits = static_cast<int>(exponent_bits);
  spec.name += Str("e", exponent_bits);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<QuantizeSpec> ParseQuantizeSpec(std::string_view text) {
  const size_t colon = text.find(':');
  std::string_view name = text.substr(0, colon);
  const bool has_block = colon != std::string_view::npos;
  const std::string_view block = has_block ? text.substr(colon + 1) : "";
  QuantizeSpec spec;
  if (name.starts_with("kbit-")) {
    TREADLE_RETURN_IF_ERROR(ParseKBit(text, name.substr(5), spec));
    if (block == "tensor") {
      spec.name += ":tensor";
      return spec;
    }
    spec.block = kDefaultBlock;
    if (has_block) {
      TREADLE_ASSIGN_OR_RETURN(spec.block, ParseBlock(text, block, 1024));
    }
    spec.name += Str(":", spec.block);
    return spec;
  }
  spec.double_quantized = EatSuffix("-dq", name);
  spec.format = FindWeightFormat(name);
  const bool four_bits = name == "nf4" || name == "fp4";
  if (four_bits) {
    spec.block = kDefaultBlock;
    if (has_block) {
      TREADLE_ASSIGN_OR_RETURN(spec.block, ParseBlock(text, block, 4096));
    }
    spec.name = Str(name, spec.double_quantized ? "-dq" : "");
    if (spec.block != kDefaultBlock) spec.name += Str(":", spec.block);
    return spec;
  }
  const bool rows = name == "int8" || name == "fp8";
  if (spec.double_quantized || (!rows && formats::FindBlockEncoder(name) == nullptr)) {
    return Unknown(text);
  }
  if (has_block) return InvalidArgument("'", text, "': ", name, " has no choice of blocks");
  spec.name = name;
  return spec;
}

}  // namespace treadle
