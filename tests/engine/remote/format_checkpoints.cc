#include "tests/engine/remote/format_checkpoints.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "base/status.h"
#include "kernels/op_cases/op_cases.h"
#include "models/architectures/architecture.h"
#include "models/checkpoints/write/quantize_checkpoint.h"
#include "tests/models/checkpoints/safetensors_file.h"
#include "tests/support/gguf_writer.h"
#include "tests/support/identifier.h"
#include "tests/support/tiny_model.h"

namespace treadle {
namespace {

using Json = nlohmann::json;

constexpr int64_t kLayers = 2;
constexpr int64_t kHidden = 256;  // a block of the K types
constexpr int64_t kKvSize = 128;
constexpr int64_t kVocab = 64;

absl::Status WriteFile(const std::string& path, const std::string& bytes) {
  std::ofstream out(path, std::ios::binary);
  out << bytes;
  out.close();
  return out ? absl::OkStatus() : Internal(path, ": cannot be written");
}
std::string ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// A Llama whose matrices are random blocks of the format.
absl::StatusOr<std::string> WriteRandomGguf(const std::string& folder, const WeightFormat& format) {
  GgufWriter writer;
  writer.AddString("general.architecture", "llama");
  const std::pair<const char*, int64_t> sizes[] = {
      {"block_count", kLayers}, {"embedding_length", kHidden}, {"feed_forward_length", kHidden},
      {"context_length", 64},   {"attention.head_count", 4},   {"attention.head_count_kv", 2}};
  for (const auto& [key, size] : sizes) writer.AddU32(Str("llama.", key), size);
  writer.AddF32("llama.attention.layer_norm_rms_epsilon", 1e-5f);
  uint64_t seed = 1;
  const auto matrix = [&](const std::string& name, int64_t n, int64_t k) {
    const RandomMatrix random = MakeRandomMatrix(format, n, k, seed++);
    const auto* bytes = reinterpret_cast<const char*>(random.bytes.data());
    writer.AddTensor(name, {n, k}, static_cast<uint32_t>(format.gguf_type),
                     {bytes, random.bytes.size()});
  };
  const auto norm = [&](const std::string& name) {
    writer.AddTensor(name, {kHidden}, /*gguf_type=*/0,
                     *EncodeWeights("f32", std::vector<float>(kHidden, 1.0f)));
  };
  matrix("token_embd.weight", kVocab, kHidden);
  for (int64_t layer = 0; layer < kLayers; ++layer) {
    const std::string prefix = Str("blk.", layer, ".");
    norm(prefix + "attn_norm.weight");
    matrix(prefix + "attn_q.weight", kHidden, kHidden);
    matrix(prefix + "attn_k.weight", kKvSize, kHidden);
    matrix(prefix + "attn_v.weight", kKvSize, kHidden);
    norm(prefix + "ffn_norm.weight");
    for (const char* name : {"attn_output", "ffn_gate", "ffn_up", "ffn_down"}) {
      matrix(prefix + name + ".weight", kHidden, kHidden);
    }
  }
  norm("output_norm.weight");
  const std::string path = folder + "/random.gguf";
  TREADLE_RETURN_IF_ERROR(WriteFile(path, writer.Bytes()));
  return path;
}

absl::StatusOr<std::string> WriteConverted(const std::string& folder, const std::string& weights) {
  const std::string plain = folder + "/plain";
  std::filesystem::create_directories(plain);
  TREADLE_RETURN_IF_ERROR(WriteTinyLlamaFolder(plain, {}).status());
  QuantizeOptions options;
  TREADLE_ASSIGN_OR_RETURN(options.weights, WeightPlan::Parse(weights));
  options.version = "test";
  options.threads = 1;
  const std::string out = folder + "/converted";
  TREADLE_RETURN_IF_ERROR(QuantizeCheckpoint(plain, out, options).status());
  return out;
}

// An oracle's checkpoint, which has one layer, with that layer twice.
absl::StatusOr<std::string> WriteDoubled(const std::string& folder, const std::string& name) {
  const std::string from = std::string(TREADLE_TESTDATA "/quantized/") + name;
  Json config = Json::parse(ReadFile(from + "/config.json"));
  Safetensors file = Safetensors::Parse(ReadFile(from + "/model.safetensors"));
  const std::string first = "model.layers.0.";
  const Json header = file.header;
  for (const auto& [tensor, entry] : header.items()) {
    if (!tensor.starts_with(first)) continue;
    file.Set("model.layers.1." + tensor.substr(first.size()), entry["dtype"], entry["shape"],
             file.Tensor(tensor));
  }
  config["num_hidden_layers"] = 2;
  TREADLE_RETURN_IF_ERROR(WriteFile(folder + "/config.json", config.dump()));
  TREADLE_RETURN_IF_ERROR(WriteFile(folder + "/model.safetensors", file.Bytes()));
  return folder;
}

}  // namespace

std::vector<FormatCheckpoint> FormatCheckpoints() {
  std::vector<FormatCheckpoint> all;
  for (const WeightFormat& format : WeightFormats()) {
    if (format.gguf_type < 0) continue;
    all.push_back({Str("gguf_", format.name), [&format](const std::string& folder) {
                     return WriteRandomGguf(folder, format);
                   }});
  }
  for (const char* weights :
       {"f16", "bf16", "nf4", "nf4-dq", "fp4", "fp4-dq", "int8", "fp8", "kbit-int3",
        "kbit-quantile4", "kbit-e2m1", "kbit-float5e2", "kbit-int6:tensor", "kbit-dynamic7",
        "kbit-dynamic8", "int8,lm_head=nf4"}) {
    all.push_back({Identifier(Str("converted_", weights)),
                   [=](const std::string& folder) { return WriteConverted(folder, weights); }});
  }
  for (const char* name :
       {"nf4", "nf4-dq", "fp4-dq", "nf4-128-dq", "int8", "fp8-channel", "fp8-tensor", "fp8-block",
        "gptq-v1", "gptq-v2-8bit", "gptq-act-v1", "gptq-act-v2-8bit", "awq"}) {
    all.push_back({Identifier(Str("oracle_", name)),
                   [=](const std::string& folder) { return WriteDoubled(folder, name); }});
  }
  for (const Architecture& architecture : Architectures()) {
    all.push_back({Identifier(Str("architecture_", architecture.name)),
                   [&architecture](const std::string& folder) {
                     return WriteTinyGguf(architecture, folder, {});
                   }});
  }
  return all;
}

}  // namespace treadle
