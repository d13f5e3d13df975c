#include "training/trained_adapter.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <set>

#include "absl/strings/str_split.h"
#include "base/output_file.h"
#include "base/status.h"
#include "kernels/sampling.h"
#include "models/architectures/llama.h"
#include "models/checkpoints/write/hf_matrix_writer.h"

namespace treadle {
namespace {

struct Target {
  std::string_view name;
  Part part;
  Linear LayerWeights::*linear;
};
constexpr Target kTargets[] = {
    {"q", Part::kQ, &LayerWeights::q},          {"k", Part::kK, &LayerWeights::k},
    {"v", Part::kV, &LayerWeights::v},          {"o", Part::kAttentionOutput, &LayerWeights::out},
    {"gate", Part::kGate, &LayerWeights::gate}, {"up", Part::kUp, &LayerWeights::up},
    {"down", Part::kDown, &LayerWeights::down}};

absl::StatusOr<std::set<Part>> ParseTargets(const std::string& targets) {
  std::set<Part> parts;
  for (const std::string& word : std::vector<std::string>(absl::StrSplit(targets, ','))) {
    const auto* const found = std::ranges::find(kTargets, word, &Target::name);
    if (found == std::end(kTargets)) {
      return InvalidArgument("--target-modules: '", word,
                             "' is none, expected some of q,k,v,o,gate,up,down");
    }
    parts.insert(found->part);
  }
  return parts;
}

}  // namespace

absl::Status CheckTrainable(const ModelConfig& config, const std::string& name,
                            const LoraOptions& options) {
  const Architecture& architecture = ArchitectureOf(config);
  const auto refuse = [&](const char* what) {
    return Unimplemented(name, ": training of ", architecture.name, " models, which have ", what,
                         "; expected a dense one of Llama's kind");
  };
  if (architecture.layer != LlamaLayer) return refuse("a layer without gradients here");
  if (config.experts > 0) return refuse("experts");
  if (config.latent_dim > 0) return refuse("latent attention");
  if (config.attention_every > 0) return refuse("layers that keep a state");
  if (architecture.xielu) return refuse("an activation without gradients here");
  if (config.logits_cap > 0) return refuse("bounded logits");
  std::set<Part> missing;
  if (options.rank > 0) {
    if (!architecture.hugging_face_gate_up.empty()) return refuse("fused matrices in folders");
    TREADLE_ASSIGN_OR_RETURN(missing, ParseTargets(options.targets));
  }
  for (const TensorRow* row : TensorsOf(config)) {
    if (row->part == Part::kSinks) return refuse("attention sinks");
    missing.erase(row->part);
  }
  return missing.empty() ? absl::OkStatus() : refuse("fused matrices");
}

std::unique_ptr<TrainedAdapter> TrainedAdapter::Create(const ModelConfig& config, LayerRange layers,
                                                       const LoraOptions& options, uint64_t seed) {
  std::unique_ptr<TrainedAdapter> adapter(new TrainedAdapter());
  adapter->options_ = options;
  if (options.rank == 0) return adapter;
  const auto parts = ParseTargets(options.targets);
  TREADLE_CHECK(parts.ok());
  size_t size = 0;
  for (int64_t layer = layers.begin; layer < layers.end; ++layer) {
    const ModelConfig own = config.OfLayer(layer);
    for (const TensorRow* row : TensorsOf(config)) {
      if (!parts->contains(row->part)) continue;
      const int64_t n = SizeOf(row->rows, own), k = SizeOf(row->columns, own);
      const int64_t rank = options.rank;
      adapter->modules_.push_back(
          {.name = SpellTensorName(ArchitectureOf(config), Container::kHuggingFace,
                                   {.row = row, .layer = std::to_string(layer)}),
           .layer = layer,
           .linear = std::ranges::find(kTargets, row->part, &Target::part)->linear,
           .begin = size,
           .update = {.n = n,
                      .k = k,
                      .scale = static_cast<float>(options.alpha / static_cast<double>(rank)),
                      .factors = {.rank = rank}},
           .row_order = FileRowOrder(*row, config, Container::kHuggingFace),
           .a_transposed = std::vector<float>(static_cast<size_t>(LowRankElements(k, rank))),
           .b_transposed = std::vector<float>(static_cast<size_t>(LowRankElements(rank, n))),
           .b = std::vector<float>(static_cast<size_t>(n * rank))});
      size += static_cast<size_t>(rank * (n + k));
    }
  }
  adapter->values_.resize(size);
  adapter->gradients_.resize(size);
  for (size_t i = 0; i < adapter->modules_.size(); ++i) {
    Module& module = adapter->modules_[i];
    LowRankUpdate& update = module.update;
    float* const a = adapter->values_.data() + module.begin;
    update.a = a;
    update.b = module.b.data();
    update.factors.a = module.a_transposed.data();
    update.factors.b = module.b_transposed.data();
    const int64_t count = options.rank * update.k;
    update.a_gradient = adapter->gradients_.data() + module.begin;
    update.b_gradient = update.a_gradient + count;
    const double bound = 1 / std::sqrt(static_cast<double>(update.k));
    for (int64_t at = 0; at < count; ++at) {
      const double uniform = CounterUniform(seed, static_cast<uint32_t>(i), at);
      a[at] = static_cast<float>((2 * uniform - 1) * bound);
    }
  }
  adapter->Refresh();
  return adapter;
}

std::vector<size_t> TrainedAdapter::Tensors() const {
  if (soft_prompt_) return {values_.size()};
  std::vector<size_t> sizes;
  for (const Module& module : modules_) {
    for (const int64_t extent : {module.update.k, module.update.n}) {
      sizes.push_back(static_cast<size_t>(options_.rank * extent));
    }
  }
  return sizes;
}

void TrainedAdapter::Attach(const Decoder& model, LayerRange layers, Tape& tape) const {
  for (const Module& module : modules_) {
    if (module.layer < layers.begin || module.layer >= layers.end) continue;
    const auto index = static_cast<size_t>(module.layer - model.layers().begin);
    const PackedMatrix& weight = (model.weights(index).*module.linear).weight();
    TREADLE_CHECK(weight.n() == module.update.n && weight.k() == module.update.k);
    tape.Attach(&weight, &module.update);
  }
}

std::span<float> TrainedAdapter::Part(std::span<float> numbers, LayerRange layers) const {
  const auto first_of = [&](int64_t layer) {
    const auto found = std::ranges::lower_bound(modules_, layer, {}, &Module::layer);
    return found == modules_.end() ? values_.size() : found->begin;
  };
  const size_t begin = first_of(layers.begin);
  return numbers.subspan(begin, first_of(layers.end) - begin);
}

void TrainedAdapter::Refresh() {
  for (size_t i = 0; soft_prompt_ && i < values_.size(); ++i) {
    soft_prompt_->soft_prompt().Row<float>(0)[i] = values_[i] * soft_prompt_scale_;
  }
  for (Module& module : modules_) {
    const LowRankUpdate& u = module.update;
    const int64_t rank = u.factors.rank;
    const float* const b_transposed = u.a + rank * u.k;
    for (int64_t r = 0; r < rank; ++r) {
      for (int64_t k = 0; k < u.k; ++k) {
        module.a_transposed[LowRankAt(u.k, k, r)] = u.a[r * u.k + k];
      }
      for (int64_t n = 0; n < u.n; ++n) {
        module.b_transposed[LowRankAt(rank, r, n)] = module.b[n * rank + r] =
            u.scale * b_transposed[r * u.n + n];
      }
    }
  }
}

absl::Status TrainedAdapter::WriteConfig(const std::string& path, const std::string& base) const {
  std::set<std::string> names;  // "q_proj"
  for (const Module& module : modules_) {
    names.insert(module.name.substr(module.name.rfind('.') + 1));
  }
  nlohmann::ordered_json config = {{"peft_type", "LORA"},
                                   {"task_type", "CAUSAL_LM"},
                                   {"base_model_name_or_path", base},
                                   {"r", options_.rank},
                                   {"lora_alpha", options_.alpha},
                                   {"lora_dropout", 0.0},
                                   {"target_modules", names},
                                   {"bias", "none"},
                                   {"fan_in_fan_out", false},
                                   {"use_rslora", false},
                                   {"use_dora", false},
                                   {"init_lora_weights", true},
                                   {"modules_to_save", nullptr},
                                   {"inference_mode", true}};
  if (soft_prompt_) {
    // PEFT makes the prompt that this names before it reads the file's, whatever it began as here.
    config = {{"peft_type", "PROMPT_TUNING"},
              {"task_type", "CAUSAL_LM"},
              {"base_model_name_or_path", base},
              {"num_virtual_tokens", soft_prompt_->virtual_tokens()},
              {"token_dim", soft_prompt_->soft_prompt().cols},
              {"num_transformer_submodules", 1},
              {"prompt_tuning_init", "RANDOM"},
              {"inference_mode", true}};
  }
  TREADLE_ASSIGN_OR_RETURN(const auto file, OutputFile::Create(path));
  TREADLE_RETURN_IF_ERROR(file->Append(
      config.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n"));
  return file->Finish();
}

absl::Status TrainedAdapter::Write(const std::string& folder, const std::string& base) const {
  if (soft_prompt_) return WriteSoftPrompt(folder, base);
  size_t room = 4096;
  const auto name = [](const Module& module, const char* factor) {
    return Str("base_model.model.", module.name, ".lora_", factor, ".weight");
  };
  for (const Module& module : modules_) {
    room += 2 * SafetensorsWriter::HeaderRoom(name(module, "A"));
  }
  TREADLE_ASSIGN_OR_RETURN(const auto writer,
                           SafetensorsWriter::Create(folder + "/adapter_model.safetensors", room));
  for (const Module& module : modules_) {
    const LowRankUpdate& u = module.update;
    const int64_t rank = u.factors.rank;
    const std::span a(u.a, static_cast<size_t>(rank * u.k));
    std::vector<float> b(module.b.size());
    for (int64_t i = 0; i < u.n; ++i) {
      const int64_t to = module.row_order.empty() ? i : module.row_order[i];
      for (int64_t r = 0; r < rank; ++r) b[to * rank + r] = u.a[rank * u.k + r * u.n + i];
    }
    TREADLE_RETURN_IF_ERROR(writer->Add(name(module, "A"), "F32", {rank, u.k}, std::as_bytes(a)));
    TREADLE_RETURN_IF_ERROR(
        writer->Add(name(module, "B"), "F32", {u.n, rank}, std::as_bytes(std::span(b))));
  }
  TREADLE_RETURN_IF_ERROR(writer->Finish({{"format", "pt"}}));
  return WriteConfig(folder + "/adapter_config.json", base);
}

}  // namespace treadle
