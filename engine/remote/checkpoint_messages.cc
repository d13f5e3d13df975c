#include "engine/remote/checkpoint_messages.h"

#include <map>
#include <span>
#include <string_view>
#include <type_traits>

#include "base/quoted.h"
#include "base/status.h"
#include "engine/remote/control.pb.h"
#include "models/architectures/config_fields.h"

namespace treadle {
namespace {

void Put(int64_t value, control::Hyperparameter& out) { out.set_integer(value); }
void Put(double value, control::Hyperparameter& out) { out.set_real(value); }
void Put(bool value, control::Hyperparameter& out) { out.set_flag(value); }
void Put(const std::string& value, control::Hyperparameter& out) { out.set_text(value); }
void Put(const std::vector<double>& values, control::Hyperparameter& out) {
  out.mutable_reals()->mutable_values()->Add(values.begin(), values.end());
}

// False: it is of another type.
bool Take(const control::Hyperparameter& in, int64_t& value) {
  value = in.integer();
  return in.has_integer();
}
template <typename Real>
requires std::is_floating_point_v<Real>
bool Take(const control::Hyperparameter& in, Real& value) {
  value = static_cast<Real>(in.real());
  return in.has_real();
}
bool Take(const control::Hyperparameter& in, bool& value) {
  value = in.flag();
  return in.has_flag();
}
bool Take(const control::Hyperparameter& in, std::string& value) {
  value = in.text();
  return in.has_text();
}
bool Take(const control::Hyperparameter& in, std::vector<double>& values) {
  values.assign(in.reals().values().begin(), in.reals().values().end());
  return in.has_reals();
}

}  // namespace

void EncodeConfig(const ModelConfig& config, control::ModelConfiguration& message) {
  VisitFields(config, [&](const std::string& name, const auto& value) {
    control::Hyperparameter& field = *message.add_fields();
    field.set_name(name);
    Put(value, field);
  });
}

absl::Status DecodeConfig(const control::ModelConfiguration& message, ModelConfig& config) {
  constexpr const char* kWhere = "the master's model configuration";
  std::map<std::string_view, const control::Hyperparameter*> fields;
  for (const control::Hyperparameter& field : message.fields()) {
    if (fields.emplace(field.name(), &field).second) continue;
    return InvalidArgument(kWhere, " has ", Quoted(field.name()), " twice");
  }
  // An object is there if anything of it is; then all of it must be.
  const auto has = [&](std::string_view prefix) {
    const auto found = fields.lower_bound(prefix);
    return found != fields.end() && found->first.starts_with(prefix);
  };
  config = {};
  if (has("rope_scaling.")) config.rope_scaling.emplace();
  if (has("long_rope.")) config.long_rope.emplace();
  if (has("yarn.")) config.yarn.emplace();
  absl::Status status;
  VisitFields(config, [&](const std::string& name, auto& value) {
    const auto found = fields.find(name);
    if (found == fields.end()) {
      status.Update(InvalidArgument(kWhere, " lacks ", name));
      return;
    }
    if (!Take(*found->second, value)) {
      status.Update(InvalidArgument(kWhere, " has ", name, " of another type"));
    }
    fields.erase(found);
  });
  if (!fields.empty()) {
    status.Update(InvalidArgument(kWhere, " has ", Quoted(fields.begin()->first),
                                  ", which this worker does not know"));
  }
  return status;
}

absl::StatusOr<MatrixConstants> ParseConstants(const std::string& bytes) {
  control::Constants message;
  if (!message.ParseFromString(bytes)) return InvalidArgument("malformed constants");
  MatrixConstants constants;
  constants.scales.assign(message.scales().begin(), message.scales().end());
  constants.zeros.assign(message.zeros().begin(), message.zeros().end());
  constants.scale_block = message.scale_block();
  constants.codebook.assign(message.codebook().begin(), message.codebook().end());
  const auto codes = std::as_bytes(std::span(message.codes()));
  constants.codes.assign(codes.begin(), codes.end());
  constants.outlier_threshold = message.outlier_threshold();
  constants.outlier_rule = message.per_call() ? OutlierRule::kPerCall : OutlierRule::kPerRow;
  constants.input_order.assign(message.input_order().begin(), message.input_order().end());
  return constants;
}

std::string SerializeConstants(const MatrixConstants& constants) {
  control::Constants message;
  message.mutable_scales()->Add(constants.scales.begin(), constants.scales.end());
  message.mutable_zeros()->Add(constants.zeros.begin(), constants.zeros.end());
  message.set_scale_block(constants.scale_block);
  message.mutable_codebook()->Add(constants.codebook.begin(), constants.codebook.end());
  message.set_codes(constants.codes.data(), constants.codes.size());
  message.set_outlier_threshold(constants.outlier_threshold);
  message.set_per_call(constants.outlier_rule == OutlierRule::kPerCall);
  message.mutable_input_order()->Add(constants.input_order.begin(), constants.input_order.end());
  return message.SerializeAsString();
}

}  // namespace treadle
