#include "scheduler/first_token.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace treadle {
namespace {

// A request that runs in the iterations to come.
struct Running {
  const Request* request = nullptr;
  int64_t prompt = 0;           // inputs left before its next token
  int64_t position = 0;         // of its next input
  std::vector<int64_t> answer;  // tokens to come, of each sequence
};

}  // namespace

void FirstTokenForecast::NoteAnswer(int64_t tokens, int64_t most) {
  constexpr double kOfLast = 1.0 / 16;
  answer_part_ +=
      kOfLast * (static_cast<double>(tokens) / static_cast<double>(most) - answer_part_);
}

int64_t FirstTokenForecast::TokensToCome(const Request& request, const Sequence& sequence) const {
  if (sequence.finished) return 0;
  const double all = answer_part_ * request.spec.max_new_tokens;
  return std::max<int64_t>(1, std::llround(all) - sequence.produced - sequence.in_flight);
}

std::optional<double> FirstTokenForecast::Predict(const PolicyView& view,
                                                  std::span<Request* const> order,
                                                  const Request& asked, double in_flight,
                                                  double give_up) const {
  if (!cost_.known()) return std::nullopt;
  double time = in_flight;

  const auto to_run = [&](const Request& request) {
    Running running{.request = &request, .prompt = request.prompt_length(), .answer = {}};
    const int64_t inputs =
        running.prompt + (request.sequences.empty() ? 0 : request.sequences[0].produced);
    if (request.state == RequestState::kRunning) running.prompt = InputsLeft(request);
    if (view.cached && (request.state == RequestState::kWaiting || IsToBegin(request))) {
      running.prompt -= view.cached(request).tokens;
    }
    running.position = inputs - running.prompt;
    for (const Sequence& sequence : request.sequences) {
      running.answer.push_back(TokensToCome(request, sequence));
    }
    return running;
  };
  std::vector<Running> batch;
  KvCapacity left = view.kv;
  int64_t sequences = 0;
  size_t next = 0;  // of `order`
  while (time <= give_up) {
    for (; next < order.size(); ++next) {
      const Request& request = *order[next];
      const int64_t size = BatchSequences(request);
      if (request.state == RequestState::kWaiting) {
        if (!batch.empty() && sequences + size > view.limits.max_batch_size) break;
        if (!Admits(view, left, request) && !batch.empty()) break;
      }
      sequences += size;
      batch.push_back(to_run(request));
    }
    // The next iterations that are alike: until somebody's prompt or answer is over.
    int64_t decoding = 0, alike = std::numeric_limits<int64_t>::max(), prompts = 0;
    double positions = 0;  // that the decoding sequences read, in each
    for (const Running& running : batch) {
      if (running.prompt > 0) continue;
      for (const int64_t tokens : running.answer) {
        if (tokens == 0) continue;
        ++decoding;
        positions += static_cast<double>(running.position);
        alike = std::min(alike, tokens);
      }
    }
    const int64_t budget = std::max<int64_t>(1, view.limits.max_batch_tokens - decoding);
    for (const Running& running : batch) {
      if (running.prompt == 0) continue;
      if (prompts == 0) alike = std::min(alike, std::max<int64_t>(1, running.prompt / budget));
      prompts += running.prompt;
    }
    if (decoding + prompts == 0) alike = 0;
    int64_t given = std::min(prompts, alike * budget);
    const auto times = static_cast<double>(alike);
    time += times * cost_.Of(
                        {static_cast<double>(decoding), positions, static_cast<double>(decoding)}) +
            static_cast<double>(given) * cost_.per_row();
    for (Running& running : batch) {
      if (running.prompt > 0) {
        const int64_t own = std::min(given, running.prompt);
        const auto rows = static_cast<double>(own);
        time += rows * (static_cast<double>(running.position) + rows / 2) * cost_.per_position();
        running.prompt -= own;
        running.position += own;
        given -= own;
        if (running.prompt > 0) continue;
        if (running.request == &asked) return time;
        for (int64_t& tokens : running.answer) tokens -= tokens > 0 ? 1 : 0;
      } else {
        running.position += alike;
        for (int64_t& tokens : running.answer) tokens -= std::min(tokens, alike);
      }
    }
    std::erase_if(batch, [&](const Running& running) {
      if (running.prompt > 0 ||
          std::ranges::any_of(running.answer, [](int64_t t) { return t > 0; }))
        return false;
      sequences -= BatchSequences(*running.request);
      const PageCounts freed = PagesNeeded(running.request->spec, left.paging);
      for (const PageKind kind : kPageKinds) left.free_pages[kind] += freed[kind];
      return true;
    });
    if (batch.empty()) left.free_pages = left.total_pages;
  }
  return time;
}

}  // namespace treadle
