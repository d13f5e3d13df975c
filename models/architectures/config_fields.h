// Hyper-parameters as a table: a row for each member of ModelConfig and of what it holds. Readers
// and writers of both kinds of file, checks of ranges, `inspect --json` and the control plane walk
// it. A new hyper-parameter is a member, its row, and what uses it; a member without a row does not
// compile.
//
// Left to code, because files do not say it by one name or one value: the epsilon of norms, biases,
// tied heads and rotation by a share of the head (ConfigJson, GgufEpsilonKey), which layers have a
// window in families whose models may lack them, and the kind of rotary scaling, whose defaults
// follow from each other (hf_config.cc, gguf_checkpoint.cc).
//
// Thread safety: constants and pure functions.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "base/status.h"
#include "models/architectures/architecture.h"
#include "models/architectures/model_config.h"

namespace treadle {

template <typename Struct>
struct ConfigField {
  const char* name;  // the member's own, on the wire and in `inspect --json`
  MemberPointer<Struct> member;
  const char* text = nullptr;     // in errors; null: no number
  double least = 0, largest = 0;  // of a number, or of each in a list; inclusive
  // In config.json, unless the family says another name or none (ConfigJson::own); null: read by
  // code, or not there.
  const char* json = nullptr;
  const char* gguf = nullptr;  // behind the architecture's name, or "rope.scaling."; likewise
  bool (*families)(const Architecture&) = nullptr;  // whose models have it; null: all
  // The size or flag where a file leaves it out; null: what the member was before. A number that is
  // then less than `least` is missing, which is an error.
  int64_t (*otherwise)(const ModelConfig&) = nullptr;
  const char* older_json = nullptr;  // another name in config.json, which is written too

  bool IsOf(const Architecture& family) const { return families == nullptr || families(family); }
};

// The rows of ModelConfig, RopeScaling, LongRope or Yarn. One whose default follows from other
// members comes after theirs.
template <typename Struct>
std::span<const ConfigField<Struct>> FieldsOf();
const ConfigField<ModelConfig>& FieldOf(const MemberPointer<ModelConfig>& member);

// Calls visit(value) with the member of `of` that the row is about.
template <typename Struct, typename Visit>
decltype(auto) VisitMember(const ConfigField<std::remove_const_t<Struct>>& field, Struct& of,
                           const Visit& visit) {
  return std::visit([&](auto member) -> decltype(auto) { return visit(of.*member); }, field.member);
}

// Calls visit(name, value) for every member of `config`, and those of an object in it, if it is
// there, as "yarn.factor".
template <typename Config, typename Visit>
void VisitFields(Config& config, const Visit& visit) {
  const auto visit_all = [&]<typename Struct>(const std::string& prefix, Struct& of) {
    for (const auto& field : FieldsOf<std::remove_const_t<Struct>>()) {
      VisitMember(field, of, [&](auto& value) { visit(prefix + field.name, value); });
    }
  };
  visit_all("", config);
  if (config.rope_scaling) visit_all("rope_scaling.", *config.rope_scaling);
  if (config.long_rope) visit_all("long_rope.", *config.long_rope);
  if (config.yarn) visit_all("yarn.", *config.yarn);
}

// Sets a size or a flag to what `otherwise` says, if it is not null.
template <typename Struct>
void SetDefault(const ConfigField<Struct>& field, int64_t (*otherwise)(const ModelConfig&),
                Struct& out) {
  if constexpr (std::is_same_v<Struct, ModelConfig>) {
    if (otherwise == nullptr) return;
    VisitMember(field, out, [&]<typename Value>(Value& value) {
      if constexpr (std::is_integral_v<Value>) value = static_cast<Value>(otherwise(out));
    });
  }
}

// The number where a file leaves it out: `value`, which the member has, unless that is too small.
template <typename Struct, typename Number>
std::optional<Number> DefaultOf(const ConfigField<Struct>& field, Number value) {
  if (static_cast<double>(value) < field.least) return std::nullopt;
  return value;
}

// Reads a member from a file that gives an Integer, a Number or a Bool by its name, each with what
// it is where the name is missing (GgufFile). A number keeps what it was, unless that is less than
// `least`. Errors: the file's; a number that is less than `least`.
template <typename Struct, typename File>
absl::Status ReadField(const ConfigField<Struct>& field, const File& file, const std::string& name,
                       Struct& out) {
  return VisitMember(field, out, [&]<typename Value>(Value& value) -> absl::Status {
    if constexpr (std::is_same_v<Value, bool>) {
      TREADLE_ASSIGN_OR_RETURN(value, file.Bool(name, value));
    } else if constexpr (std::is_same_v<Value, int64_t> || std::is_same_v<Value, double>) {
      if constexpr (std::is_same_v<Value, double>) {
        TREADLE_ASSIGN_OR_RETURN(value, file.Number(name, DefaultOf(field, value)));
      } else {
        const std::optional<int64_t> otherwise = DefaultOf(field, value);
        if constexpr (requires { file.Integer(name, otherwise, int64_t{0}); }) {
          const int64_t least = field.least < 1 ? 0 : 1;
          TREADLE_ASSIGN_OR_RETURN(value, file.Integer(name, otherwise, least));
        } else {
          TREADLE_ASSIGN_OR_RETURN(value, file.Integer(name, otherwise));
        }
      }
      if (!DefaultOf(field, value)) {
        return InvalidArgument(file.path(), ": ", name, " is ", value, ", expected at least ",
                               field.least);
      }
    }
    return absl::OkStatus();
  });
}

// Every number is in its range, or 0 where the family has none. Errors: InvalidArgument with
// `where`, the field, its value and its range.
template <typename Struct>
absl::Status CheckRanges(const Struct& of, const Architecture& architecture,
                         std::string_view where);

// How this family's config.json says a field; a null name: not at all.
JsonField JsonFieldOf(const Architecture& architecture, const ConfigField<ModelConfig>& field);

}  // namespace treadle
