// Files of stored requests that are damaged: what is read is what was written, or a beginning of
// it, and the log names what was lost.
#include <sys/resource.h>
#include <sys/stat.h>

#include <cstring>

#include "base/checksum.h"
#include "tests/server/durable/request_journal_case.h"

namespace treadle {
namespace {

namespace fs = std::filesystem;
using testing::Contains;
using testing::HasSubstr;
using testing::IsEmpty;

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
      ExpectBeginnings(contents);
      EXPECT_THAT(logged_, Contains(HasSubstr("durable_answers_cut")));
      Restore(files);
      WriteFile(Segment(1), copied);
      ASSERT_TRUE(Open().ok());
      ExpectBeginnings(contents);
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
        ExpectBeginnings(contents);
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
    ExpectAll(contents);
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
  ExpectAll(contents);
  journal_.reset();
  constexpr size_t kSummed = SegmentHeader::kBytes - sizeof(uint64_t);
  const uint64_t sum = Checksum(0, reinterpret_cast<const std::byte*>(later.data()), kSummed);
  std::memcpy(later.data() + kSummed, &sum, sizeof sum);
  WriteFile(Segment(7), later);
  const absl::Status refused = Open();
  EXPECT_TRUE(absl::IsFailedPrecondition(refused));
  EXPECT_THAT(refused.message(), HasSubstr("00000007.log has format 9, which another version"));
}

}  // namespace
}  // namespace treadle
