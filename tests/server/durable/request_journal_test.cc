// The files of stored requests: whatever happens to them, what is read is what was written, or a
// beginning of it, and the log names what was lost.
#include "server/durable/request_journal.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <random>
#include <span>
#include <sstream>

#include "base/checksum.h"
#include "base/status.h"
#include "tests/support/assert_ok.h"
#include "tests/support/whole_file.h"

namespace treadle {
namespace {

namespace fs = std::filesystem;
using testing::Contains;
using testing::HasSubstr;
using testing::IsEmpty;

void WriteFile(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}

// Stored requests by id: the request, and the pieces of its answer.
struct Stored {
  std::string request;
  std::vector<std::string> pieces;
  bool operator==(const Stored&) const = default;
};
using Contents = std::map<std::string, Stored>;

class RequestJournalTest : public testing::Test {
 protected:
  void SetUp() override {
    // In memory, where there is such a folder: thousands of starts do not wait for a disk.
    const std::string parent = access("/dev/shm", W_OK) == 0 ? "/dev/shm" : testing::TempDir();
    root_ = parent + Str("/treadle-request-journal-", getpid());
    folder_ = root_ + "/durable";
    fs::remove_all(root_);
    fs::create_directories(root_);
  }
  void TearDown() override {
    journal_.reset();
    fs::remove_all(root_);
  }

  absl::Status Open() {
    journal_.reset();
    logged_.clear();
    TREADLE_ASSIGN_OR_RETURN(
        journal_,
        RequestJournal::Open(folder_, {.log =
                                           [this](const LogEvent& event) {
                                             logged_.push_back(event.name + ": " + event.message);
                                           },
                                       .segment_bytes = segment_bytes_}));
    return absl::OkStatus();
  }
  absl::Status Commit(const std::function<void()>& write) {
    absl::Status status = journal_->Begin();
    if (status.ok()) {
      write();
      status = journal_->Commit();
    }
    if (!status.ok()) journal_->Rollback();
    return status;
  }
  uint64_t Insert(const std::string& id, const std::string& request) {
    const uint64_t number = journal_->next_number();
    EXPECT_TRUE(Commit([&] {
                  journal_->Insert({.number = number, .id = id, .owner = "o-" + id}, request);
                }).ok());
    return number;
  }
  absl::Status Append(uint64_t number, const std::string& piece) {
    return Commit([&] { journal_->Append(number, piece); });
  }
  absl::StatusOr<Stored> Read(uint64_t number) {
    Stored read;
    TREADLE_ASSIGN_OR_RETURN(read.request, journal_->Request(number));
    TREADLE_RETURN_IF_ERROR(journal_->ForEachPiece(number, [&](std::string_view piece) {
      read.pieces.emplace_back(piece);
      return absl::OkStatus();
    }));
    return read;
  }
  uint64_t NumberOf(const std::string& id) {
    for (const RequestJournal::Row& row : journal_->Rows()) {
      if (row.id == id) return row.number;
    }
    return 0;
  }
  std::vector<std::string> Files() const {
    std::vector<std::string> files;
    for (const auto& entry : fs::directory_iterator(folder_)) files.push_back(entry.path());
    std::ranges::sort(files);
    return files;
  }

