#include "models/checkpoints/inspect/inspect.h"

#include <algorithm>
#include <iomanip>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>

#include "base/status.h"
#include "base/utf8.h"
#include "kernels/kv_view.h"
#include "models/architectures/config_fields.h"
#include "models/checkpoints/model_path.h"

namespace treadle {
namespace {

std::string Size(uint64_t bytes) {
  const char* const units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes);
  size_t unit = 0;
  for (; value >= 1024 && unit + 1 < std::size(units); ++unit) value /= 1024;
  std::ostringstream out;
  out << std::fixed << std::setprecision(unit == 0 ? 0 : 1) << value << ' ' << units[unit];
  return out.str();
}

// K and V of `tokens` positions in all layers that see everything, or a window.
uint64_t KvBytes(const ModelConfig& config, bool local, int64_t tokens, DType dtype = DType::kF16) {
  if (local && config.HasStates()) return 0;  // these keep states
  const KvLayout page = {.kv_heads = config.KvHeads(local),
                         .head_dim = config.HeadDim(local),
                         .page_size = 1,
                         .dtype = dtype,
                         .latent_dim = config.latent_dim};
  return static_cast<uint64_t>(page.PageBytes() * config.KvLayers(0, config.layers, local) *
                               tokens);
}

int64_t StateLayers(const ModelConfig& config) {
  return config.HasStates() ? config.RingLayers(0, config.layers) : 0;
}
// The two pages of states that a sequence has in each layer that keeps one.
uint64_t StateBytes(const ModelConfig& config) {
  constexpr int64_t kPageSize = 32;  // by default
  const int64_t floats = StateOf(config, config.StateUnits()).Floats(kPageSize);
  return static_cast<uint64_t>(2 * StateLayers(config) * floats) * sizeof(float);
}

int64_t ContextOf(const ModelReport& report, const ServingPlan& plan) {
  return plan.context > 0 ? plan.context : report.config.context;
}

}  // namespace

ModelReport Inspect(const Checkpoint& checkpoint) {
  ModelReport report;
  report.name = checkpoint.model_name();
  report.path = checkpoint.path();
  report.kind = checkpoint.weight_files().empty()              ? "random weights"
                : checkpoint.kind() == Checkpoint::Kind::kGguf ? "GGUF"
                                                               : "Hugging Face";
  report.config = checkpoint.config();
  report.file_bytes = checkpoint.file_bytes();
  int64_t of_experts = 0;  // parameters
  std::map<std::string_view, ModelReport::FormatUse> formats;
  for (const StoredTensor& tensor : checkpoint.tensors()) {
    const int64_t parameters = tensor.Elements();
    report.parameters += parameters;
    const TensorName name =
        ParseTensorName(ArchitectureOf(report.config), checkpoint.kind(), tensor.name);
    if (!name.expert.empty()) of_experts += parameters;
    report.weight_bytes += tensor.bytes + tensor.constant_bytes;
    ModelReport::FormatUse& use = formats[tensor.format->name];
    use.format = std::string(tensor.format->name);
    ++use.tensors;
    use.parameters += parameters;
    use.bytes += tensor.bytes + tensor.constant_bytes;
  }
  report.parameters_per_token =
      report.parameters - of_experts +
      of_experts / std::max<int64_t>(report.config.experts, 1) * report.config.experts_per_token;
  for (auto& [name, use] : formats) report.formats.push_back(std::move(use));
  std::ranges::sort(report.formats, std::ranges::greater(), &ModelReport::FormatUse::bytes);
  if (const TokenizerSpec* spec = checkpoint.tokenizer()) {
    const bool bpe = spec->model == TokenizerSpec::Model::kByteLevelBpe;
    report.tokenizer = bpe ? "byte-level BPE" : "SentencePiece";
    report.pre_tokenizer = spec->pre_tokenizer;
    report.tokens = static_cast<int64_t>(spec->tokens.size());
    report.bos = spec->bos;
    report.eos = spec->eos;
  }
  report.end_ids = checkpoint.end_ids();
  report.left_aside = checkpoint.left_aside();
  report.chat_template = !checkpoint.chat_template().empty();
  report.kv_bytes_per_token =
      KvBytes(report.config, /*local=*/false, 1) + KvBytes(report.config, /*local=*/true, 1);
  return report;
}

ServingCost EstimateServingCost(const ModelReport& report, int64_t context, int64_t batch,
                                int64_t batch_tokens) {
  const ModelConfig& config = report.config;
  // The residual stream, its norm, q, k, v, the attention's output, and two feed-forward rows; of
  // experts as many as a row has, and what they are given.
  const int64_t row = 2 * config.hidden + 2 * config.heads * config.head_dim +
                      2 * config.kv_heads * config.head_dim +
                      2 * config.ffn_hidden * std::max<int64_t>(config.experts_per_token, 1) +
                      config.hidden * config.experts_per_token + config.experts +
                      2 * std::max(config.shared_hidden, config.dense_hidden) +
                      config.layers * config.layer_embedding;
  const auto floats = static_cast<uint64_t>(batch_tokens * row + batch * config.vocab);
  // Layers with a window keep it and what one iteration adds.
  const int64_t kept = std::min(context, config.window + batch_tokens);
  const uint64_t kv = KvBytes(config, /*local=*/false, context * batch) +
                      KvBytes(config, /*local=*/true, kept * batch) +
                      StateBytes(config) * static_cast<uint64_t>(batch);
  return {report.weight_bytes, kv, floats * sizeof(float)};
}

