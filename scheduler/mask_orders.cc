#include "scheduler/mask_orders.h"

#include <algorithm>

#include "base/status.h"
#include "scheduler/request/request_pool.h"

namespace treadle {

MaskThread::Step MaskOrders::TakeUnordered(Sequence& sequence) {
  Sequence::MaskedStep& step = sequence.unordered.front();
  MaskThread::Step order{.epoch = step.epoch,
                         .iteration = step.iteration,
                         .step = step.step,
                         .output = step.output,
                         .candidate = sequence.masked,
                         .draft = std::move(step.draft)};
  sequence.unordered.pop_front();
  return order;
}

// Masks of sequences that have all their tokens are ordered now, the others' with the token.
void MaskOrders::NotePlan(const IterationPlan& plan, const PlanInFlight& note,
                          Clock::time_point now) {
  const std::vector<int32_t> no_draft;
  for (size_t i = 0; i < plan.steps.size(); ++i) {
    const std::vector<RowOutput>& outputs = plan.steps[i].outputs;
    if (outputs.empty() || !outputs.back().masked) continue;
    const PlanInFlight::Target& target = note.steps[i];
    Sequence& sequence = target.request->sequences[target.sequence];
    if (!sequence.masked) {
      sequence.masked = std::make_shared<MaskedCandidate>(target.request->spec, sequence.output);
      sequence.told = sequence.output.size();
    }
    sequence.unordered.push_back({.epoch = plan.epoch,
                                  .iteration = plan.iteration,
                                  .step = static_cast<int32_t>(i),
                                  .output = static_cast<int32_t>(outputs.size()) - target.samples,
                                  .draft = target.samples > 1 ? sequence.draft : no_draft});
    if (sequence.in_flight == target.samples) NoteToken(*target.request, sequence, now);
  }
}

void MaskOrders::NoteToken(Request& request, Sequence& sequence, Clock::time_point now) {
  if (sequence.unordered.empty()) return;
  orders_.push_back(TakeUnordered(sequence));
  const auto news = sequence.output.begin() + static_cast<int64_t>(sequence.told);
  orders_.back().tokens.assign(news, sequence.output.end());
  sequence.told = sequence.output.size();
  const auto patience =
      std::clamp<Clock::duration>(kPatience * iteration_time_, kMinPatience, kMaxPatience);
  awaited_.push_back({.request = request.id,
                      .candidate = sequence.candidate,
                      .step = orders_.back(),
                      .due = now + patience,
                      .ordered = now});
}

void MaskOrders::Forget(Sequence& sequence) {
  while (!sequence.unordered.empty()) unwanted_.push_back(TakeUnordered(sequence));
}

void MaskOrders::Give() {
  for (const MaskThread::Step& step : unwanted_) thread_.Allow(step);
  unwanted_.clear();
  if (!orders_.empty()) thread_.Order(std::exchange(orders_, {}));
}

void MaskOrders::NoteIteration(double seconds) {
  iteration_time_ = std::chrono::duration_cast<Clock::duration>(
      (iteration_time_ * 7 + std::chrono::duration<double>(seconds)) / 8);
}

void MaskOrders::Clear() {
  awaited_.clear();
  sitting_out_.clear();
}

Sequence* MaskOrders::SequenceOf(const Awaited& mask, Request*& request) const {
  request = pool_.Find(mask.request);
  if (request == nullptr || request->state == RequestState::kFinished) return nullptr;
  Sequence& sequence = request->sequences[mask.candidate];
  return sequence.finished ? nullptr : &sequence;
}

std::vector<std::pair<Request*, absl::Status>> MaskOrders::Excuse(Clock::time_point now) {
  bool excused = false;
  std::erase_if(awaited_, [&](const Awaited& mask) {
    if (mask.step.given->load()) return true;
    if (now < mask.due) return false;
    if (!thread_.Excuse(mask.step)) return true;
    excused = true;
    Request* request = nullptr;
    Sequence* const sequence = SequenceOf(mask, request);
    if (sequence == nullptr) return true;
    sequence->sits_out = true;
    Forget(*sequence);
    sitting_out_.push_back(mask);
    return true;
  });
  if (excused) thread_.Relieve();
  std::vector<std::pair<Request*, absl::Status>> ended;
  std::erase_if(sitting_out_, [&](const Awaited& mask) {
    Request* request = nullptr;
    Sequence* const sequence = SequenceOf(mask, request);
    if (sequence == nullptr) return true;
    if (sequence->masked->arrived() && sequence->in_flight == 0) {
      const absl::Status stuck = sequence->masked->Stuck(sequence->produced);
      sequence->masked->TakeUp();
      sequence->sits_out = false;
      if (!stuck.ok()) ended.emplace_back(request, stuck);
      return true;
    }
    if (now - mask.ordered < kMaxSittingOut) return false;
    ended.emplace_back(request,
                       InvalidArgument("the constraint is too expensive: the mask of token ",
                                       sequence->produced + 1, " is not there after ",
                                       kMaxSittingOut.count(), " s"));
    return true;
  });
  return ended;
}

Clock::time_point MaskOrders::next_due() const {
  Clock::time_point next = Clock::time_point::max();
  for (const Awaited& mask : awaited_) next = std::min(next, mask.due);
  return next;
}

}  // namespace treadle
