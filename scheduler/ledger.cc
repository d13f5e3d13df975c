#include "scheduler/ledger.h"

#include <algorithm>
#include <cstdio>
#include <utility>

#include "base/status.h"

namespace treadle {
namespace {

void AppendString(std::string& out, const std::string& text) {
  out += '"';
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      char escape[8];
      std::snprintf(escape, sizeof(escape), "\\u%04x", c);
      out += escape;
    } else {
      out += c;
    }
  }
  out += '"';
}

void AppendNumber(std::string& out, const char* name, double value) {
  char text[64];
  std::snprintf(text, sizeof(text), ",\"%s\":%.9g", name, value);
  out += text;
}

void AppendArrival(std::string& out, const LedgerArrival& arrival) {
  out += Str("{\"request\":", arrival.request, ",\"prompt_tokens\":", arrival.prompt_tokens, "}");
}

void AppendMember(std::string& out, const LedgerMember& member) {
  out += Str("{\"request\":", member.request, ",\"tokens\":", member.tokens, ",\"phase\":\"",
             member.initiation ? "initiation" : "increment", "\"}");
}

void AppendEnd(std::string& out, const LedgerEnd& end) {
  out += Str("{\"request\":", end.request, ",\"request_id\":");
  AppendString(out, end.client_id);
  out +=
      Str(",\"prompt_tokens\":", end.prompt_tokens, ",\"cached_tokens\":", end.cached_tokens,
          ",\"output_tokens\":", end.output_tokens, ",\"draft_tokens\":", end.timings.draft_tokens,
          ",\"accepted_draft_tokens\":", end.timings.accepted_draft_tokens, ",\"reason\":");
  AppendString(out, end.reason);
  AppendNumber(out, "queued", end.timings.queued);
  AppendNumber(out, "first_token", end.timings.first_token);
  if (end.predicted_first_token >= 0) {
    AppendNumber(out, "predicted_first_token", end.predicted_first_token);
  }
  AppendNumber(out, "total", end.timings.total);
  out += '}';
}

template <typename Item>
void AppendList(std::string& out, const char* name, const std::vector<Item>& items,
                void (*append)(std::string&, const Item&)) {
  out += Str(",\"", name, "\":[");
  for (const Item& item : items) {
    if (&item != items.data()) out += ',';
    append(out, item);
  }
  out += ']';
}

}  // namespace

Ledger::Ledger(size_t capacity) : capacity_(capacity), ring_(capacity) {
  TREADLE_CHECK(capacity > 0);
}

void Ledger::Append(LedgerRecord record) {
  auto stored = std::make_shared<const LedgerRecord>(std::move(record));
  MutexLock lock(mutex_);
  ring_[end_ % capacity_].swap(stored);  // what was there goes with `stored`, after the lock
  ++end_;
  appended_.NotifyAll();
}

std::vector<std::shared_ptr<const LedgerRecord>> Ledger::Read(uint64_t& next, size_t limit,
                                                              uint64_t& lost) const {
  MutexLock lock(mutex_);
  const uint64_t oldest = end_ > capacity_ ? end_ - capacity_ : 0;
  if (next < oldest) {
    lost += oldest - next;
    next = oldest;
  }
  std::vector<std::shared_ptr<const LedgerRecord>> records;
  for (; next < end_ && records.size() < limit; ++next) records.push_back(ring_[next % capacity_]);
  return records;
}

bool Ledger::WaitFor(uint64_t next, Clock::time_point deadline,
                     const std::atomic<bool>* stop) const {
  MutexLock lock(mutex_);
  while (end_ <= next && !(stop && *stop)) {
    if (!appended_.WaitUntil(mutex_, deadline)) break;
  }
  return end_ > next;
}

void Ledger::Wake() {
  MutexLock lock(mutex_);
  appended_.NotifyAll();
}

uint64_t Ledger::end() const {
  MutexLock lock(mutex_);
  return end_;
}

std::string Ledger::ToJson(const LedgerRecord& record) {
  std::string out = Str("{\"epoch\":", record.epoch, ",\"iteration\":", record.iteration);
  AppendNumber(out, "time", record.time);
  AppendList(out, "arrivals", record.arrivals, AppendArrival);
  AppendList(out, "members", record.members, AppendMember);
  if (record.padding > 0) out += Str(",\"padding\":", record.padding);
  AppendList(out, "ends", record.ends, AppendEnd);
  out += Str(",\"waiting\":", record.waiting, ",\"running\":", record.running,
             ",\"free_pages\":", record.free_pages, ",\"total_pages\":", record.total_pages,
             ",\"stages\":", record.stages);
  AppendNumber(out, "schedule", record.schedule);
  AppendNumber(out, "queue", record.queue);
  AppendNumber(out, "receive", record.receive);
  AppendNumber(out, "compute", record.compute);
  AppendNumber(out, "sample", record.sample);
  AppendNumber(out, "idle", record.idle);
  AppendNumber(out, "bubble", record.bubble);
  if (const ExpertUse& use = record.experts; use.layers > 0) {
    out += Str(",\"experts\":{\"layers\":", use.layers, ",\"rows\":", use.rows,
               ",\"used\":", use.used, ",\"most_rows\":", use.most_rows, "}");
  }
  out += '}';
  return out;
}

}  // namespace treadle
