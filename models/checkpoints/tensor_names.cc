#include "models/checkpoints/tensor_names.h"

#include <algorithm>
#include <span>

#include "base/status.h"
#include "models/architectures/gpt2_names.h"
#include "models/architectures/llama_names.h"

namespace treadle {
namespace {

constexpr std::string_view kWholeGpt2 = "transformer.";

struct Pair {
  std::string_view gguf;
  std::string_view hugging_face;
};
using Side = std::string_view Pair::*;

template <typename Names>
struct Both {
  const Names& g;
  const Names& h;
  constexpr Pair operator()(const char* Names::*name) const { return {g.*name, h.*name}; }
};
constexpr Both<LlamaNames> kLlama = {kLlamaGgufNames, kLlamaHuggingFaceNames};
constexpr Both<Gpt2Names> kGpt2 = {kGpt2GgufNames, kGpt2HuggingFaceNames};

constexpr Pair kLlamaOutside[] = {kLlama(&LlamaNames::embedding), kLlama(&LlamaNames::norm),
                                  kLlama(&LlamaNames::head)};
constexpr Pair kLlamaInLayer[] = {kLlama(&LlamaNames::attention_norm),
                                  kLlama(&LlamaNames::q),
                                  kLlama(&LlamaNames::k),
                                  kLlama(&LlamaNames::v),
                                  kLlama(&LlamaNames::out),
                                  kLlama(&LlamaNames::ffn_norm),
                                  kLlama(&LlamaNames::gate),
                                  kLlama(&LlamaNames::up),
                                  kLlama(&LlamaNames::down)};
constexpr Pair kGpt2Outside[] = {kGpt2(&Gpt2Names::embedding), kGpt2(&Gpt2Names::positions),
                                 kGpt2(&Gpt2Names::norm), kGpt2(&Gpt2Names::head)};
constexpr Pair kGpt2InLayer[] = {
    kGpt2(&Gpt2Names::attention_norm), kGpt2(&Gpt2Names::qkv), kGpt2(&Gpt2Names::out),
    kGpt2(&Gpt2Names::ffn_norm),       kGpt2(&Gpt2Names::up),  kGpt2(&Gpt2Names::down)};

struct Architecture {
  std::string_view name;
  Pair layers;
  std::span<const Pair> outside;
  std::span<const Pair> in_layer;
};
constexpr Architecture kArchitectures[] = {
    {"llama", kLlama(&LlamaNames::layers), kLlamaOutside, kLlamaInLayer},
    {"gpt2", kGpt2(&Gpt2Names::layers), kGpt2Outside, kGpt2InLayer}};

TensorName Rename(std::string_view architecture, std::string_view name, Side from, Side to) {
  const auto* found = std::ranges::find(kArchitectures, architecture, &Architecture::name);
  const size_t dot = name.rfind('.');
  if (found == std::end(kArchitectures) || dot == std::string_view::npos) return {};
  const std::string_view suffix = name.substr(dot);  // ".weight" or ".bias"
  if (suffix != ".weight" && suffix != ".bias") return {};
  std::string_view part = name.substr(0, dot);
  std::string before;
  const bool in_layer = part.starts_with(found->layers.*from);
  if (in_layer) {
    part.remove_prefix((found->layers.*from).size());
    const size_t end = std::min(part.find('.'), part.size() - 1);
    before = Str(found->layers.*to, part.substr(0, end), ".");
    part.remove_prefix(end + 1);
  }
  const std::span<const Pair> pairs = in_layer ? found->in_layer : found->outside;
  const auto pair = std::ranges::find(pairs, part, from);
  if (pair == pairs.end()) return {};
  return {Str(before, *pair.*to, suffix), pair->gguf};
}

}  // namespace

TensorName GgufTensorName(std::string_view architecture, std::string_view hugging_face_name) {
  if (architecture == "gpt2" && hugging_face_name.starts_with(kWholeGpt2)) {
    hugging_face_name.remove_prefix(kWholeGpt2.size());
  }
  return Rename(architecture, hugging_face_name, &Pair::hugging_face, &Pair::gguf);
}

TensorName HuggingFaceTensorName(std::string_view architecture, std::string_view gguf_name) {
  return Rename(architecture, gguf_name, &Pair::gguf, &Pair::hugging_face);
}

}  // namespace treadle
