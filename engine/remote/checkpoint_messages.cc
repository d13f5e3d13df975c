#include "engine/remote/checkpoint_messages.h"

#include <span>

#include "base/status.h"
#include "engine/remote/control.pb.h"

namespace treadle {
namespace {

// A ModelConfig on the wire, field by field.
constexpr int64_t ModelConfig::*kSizes[] = {
    &ModelConfig::layers,       &ModelConfig::hidden,
    &ModelConfig::heads,        &ModelConfig::kv_heads,
    &ModelConfig::head_dim,     &ModelConfig::ffn_hidden,
    &ModelConfig::vocab,        &ModelConfig::context,
    &ModelConfig::rope_dim,     &ModelConfig::layer_norms,
    &ModelConfig::window,       &ModelConfig::global_every,
    &ModelConfig::query_scalar, &ModelConfig::global_layers,
    &ModelConfig::experts,      &ModelConfig::experts_per_token};
constexpr double ModelConfig::*kReals[] = {
    &ModelConfig::rope_base, &ModelConfig::rope_linear_factor, &ModelConfig::local_rope_base};
constexpr double RopeScaling::*kScaling[] = {&RopeScaling::factor, &RopeScaling::low_freq_factor,
                                             &RopeScaling::high_freq_factor};

}  // namespace

void EncodeConfig(const ModelConfig& config, control::ModelConfiguration& message) {
  message.set_architecture(config.architecture);
  message.set_tied_head(config.tied_head);
  message.set_qkv_bias(config.qkv_bias);
  message.set_output_bias(config.output_bias);
  message.set_parallel_residual(config.parallel_residual);
  message.set_normalized_experts(config.normalized_experts);
  message.set_llama3_scaling(config.rope_scaling.has_value());
  const RopeScaling scaling = config.rope_scaling.value_or(RopeScaling());
  for (const auto size : kSizes) message.add_sizes(config.*size);
  message.add_sizes(scaling.original_context);
  for (const auto real : kReals) message.add_reals(config.*real);
  for (const auto real : kScaling) message.add_reals(scaling.*real);
  message.add_reals(config.norm_epsilon);
  if (const auto& rope = config.long_rope) {
    control::LongRope& out = *message.mutable_long_rope();
    out.mutable_short_factors()->Add(rope->short_factors.begin(), rope->short_factors.end());
    out.mutable_long_factors()->Add(rope->long_factors.begin(), rope->long_factors.end());
    out.set_original_context(rope->original_context);
    out.set_attention_factor(rope->attention_factor);
  }
  if (const auto& yarn = config.yarn) {
    control::Yarn& out = *message.mutable_yarn();
    out.set_factor(yarn->factor);
    out.set_beta_fast(yarn->beta_fast);
    out.set_beta_slow(yarn->beta_slow);
    out.set_original_context(yarn->original_context);
    out.set_truncate(yarn->truncate);
    out.set_attention_factor(yarn->attention_factor);
  }
}

absl::Status DecodeConfig(const control::ModelConfiguration& message, ModelConfig& config) {
  constexpr int kNumSizes = std::size(kSizes) + 1;
  constexpr int kNumReals = std::size(kReals) + std::size(kScaling) + 1;
  if (message.sizes_size() != kNumSizes || message.reals_size() != kNumReals) {
    return InvalidArgument("model configuration has ", message.sizes_size(), " sizes and ",
                           message.reals_size(), " reals, expected ", kNumSizes, " and ",
                           kNumReals);
  }
  config.architecture = message.architecture();
  config.tied_head = message.tied_head();
  config.qkv_bias = message.qkv_bias();
  config.output_bias = message.output_bias();
  config.parallel_residual = message.parallel_residual();
  config.normalized_experts = message.normalized_experts();
  int next = 0;
  for (const auto size : kSizes) config.*size = message.sizes(next++);
  RopeScaling scaling;
  scaling.original_context = message.sizes(next);
  next = 0;
  for (const auto real : kReals) config.*real = message.reals(next++);
  for (const auto real : kScaling) scaling.*real = message.reals(next++);
  config.norm_epsilon = static_cast<float>(message.reals(next));
  if (message.llama3_scaling()) config.rope_scaling = scaling;
  if (message.has_long_rope()) {
    const control::LongRope& rope = message.long_rope();
    config.long_rope = {{rope.short_factors().begin(), rope.short_factors().end()},
                        {rope.long_factors().begin(), rope.long_factors().end()},
                        rope.original_context(),
                        rope.attention_factor()};
  }
  if (message.has_yarn()) {
    const control::Yarn& yarn = message.yarn();
    config.yarn = {yarn.factor(),           yarn.beta_fast(), yarn.beta_slow(),
                   yarn.original_context(), yarn.truncate(),  yarn.attention_factor()};
  }
  return absl::OkStatus();
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
