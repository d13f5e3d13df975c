#include "server/cli/open_draft_model.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "base/quoted.h"
#include "base/status.h"
#include "base/utf8.h"
#include "models/text/tokenizer.h"
#include "scheduler/speculation.h"
#include "server/cli/rank_devices.h"

namespace treadle {
namespace {

// As many pages as hold what `served` holds: the same number of requests of max_context tokens.
PageCounts PagesBeside(const KvMemoryPlan& served, const KvMemoryPlan& each) {
  double requests = HUGE_VAL;
  for (const PageKind kind : kPageKinds) {
    if (served.pages_per_request[kind] == 0) continue;
    requests = std::min(requests, static_cast<double>(served.pages[kind]) /
                                      static_cast<double>(served.pages_per_request[kind]));
  }
  PageCounts pages;
  for (const PageKind kind : kPageKinds) {
    pages[kind] =
        std::llround(std::ceil(requests * static_cast<double>(each.pages_per_request[kind])));
  }
  return pages;
}

absl::Status CheckTokens(const Checkpoint& draft, const Checkpoint& served) {
  const auto wrong = [&](const auto&... what) {
    return InvalidArgument("--speculate draft:", draft.path(), ": ", what...,
                           "; expected the vocabulary of ", served.path());
  };
  const int64_t vocab = draft.config().vocab, expected = served.config().vocab;
  if (vocab != expected) return wrong("it has ", vocab, " tokens, the served model ", expected);
  const TokenizerSpec* const ours = draft.tokenizer();
  const TokenizerSpec* const theirs = served.tokenizer();
  if ((ours == nullptr) != (theirs == nullptr)) {
    return wrong("only ", ours == nullptr ? "the served model" : "it", " has a tokenizer");
  }
  if (ours == nullptr) return absl::OkStatus();
  const auto [own, other] = std::ranges::mismatch(
      ours->tokens, theirs->tokens, {}, &TokenizerSpec::Token::text, &TokenizerSpec::Token::text);
  if (own == ours->tokens.end() && other == theirs->tokens.end()) return absl::OkStatus();
  const auto show = [](auto token, auto end) {
    return token == end ? std::string("none") : Quoted(Cut(token->text, 40));
  };
  return wrong("its token ", own - ours->tokens.begin(), " is ", show(own, ours->tokens.end()),
               ", the served model's ", show(other, theirs->tokens.end()));
}

}  // namespace

absl::StatusOr<std::shared_ptr<const Checkpoint>> CheckDraftModel(const ServeOptions& options,
                                                                  const Checkpoint& served) {
  if (options.speculate != Speculate::kDraft) return nullptr;
  auto opened = Checkpoint::Open(options.draft_model);
  if (!opened.ok()) {
    return absl::Status(opened.status().code(),
                        Str("--speculate draft: ", std::string(opened.status().message())));
  }
  TREADLE_RETURN_IF_ERROR(CheckTokens(**opened, served));
  return std::shared_ptr<const Checkpoint>(*std::move(opened));
}

absl::StatusOr<OpenedDraft> OpenDraftModel(const Checkpoint& checkpoint,
                                           const ServeOptions& options, const KvMemoryPlan& served,
                                           const LogSink& log) {
  ServeOptions alone = options;  // all layers on one rank of this process, as they are stored
  alone.model = options.draft_model;
  alone.tensor_parallel = alone.pipeline_parallel = 1;
  alone.spares = 0;
  alone.workers.clear();
  alone.weights = {};
  TREADLE_ASSIGN_OR_RETURN(const RankDevices devices, RankDevices::Choose(alone));
  const ModelConfig& config = checkpoint.config();
  const int64_t context = std::min(options.max_context, config.context);

  const KvMemoryRequest memory = KvMemoryFrom(alone);
  const PageCounts pages = PagesBeside(served, KvMemoryOf(config, memory, {}));
  const KvMemoryPlan kv = KvMemoryOf(config, memory, pages);
  const auto weights = static_cast<int64_t>(alone.weights.EstimateBytes(checkpoint));
  const int64_t left = devices.AvailableBytes() - served.bytes - weights;
  if (kv.bytes > left) {
    return absl::ResourceExhaustedError(
        Str("--speculate draft:", checkpoint.path(), ": its weights need ", weights >> 20,
            " MiB and its K/V cache ", kv.bytes >> 20, " MiB, for as many tokens as the served ",
            "model's; ", devices.owner(), " can give ", (left + weights) >> 20,
            " MiB beside the served model; lower --kv-memory"));
  }

  LocalEngineOptions engine = LocalEngineFrom(alone, pages);
  engine.depth = Speculation::kMaxDraft;
  TREADLE_ASSIGN_OR_RETURN(std::vector<StageRanks::Rank> ranks,
                           LoadRanks(checkpoint, alone, devices, context, {}));
  const uint64_t bytes = ranks[0].model->weight_bytes();
  TREADLE_ASSIGN_OR_RETURN(std::unique_ptr<Engine> made,
                           LocalEngine::Create(std::move(ranks), engine));
  const auto on_failure = [log](const absl::Status& why) {
    log({.severity = Severity::kWarning,
         .name = "draft_model_failed",
         .message =
             Str("the draft model failed, requests go on without: ", std::string(why.message()))});
  };
  OpenedDraft opened;
  opened.model = std::make_unique<DraftModel>(
      std::move(made), DraftModel::Options{.pages = pages,
                                           .paging = kv.paging,
                                           .context = context,
                                           .max_batch_tokens = options.max_batch_tokens,
                                           .on_failure = on_failure});
  opened.notice =
      Str("draft model ", checkpoint.path(), ": weights ", bytes >> 20, " MiB; ", kv.ToString());
  return opened;
}

}  // namespace treadle
