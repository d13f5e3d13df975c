// Stored requests through deletions of their files while these are in use, and through random
// histories; and the disk that they take.
#include <random>
#include <sstream>

#include "tests/server/durable/request_journal_case.h"

namespace treadle {
namespace {

namespace fs = std::filesystem;
using testing::Contains;
using testing::HasSubstr;
using testing::IsEmpty;

TEST_F(RequestJournalTest, AFolderThatIsDeletedIsNoticedAndMadeAnew) {
  const std::vector<std::function<void()>> ways = {
      [&] { fs::remove_all(folder_); },
      [&] { fs::remove(Files().back()); },
      [&] { fs::rename(folder_, folder_ + ".moved"); },
      [&] {
        fs::rename(folder_, folder_ + ".moved");
        fs::create_directories(folder_);
      },
      [&] {  // a file of the same name
        const std::string path = Files().back(), bytes = ReadWhole(path);
        fs::remove(path);
        WriteFile(path, bytes);
      },
  };
  for (size_t way = 0; way < ways.size(); ++way) {
    for (const bool synced_first : {false, true}) {
      SCOPED_TRACE(Str(way, synced_first));
      journal_.reset();
      fs::remove_all(root_);
      fs::create_directories(root_);
      ASSERT_TRUE(Open().ok());
      const uint64_t running = Insert("running", "r");
      ASSERT_TRUE(Append(running, "piece 0").ok());
      ASSERT_TRUE(journal_->Sync().ok());
      ways[way]();
      const absl::Status noticed = synced_first ? journal_->Sync() : Append(running, "piece 1");
      if (noticed.ok()) {  // it has begun anew before
        EXPECT_FALSE(synced_first);
      } else {
        EXPECT_TRUE(absl::IsUnavailable(noticed));
        EXPECT_THAT(noticed.message(), HasSubstr("was deleted while it was in use"));
      }
      // It runs on, and is not half stored.
      EXPECT_TRUE(Append(running, "piece 2").ok());
      EXPECT_THAT(logged_, Contains(HasSubstr("durable_files_lost")));
      const uint64_t next = Insert("next", "n");
      EXPECT_GT(next, running);
      EXPECT_TRUE(Append(next, "piece").ok());
      EXPECT_FALSE(journal_->Sync().ok()) << "what was in the file that is lost";
      EXPECT_TRUE(journal_->Sync().ok());
      for (const bool again : {false, true}) {
        if (again) {
          ASSERT_TRUE(Open().ok());
        }
        const auto read = Read(running);
        if (way == 4) {  // what is in it is as it was
          EXPECT_EQ(read->pieces, std::vector<std::string>{"piece 0"});
        } else {
          EXPECT_TRUE(absl::IsNotFound(read.status()));
        }
        EXPECT_EQ(Read(next).value(), (Stored{"n", {"piece"}}));
      }
    }
  }
}

TEST_F(RequestJournalTest, AnEarlierSegmentThatIsDeletedCostsItsRequests) {
  const Contents contents = Fill();
  ASSERT_TRUE(Open().ok());
  fs::remove(Segment(2));
  for (const auto& [id, stored] : contents) EXPECT_EQ(Read(NumberOf(id))->pieces.size(), 3u);
  EXPECT_THAT(logged_, Contains(HasSubstr("from piece 4")));
  fs::remove(Segment(1));
  for (const auto& [id, stored] : contents) {
    EXPECT_TRUE(absl::IsDataLoss(Read(NumberOf(id)).status()));
  }
}

TEST_F(RequestJournalTest, AnotherStoresFolderIsNotMixedIn) {
  Fill();
  fs::rename(folder_, root_ + "/other");
  Fill();
  ASSERT_TRUE(Open().ok());
  const uint64_t one = NumberOf("one");
  fs::rename(folder_, root_ + "/mine");
  fs::rename(root_ + "/other", folder_);
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(absl::IsUnavailable(Append(one, "more")));
  EXPECT_THAT(std::string(Append(one, "more").message()), HasSubstr("folder of another server"));
  fs::rename(folder_, root_ + "/other");
  fs::rename(root_ + "/mine", folder_);
  EXPECT_TRUE(Append(one, "more").ok());
  EXPECT_EQ(Read(one)->pieces.size(), 6u) << "its session has more than what is stored";
}

// The tokens of a request that was told of; -1: it is lost.
int TokensIn(const absl::StatusOr<Stored>& read, uint64_t number) {
  if (!read.ok()) return -1;
  EXPECT_EQ(read->request, Str("request ", number));
  int tokens = 0;
  for (const std::string& piece : read->pieces) {
    std::istringstream in(piece);
    for (int token; in >> token; ++tokens) EXPECT_EQ(token, tokens);
  }
  return tokens;
}

void FlipABit(const std::string& path, std::mt19937& random) {
  std::string bytes = ReadWhole(path);
  char& byte = bytes[random() % bytes.size()];
  byte = static_cast<char>(byte ^ 1 << random() % 8);
  WriteFile(path, bytes);
}

// Requests whose answers count up from 0, written in pieces of any size, beside deletions, ends of
// the process, commits that are given up, and, in every third history, flipped bits. An answer that
// is read counts up from 0.
TEST_F(RequestJournalTest, RandomHistoriesHold) {
  segment_bytes_ = 700;
  for (unsigned seed = 0; seed < 60; ++seed) {
    SCOPED_TRACE(Str("seed ", seed));
    const bool damage = seed % 3 == 2;
    std::mt19937 random(seed);
    const auto below = [&](unsigned n) { return random() % n; };
    Restore({});
    ASSERT_TRUE(Open().ok());
    std::map<uint64_t, int> told;  // tokens of each request
    for (int step = 0; step < 300; ++step) {
      const unsigned what = below(100);
      if (what < 10) {
        told[Insert(Str("id", step), Str("request ", journal_->next_number()))] = 0;
      } else if (what < 80 && !told.empty()) {
        auto& [number, tokens] = *std::next(told.begin(), below(told.size()));
        std::string piece;
        const int end = tokens + 1 + static_cast<int>(below(5));
        for (int token = tokens; token < end; ++token) piece += Str(token, " ");
        if (below(10) == 0) {
          ASSERT_TRUE(journal_->Begin().ok());
          journal_->Append(number, piece);
          journal_->Rollback();
        } else {
          ASSERT_TRUE(Append(number, piece).ok());
          tokens = end;
        }
      } else if (what < 90 && !told.empty()) {
        const auto gone = std::next(told.begin(), below(told.size()));
        ASSERT_TRUE(Commit([&] { journal_->Delete(gone->first); }).ok());
        told.erase(gone);
      } else if (what < 95) {
        ASSERT_TRUE(Commit([] {}).ok());
      } else {
        journal_.reset();
        for (unsigned i = damage ? below(3) : 0; i > 0; --i) {
          FlipABit(Files()[below(Files().size())], random);
        }
        ASSERT_TRUE(Open().ok());
        if (!damage) {
          EXPECT_THAT(logged_, IsEmpty());
          EXPECT_EQ(journal_->Rows().size(), told.size());
        }
        for (auto& [number, tokens] : told) {
          const int found = TokensIn(Read(number), number);
          EXPECT_TRUE(damage || found == tokens) << found << " " << tokens;
          tokens = found;
        }
        std::erase_if(told, [](const auto& request) { return request.second < 0; });
      }
      if (HasFailure()) return;
    }
    if (damage) continue;
    for (int i = 0; i < 100; ++i) ASSERT_TRUE(Commit([] {}).ok());
    uint64_t needed = 0;
    for (const RequestJournal::Row& row : journal_->Rows())
      needed += static_cast<uint64_t>(row.bytes);
    EXPECT_LE(BytesOnDisk(), 2 * needed + 5 * segment_bytes_);
  }
}

// One old request does not keep all that came later.
TEST_F(RequestJournalTest, TheDiskIsBounded) {
  segment_bytes_ = 10'000;
  ASSERT_TRUE(Open().ok());
  const uint64_t old = Insert("old", "r");
  for (int i = 0; i < 1000; ++i) {
    const uint64_t number = Insert(Str("id", i), std::string(500, 'x'));
    ASSERT_TRUE(Append(number, std::string(500, 'y')).ok());
    if (i % 100 == 0) {
      ASSERT_TRUE(Append(old, Str("piece ", i)).ok());
    }
    ASSERT_TRUE(Commit([&] { journal_->Delete(number); }).ok());
    ASSERT_LE(BytesOnDisk(), 6 * segment_bytes_);
  }
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(Read(old)->pieces.size(), 10u);
    ASSERT_TRUE(Open().ok());
    EXPECT_THAT(logged_, IsEmpty());
  }
}

}  // namespace
}  // namespace treadle
