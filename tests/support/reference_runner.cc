#include "tests/support/reference_runner.h"

#include <algorithm>
#include <bit>
#include <map>

#include "models/adapter.h"

namespace treadle {
namespace {

template <typename T>
T Must(absl::StatusOr<T> value) {
  TREADLE_CHECK(value.ok());
  return *std::move(value);
}

TokenDetail Detail(float logprob, const SampleResult& result, int32_t top) {
  TokenDetail detail;
  detail.logprob = logprob;
  detail.top.assign(result.top.begin(), result.top.begin() + std::min(top, result.num_top));
  return detail;
}

std::vector<TokenCount> Tally(std::span<const int32_t> ids, size_t prompt_length) {
  std::map<int32_t, TokenCount> counts;
  for (size_t p = 0; p < ids.size(); ++p) {
    TokenCount& count = counts[ids[p]];
    count.token = ids[p];
    ++(p < prompt_length ? count.in_prompt : count.in_output);
  }
  std::vector<TokenCount> list;
  for (const auto& [token, count] : counts) list.push_back(count);
  return list;
}

}  // namespace

ReferenceRunner::ReferenceRunner(Backend& backend, Model& model, int64_t max_tokens,
                                 int64_t page_size, DType kv_dtype)
    : backend_(backend),
      model_(model),
      cache_(Must(KvCache::Create(backend, model,
                                  {.page_size = page_size,
                                   .num_pages = {(max_tokens + page_size - 1) / page_size,
                                                 (max_tokens + page_size - 1) / page_size},
                                   .dtype = kv_dtype}))),
      hidden_(Must(backend.Allocate(max_tokens * model.config().hidden * sizeof(float)))),
      head_hidden_(Must(backend.Allocate(model.config().hidden * sizeof(float)))),
      logits_(Must(backend.Allocate(model.config().vocab * sizeof(float)))) {
  for (int32_t page = 0; page < cache_.layout().num_pages; ++page) pages_.push_back(page);
}

AloneAnswer ReferenceRunner::Run(const AloneRequest& request, int64_t chunk) {
  AloneAnswer answer;
  std::vector<int32_t> ids = request.prompt;
  const int64_t prompt = static_cast<int64_t>(ids.size());
  int64_t begin = 0;
  while (true) {
    const int64_t length = static_cast<int64_t>(ids.size());
    const int64_t end = std::min(begin + chunk, length);
    Forward(request, ids, begin, end);
    if (request.prompt_logprobs >= 0) {
      for (int64_t p = begin; p < end && p + 1 < prompt; ++p) {
        const SampleResult result = Output(request, ids, p - begin, false, ids[p + 1]);
        answer.prompt_details.push_back(
            Detail(result.target_logprob, result, request.prompt_logprobs));
      }
    }
    const int64_t last_row = end - 1 - begin;
    begin = end;
    if (end < length) continue;
    const SampleResult result = Output(request, ids, last_row, true, -1);
    answer.tokens.push_back(result.token);
    if (request.top_logprobs >= 0) {
      answer.details.push_back(Detail(result.logprob, result, request.top_logprobs));
    }
    ids.push_back(result.token);
    const auto& ends = request.end_tokens;
    if (std::find(ends.begin(), ends.end(), result.token) != ends.end()) return answer;
    if (static_cast<int32_t>(answer.tokens.size()) == request.max_new_tokens) return answer;
  }
}

std::vector<const Adapter*> ReferenceRunner::AdaptersOf(const AloneRequest& request,
                                                        int64_t rows) const {
  if (request.adapter == 0) return {};
  return std::vector(static_cast<size_t>(rows), adapters_.at(request.adapter).get());
}

void ReferenceRunner::Forward(const AloneRequest& request, std::span<const int32_t> ids,
                              int64_t first_position, int64_t end) {
  std::vector<int32_t> positions;
  for (int64_t p = first_position; p < end; ++p) positions.push_back(static_cast<int32_t>(p));
  const SequenceSpan span{.first_row = 0,
                          .num_rows = static_cast<int32_t>(end - first_position),
                          .first_position = static_cast<int32_t>(first_position),
                          .pages = pages_.data()};
  const std::vector<const Adapter*> adapters = AdaptersOf(request, end - first_position);
  const Batch batch{
      ids.subspan(first_position, end - first_position), positions, {&span, 1}, {}, adapters};
  const Tensor hidden =
      DenseTensor(hidden_.data(), DType::kF32, end - first_position, model_.config().hidden);
  TREADLE_CHECK(model_.Forward(batch, cache_.pages(), nullptr, hidden).ok());
}

SampleResult ReferenceRunner::Output(const AloneRequest& request, std::span<const int32_t> ids,
                                     int64_t row, bool sample, int32_t target) {
  const ModelConfig& config = model_.config();
  const Tensor hidden = DenseTensor(hidden_.data(), DType::kF32, row + 1, config.hidden);
  const Tensor gathered = DenseTensor(head_hidden_.data(), DType::kF32, 1, config.hidden);
  const Tensor logits = DenseTensor(logits_.data(), DType::kF32, 1, config.vocab);
  const int32_t index = static_cast<int32_t>(row);
  backend_.Gather(hidden, {&index, 1}, gathered);
  model_.Head(gathered, logits, AdaptersOf(request, 1));

  const int32_t produced = static_cast<int32_t>(ids.size() - request.prompt.size());
  std::vector<TokenCount> counts;
  SampleRow wanted;
  wanted.target = target;
  wanted.top_logprobs = sample ? request.top_logprobs : request.prompt_logprobs;
  if (sample) {
    wanted.parameters = &request.sampling;
    const std::vector<const Adapter*> adapter = AdaptersOf(request, 1);
    const auto no_text = static_cast<size_t>(adapter.empty() ? 0 : adapter[0]->virtual_tokens());
    if (request.sampling.NeedsCounts()) {
      counts = Tally(ids.subspan(no_text), request.prompt.size() - no_text);
    }
    wanted.counts = counts;
    if (produced < request.min_new_tokens) wanted.suppressed = request.end_tokens;
    wanted.candidate = request.candidate;
    wanted.position = static_cast<int64_t>(ids.size());
  }
  SampleResult result;
  backend_.Sample(logits, {&wanted, 1}, {&result, 1});
  TREADLE_CHECK(backend_.Synchronize().ok());
  return result;
}

std::string Difference(const std::vector<TokenDetail>& a, const std::vector<TokenDetail>& b) {
  if (a.size() != b.size()) return Str(a.size(), " and ", b.size(), " details");
  const auto same = [](float x, float y) {
    return std::bit_cast<uint32_t>(x) == std::bit_cast<uint32_t>(y);
  };
  for (size_t i = 0; i < a.size(); ++i) {
    if (!same(a[i].logprob, b[i].logprob)) {
      return Str("detail ", i, ": log probability ", a[i].logprob, " and ", b[i].logprob);
    }
    if (a[i].top.size() != b[i].top.size()) {
      return Str("detail ", i, ": ", a[i].top.size(), " and ", b[i].top.size(), " alternatives");
    }
    for (size_t k = 0; k < a[i].top.size(); ++k) {
      const TokenLogprob &x = a[i].top[k], &y = b[i].top[k];
      if (x.token != y.token || !same(x.logprob, y.logprob)) {
        return Str("detail ", i, ", alternative ", k, ": token ", x.token, " (", x.logprob,
                   ") and ", y.token, " (", y.logprob, ")");
      }
    }
  }
  return "";
}

}  // namespace treadle
