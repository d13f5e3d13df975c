// The fields of a GGUF file, beside the tensors' data, of a model that comes from a Hugging Face
// folder, as llama.cpp expects it.
#include <algorithm>
#include <unordered_map>

#include "base/quoted.h"
#include "base/status.h"
#include "models/architectures/config_fields.h"
#include "models/architectures/rotary_embedding.h"
#include "models/checkpoints/write/gguf_file_writer.h"
#include "models/checkpoints/write/gguf_states.h"
#include "models/text/pre_tokenizer.h"

namespace treadle {
namespace {

// A list says these of each layer, where layers differ.
bool ListedByLayer(const Architecture& architecture, std::string_view member) {
  if (member == "kv_heads" && ListsKvHeads(architecture)) return true;
  if (member == "ffn_hidden" && architecture.one_block) return true;
  return architecture.local_heads && (member == "kv_heads" || member == "ffn_hidden");
}

void DescribeLayers(const ModelConfig& config, const std::string& prefix,
                    GgufMetadataWriter& metadata) {
  std::vector<int32_t> kv_heads, inner;
  const auto local = std::make_unique<bool[]>(static_cast<size_t>(config.layers));
  for (int64_t i = 0; i < config.layers; ++i) {
    const ModelConfig own = config.OfLayer(i);
    kv_heads.push_back(static_cast<int32_t>(own.kv_heads));
    inner.push_back(static_cast<int32_t>(config.experts > 0 ? own.shared_hidden : own.ffn_hidden));
    local[static_cast<size_t>(i)] = config.Local(i);
  }
  metadata.Add(prefix + "attention.head_count_kv", kv_heads);
  metadata.Add(prefix + "feed_forward_length", inner);
  metadata.Add(prefix + "attention.sliding_window_pattern",
               std::span<const bool>(local.get(), static_cast<size_t>(config.layers)));
  const auto head_dim = static_cast<uint32_t>(config.HeadDim(/*local=*/true));
  metadata.Add(prefix + "attention.value_length_swa", head_dim);
  metadata.Add(prefix + "rope.dimension_count_swa", head_dim);
}

// The rows of `of` that have keys, behind `prefix`.
template <typename Struct>
void DescribeFields(const Struct& of, const Architecture& architecture, const std::string& prefix,
                    GgufMetadataWriter& metadata) {
  for (const ConfigField<Struct>& field : FieldsOf<Struct>()) {
    if (field.gguf == nullptr || !field.IsOf(architecture)) continue;
    if (ListedByLayer(architecture, field.name)) continue;
    if (architecture.dense_first && std::string_view(field.name) == "ffn_hidden") continue;
    VisitMember(field, of, [&]<typename Value>(const Value& value) {
      if constexpr (std::is_same_v<Value, bool>) metadata.Add(prefix + field.gguf, value);
      if constexpr (std::is_same_v<Value, int64_t>) {
        metadata.Add(prefix + field.gguf, static_cast<uint32_t>(value));
      }
      if constexpr (std::is_same_v<Value, double>) {
        metadata.Add(prefix + field.gguf, static_cast<float>(value));
      }
    });
  }
}

void DescribeRope(const ModelConfig& config, const Architecture& architecture,
                  const std::string& prefix, GgufMetadataWriter& metadata) {
  const std::string scaling = prefix + "rope.scaling.";
  const int64_t value_dim = architecture.latent ? config.latent_dim : config.head_dim;
  metadata.Add(prefix + "attention.value_length", static_cast<uint32_t>(value_dim));
  if (architecture.latent) {
    metadata.Add(prefix + "attention.key_length_mla", static_cast<uint32_t>(config.QueryDim()));
    metadata.Add(prefix + "attention.value_length_mla", static_cast<uint32_t>(config.value_dim));
  }
  if (config.long_rope) {
    metadata.Add(scaling + "type", "longrope");
    DescribeFields(*config.long_rope, architecture, scaling, metadata);
  }
  if (const auto& yarn = config.yarn) {
    metadata.Add(scaling + "type", "yarn");
    DescribeFields(*yarn, architecture, scaling, metadata);
    if (yarn->query_beta > 0) {
      metadata.Add(prefix + kQueryBeta, static_cast<float>(yarn->query_beta));
    }
    const bool scores = yarn->score_scale > 0;
    const double usual = Yarn::AttentionFactor(yarn->factor);
    if (scores) {
      metadata.Add(scaling + kYarnDivisor, static_cast<float>(kGgufScoreScale * yarn->score_scale));
      metadata.Add(scaling + "yarn_attn_factor", static_cast<float>(yarn->attention_factor));
    } else if (yarn->attention_factor == 1 && usual != 1) {
      metadata.Add(scaling + kYarnDivisor, 1.0f);
    } else {
      metadata.Add(scaling + "yarn_attn_factor",
                   static_cast<float>(yarn->attention_factor / usual));
    }
  }
  if (config.rope_linear_factor != 1) {
    metadata.Add(scaling + "type", "linear");
    metadata.Add(scaling + "factor", static_cast<float>(config.rope_linear_factor));
  }
}

// Every id has a text of its own, even where the folder names none.
std::vector<std::string> TokenTexts(const TokenizerSpec& spec, int64_t vocab) {
  std::vector<std::string> texts;
  for (int64_t id = 0; id < vocab; ++id) {
    const bool known = id < std::ssize(spec.tokens) && !spec.tokens[id].text.empty();
    texts.push_back(known ? spec.tokens[id].text : Str("[PAD", id, "]"));
  }
  return texts;
}

std::vector<int32_t> TokenTypes(const TokenizerSpec& spec, int64_t vocab) {
  std::vector<int32_t> types(static_cast<size_t>(vocab),
                             static_cast<int32_t>(TokenKind::kUnused) + 1);
  for (size_t id = 0; id < spec.tokens.size(); ++id) {
    if (!spec.tokens[id].text.empty()) types[id] = static_cast<int32_t>(spec.tokens[id].kind) + 1;
  }
  return types;
}

// The scores of SentencePiece tokens that merges in this order say: the earlier a token is made,
// the larger. Tokens that no merge makes have the least.
std::vector<float> ScoresOfMerges(const TokenizerSpec& spec) {
  std::unordered_map<std::string, float> rank;  // by what is made
  for (const auto& [left, right] : spec.merges) {
    rank.emplace(left + right, static_cast<float>(rank.size()));
  }
  std::vector<float> scores;
  for (const TokenizerSpec::Token& token : spec.tokens) {
    const auto found = rank.find(token.text);
    const auto least = static_cast<float>(rank.size());
    scores.push_back(-(found == rank.end() ? least : found->second));
  }
  return scores;
}

absl::Status DescribeMerges(const TokenizerSpec& spec, GgufMetadataWriter& metadata) {
  TREADLE_ASSIGN_OR_RETURN(const PreTokenizerRow* row, FindPreTokenizer(spec.pre_tokenizer));
  if (row->ignore_merges != spec.ignore_merges) {
    return Unimplemented("the tokenizer has ignore_merges ", spec.ignore_merges ? "true" : "false",
                         ", and GGUF's pre-tokenizer ", Quoted(row->name), " the other");
  }
  std::vector<std::string> merges;
  for (const auto& [left, right] : spec.merges) {
    if (left.find(' ') != std::string::npos || right.find(' ') != std::string::npos) {
      return Unimplemented("the tokenizer merges ", Quoted(left), " and ", Quoted(right),
                           ", which GGUF cannot say: expected pieces without spaces");
    }
    merges.push_back(Str(left, " ", right));
  }
  metadata.Add("tokenizer.ggml.merges", merges);
  metadata.Add("tokenizer.ggml.pre", spec.pre_tokenizer);
  return absl::OkStatus();
}

void DescribeIds(const TokenizerSpec& spec, GgufMetadataWriter& metadata,
                 std::vector<std::string>& notices) {
  const auto put = [&](const char* key, int32_t id) {
    if (id >= 0) metadata.Add(key, static_cast<uint32_t>(id));
  };
  put("tokenizer.ggml.bos_token_id", spec.bos);
  put("tokenizer.ggml.eos_token_id", spec.eos);
  put("tokenizer.ggml.unknown_token_id", spec.unknown);
  put("tokenizer.ggml.padding_token_id", spec.padding);
  std::vector<int32_t> others;
  std::ranges::copy_if(spec.end_ids, std::back_inserter(others),
                       [&](int32_t id) { return id != spec.eos; });
  if (!others.empty()) put("tokenizer.ggml.eot_token_id", others[0]);
  for (size_t i = 1; i < others.size(); ++i) {
    notices.push_back(Str("generation ended at token ", others[i], " (",
                          Quoted(spec.tokens[others[i]].text),
                          ") too; a .gguf file names two such tokens"));
  }
}

}  // namespace

absl::Status DescribeModel(const Checkpoint& checkpoint, GgufMetadataWriter& metadata,
                           std::vector<std::string>& notices) {
  ModelConfig config = checkpoint.config();
  const Architecture& architecture = ArchitectureOf(config);
  metadata.Add("general.architecture", std::string(architecture.GgufName()));
  metadata.Add("general.name", checkpoint.model_name());
  const auto sampling = checkpoint.Sampling();
  if (!sampling.ok()) notices.emplace_back(sampling.status().message());
  for (const auto& [name, key] : kSamplingNames) {
    if (!sampling.ok() || !sampling->values.contains(name)) continue;
    const double value = sampling->values.at(name);
    if (std::string_view(name) != "top_k") {
      metadata.Add(key, static_cast<float>(value));
    } else if (value > 0) {
      metadata.Add(key, static_cast<uint32_t>(std::min(value, 2147483647.0)));
    }
  }
  const std::string prefix = Str(architecture.GgufName(), ".");
  if (config.window > 0 && config.window < config.context && config.global_layers > 0) {
    config.context = config.window;
    notices.push_back(Str("the context is cut to the sliding window of ", config.context,
                          "; a .gguf file cannot say which layers have one"));
  }
  DescribeFields(config, architecture, prefix, metadata);
  if (architecture.experts) {
    metadata.Add(prefix + "expert_feed_forward_length", static_cast<uint32_t>(config.ffn_hidden));
    if (architecture.dense_first) {
      metadata.Add(prefix + "feed_forward_length", static_cast<uint32_t>(config.dense_hidden));
    }
    if (architecture.sigmoid_router) {
      metadata.Add(prefix + "expert_gating_func", uint32_t{2});
    } else if (architecture.grouped_experts) {
      metadata.Add(prefix + "expert_gating_func", uint32_t{1});
    }
    if (architecture.shared_expert && !architecture.grouped_experts) {
      metadata.Add(prefix + "expert_shared_count", uint32_t{1});
    }
    if (config.normalized_experts == architecture.unnormalized_experts) {
      notices.push_back(
          Str("Treadle reads this file; llama.cpp takes the weights of a row's experts to be a "
              "softmax over ",
              architecture.unnormalized_experts ? "all of them" : "them alone"));
    }
  }
  metadata.Add(prefix + GgufEpsilonKey(architecture), config.norm_epsilon);
  if (!architecture.gguf_elsewhere) {
    notices.push_back(Str("Treadle reads this file; llama.cpp has no ", architecture.name));
  }
  if (config.HasStates()) DescribeStates(config, architecture, prefix, metadata);
  if (architecture.rotary) DescribeRope(config, architecture, prefix, metadata);
  if (config.window > 0 && config.global_layers == 0) {
    metadata.Add(prefix + "attention.sliding_window", static_cast<uint32_t>(config.window));
    if (architecture.local_heads) {
      DescribeLayers(config, prefix, metadata);
    } else if (config.global_every > 0) {
      metadata.Add(prefix + "attention.sliding_window_pattern",
                   static_cast<uint32_t>(config.global_every));
    }
  }
  for (const TensorRow& row : architecture.tensors) {
    if (!InXielu(row.part)) continue;
    std::vector<float> numbers;
    for (int64_t i = 0; i < config.layers; ++i) {
      const std::string name =
          SpellTensorName(architecture, checkpoint.kind(), {&row, std::to_string(i), ".weight"});
      TREADLE_ASSIGN_OR_RETURN(const StoredTensor* tensor, checkpoint.Require(name, {1}));
      numbers.push_back(DecodeVector(*tensor)[0]);
    }
    metadata.Add(Str(kGgufXielu, row.gguf.substr(row.gguf.find('.') + 1)), numbers);
  }
  if (architecture.unrotated_every != nullptr &&
      config.unrotated_every != architecture.unrotated_every(config)) {
    return Unimplemented(checkpoint.path(), ": one of ", config.unrotated_every,
                         " layers does not rotate, expected one of ",
                         architecture.unrotated_every(config), ", which a .gguf file means");
  }
  if (architecture.gguf_query_scalar != nullptr &&
      config.query_scalar != architecture.gguf_query_scalar(config)) {
    return Unimplemented(checkpoint.path(), ": divides scores by the root of ", config.query_scalar,
                         ", expected ", architecture.gguf_query_scalar(config),
                         ", which a .gguf file means");
  }
  if (architecture.chunked &&
      (config.query_floor != kQueryFloor || config.query_beta != kOwnQueryBeta ||
       config.head_norms != (config.experts != kExpertsWithoutHeadNorms))) {
    return Unimplemented(checkpoint.path(), ": floor_scale is ", config.query_floor,
                         ", attn_scale ", config.query_beta, ", use_qk_norm ",
                         config.head_norms ? "true" : "false", ", expected ", kQueryFloor, ", ",
                         kOwnQueryBeta, " and true, but of ", kExpertsWithoutHeadNorms,
                         " experts, which a .gguf file means");
  }
  if (checkpoint.tokenizer() == nullptr) {
    metadata.Add("tokenizer.ggml.model", "none");
    return absl::OkStatus();
  }
  if (!checkpoint.chat_template().empty()) {
    metadata.Add("tokenizer.chat_template", checkpoint.chat_template());
  }
  const absl::Status status =
      DescribeTokenizer(*checkpoint.tokenizer(), config.vocab, metadata, notices);
  if (status.ok()) return status;
  return absl::Status(status.code(), Str(checkpoint.path(), ": ", std::string(status.message())));
}

absl::Status DescribeTokenizer(const TokenizerSpec& spec, int64_t vocab,
                               GgufMetadataWriter& metadata, std::vector<std::string>& notices) {
  const bool sentencepiece = spec.model == TokenizerSpec::Model::kSentencePiece;
  metadata.Add("tokenizer.ggml.model", sentencepiece ? "llama" : "gpt2");
  metadata.Add("tokenizer.ggml.tokens", TokenTexts(spec, vocab));
  metadata.Add("tokenizer.ggml.token_type", TokenTypes(spec, vocab));
  if (sentencepiece) {
    std::vector<float> scores = ScoresOfMerges(spec);
    scores.resize(static_cast<size_t>(vocab), 0.0f);
    metadata.Add("tokenizer.ggml.scores", scores);
    metadata.Add("tokenizer.ggml.add_space_prefix", spec.add_space_prefix);
    if (spec.space_prefix_at_start_only || spec.space_prefix_if_missing) {
      notices.push_back(
          "the folder's tokenizer puts a space before a text that begins with none; a .gguf "
          "file's, "
          "before each text between special tokens");
    }
  } else {
    TREADLE_RETURN_IF_ERROR(DescribeMerges(spec, metadata));
  }
  metadata.Add("tokenizer.ggml.add_bos_token", spec.add_bos);
  metadata.Add("tokenizer.ggml.add_eos_token", spec.add_eos);
  DescribeIds(spec, metadata, notices);
  const auto flagged = std::ranges::find_if(spec.tokens, [](const TokenizerSpec::Token& token) {
    return token.trim_left || token.trim_right || token.single_word;
  });
  if (flagged != spec.tokens.end()) {
    notices.push_back(Str(
        "the folder's tokenizer takes white space along with a token, or finds it ",
        "as a whole word only (", Quoted(flagged->text), " is one); a .gguf file cannot say that"));
  }
  return absl::OkStatus();
}

std::vector<FrequencyFactors> FrequencyFactorsOf(const ModelConfig& config) {
  if (const auto& rope = config.long_rope) {
    return {
        {"rope_factors_long.weight", {rope->long_factors.begin(), rope->long_factors.end()}},
        {"rope_factors_short.weight", {rope->short_factors.begin(), rope->short_factors.end()}}};
  }
  if (config.rotated_pairs > 0) {
    std::vector<float> factors(static_cast<size_t>(config.rope_dim / 2), kUnrotated);
    std::fill_n(factors.begin(), config.rotated_pairs, 1.0f);
    return {{"rope_freqs.weight", std::move(factors)}};
  }
  if (!config.rope_scaling) return {};
  ModelConfig plain = config;
  plain.rope_scaling.reset();
  std::vector<float> factors = RotaryFrequencies(plain, {});
  const std::vector<float> scaled = RotaryFrequencies(config, {});
  for (size_t i = 0; i < factors.size(); ++i) factors[i] /= scaled[i];
  return {{"rope_freqs.weight", std::move(factors)}};
}

}  // namespace treadle
