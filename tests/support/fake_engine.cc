#include "tests/support/fake_engine.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/status.h"
#include "models/adapters/adapter_file.h"

namespace treadle {
namespace {

constexpr uint64_t kRoot = 0x9e3779b97f4a7c15;
constexpr uint64_t kVocab = FakeEngine::kVocab;

uint64_t Mix(uint64_t a, uint64_t b) {
  uint64_t x = a ^ (b + kRoot + (a << 6) + (a >> 2));
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  x ^= x >> 31;
  return x == 0 ? 1 : x;  // 0 means never written
}

int32_t NextToken(uint64_t chain, const SequenceStart& start, int64_t position) {
  const uint64_t key =
      Mix(Mix(start.sampling.seed, start.candidate), static_cast<uint64_t>(position));
  auto token = static_cast<int32_t>(Mix(chain, key) % kVocab);
  if (position - start.prompt_length >= start.min_new_tokens) return token;
  const auto& ends = start.end_tokens;
  while (std::find(ends.begin(), ends.end(), token) != ends.end()) {
    token = static_cast<int32_t>((static_cast<uint64_t>(token) + 1) % kVocab);
  }
  return token;
}

std::vector<float> EmbeddingOf(uint64_t chain) {
  return {static_cast<float>(chain % 1000), static_cast<float>(chain / 1000 % 1000)};
}

// Where a sequence begins that has the adapter.
uint64_t RootOf(uint64_t adapter) { return adapter == 0 ? kRoot : Mix(kRoot, adapter); }

}  // namespace

std::vector<float> ReferenceEmbedding(std::span<const int32_t> prompt) {
  uint64_t chain = kRoot;
  for (const int32_t token : prompt) chain = Mix(chain, static_cast<uint64_t>(token));
  return EmbeddingOf(chain);
}

std::vector<int32_t> ReferenceOutput(const RequestSpec& spec, uint32_t candidate) {
  SequenceStart start;
  start.prompt_length = static_cast<int32_t>(spec.prompt.size());
  start.sampling = spec.sampling;
  start.min_new_tokens = spec.min_new_tokens;
  start.end_tokens = spec.end_tokens;
  start.candidate = candidate;
  uint64_t chain = RootOf(spec.adapter);
  for (const int32_t token : spec.prompt) chain = Mix(chain, static_cast<uint64_t>(token));
  std::vector<int32_t> output;
  while (static_cast<int32_t>(output.size()) < spec.max_new_tokens) {
    const auto position = start.prompt_length + static_cast<int64_t>(output.size());
    output.push_back(NextToken(chain, start, position));
    const auto& ends = spec.end_tokens;
    if (std::find(ends.begin(), ends.end(), output.back()) != ends.end()) break;
    chain = Mix(chain, static_cast<uint64_t>(output.back()));
  }
  return output;
}

float ReferencePromptLogprob(int32_t position, int32_t token) {
  return -static_cast<float>(position) - static_cast<float>(token) / 128.0f;
}

FakeEngine::FakeEngine(const FakeEngineOptions& options) : options_(options) {
  for (const PageKind kind : kPageKinds) {
    pages_[kind].resize(static_cast<size_t>(options.total_pages[kind]));
  }
  Wipe({});
}

absl::Status FakeEngine::Start(std::function<void()> wake) {
  MutexLock lock(mutex_);
  wake_ = std::move(wake);
  standing_ = true;
  return absl::OkStatus();
}

uint64_t FakeEngine::epoch() const {
  MutexLock lock(mutex_);
  return epoch_;
}

bool FakeEngine::HasRoom() const {
  MutexLock lock(mutex_);
  return standing_ && status_.ok() && static_cast<int>(in_flight()) < options_.depth;
}

void FakeEngine::Submit(IterationPlan plan) {
  {
    MutexLock lock(mutex_);
    if (!standing_ || !status_.ok()) return;
    if (plan.epoch != epoch_) Violation(Str("plan of epoch ", plan.epoch, " in ", epoch_));
    if (plan.iteration != next_iteration_++) Violation(Str("iteration ", plan.iteration));
    if (static_cast<int>(in_flight()) >= options_.depth) {
      Violation("submitted without room");
    }
    if (plan.num_tokens() > options_.max_batch_tokens && !plan.stages.empty()) {
      Violation(Str("plan has ", plan.num_tokens(), " tokens"));
    }
    if (options_.record) plans_.push_back(plan);
    submitted_.push_back(std::move(plan));
    RunReady();
  }
  while (!options_.manual && Complete()) {
  }
}

void FakeEngine::SetMasks(uint64_t epoch, uint64_t iteration, std::vector<OutputMask> masks) {
  {
    MutexLock lock(mutex_);
    if (epoch != epoch_ || !status_.ok()) return;
    for (OutputMask& mask : masks) {
      if (mask.allowed.size() == MaskWords(kVocab) &&
          masks_[iteration].try_emplace({mask.step, mask.output}, std::move(mask.allowed)).second) {
        continue;
      }
      Violation(Str("mask of step ", mask.step, " of iteration ", iteration));
    }
    RunReady();
  }
  while (!options_.manual && Complete()) {
  }
}

void FakeEngine::RunReady() {
  while (!submitted_.empty()) {
    const IterationPlan& plan = submitted_.front();
    int64_t masked = 0;
    for (const Step& step : plan.steps) {
      masked += std::ranges::count_if(step.outputs, &RowOutput::masked);
    }
    if (std::ssize(masks_[plan.iteration]) < masked) return;
    Run(plan);
    masks_.erase(plan.iteration);
    submitted_.pop_front();
  }
}

absl::Status FakeEngine::LoadAdapter(std::shared_ptr<const AdapterFile> adapter) {
  MutexLock lock(mutex_);
  if (no_adapters_.ok()) adapters_.insert(adapter->id());
  return no_adapters_;
}

void FakeEngine::UnloadAdapter(uint64_t id) {
  MutexLock lock(mutex_);
  adapters_.erase(id);
}

std::set<uint64_t> FakeEngine::adapters() const {
  MutexLock lock(mutex_);
  return adapters_;
}

void FakeEngine::RefuseAdapters(absl::Status why) {
  MutexLock lock(mutex_);
  no_adapters_ = std::move(why);
}

std::vector<IterationResult> FakeEngine::TakeResults() {
  MutexLock lock(mutex_);
  return std::exchange(complete_, {});
}

absl::Status FakeEngine::status() const {
  MutexLock lock(mutex_);
  return status_;
}

void FakeEngine::Restart() {
  MutexLock lock(mutex_);
  ++epoch_;
  next_iteration_ = 0;
  status_ = absl::OkStatus();
  standing_ = !options_.manual_restart;
  submitted_.clear();
  masks_.clear();
  running_.clear();
  complete_.clear();
  live_.clear();
  Wipe(lost_);
}

bool FakeEngine::Complete(const IterationTimings* timings) {
  {
    MutexLock lock(mutex_);
    if (running_.empty()) return false;
    if (timings != nullptr) running_.front().result.timings = *timings;
    complete_.push_back(std::move(running_.front().result));
    running_.pop_front();
  }
  wake_();
  return true;
}

void FakeEngine::SetTimings(const IterationTimings& timings) {
  MutexLock lock(mutex_);
  timings_ = timings;
}

void FakeEngine::Fail(absl::Status status, StageRange lost) {
  {
    MutexLock lock(mutex_);
    standing_ = false;
    lost_ = lost_.Around(lost);
    status_ = std::move(status);
    submitted_.clear();
    for (const Running& running : running_) {
      for (Page::Slot* const slot : running.written) *slot = {};
    }
    running_.clear();
    complete_.clear();
  }
  wake_();
}

void FakeEngine::FinishRestart() {
  {
    MutexLock lock(mutex_);
    standing_ = true;
  }
  wake_();
}

int64_t FakeEngine::running_plans() const {
  MutexLock lock(mutex_);
  return static_cast<int64_t>(submitted_.size() + running_.size());
}

std::vector<IterationPlan> FakeEngine::TakePlans() {
  MutexLock lock(mutex_);
  return std::exchange(plans_, {});
}

std::vector<std::string> FakeEngine::violations() const {
  MutexLock lock(mutex_);
  return violations_;
}

int64_t FakeEngine::live_sequences() const {
  MutexLock lock(mutex_);
  return static_cast<int64_t>(live_.size());
}

void FakeEngine::Violation(std::string what) {
  if (violations_.size() < 20) violations_.push_back(std::move(what));
}

void FakeEngine::Wipe(const StageRange& stages) {
  for (const PageKind kind : kPageKinds) {
    for (Page& page : pages_[kind]) {
      page.owners = 0;
      page.slots.resize(static_cast<size_t>(options_.stages));
      for (int stage = 0; stage < options_.stages; ++stage) {
        if (!stages.Contains(stage)) continue;
        page.slots[stage].assign(static_cast<size_t>(options_.page_size), {});
      }
    }
  }
}

FakeEngine::Page* FakeEngine::PageAt(int32_t id, PageKind kind) {
  if (id < 0 || id >= options_.total_pages[kind]) {
    Violation(Str("page ", id, " does not exist"));
    return nullptr;
  }
  return &pages_[kind][static_cast<size_t>(id)];
}

std::span<const int32_t> FakeEngine::Ring(const SequenceStart& start, PageKind kind) const {
  const std::span<const int32_t> table = start.pages[kind];
  if (kind == PageKind::kWhole) return table;
  return table.last(std::min(table.size(), static_cast<size_t>(options_.paging().ring)));
}

void FakeEngine::Run(const IterationPlan& plan) {
  for (const SequenceId sequence : plan.releases) Release(sequence);
  std::vector<PageBytes> stored;
  for (const PageStore& store : plan.page_stores) stored.push_back(BytesOf(store.page));
  IterationResult& result = running_.emplace_back().result;
  for (const PageKind kind : kPageKinds) {
    for (const PageCopy& copy : plan.page_copies[kind]) {
      for (int stage = 0; stage < options_.stages; ++stage) {
        if (plan.stages.Contains(stage)) Copy(copy, kind, stage);
      }
    }
  }
  for (const SequenceStart& start : plan.starts) StartSequence(start);
  for (const PageLoad& load : plan.page_loads) Load(load);
  result.stored_pages = std::move(stored);
  result.epoch = plan.epoch;
  result.iteration = plan.iteration;
  result.timings = timings_;
  for (auto& [id, live] : live_) live.stepped = false;
  for (int32_t i = 0; i < std::ssize(plan.steps); ++i) result.steps.push_back(RunStep(plan, i));
}

void FakeEngine::Release(SequenceId sequence) {
  const auto it = live_.find(sequence);
  if (it == live_.end()) return Violation(Str("release of unknown sequence ", sequence));
  for (const PageKind kind : kPageKinds) {
    for (const int32_t id : Ring(it->second.start, kind)) {
      if (Page* page = PageAt(id, kind)) --page->owners;
    }
  }
  live_.erase(it);
}

void FakeEngine::Copy(const PageCopy& copy, PageKind kind, int stage) {
  const Page* from = PageAt(copy.from, kind);
  Page* to = PageAt(copy.to, kind);
  if (from == nullptr || to == nullptr) return;
  // A row of it may be gone with a plan that failed; whoever reads that one shows.
  if (std::ranges::all_of(from->slots[stage], [](const auto& slot) { return slot.chain == 0; })) {
    Violation(Str("copy from page ", copy.from, ", never written"));
  }
  if (to->owners != 0) Violation(Str("copy to page ", copy.to, ", which is in use"));
  to->slots[stage] = from->slots[stage];
  for (Page::Slot& slot : to->slots[stage]) running_.back().written.push_back(&slot);
}

PageBytes FakeEngine::BytesOf(int32_t page) {
  const Page* const from = PageAt(page, PageKind::kWhole);
  if (from == nullptr) return {};
  const auto bytes = std::as_bytes(std::span(from->slots[0]));
  return {bytes.begin(), bytes.end()};
}

void FakeEngine::Load(const PageLoad& load) {
  const auto it = live_.find(load.sequence);
  if (it == live_.end()) return Violation(Str("page load of unknown sequence ", load.sequence));
  const SequenceStart& start = it->second.start;
  Page* const to = PageOf(start, load.index * options_.page_size, PageKind::kWhole);
  if (to == nullptr) return;
  std::vector<Page::Slot>& slots = to->slots[0];
  const std::vector<Page::Slot> before = slots;
  if (load.bytes.size() != std::span(slots).size_bytes()) {
    return Violation(Str("page load of ", load.bytes.size(), " bytes"));
  }
  std::memcpy(slots.data(), load.bytes.data(), load.bytes.size());
  if (to->owners > 1 && before != slots) {
    Violation(Str("sequence ", load.sequence, " loads other rows into a page, which is shared"));
  }
}

void FakeEngine::StartSequence(const SequenceStart& start) {
  for (const PageKind kind : kPageKinds) {
    for (const int32_t id : Ring(start, kind)) {
      if (Page* page = PageAt(id, kind)) ++page->owners;
    }
  }
  if (start.earlier_tokens.size() != static_cast<size_t>(start.first_position)) {
    Violation(Str("sequence ", start.sequence, " starts without its earlier tokens"));
  }
  Live live{start, start.first_position};
  uint64_t chain = RootOf(start.adapter);
  for (const int32_t token : start.earlier_tokens) {
    live.chains.push_back(chain = Mix(chain, static_cast<uint64_t>(token)));
  }
  if (!live_.try_emplace(start.sequence, std::move(live)).second) {
    Violation(Str("sequence ", start.sequence, " starts twice"));
  }
}

FakeEngine::Page* FakeEngine::PageOf(const SequenceStart& start, int64_t position, PageKind kind) {
  const std::vector<int32_t>& table = start.pages[kind];
  const auto index = static_cast<size_t>(position / options_.page_size);
  if (position >= 0 && index < table.size()) return PageAt(table[index], kind);
  Violation(Str("sequence ", start.sequence, " has no page for position ", position));
  return nullptr;
}

// Returns the row, which all stages that run it write.
uint64_t FakeEngine::Enter(Live& live, const StageRange& stages, int64_t position, int32_t token) {
  live.chains.resize(static_cast<size_t>(position));
  const uint64_t chain = Mix(live.chains.empty() ? RootOf(live.start.adapter) : live.chains.back(),
                             static_cast<uint64_t>(token));
  for (int stage = stages.begin; stage < std::min(stages.end, options_.stages); ++stage) {
    if (stage == stages.begin && stage > 0) CheckLog(live, stage - 1, position, chain);
    EnterAt(live, stage, position, chain);
  }
  live.chains.push_back(chain);
  return chain;
}

void FakeEngine::CheckLog(const Live& live, int stage, int64_t position, uint64_t chain) {
  const Page* const page = PageOf(live.start, position, PageKind::kWhole);
  if (page == nullptr) return;
  const auto id = page - pages_[PageKind::kWhole].data();
  const Page::Slot& slot = page->slots[stage][position % options_.page_size];
  if (id < options_.replay_pages && slot.chain == chain && slot.position == position) return;
  Violation(Str("sequence ", live.start.sequence, ": the log of stage ", stage, " has no position ",
                position));
}

void FakeEngine::EnterAt(const Live& live, int stage, int64_t position, uint64_t chain) {
  for (const PageKind kind : kPageKinds) {
    if (options_.total_pages[kind] == 0) continue;
    const bool local = kind == PageKind::kWindow;
    const int64_t seen = local ? std::max<int64_t>(0, position - options_.window + 1) : 0;
    for (int64_t p = seen; p < position; ++p) {  // attention reads them all
      const Page* page = PageOf(live.start, p, kind);
      const auto slot = page == nullptr ? Page::Slot() : page->slots[stage][p % options_.page_size];
      if (slot.chain == live.chains[static_cast<size_t>(p)] && slot.position == p &&
          slot.tenant == TenantOf(live.start)) {
        continue;
      }
      return Violation(Str("sequence ", live.start.sequence, " reads position ", p,
                           ", which its page does not hold"));
    }
    Page* page = PageOf(live.start, position, kind);
    if (page == nullptr) return;
    Page::Slot& slot = page->slots[stage][position % options_.page_size];
    const Page::Slot row = {chain, position, TenantOf(live.start)};
    if (page->owners == 0 || (page->owners > 1 && slot.chain != 0 && slot != row)) {
      Violation(Str("sequence ", live.start.sequence, " writes position ", position,
                    " over another row in a page, which is shared"));
    }
    if (slot == row) continue;  // a failure takes nothing from it
    slot = row;
    running_.back().written.push_back(&slot);
  }
}

StepResult FakeEngine::RunStep(const IterationPlan& plan, int32_t index) {
  const Step& step = plan.steps[static_cast<size_t>(index)];
  StepResult result;
  result.sequence = step.sequence;
  const auto it = live_.find(step.sequence);
  if (it == live_.end()) {
    Violation(Str("step of unknown sequence ", step.sequence));
    return result;
  }
  Live& live = it->second;
  if (std::exchange(live.stepped, true)) Violation(Str("two steps of ", step.sequence));
  // A masked step may have been excused: its row runs again, and what it sampled is dropped.
  const bool masked = std::ranges::any_of(step.outputs, &RowOutput::masked);
  // A draft model goes on after what the other one sampled.
  const bool back = step.first_position < live.next_position + (options_.drafts ? 1 : 0);
  if ((masked || options_.drafts) && !step.tokens.empty() && back) {
    live.next_position = step.first_position;
    live.previous_sample = -1;
  }
  if (step.first_position != live.next_position) {
    Violation(Str("sequence ", step.sequence, " runs position ", step.first_position, ", expected ",
                  live.next_position));
  }
  std::vector<int32_t> tokens = step.tokens;
  if (tokens.empty()) tokens = {live.previous_sample};
  if (static_cast<int32_t>(tokens.size()) != step.num_tokens || tokens[0] < 0) {
    Violation(Str("sequence ", step.sequence, " runs without its tokens"));
  }
  if (live.previous_sample >= 0 && tokens[0] != live.previous_sample) {
    Violation(Str("sequence ", step.sequence, " runs another token than it sampled"));
  }
  if (!step.outputs.empty() && !plan.stages.Contains(options_.stages - 1)) {
    Violation(Str("sequence ", step.sequence, " has outputs, but the last stage does not run"));
  }
  live.previous_sample = -1;
  for (int32_t row = 0; row < std::ssize(tokens); ++row) {
    const int64_t position = int64_t{step.first_position} + row;
    const uint64_t chain = Enter(live, plan.stages, position, tokens[static_cast<size_t>(row)]);
    const auto output = result.outputs.size();
    if (output == step.outputs.size() || step.outputs[output].row != row) continue;
    const RowOutput& asked = step.outputs[output];
    const uint32_t* allowed = nullptr;
    if (asked.masked) {
      allowed = masks_[plan.iteration][{index, static_cast<int32_t>(output)}].data();
    }
    result.outputs.push_back(RunRow(live, asked, position, chain, allowed));
    if (row + 1 == std::ssize(tokens)) live.previous_sample = result.outputs.back().token;
  }
  live.next_position = step.first_position + std::ssize(tokens);
  // Inputs behind sampled rows are guesses: the next step begins at the first wrong one.
  for (size_t i = 0; i + 1 < result.outputs.size(); ++i) {
    const int32_t sample = result.outputs[i].token, row = step.outputs[i].row + 1;
    if (sample < 0 || sample == tokens[static_cast<size_t>(row)]) continue;
    live.previous_sample = sample;
    live.next_position = int64_t{step.first_position} + row;
    break;
  }
  return result;
}

RowResult FakeEngine::RunRow(const Live& live, const RowOutput& asked, int64_t position,
                             uint64_t chain, const uint32_t* allowed) const {
  RowResult result;
  if (asked.target >= 0) {
    const auto next = static_cast<int32_t>(position) + 1;
    result.target.logprob = ReferencePromptLogprob(next, asked.target);
  }
  if (asked.hidden) result.hidden = EmbeddingOf(chain);
  if (!asked.sample) return result;
  result.token = NextToken(chain, live.start, position + 1);
  if (options_.wrong_every > 0 && Mix(chain, kRoot) % options_.wrong_every == 0) {
    result.token = (result.token + 1) % FakeEngine::kVocab;
  }
  for (size_t i = 0; allowed != nullptr && i < kVocab; ++i) {
    if ((allowed[result.token / 32] >> (result.token % 32) & 1) != 0) break;
    result.token = static_cast<int32_t>((result.token + 1) % kVocab);
  }
  if (asked.top_logprobs >= 0) result.detail.logprob = -static_cast<float>(result.token);
  return result;
}

}  // namespace treadle
