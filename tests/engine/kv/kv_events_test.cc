// Readers of the prefix cache's events, however slow, come to know what it holds.
#include "engine/kv/kv_events.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "engine/kv/kv_slot_manager.h"

namespace treadle {
namespace {

using testing::IsEmpty;
using testing::SizeIs;

constexpr int64_t kPage = 4;

// One that follows the events, as a gateway does.
class Reader {
 public:
  explicit Reader(KvEventLog& log) : log_(log) {}

  // False: there was nothing to read.
  bool Read(size_t most) {
    const KvEventLog::Part part = log_.Read(cursor_, most);
    EXPECT_LE(part.events.size(), most);
    if (part.resync) {
      ++resyncs;
      blocks.clear();
    }
    for (const auto& event : part.events) {
      if (event->ids.empty()) {
        EXPECT_EQ(blocks.erase(event->hash), 1u) << "removed before it was stored";
      } else {
        EXPECT_TRUE(blocks.emplace(event->hash, *event).second) << "stored twice";
        EXPECT_TRUE(event->parent == 0 || blocks.contains(event->parent)) << "before its parent";
      }
    }
    return part.resync || !part.events.empty();
  }
  // How many of the ids it takes to be cached, of whatever salt.
  int64_t Cached(std::span<const int32_t> ids) const {
    std::set<uint64_t> ends = {0};
    for (int64_t tokens = 0;; tokens += kPage) {
      const auto page = ids.subspan(0, std::min<size_t>(ids.size(), kPage));
      std::set<uint64_t> next;
      for (const auto& [hash, block] : blocks) {
        if (ends.contains(block.parent) && std::ranges::equal(block.ids, page)) next.insert(hash);
      }
      if (next.empty()) return tokens;
      ends = next;
      ids = ids.subspan(page.size());
    }
  }

  std::map<uint64_t, KvBlockEvent> blocks;
  int resyncs = 0;

