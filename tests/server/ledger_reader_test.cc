// The ledger as a client watches it, over records that are written here.
#include "server/grpc/ledger_reader.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>
#include <vector>

#include "server/grpc/inference.pb.h"

namespace treadle {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

LedgerRecord Record(uint64_t iteration, const std::vector<RequestId>& come,
                    const std::vector<RequestId>& end) {
  LedgerRecord record;
  record.iteration = iteration;
  for (const RequestId id : come) record.arrivals.push_back({.request = id, .prompt_tokens = 5});
  for (const RequestId id : end) record.ends.push_back({.request = id});
  return record;
}

// The requests that the next message says have come; nothing if there is no message.
std::optional<std::vector<RequestId>> Arrivals(LedgerReader& reader, uint64_t lost = 0) {
  v1::LedgerRecord message;
  if (!reader.Next(message)) return std::nullopt;
  EXPECT_EQ(message.lost(), lost);
  std::vector<RequestId> ids;
  for (const v1::LedgerArrival& arrival : message.arrivals()) ids.push_back(arrival.request());
  return ids;
}

TEST(LedgerReader, TheFirstMessageNamesTheRequestsThatAreThere) {
  Ledger ledger;
  ledger.Append(Record(1, {1, 2, 3}, {}));
  ledger.Append(Record(2, {4}, {1, 4}));
  LedgerReader reader(ledger, /*from_start=*/false, {});
  EXPECT_EQ(Arrivals(reader), std::nullopt);
  ledger.Append(Record(3, {5}, {2}));
  EXPECT_THAT(*Arrivals(reader), ElementsAre(5, 2, 3));
  ledger.Append(Record(4, {6}, {}));
  EXPECT_THAT(*Arrivals(reader), ElementsAre(6));
}

TEST(LedgerReader, FromTheStartIsWhatTheRingHas) {
  Ledger ledger(/*capacity=*/2);
  for (uint64_t i = 1; i <= 3; ++i) ledger.Append(Record(i, {i}, {}));
  LedgerReader reader(ledger, /*from_start=*/true, {});
  EXPECT_THAT(*Arrivals(reader), ElementsAre(2));
  for (uint64_t i = 4; i <= 6; ++i) ledger.Append(Record(i, {}, {}));
  EXPECT_THAT(*Arrivals(reader, /*lost=*/2), IsEmpty());
}

}  // namespace
}  // namespace treadle