  // Three requests, with pieces between each other's, in two segments, and a third one that is
  // empty: what is damaged in the second one is not at the end of the last.
  Contents Fill() {
    Contents contents;
    EXPECT_TRUE(Open().ok());
    std::map<std::string, uint64_t> numbers;
    for (const std::string id : {"one", "two", "three"}) {
      contents[id].request = "request " + id;
      numbers[id] = Insert(id, contents[id].request);
    }
    for (int i = 0; i < 6; ++i) {
      if (i == 3) {
        EXPECT_TRUE(Open().ok());
        for (const auto& [id, number] : numbers) EXPECT_TRUE(Read(number).ok());
      }
      for (const auto& [id, number] : numbers) {
        contents[id].pieces.push_back(Str(id, " piece ", i));
        EXPECT_TRUE(Append(number, contents[id].pieces.back()).ok());
      }
    }
    EXPECT_TRUE(Open().ok());
    EXPECT_THAT(logged_, IsEmpty());
    journal_.reset();
    return contents;
  }
  // Opens what was damaged. Whatever is there is right; whatever is not was told. How many requests
  // lack something.
  int Check(const Contents& contents) {
    const absl::Status opened = Open();
    EXPECT_TRUE(opened.ok()) << opened;
    if (!opened.ok()) return -1;
    int lacking = 0;
    for (const auto& [id, stored] : contents) {
      const uint64_t number = NumberOf(id);
      const auto read = number == 0 ? absl::NotFoundError("") : Read(number);
      if (read.ok() && *read == stored) continue;
      ++lacking;
      EXPECT_THAT(logged_, Contains(HasSubstr("durable_damaged: "))) << id;
      if (!read.ok()) {
        EXPECT_TRUE(absl::IsNotFound(read.status()) || absl::IsDataLoss(read.status()));
        EXPECT_THAT(logged_, Contains(HasSubstr("durable_requests_lost: "))) << id;
        if (number != 0) {
          EXPECT_THAT(logged_, Contains(HasSubstr("'" + id + "'")));
          EXPECT_THAT(read.status().message(), HasSubstr("'" + id + "'"));
        }
        continue;
      }
      EXPECT_EQ(read->request, stored.request);
      const size_t whole = read->pieces.size();
      EXPECT_LT(whole, stored.pieces.size());
      EXPECT_TRUE(std::ranges::equal(read->pieces, std::span(stored.pieces).first(whole))) << id;
    }
    return lacking;
  }
  // The lost part is computed again, in pieces of other sizes, and is there after another start,
  // damage or not.
  void CheckGoesOn(const Contents& contents) {
    Contents expected;
    for (const auto& [id, stored] : contents) {
      const uint64_t number = NumberOf(id);
      auto read = Read(number);
      if (number == 0 || !read.ok()) continue;
      expected[id] = *read;
      if (*read == stored) continue;
      for (int i = 0; i < 2; ++i) {
        expected[id].pieces.push_back(Str(id, " again ", i));
        EXPECT_TRUE(Append(number, expected[id].pieces.back()).ok());
      }
    }
    EXPECT_TRUE(Open().ok());
    for (const auto& [id, stored] : expected) EXPECT_EQ(Read(NumberOf(id)).value(), stored) << id;
    EXPECT_THAT(logged_, testing::Not(Contains(HasSubstr("durable_answers_cut"))));
  }
  void Restore(const std::map<std::string, std::string>& files) {
    journal_.reset();
    fs::remove_all(folder_);
    fs::create_directories(folder_);
    for (const auto& [path, bytes] : files) WriteFile(path, bytes);
  }
  std::map<std::string, std::string> Save() {
    std::map<std::string, std::string> files;
    for (const std::string& path : Files()) files[path] = ReadWhole(path);
    return files;
  }
  std::string Segment(int number) const {
    return Str(folder_, "/requests-0000000", number, ".log");
  }