 private:
  KvEventLog& log_;
  KvEventLog::Cursor cursor_;
};

struct Sequence {
  std::string salt;
  std::vector<int32_t> ids;
  SequencePages pages;
};

TEST(KvEvents, EveryReaderComesToKnowWhatIsKept) {
  std::mt19937 random(7);
  const auto upto = [&](int most) { return std::uniform_int_distribution<int>(0, most)(random); };
  int resyncs = 0;
  for (int round = 0; round < 60; ++round) {
    KvEventLog log(static_cast<size_t>(8 + upto(60)));
    KvSlotManager kv(64, {.page_size = kPage}, 8 + upto(56), &log);
    std::vector<Reader> readers(3, Reader(log));
    std::vector<Sequence> running, asked;
    for (int step = 0; step < 300; ++step) {
      const int what = upto(19);
      if (what < 8) {
        // Few ids, so that prompts begin alike.
        Sequence sequence{.salt = upto(1) == 0 ? "a" : "b", .ids = {}, .pages = {}};
        for (int i = 1 + upto(30); i > 0; --i) sequence.ids.push_back(upto(1));
        const std::span<const int32_t> ids = sequence.ids;
        const KvSlotManager::Prefix prefix{sequence.salt, ids.first(ids.size() - 1)};
        auto pages = kv.Admit(std::ssize(ids), std::ssize(ids) + 3, 1, prefix);
        if (!pages) continue;
        sequence.pages = pages->front();
        kv.Keep(prefix, sequence.pages, {0, std::ssize(ids)});
        asked.push_back(sequence);
        running.push_back(std::move(sequence));
      } else if (what < 14 && !running.empty()) {
        std::swap(running[static_cast<size_t>(upto(static_cast<int>(running.size()) - 1))],
                  running.back());
        const Sequence& ended = running.back();
        kv.KeepAndRelease({ended.salt, ended.ids}, ended.pages, {0, std::ssize(ended.ids)});
        running.pop_back();
      } else if (what == 14 && !running.empty()) {
        kv.Forget(running.back().pages, upto(30));
      } else if (what == 15 && upto(9) == 0) {
        kv.ForgetAll();
      } else {
        readers[static_cast<size_t>(upto(1))].Read(static_cast<size_t>(1 + upto(9)));
        kv.TellWhatIsKept();
      }
    }
    for (Reader& reader : readers) {  // one begins only now
      do {
        kv.TellWhatIsKept();
      } while (reader.Read(5) || log.wanted());
      int64_t kept = 0;
      for (const Sequence& sequence : asked) {
        const int64_t found =
            std::max(kv.Find({"a", sequence.ids}).tokens, kv.Find({"b", sequence.ids}).tokens);
        EXPECT_EQ(reader.Cached(sequence.ids), found) << "round " << round;
        kept = std::max(kept, found);
      }
      EXPECT_EQ(reader.blocks.size(), readers[0].blocks.size());
      EXPECT_GE(reader.resyncs, 1);
      resyncs += reader.resyncs - 1;
    }
  }
  EXPECT_GT(resyncs, 50);  // or nobody was ever too slow
}

// Sequences with rings, of states or windows, beside whole pages, which events are about: a third
// one begins at the copy of a window page that the cache kept of the second, where the two before
// it part.
TEST(KvEvents, TellNothingOfCopiesForBranches) {
  KvEventLog log(100);
  KvSlotManager kv({60, 9}, {.page_size = kPage, .ring = 2, .whole = true, .window = kPage + 1},
                   {60, 9}, &log);
  Reader early(log);
  early.Read(100);
  kv.TellWhatIsKept();
  const auto prompt_of = [](int32_t own) {
    std::vector<int32_t> ids(40, own);
    std::iota(ids.begin(), ids.begin() + 14, 0);
    return ids;
  };
  for (const int32_t own : {100, 200, 300}) {
    const std::vector<int32_t> ids = prompt_of(own);
    const auto first = [&](int64_t count) {
      return KvSlotManager::Prefix{"", std::span(ids).first(static_cast<size_t>(count))};
    };
    SequencePages pages = kv.Admit(40, 40, 1, first(39))->front();
    SequencePages* const tables[] = {&pages};
    const int64_t begun = kv.ShareKept(first(39), tables);
    EXPECT_EQ(begun, own == 300 ? 12 : 0);
    IterationPlan plan;
    kv.AddPrefixCopies(first(begun), pages, plan);
    for (int64_t next = begun, end = 0; next < 40; next = end) {
      if (next == 12 && own == 200) EXPECT_THAT(kv.KeepCopies(first(12), pages, plan), SizeIs(1));
      end = next < 12 ? 12 : 40;
      kv.NoteWrites(pages, next, end);
      kv.Keep(first(std::min<int64_t>(end, 39)), pages, {begun, end});
    }
    kv.KeepAndRelease(first(40), pages, {begun, 40});
    while (early.Read(5)) {
    }
  }
  Reader late(log);
  do {
    kv.TellWhatIsKept();
  } while (late.Read(5) || log.wanted());
  const std::vector<int32_t> next = prompt_of(400);
  EXPECT_EQ(kv.Find({"", next}).tokens, 12);
  for (const Reader& reader : {early, late}) {
    EXPECT_EQ(reader.Cached(next), 12);
    EXPECT_THAT(reader.blocks, SizeIs(3 + 3 * 7));  // common ones, and those of each
  }
}

TEST(KvEvents, HashesTellNoSalts) {
  const std::vector<int32_t> ids = {1, 2, 3, 4, 5, 6, 7, 8};
  std::set<uint64_t> hashes;
  for (int process = 0; process < 2; ++process) {
    KvEventLog log(100);
    KvSlotManager kv(64, {.page_size = kPage}, 64, &log);
    Reader reader(log);
    for (const char* const salt : {"alice", "bob"}) {
      const auto pages = *kv.Admit(8, 8, 1);
      kv.KeepAndRelease({salt, ids}, pages[0], {0, 8});
    }
    EXPECT_FALSE(reader.Read(100));
    kv.TellWhatIsKept();
    EXPECT_TRUE(reader.Read(100));
    EXPECT_THAT(reader.blocks, SizeIs(4));
    for (const auto& [hash, block] : reader.blocks) hashes.insert(hash);
  }
  EXPECT_THAT(hashes, SizeIs(8)) << "equal for two salts, or foretold by another process's";
}

// However many readers come, and however slow they are, the loop makes a snapshot only after as
// many changes as the ring holds.
TEST(KvEvents, ASnapshotServesAllWhoComeBeforeTheRingHasTurned) {
  KvEventLog log(10);
  std::vector<Reader> readers(20, Reader(log));
  int snapshots = 0;
  for (uint64_t change = 1; change <= 100; ++change) {
    log.Change({.hash = change, .parent = 0, .ids = {1}});
    for (Reader& reader : readers) reader.Read(1);
    readers.emplace_back(log);
    if (!log.wanted()) continue;
    ++snapshots;
    log.Snapshot({});
  }
  EXPECT_LE(snapshots, 100 / 10 + 1);
  EXPECT_GE(snapshots, 5);
}

TEST(KvEvents, NothingIsMadeForNobody) {
  KvEventLog log(10);
  for (uint64_t change = 1; change <= 100; ++change) log.Change({.hash = change, .ids = {1}});
  EXPECT_FALSE(log.wanted());
}

}  // namespace
}  // namespace treadle
