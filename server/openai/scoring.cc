#include "server/openai/scoring.h"

#include <algorithm>
#include <memory>
#include <numeric>
#include <string>
#include <string_view>
#include <utility>

#include "base/status.h"
#include "server/openai/json/json_text.h"
#include "server/openai/openai_call.h"
#include "server/openai/openai_errors.h"
#include "server/openai/scoring_request.h"

namespace treadle {
namespace {

// Is never streamed.
class ScoringAnswer final : public HttpAnswer {
 public:
  ScoringAnswer(const ServedModel& model, const OpenAiRequest& request,
                const ScoringQuestion& question, std::string id, int64_t created)
      : model_(model),
        question_(question),
        id_(std::move(id)),
        created_(created),
        embeddings_(request.prompts.size()) {
    if (!question.rank) return;
    for (size_t i = question.first; i < request.prompts.size(); ++i) {
      documents_.push_back(std::get<std::string>(request.prompts[i]));
    }
  }

  bool Add(size_t prompt, const SessionEvent& event) override {
    if (event.prompt != nullptr) tokens_ += event.prompt->request.prompt.size();
    if (event.output != nullptr) embeddings_[prompt] = event.output->embedding;
    return false;
  }
  std::string TakeEvents() override { return ""; }
  std::string LastEvents() override { return ""; }
  std::string ErrorEvent(const HttpResponse& /*error*/) override { return ""; }

  std::string Whole() const override {
    std::vector<float> scores;
    for (size_t i = question_.first; i < embeddings_.size(); ++i) {
      const std::vector<float>& other = embeddings_[question_.first == 1 ? 0 : scores.size()];
      // Embeddings have length 1.
      scores.push_back(
          std::inner_product(other.begin(), other.end(), embeddings_[i].begin(), 0.0F));
    }
    return question_.rank ? Ranking(scores) : Scores(scores);
  }

 private:
  std::string Scores(const std::vector<float>& scores) const {
    std::string data;
    for (size_t i = 0; i < scores.size(); ++i) {
      data += Str(i == 0 ? "" : ",", R"({"index":)", i, R"(,"object":"score","score":)",
                  JsonLogprob(scores[i]), "}");
    }
    return Str(R"({"id":)", JsonString(id_), R"(,"object":"list","created":)", created_,
               R"(,"model":)", JsonString(model_.name), R"(,"data":[)", data, "],", Usage(), "}");
  }
  // The nearest document first.
  std::string Ranking(const std::vector<float>& scores) const {
    std::vector<size_t> order(scores.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::stable_sort(order.begin(), order.end(),
                     [&](size_t a, size_t b) { return scores[a] > scores[b]; });
    const auto most = static_cast<size_t>(question_.top_n);
    if (most > 0 && most < order.size()) order.resize(most);
    std::string results;
    for (const size_t i : order) {
      results +=
          Str(results.empty() ? "" : ",", R"({"index":)", i, R"(,"document":{"text":)",
              JsonString(documents_[i]), R"(},"relevance_score":)", JsonLogprob(scores[i]), "}");
    }
    return Str(R"({"id":)", JsonString(id_), R"(,"model":)", JsonString(model_.name), ",", Usage(),
               R"(,"results":[)", results, "]}");
  }
  std::string Usage() const {
    return Str(R"("usage":{"prompt_tokens":)", tokens_, R"(,"total_tokens":)", tokens_, "}");
  }

  const ServedModel& model_;
  const ScoringQuestion question_;
  const std::string id_;
  const int64_t created_;
  std::vector<std::string> documents_;  // of a ranking
  std::vector<std::vector<float>> embeddings_;
  size_t tokens_ = 0;
};

class ScoringApi final : public HttpApi {
 public:
  ScoringApi(const ServedModel& model, bool rank) : model_(model), question_{.rank = rank} {}

  const char* id_prefix() const override { return question_.rank ? "rerank-" : "score-"; }
  absl::StatusOr<OpenAiRequest> Read(std::string_view body) override {
    return ReadScoring(body, model_, question_);
  }
  std::unique_ptr<HttpAnswer> Answer(const OpenAiRequest& request, const std::string& id,
                                     int64_t created) override {
    return std::make_unique<ScoringAnswer>(model_, request, question_, id, created);
  }
  HttpResponse Error(const absl::Status& status, const OpenAiRequest* /*request*/) const override {
    return OpenAiError(status, OpenAiKind::kScore);
  }

 private:
  const ServedModel& model_;
  ScoringQuestion question_;  // what Read found
};

}  // namespace

std::vector<HttpRoute> ScoringRoutes(SessionEnvironment& sessions) {
  std::vector<HttpRoute> routes;
  for (const char* const path : {"/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"}) {
    const bool rank = std::string_view(path).ends_with("rerank");
    routes.push_back({"POST", path, [&sessions, rank](HttpRequest request, auto reply) {
                        StartCall(sessions, std::make_unique<ScoringApi>(sessions.model, rank),
                                  std::move(request), std::move(reply));
                      }});
  }
  return routes;
}

}  // namespace treadle