  std::string root_, folder_;
  uint64_t segment_bytes_ = 1 << 20;
  std::vector<std::string> logged_;
  std::unique_ptr<RequestJournal> journal_;
};

TEST_F(RequestJournalTest, FilesAreTheirUsersAlone) {
  Fill();
  EXPECT_THAT(Files(), testing::ElementsAre(folder_ + "/lock", Segment(1), Segment(2), Segment(3)));
  for (const std::string& path : Files()) {
    struct stat info {};
    ASSERT_EQ(stat(path.c_str(), &info), 0);
    EXPECT_EQ(info.st_mode & 0777, 0600u) << path;
  }
}

TEST_F(RequestJournalTest, AFlippedBitIsFound) {
  const Contents contents = Fill();
  const auto files = Save();
  int lacking = 0;
  for (const auto& [path, bytes] : files) {
    for (size_t bit = 0; bit < 8 * bytes.size(); ++bit) {
      SCOPED_TRACE(Str(path, ", bit ", bit));
      const size_t i = bit / 8;
      Restore(files);
      std::string damaged = bytes;
      damaged[i] = static_cast<char>(damaged[i] ^ 1 << bit % 8);
      WriteFile(path, damaged);
      const int lack = Check(contents);
      ASSERT_TRUE(lack == 0 || lack == 1);
      if (i >= SegmentHeader::kBytes) {
        EXPECT_EQ(lack, 1);
      }
      lacking += lack;
      if (lack == 1 && bit % 5 == 0) CheckGoesOn(contents);
      if (HasFailure()) return;
    }
  }
  EXPECT_GT(lacking, 8 * 500);
}

TEST_F(RequestJournalTest, BytesThatRotWhileTheServerRunsAreFound) {
  const Contents contents = Fill();
  ASSERT_TRUE(Open().ok());
  std::string bytes = ReadWhole(Segment(2));
  const size_t at = bytes.find("two piece 4");
  ++bytes[at];
  WriteFile(Segment(2), bytes);
  const uint64_t number = NumberOf("two");
  EXPECT_EQ(Read(number)->pieces.size(), 4u);
  EXPECT_THAT(logged_, Contains(HasSubstr("computed again: 'two' from piece 5")));
  EXPECT_TRUE(Append(number, "two again").ok());
  for (int i = 0; i < 2; ++i) {
    const auto read = Read(number);
    ASSERT_EQ(read->pieces.size(), 5u);
    EXPECT_EQ(read->pieces.back(), "two again");
    --bytes[at];  // as it was
    WriteFile(Segment(2), bytes);
    ASSERT_TRUE(Open().ok());
  }
  EXPECT_EQ(Read(NumberOf("one")).value(), contents.at("one"));

  bytes = ReadWhole(Segment(1));
  ++bytes[bytes.find("request three")];
  WriteFile(Segment(1), bytes);
  const absl::Status lost = Read(NumberOf("three")).status();
  EXPECT_TRUE(absl::IsDataLoss(lost));
  EXPECT_THAT(lost.message(), HasSubstr("'three' is damaged: it cannot be resumed"));
  EXPECT_THAT(logged_, Contains(HasSubstr("durable_requests_lost")));
}

TEST_F(RequestJournalTest, DamageIsCountedAndNamed) {
  const Contents contents = Fill();
  std::string bytes = ReadWhole(Segment(1));
  const size_t begin = bytes.find("request two"), end = bytes.find("two piece 1");
  std::fill(bytes.begin() + static_cast<ptrdiff_t>(begin),
            bytes.begin() + static_cast<ptrdiff_t>(end), '\0');
  WriteFile(Segment(1), bytes);
  EXPECT_EQ(Check(contents), 3);  // one and three lack their first pieces
  EXPECT_THAT(logged_, Contains(HasSubstr("requests-00000001.log (")));
  EXPECT_THAT(logged_, Contains(HasSubstr("cannot be resumed: 'two', request number 3")));
  EXPECT_THAT(logged_, Contains(HasSubstr("computed again: 'one' from piece 1")));
}

// Equal frames change places, or one is copied over another.
TEST_F(RequestJournalTest, FramesThatWereMovedAreFound) {
  Contents contents;
  ASSERT_TRUE(Open().ok());
  std::vector<uint64_t> numbers;
  for (const std::string id : {"a", "b"}) {
    contents[id].request = id;
    numbers.push_back(Insert(id, id));
  }
  for (int i = 0; i < 4; ++i) {
    for (size_t n = 0; n < 2; ++n) {
      contents[n == 0 ? "a" : "b"].pieces.push_back(Str(n, "-", i));
      ASSERT_TRUE(Append(numbers[n], Str(n, "-", i)).ok());
    }
  }
  ASSERT_TRUE(Open().ok());
  const auto files = Save();
  const std::string& bytes = files.at(Segment(1));
  constexpr size_t kBytes = kFrameBytes + 3;
  const size_t first = bytes.size() - 8 * kBytes;
  for (size_t i = 0; i < 8; ++i) {
    for (size_t j = 0; j < 8; ++j) {
      if (i == j) continue;
      SCOPED_TRACE(Str(i, " ", j));
      const std::string one = bytes.substr(first + i * kBytes, kBytes),
                        other = bytes.substr(first + j * kBytes, kBytes);
      std::string copied = bytes;
      copied.replace(first + j * kBytes, kBytes, one);
      std::string swapped = copied;
      swapped.replace(first + i * kBytes, kBytes, other);
      Restore(files);
      WriteFile(Segment(1), swapped);
      EXPECT_EQ(Check(contents), 0) << "a frame says itself what it is";
      // Where they are read.
      Restore(files);
      ASSERT_TRUE(Open().ok());
      WriteFile(Segment(1), swapped);
      for (const std::string id : {"a", "b"}) {
        const auto read = Read(NumberOf(id));
        EXPECT_TRUE(std::ranges::equal(read->pieces,
                                       std::span(contents[id].pieces).first(read->pieces.size())));
      }
      EXPECT_THAT(logged_, Contains(HasSubstr("durable_answers_cut")));
      Restore(files);
      WriteFile(Segment(1), copied);
      ASSERT_TRUE(Open().ok());
      for (const std::string id : {"a", "b"}) {
        const auto read = Read(NumberOf(id));
        EXPECT_TRUE(std::ranges::equal(read->pieces,
                                       std::span(contents[id].pieces).first(read->pieces.size())));
      }
    }
  }
}

// The same requests, numbers and places, in another folder.
TEST_F(RequestJournalTest, AnotherStoresFramesAreFound) {
  Fill();
  const std::string other = ReadWhole(Segment(1));
  Restore({});
  const Contents contents = Fill();
  const auto files = Save();
  WriteFile(Segment(1), other);
  EXPECT_EQ(Check(contents), 3);
  EXPECT_THAT(journal_->Rows(), IsEmpty());
  Restore(files);
  std::string mixed = files.at(Segment(1));
  const size_t at = mixed.find("one piece 2") - kFrameBytes, bytes = kFrameBytes + 11;
  mixed.replace(at, bytes, other.substr(at, bytes));
  WriteFile(Segment(1), mixed);
  EXPECT_EQ(Check(contents), 1);
  EXPECT_EQ(Read(NumberOf("one"))->pieces.size(), 2u);
}

TEST_F(RequestJournalTest, AFileMayEndAnywhere) {
  const Contents contents = Fill();
  const auto files = Save();
  for (const bool last : {false, true}) {
    for (size_t size = 0; size < files.at(Segment(2)).size(); ++size) {
      SCOPED_TRACE(Str(last, " ", size));
      Restore(files);
      if (last) fs::remove(Segment(3));
      fs::resize_file(Segment(2), size);
      if (!last) {
        Check(contents);
        EXPECT_THAT(logged_, Contains(HasSubstr("requests-00000002.log (")));
        continue;
      }
      // A crash leaves that: nothing to tell, and not at the next start.
      for (int i = 0; i < 2; ++i) {
        ASSERT_TRUE(Open().ok());
        EXPECT_THAT(logged_, IsEmpty());
        for (const auto& [id, stored] : contents) {
          ASSERT_OK_AND_ASSIGN(const auto read, Read(NumberOf(id)));
          EXPECT_TRUE(
              std::ranges::equal(read.pieces, std::span(stored.pieces).first(read.pieces.size())));
        }
      }
    }
  }
  // A request that was never whole was never told of.
  Restore({{folder_ + "/lock", files.at(folder_ + "/lock")}});
  const std::string& bytes = files.at(Segment(1));
  for (size_t size = 0; size < bytes.find("request one"); ++size) {
    WriteFile(Segment(1), bytes.substr(0, size));
    ASSERT_TRUE(Open().ok());
    EXPECT_THAT(logged_, IsEmpty()) << size;
    EXPECT_THAT(journal_->Rows(), IsEmpty());
    Restore({{folder_ + "/lock", files.at(folder_ + "/lock")}});
  }
}

TEST_F(RequestJournalTest, AFileThatIsMissingIsTold) {
  const Contents contents = Fill();
  fs::remove(Segment(2));
  EXPECT_EQ(Check(contents), 3);
  EXPECT_THAT(logged_, Contains(HasSubstr("requests-00000002.log (")));
}

// This is no damage: nothing is deleted, and all is there later.
TEST_F(RequestJournalTest, AFileThatCannotBeOpenedNowLosesNothing) {
  const Contents contents = Fill();
  ASSERT_TRUE(Open().ok());
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  rlimit none = before;
  none.rlim_cur = 0;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
  const absl::Status read = Read(NumberOf("one")).status();
  const absl::Status opened = RequestJournal::Open(folder_, {}).status();
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_TRUE(absl::IsUnavailable(read)) << read;
  EXPECT_THAT(read.message(), HasSubstr("requests-00000001.log: cannot be opened: Too many open"));
  EXPECT_TRUE(absl::IsUnavailable(opened)) << opened;
  for (int i = 0; i < 2; ++i) {
    for (const auto& [id, stored] : contents) EXPECT_EQ(Read(NumberOf(id)).value(), stored);
    ASSERT_TRUE(Open().ok());
    EXPECT_THAT(logged_, IsEmpty());
  }
}

TEST_F(RequestJournalTest, AFolderIsOneProcesss) {
  Fill();
  ASSERT_TRUE(Open().ok());
  const auto second = RequestJournal::Open(folder_, {});
  EXPECT_TRUE(absl::IsFailedPrecondition(second.status()));
  EXPECT_THAT(second.status().message(), HasSubstr(folder_ + " is in use by another process"));
}

TEST_F(RequestJournalTest, OtherVersionsAreRefusedOrLeftAlone) {
  const Contents contents = Fill();
  WriteFile(folder_ + "/requests.sqlite", "of an older version");
  ASSERT_TRUE(Open().ok());
  EXPECT_THAT(logged_, testing::ElementsAre(HasSubstr("requests.sqlite was written by another")));
  EXPECT_EQ(ReadWhole(folder_ + "/requests.sqlite"), "of an older version");
  journal_.reset();
  std::string later = SegmentHeader{.store = 7}.ToBytes();
  later[7] = 9;
  WriteFile(Segment(7), later);  // damaged
  ASSERT_TRUE(Open().ok());
  for (const auto& [id, stored] : contents) EXPECT_EQ(Read(NumberOf(id)).value(), stored);
  journal_.reset();
  constexpr size_t kSummed = SegmentHeader::kBytes - sizeof(uint64_t);
  const uint64_t sum = Checksum(0, reinterpret_cast<const std::byte*>(later.data()), kSummed);
  std::memcpy(later.data() + kSummed, &sum, sizeof sum);
  WriteFile(Segment(7), later);
  const absl::Status refused = Open();
  EXPECT_TRUE(absl::IsFailedPrecondition(refused));
  EXPECT_THAT(refused.message(), HasSubstr("00000007.log has format 9, which another version"));
}

// Deleted, moved and replaced while it is in use.

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
    const auto count = [&](uint64_t number) {
      const auto read = Read(number);
      if (!read.ok()) return -1;
      EXPECT_EQ(read->request, Str("request ", number));
      int tokens = 0;
      for (const std::string& piece : read->pieces) {
        std::istringstream in(piece);
        for (int token; in >> token; ++tokens) EXPECT_EQ(token, tokens);
      }
      return tokens;
    };
    int made = 0;
    for (int step = 0; step < 300; ++step) {
      const unsigned what = below(100);
      if (what < 10) {
        told[Insert(Str("id", made++), Str("request ", journal_->next_number()))] = 0;
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
          const std::string path = Files()[below(Files().size())];
          std::string bytes = ReadWhole(path);
          const unsigned at = below(bytes.size());
          bytes[at] = static_cast<char>(bytes[at] ^ 1 << below(8));
          WriteFile(path, bytes);
        }
        ASSERT_TRUE(Open().ok());
        if (!damage) {
          EXPECT_THAT(logged_, IsEmpty());
          EXPECT_EQ(journal_->Rows().size(), told.size());
        }
        for (auto request = told.begin(); request != told.end();) {
          const int tokens = count(request->first);
          if (!damage) {
            EXPECT_EQ(tokens, request->second);
          }
          request->second = tokens;
          request = tokens < 0 ? told.erase(request) : std::next(request);
        }
      }
      if (HasFailure()) return;
    }
    if (damage) continue;
    for (int i = 0; i < 100; ++i) ASSERT_TRUE(Commit([] {}).ok());
    uint64_t on_disk = 0, needed = 0;
    for (const std::string& path : Files()) on_disk += fs::file_size(path);
    for (const RequestJournal::Row& row : journal_->Rows())
      needed += static_cast<uint64_t>(row.bytes);
    EXPECT_LE(on_disk, 2 * needed + 5 * segment_bytes_);
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
    uint64_t on_disk = 0;
    for (const std::string& path : Files()) on_disk += fs::file_size(path);
    ASSERT_LE(on_disk, 6 * segment_bytes_);
  }
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(Read(old)->pieces.size(), 10u);
    ASSERT_TRUE(Open().ok());
    EXPECT_THAT(logged_, IsEmpty());
  }
}

}  // namespace
}  // namespace treadle
