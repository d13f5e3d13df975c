#include "engine/remote/model_configuration.h"

#include "base/status.h"
#include "engine/remote/control.pb.h"

namespace treadle {
namespace {

constexpr int64_t ModelConfig::*kSizes[] = {
    &ModelConfig::layers,   &ModelConfig::hidden,   &ModelConfig::heads,
    &ModelConfig::kv_heads, &ModelConfig::head_dim, &ModelConfig::ffn_hidden,
    &ModelConfig::vocab,    &ModelConfig::context,  &ModelConfig::rope_dim};
constexpr double ModelConfig::*kReals[] = {&ModelConfig::rope_base,
                                           &ModelConfig::rope_linear_factor};
constexpr double RopeScaling::*kScaling[] = {&RopeScaling::factor, &RopeScaling::low_freq_factor,
                                             &RopeScaling::high_freq_factor};

}  // namespace

void EncodeConfig(const ModelConfig& config, control::ModelConfiguration& message) {
  message.set_architecture(config.architecture);
  message.set_tied_head(config.tied_head);
  message.set_qkv_bias(config.qkv_bias);
  message.set_output_bias(config.output_bias);
  message.set_llama3_scaling(config.rope_scaling.has_value());
  const RopeScaling scaling = config.rope_scaling.value_or(RopeScaling());
  for (const auto size : kSizes) message.add_sizes(config.*size);
  message.add_sizes(scaling.original_context);
  for (const auto real : kReals) message.add_reals(config.*real);
  for (const auto real : kScaling) message.add_reals(scaling.*real);
  message.add_reals(config.norm_epsilon);
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
  int next = 0;
  for (const auto size : kSizes) config.*size = message.sizes(next++);
  RopeScaling scaling;
  scaling.original_context = message.sizes(next);
  next = 0;
  for (const auto real : kReals) config.*real = message.reals(next++);
  for (const auto real : kScaling) scaling.*real = message.reals(next++);
  config.norm_epsilon = static_cast<float>(message.reals(next));
  if (message.llama3_scaling()) config.rope_scaling = scaling;
  return absl::OkStatus();
}

}  // namespace treadle
