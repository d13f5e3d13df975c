// Perplexity of a model on a text, by a protocol that is named: numbers of different protocols do
// not compare.
//
// Thread safety: pure functions, but for the model that they drive.
#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <span>
#include <string>

#include "absl/status/statusor.h"
#include "base/choice.h"
#include "bench/quality/teacher_forcing.h"

namespace treadle {

enum class PerplexityProtocol : uint8_t {
  // Consecutive windows of the text's tokens; each predicts all its tokens but the first (GPTQ;
  // SpQR, section 4). Usual context: 2048.
  kWindow,
  // llama-perplexity's: consecutive chunks, whose first token is replaced by BOS if the model
  // begins texts with it; chunk tokens context / 2 + 1 and on are predicted. Usual context: 512.
  kLlamaCpp,
};
inline constexpr Choice<PerplexityProtocol> kPerplexityProtocols[] = {
    {"window", PerplexityProtocol::kWindow}, {"llama.cpp", PerplexityProtocol::kLlamaCpp}};

// The windows of one protocol over `tokens` tokens. A rest shorter than `context` is dropped.
struct PerplexityPlan {
  PerplexityProtocol protocol = PerplexityProtocol::kWindow;
  int64_t context = 0;          // tokens of each window
  int64_t windows = 0;          // at least 1
  int64_t first_predicted = 1;  // position of the first token that is predicted
  int64_t scored() const { return windows * (context - first_predicted); }
};

// context 0: the protocol's usual one, or the model's where that is less. max_tokens 0: the whole
// text. Errors: a context that the model or the protocol does not allow; fewer tokens than one
// window (llama.cpp: than two, as its tool wants).
absl::StatusOr<PerplexityPlan> PlanPerplexity(PerplexityProtocol protocol, int64_t context,
                                              int64_t model_context, int64_t tokens,
                                              int64_t max_tokens);

struct ScoredToken {
  int64_t window = 0;
  int64_t position = 0;  // within the window
  int32_t token = 0;
  double log_probability = 0;  // natural, given what is before it in the window
};

struct PerplexityReport {
  PerplexityPlan plan;
  double mean_loss = 0;       // nats per token
  double standard_error = 0;  // of mean_loss, with tokens taken as independent
  double seconds = 0;         // without loading

  double perplexity() const;
  // By the delta method, as llama.cpp prints it.
  double perplexity_error() const { return perplexity() * standard_error; }
  // 95 % interval of the perplexity.
  double low() const;
  double high() const;
};

struct PerplexityCallbacks {
  std::function<void(double fraction)> progress;   // may be empty
  std::function<void(const ScoredToken&)> scored;  // in order; may be empty
};

// tokens: at least plan.windows * plan.context. bos: what replaces each window's first token, or -1
// (the window protocol takes the tokens as they are). model: window at least plan.context.
PerplexityReport MeasurePerplexity(TeacherForcedModel& model, std::span<const int32_t> tokens,
                                   const PerplexityPlan& plan, int32_t bos,
                                   const PerplexityCallbacks& callbacks);

nlohmann::ordered_json ToJson(const PerplexityReport& report);
std::string ToTable(const PerplexityReport& report);

}  // namespace treadle
