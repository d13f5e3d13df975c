#include "server/grpc/ledger_reader.h"

#include <utility>

#include "server/grpc/inference.pb.h"
#include "server/grpc/messages.h"

namespace treadle {

LedgerReader::LedgerReader(const Ledger& ledger, bool from_start, ApiKey::Terms reader)
    : ledger_(ledger), from_start_(from_start), reader_(std::move(reader)) {}

bool LedgerReader::Next(v1::LedgerRecord& message) {
  const bool first = !std::exchange(began_, true);
  if (first && !from_start_) Skip();
  uint64_t lost = 0;
  const auto records = ledger_.Read(next_, 1, lost);
  // From the start means what is still in the ring; only what slips away later is a loss.
  if (first) lost = 0;
  if (records.empty()) return false;
  LedgerRecord record = *records.front();
  for (const auto& [request, arrival] : present_) record.arrivals.push_back(arrival);
  present_.clear();
  FillLedgerRecord(record, lost, reader_, message);
  return true;
}

// Passes over the records that are there, but for the requests that they leave.
void LedgerReader::Skip() {
  constexpr size_t kAtOnce = 256;  // the loop may have to wait while so many are copied
  for (uint64_t lost = 0;;) {
    const auto records = ledger_.Read(next_, kAtOnce, lost);
    if (records.empty()) return;
    for (const auto& record : records) {
      for (const LedgerArrival& each : record->arrivals) present_.emplace(each.request, each);
      for (const LedgerEnd& end : record->ends) present_.erase(end.request);
    }
  }
}

}  // namespace treadle