std::string ReportText(const ModelReport& report, const ServingPlan& plan) {
  const ModelConfig& config = report.config;
  std::ostringstream out;
  const auto line = [&out](const char* name, const std::string& value) {
    out << std::left << std::setw(22) << name << Printable(value) << '\n';
  };
  line("model", Cut(Printable(report.name), kMaxModelName));
  line("file", Str(report.path, " (", report.kind, ", ", Size(report.file_bytes), ")"));
  line("architecture", config.architecture);
  line("parameters", Str(report.parameters));
  line("layers", Str(config.layers));
  line("hidden size", Str(config.hidden));
  if (config.latent_dim > 0) {
    line("heads", Str(config.heads, " of ", config.QueryDim(), ", over latents of ",
                      config.latent_dim, " and ", config.rope_dim, " rotated features"));
  } else {
    line("heads", Str(config.heads, " of ", config.head_dim, ", ", config.kv_heads, " for K/V"));
  }
  line("feed-forward size", Str(config.ffn_hidden));
  if (config.experts > 0) {
    line("experts", Str(config.experts, ", of which ", config.experts_per_token,
                        " for each token: ", report.parameters_per_token, " parameters"));
  }
  line("vocabulary", Str(config.vocab, config.tied_head ? ", tied head" : ", own head"));
  line("context", Str(config.context));
  if (const int64_t layers = StateLayers(config); layers > 0) {
    const std::string each = config.state_key_heads > 0
                                 ? Str(config.state_heads, " heads of ", config.state_key_dim,
                                       " x ", config.state_value_dim)
                                 : Str("the last ", config.conv_taps - 1, " inputs of ",
                                       config.state_heads, " channels");
    line("states", Str(layers, " of ", config.layers, " layers keep one instead of K/V: ", each,
                       ", ", Size(StateBytes(config)), " a sequence"));
  } else if (const int64_t local = config.RingLayers(0, config.layers); local > 0) {
    line("sliding window", Str(config.window, " positions in ", local, " of ", config.layers,
                               " layers, which keep no K/V from before it"));
  }
  for (const ModelReport::FormatUse& use : report.formats) {
    std::ostringstream bits;
    bits << std::fixed << std::setprecision(2) << use.Bits();
    line("format", Str(use.format, ": ", use.tensors, " tensors, ", Size(use.bytes), ", ",
                       bits.str(), " bits per weight"));
  }
  std::string ends;
  for (const int32_t id : report.end_ids) ends += Str(ends.empty() ? "" : " ", id);
  if (report.tokenizer.empty()) {
    line("tokenizer", "none: token ids only");
    if (!ends.empty()) line("special tokens", Str("stops ", ends));
  } else {
    const std::string pattern =
        report.pre_tokenizer.empty() ? "" : Str(" (", report.pre_tokenizer, ")");
    line("tokenizer", Str(report.tokenizer, pattern, ", ", report.tokens, " tokens"));
    line("special tokens", Str("bos ", report.bos, ", eos ", report.eos, ", stops ", ends));
  }
  line("chat template", report.chat_template ? "yes" : "no");
  std::string aside;
  for (const std::string& part : report.left_aside) aside += Str(aside.empty() ? "" : ", ", part);
  if (!aside.empty()) line("left aside", Str(aside, ": text alone is served"));
  const uint64_t int8 = KvBytes(config, /*local=*/false, 1, DType::kI8) +
                        KvBytes(config, /*local=*/true, 1, DType::kI8);
  line("K/V per token", Str(Size(report.kv_bytes_per_token), " (f16), ", Size(int8), " (int8)"));
  const int64_t context = ContextOf(report, plan);
  const ServingCost cost = EstimateServingCost(report, context, plan.batch, plan.batch_tokens);
  line("serving",
       Str(plan.batch, " requests of ", context, " tokens: weights ", Size(cost.weights), " + K/V ",
           Size(cost.kv), " + activations ", Size(cost.activations), " = ", Size(cost.total())));
  return out.str();
}

std::string ReportJson(const ModelReport& report, const ServingPlan& plan) {
  using Json = nlohmann::ordered_json;
  const ModelConfig& config = report.config;
  const int64_t context = ContextOf(report, plan);
  const ServingCost cost = EstimateServingCost(report, context, plan.batch, plan.batch_tokens);
  Json json = {{"name", report.name},
               {"path", report.path},
               {"kind", report.kind},
               {"file_bytes", report.file_bytes},
               {"parameters", report.parameters},
               {"parameters_per_token", report.parameters_per_token},
               {"window_layers", config.RingLayers(0, config.layers) - StateLayers(config)},
               {"state_bytes", StateBytes(config)},
               {"weight_bytes", report.weight_bytes},
               {"kv_bytes_per_token", report.kv_bytes_per_token},
               {"chat_template", report.chat_template},
               {"left_aside", report.left_aside}};
  VisitFields(config, [&](const std::string& name, const auto& value) { json[name] = value; });
  json["formats"] = Json::array();
  for (const ModelReport::FormatUse& use : report.formats) {
    json["formats"].push_back({{"format", use.format},
                               {"tensors", use.tensors},
                               {"parameters", use.parameters},
                               {"bytes", use.bytes},
                               {"bits_per_weight", use.Bits()}});
  }
  json["tokenizer"] = nullptr;
  if (!report.tokenizer.empty()) {
    json["tokenizer"] = {{"model", report.tokenizer}, {"pre_tokenizer", report.pre_tokenizer},
                         {"tokens", report.tokens},   {"bos", report.bos},
                         {"eos", report.eos},         {"end_ids", report.end_ids}};
  }
  json["serving"] = {
      {"context", context},      {"batch", plan.batch}, {"batch_tokens", plan.batch_tokens},
      {"weights", cost.weights}, {"kv", cost.kv},       {"activations", cost.activations},
      {"total", cost.total()}};
  return json.dump(2, ' ', false, Json::error_handler_t::replace);
}

}  // namespace treadle
