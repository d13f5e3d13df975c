#include "server/session/fair_queue.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

namespace treadle {
namespace {

constexpr size_t kAny = SIZE_MAX;

FairQueue::Entry EntryOf(const std::string& owner, size_t bytes = 1) {
  return {.owner = owner, .bytes = bytes, .work = [] {}};
}

// The owners that are served, in order, where each entry of an owner costs what `costs` says.
std::string Serve(FairQueue& queue, const std::map<std::string, double>& costs, int most = 1000) {
  std::string order;
  while (most-- > 0) {
    const auto entry = queue.Pop(kAny);
    if (!entry) break;
    order += entry->owner;
    queue.Charge(entry->owner, costs.at(entry->owner));
  }
  return order;
}

TEST(FairQueue, OwnersOfEqualWorkTakeTurns) {
  FairQueue queue;
  for (int i = 0; i < 4; ++i) queue.Push(EntryOf("a"));
  for (int i = 0; i < 2; ++i) queue.Push(EntryOf("b"));
  queue.Push(EntryOf("c"));
  EXPECT_EQ(Serve(queue, {{"a", 1}, {"b", 1}, {"c", 1}}), "abcabaa");
}

// An entry of a's costs as much as four of b's.
TEST(FairQueue, OwnersHaveAsMuchOfAProcessor) {
  FairQueue queue;
  for (int i = 0; i < 20; ++i) queue.Push(EntryOf("a"));
  for (int i = 0; i < 20; ++i) queue.Push(EntryOf("b"));
  EXPECT_EQ(Serve(queue, {{"a", 4}, {"b", 1}}, 15), "abbbbabbbbabbbb");
}

TEST(FairQueue, WhoCameEarlierHasNoClaimAndWhoComesLateSavedNothing) {
  FairQueue queue;
  for (int i = 0; i < 100; ++i) queue.Push(EntryOf("a"));
  EXPECT_EQ(Serve(queue, {{"a", 1}}, 50), std::string(50, 'a'));
  for (int i = 0; i < 10; ++i) queue.Push(EntryOf("b"));
  EXPECT_EQ(Serve(queue, {{"a", 1}, {"b", 1}}, 6), "bababa");
}

// Service that was had is not forgotten with the last entry.
TEST(FairQueue, OneAtATimeIsNoWayToHaveMore) {
  FairQueue queue;
  std::string order;
  for (int i = 0; i < 20; ++i) queue.Push(EntryOf("b"));
  queue.Push(EntryOf("a"));
  for (int i = 0; i < 12; ++i) {
    const std::string served = Serve(queue, {{"a", 5}, {"b", 1}}, 1);
    if (served == "a") queue.Push(EntryOf("a"));
    order += served;
  }
  EXPECT_EQ(order, "abbbbbabbbbb");
}

TEST(FairQueue, ShortEntriesPassLongOnes) {
  FairQueue queue;
  queue.Push(EntryOf("a", 100));
  queue.Push(EntryOf("a", 1));
  queue.Push(EntryOf("b", 100));
  EXPECT_EQ(queue.Pop(10)->bytes, 1u);
  EXPECT_FALSE(queue.Pop(10).has_value());
  EXPECT_EQ(queue.Pop(kAny)->owner, "b");  // a is being served
  EXPECT_EQ(queue.Pop(kAny)->owner, "a");
  EXPECT_FALSE(queue.Pop(kAny).has_value());
}

}  // namespace
}  // namespace treadle
