// A journal in a folder of its own, and checks that whatever is in it is what was written, or a
// beginning of it.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "server/durable/request_journal.h"
#include "tests/support/whole_file.h"

namespace treadle {

inline void WriteFile(const std::string& path, const std::string& bytes) {
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
    std::filesystem::remove_all(root_);
    std::filesystem::create_directories(root_);
  }
  void TearDown() override {
    journal_.reset();
    std::filesystem::remove_all(root_);
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
    for (const auto& entry : std::filesystem::directory_iterator(folder_))
      files.push_back(entry.path());
    std::ranges::sort(files);
    return files;
  }

  uint64_t BytesOnDisk() const {
    uint64_t bytes = 0;
    for (const std::string& path : Files()) bytes += std::filesystem::file_size(path);
    return bytes;
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
    EXPECT_THAT(logged_, testing::IsEmpty());
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
      EXPECT_THAT(logged_, testing::Contains(testing::HasSubstr("durable_damaged: "))) << id;
      if (!read.ok()) {
        EXPECT_TRUE(absl::IsNotFound(read.status()) || absl::IsDataLoss(read.status()));
        EXPECT_THAT(logged_, testing::Contains(testing::HasSubstr("durable_requests_lost: ")))
            << id;
        if (number != 0) {
          EXPECT_THAT(logged_, testing::Contains(testing::HasSubstr("'" + id + "'")));
          EXPECT_THAT(read.status().message(), testing::HasSubstr("'" + id + "'"));
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
    ExpectAll(expected);
    EXPECT_THAT(logged_,
                testing::Not(testing::Contains(testing::HasSubstr("durable_answers_cut"))));
  }
  // As much of each of these answers as there is must be its beginning.
  void ExpectBeginnings(const Contents& contents) {
    for (const auto& [id, stored] : contents) {
      const auto read = Read(NumberOf(id));
      ASSERT_TRUE(read.ok()) << id << " " << read.status();
      EXPECT_TRUE(
          std::ranges::equal(read->pieces, std::span(stored.pieces).first(read->pieces.size())));
    }
  }
  void ExpectAll(const Contents& contents) {
    for (const auto& [id, stored] : contents) EXPECT_EQ(Read(NumberOf(id)).value(), stored) << id;
  }
  void Restore(const std::map<std::string, std::string>& files) {
    journal_.reset();
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directories(folder_);
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

}  // namespace treadle
