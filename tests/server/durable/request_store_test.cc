// Requests on disk, without a server: which survive, who may have it, and what happens
// where the disk is full.
#include "server/durable/request_store.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mount.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <future>
#include <thread>

#include "base/status.h"
#include "tests/support/assert_ok.h"
#include "tests/support/in_time.h"
#include "tests/support/whole_file.h"

namespace treadle {
namespace {

using testing::HasSubstr;

constexpr std::chrono::seconds kPatience{60};

class RequestStoreTest : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = testing::TempDir() + Str("/request-store-", getpid());
    std::filesystem::remove_all(folder_);
  }
  void TearDown() override {
    store_.reset();
    std::filesystem::remove_all(folder_);
  }

  absl::Status Open(RequestStore::Options options = {.fingerprint = "fp_1"}) {
    store_.reset();
    TREADLE_ASSIGN_OR_RETURN(auto journal, RequestJournal::Open(folder_, {.log = options.log}));
    TREADLE_ASSIGN_OR_RETURN(store_, RequestStore::Open(std::move(journal), std::move(options)));
    return absl::OkStatus();
  }
  static StoredRequest Request() {
    return {.kind = "test",
            .body = std::string("body\0with a zero", 16),
            .created = 1700000000,
            .prompt = {3, 1, 4},
            .seed = ~uint64_t{0},
            .max_new_tokens = 9};
  }
  // Tokens first.. of candidate 0, each with something to tell of it.
  static StreamBatch Piece(int32_t first, int32_t count, bool end = false) {
    StreamBatch piece;
    if (first == 0) piece.prompt_detail = {{.logprob = -0.5f, .top = {{7, -0.25f}, {8, -2}}}};
    for (int32_t i = first; i < first + count; ++i) {
      piece.tokens.push_back({.token = i, .detail = {.logprob = -0.1f * i, .top = {{i, -1}}}});
    }
    if (end) {
      piece.tokens.back().finish = FinishReason::kLength;
      piece.ended = true;
      piece.timings = {0.5, 1.5, 2.5};
    }
    return piece;
  }
  absl::StatusOr<std::unique_ptr<RequestStore::Stream>> Accept(const std::string& id,
                                                               const std::string& owner = "") {
    TREADLE_ASSIGN_OR_RETURN(auto stream, store_->Reserve({id, owner, [] {}}));
    stream->Accept(Request(), [](const absl::Status&) {});
    return stream;
  }
  static absl::Status Append(RequestStore::Stream& stream, const StreamBatch& piece) {
    std::promise<absl::Status> done;
    stream.Append(piece, [&](const absl::Status& status) { done.set_value(status); });
    auto result = done.get_future();
    if (result.wait_for(kPatience) != std::future_status::ready) _exit(1);
    return result.get();
  }
  absl::StatusOr<RequestStore::Resumed> Claim(const std::string& id,
                                              const std::string& owner = "") {
    return store_->Claim({id, owner, [] {}});
  }
  // Waits until nobody can have it any more.
  bool Goes(const std::string& id) {
    return ComesTrue([&] { return absl::IsNotFound(Claim(id).status()); });
  }

  std::string folder_;
  std::unique_ptr<RequestStore> store_;
};

TEST_F(RequestStoreTest, WhatWasToldIsThereAgain) {
  ASSERT_TRUE(Open().ok());
  {
    auto one = Accept("one"), other = Accept("other");
    ASSERT_TRUE(one.ok() && other.ok());
    EXPECT_TRUE(Append(**one, Piece(0, 2)).ok());
    EXPECT_TRUE(Append(**other, Piece(0, 4, /*end=*/true)).ok());
    EXPECT_TRUE(Append(**one, Piece(2, 1)).ok());
  }
  ASSERT_TRUE(Open().ok());
  for (const auto& [id, tokens] : {std::pair("one", 3), std::pair("other", 4)}) {
    ASSERT_OK_AND_ASSIGN(auto resumed, Claim(id));
    const StoredRequest& request = resumed.request;
    EXPECT_EQ(request.id, id);
    EXPECT_EQ(request.kind, "test");
    EXPECT_EQ(request.body, Request().body);
    EXPECT_EQ(request.created, 1700000000);
    EXPECT_EQ(request.prompt, Request().prompt);
    EXPECT_EQ(request.seed, ~uint64_t{0});
    EXPECT_EQ(request.max_new_tokens, 9);
    const StreamBatch& answer = resumed.answer;
    ASSERT_EQ(answer.prompt_detail.size(), 1u);
    EXPECT_EQ(answer.prompt_detail[0].top[1].logprob, -2);
    ASSERT_EQ(std::ssize(answer.tokens), tokens);
    for (int32_t i = 0; i < tokens; ++i) {
      EXPECT_EQ(answer.tokens[i].token, i);
      EXPECT_EQ(answer.tokens[i].detail.logprob, -0.1f * i);
      EXPECT_EQ(answer.tokens[i].detail.top.at(0).token, i);
    }
    EXPECT_EQ(answer.ended, tokens == 4);
    EXPECT_EQ(answer.tokens.back().finish,
              tokens == 4 ? FinishReason::kLength : FinishReason::kNone);
    if (answer.ended) {
      EXPECT_EQ(answer.timings.total, 2.5);
    } else {  // it goes on behind that
      EXPECT_TRUE(Append(*resumed.stream, Piece(3, 1, true)).ok());
    }
  }
  EXPECT_EQ(Claim("one")->answer.tokens.size(), 4u);
}

// Beside three streams that write all the time; opened by who knows nothing of the process before.
TEST_F(RequestStoreTest, ManyWriteAtOnce) {
  ASSERT_TRUE(Open().ok());
  std::vector<std::thread> writers;
  for (int w = 0; w < 3; ++w) {
    writers.emplace_back([&, w] {
      for (int r = 0; r < 5; ++r) {
        auto stream = Accept(Str(w, ".", r));
        for (int i = 0; i < 40; ++i) EXPECT_TRUE(Append(**stream, Piece(i, 1)).ok());
      }
    });
  }
  for (std::thread& writer : writers) writer.join();
  ASSERT_TRUE(Open().ok());
  for (int w = 0; w < 3; ++w) {
    for (int r = 0; r < 5; ++r) {
      ASSERT_OK_AND_ASSIGN(const auto resumed, Claim(Str(w, ".", r)));
      ASSERT_EQ(resumed.answer.tokens.size(), 40u);
      for (int32_t i = 0; i < 40; ++i) EXPECT_EQ(resumed.answer.tokens[i].token, i);
    }
  }
}

TEST_F(RequestStoreTest, AnIdIsOneRequests) {
  ASSERT_TRUE(Open().ok());
  {
    auto stream = Accept("a");
    EXPECT_THAT(std::string(store_->Reserve({"a", "", [] {}}).status().message()),
                HasSubstr("a request with the id 'a' is stored"));
    EXPECT_TRUE(Append(**stream, Piece(0, 1)).ok());
  }
  EXPECT_TRUE(absl::IsAlreadyExists(store_->Reserve({"a", "", [] {}}).status()));
  // One that was never accepted is nobody's.
  ASSERT_TRUE(store_->Reserve({"b", "", [] {}}).ok());
  EXPECT_TRUE(absl::IsNotFound(Claim("b").status()));
  EXPECT_TRUE(store_->Reserve({"b", "", [] {}}).ok());
}

TEST_F(RequestStoreTest, OnlyItsOwnerHasIt) {
  ASSERT_TRUE(Open().ok());
  EXPECT_TRUE(Append(**Accept("a", "alice"), Piece(0, 1)).ok());
  for (const bool again : {false, true}) {
    if (again) {
      ASSERT_TRUE(Open().ok());
    }
    for (const char* stranger : {"bob", ""}) {
      EXPECT_TRUE(absl::IsNotFound(Claim("a", stranger).status()));
    }
    EXPECT_TRUE(Claim("a", "alice").ok());
  }
}

TEST_F(RequestStoreTest, WhoHasItIsAskedToLetGo) {
  ASSERT_TRUE(Open().ok());
  int asked = 0;
  auto stream = store_->Reserve({"a", "alice", [&] { ++asked; }});
  (*stream)->Accept(Request(), [](const absl::Status&) {});
  EXPECT_TRUE(absl::IsNotFound(Claim("a", "bob").status()));
  EXPECT_EQ(asked, 0) << "by a stranger";
  EXPECT_TRUE(absl::IsAborted(Claim("a", "alice").status()));
  EXPECT_EQ(asked, 1);
  EXPECT_TRUE(Append(**stream, Piece(0, 1)).ok());
  stream->reset();
  EXPECT_TRUE(Claim("a", "alice").ok());
}

// An owner's name of a request is nothing to another one: neither taken nor told.
TEST_F(RequestStoreTest, IdsAreTheirOwnersOwn) {
  ASSERT_TRUE(Open().ok());
  for (const int32_t tokens : {1, 2}) {
    const std::string owner = tokens == 1 ? "alice" : "bob";
    ASSERT_OK_AND_ASSIGN(auto stream, Accept("a", owner));
    EXPECT_TRUE(Append(*stream, Piece(0, tokens)).ok());
    EXPECT_TRUE(absl::IsAlreadyExists(Accept("a", owner).status()));
  }
  ASSERT_TRUE(Open().ok());
  for (const int32_t tokens : {1, 2}) {
    ASSERT_OK_AND_ASSIGN(const auto resumed, Claim("a", tokens == 1 ? "alice" : "bob"));
    EXPECT_EQ(std::ssize(resumed.answer.tokens), tokens);
  }
}

TEST_F(RequestStoreTest, AnotherModelCannotContinueIt) {
  ASSERT_TRUE(Open().ok());
  Accept("a")->reset();
  ASSERT_TRUE(Open({.fingerprint = "fp_2"}).ok());
  const absl::Status status = Claim("a").status();
  EXPECT_TRUE(absl::IsFailedPrecondition(status));
  EXPECT_THAT(status.message(), HasSubstr("was accepted by a server of fp_1, this one is fp_2"));
  ASSERT_TRUE(Open().ok());
  EXPECT_TRUE(Claim("a").ok());
}

TEST_F(RequestStoreTest, ADamagedRequestIsNamedAndTheOthersAreThere) {
  ASSERT_TRUE(Open().ok());
  for (const char* id : {"a", "b", "c"}) {
    auto stream = Accept(id);
    for (int i = 0; i < 9; i += 3) EXPECT_TRUE(Append(**stream, Piece(i, 3)).ok());
  }
  store_.reset();
  const std::string path = folder_ + "/requests-00000001.log";
  std::string bytes = ReadWhole(path);
  // The second request's own frame, and the third one's second piece: its tokens would be others.
  const size_t second = bytes.find("body", bytes.find("body") + 1);
  const size_t third = bytes.find(ToBytes(Piece(3, 3)), bytes.rfind("body"));
  ASSERT_TRUE(second != bytes.npos && third != bytes.npos);
  bytes[second] = static_cast<char>(bytes[second] ^ 4);
  bytes[third + 4] = static_cast<char>(bytes[third + 4] ^ 1);
  std::ofstream(path, std::ios::binary) << bytes;

  std::string logged;
  ASSERT_TRUE(
      Open({.fingerprint = "fp_1", .log = [&](const LogEvent& event) { logged += ToText(event); }})
          .ok());
  EXPECT_THAT(logged, HasSubstr("lost, and cannot be resumed: 'b'"));
  EXPECT_THAT(logged, HasSubstr("computed again: 'c' from piece 2"));
  EXPECT_EQ(Claim("a")->answer.tokens.size(), 9u);
  const absl::Status lost = Claim("b").status();
  EXPECT_TRUE(absl::IsDataLoss(lost));
  EXPECT_THAT(lost.message(), HasSubstr("'b' is damaged"));
  {
    auto resumed = Claim("c");
    ASSERT_EQ(resumed->answer.tokens.size(), 3u);
    EXPECT_TRUE(Append(*resumed->stream, Piece(3, 2)).ok());
    EXPECT_TRUE(Append(*resumed->stream, Piece(5, 5, true)).ok());
  }
  ASSERT_TRUE(Open().ok());
  const auto resumed = Claim("c");
  ASSERT_EQ(resumed->answer.tokens.size(), 10u);
  for (int32_t i = 0; i < 10; ++i) EXPECT_EQ(resumed->answer.tokens[i].token, i);
}

// Nothing is told of a request whose file has no name.
TEST_F(RequestStoreTest, AFolderThatIsDeletedRefusesRequestsUntilItIsThereAgain) {
  std::vector<std::string> logged;
  Mutex mutex;
  const auto said = [&](const std::string& name) {
    MutexLock lock(mutex);
    return std::ranges::count(logged, name);
  };
  ASSERT_TRUE(Open({.fingerprint = "fp_1",
                    .log =
                        [&](const LogEvent& event) {
                          MutexLock lock(mutex);
                          logged.push_back(event.name);
                        }})
                  .ok());
  auto old = Accept("old");
  EXPECT_TRUE(Append(**old, Piece(0, 3)).ok());
  for (int round = 1; round <= 3; ++round) {
    std::filesystem::remove_all(folder_);
    // The next one is refused, or, if its file was made anew before, is stored there.
    for (int i = 0;; ++i) {
      const std::string id = Str("new", round, "-", i);
      auto stream = Accept(id);
      const absl::Status status = Append(**stream, Piece(0, 1));
      stream->reset();
      EXPECT_TRUE(Append(**old, Piece(round * 3 + i, 1)).ok()) << "goes on";
      if (!status.ok()) {
        EXPECT_TRUE(absl::IsUnavailable(status)) << status;
        EXPECT_TRUE(absl::IsNotFound(Claim(id).status()));
        ASSERT_LT(i, 100);
        continue;
      }
      EXPECT_TRUE(std::filesystem::exists(folder_ + "/lock"));
      EXPECT_EQ(Claim(id)->answer.tokens.size(), 1u);
      break;
    }
    EXPECT_GE(said("durable_failed"), round);
    EXPECT_EQ(said("durable_resumed"), said("durable_failed"));
  }
  old->reset();
  EXPECT_TRUE(absl::IsNotFound(Claim("old").status()));
  EXPECT_TRUE(Accept("old").ok()) << "the id is free again";
  ASSERT_TRUE(Open().ok());
  EXPECT_TRUE(absl::IsNotFound(Claim("new1-0").status()));
}

TEST_F(RequestStoreTest, OldOnesGo) {
  ASSERT_TRUE(Open({.fingerprint = "fp_1", .keep = std::chrono::milliseconds(1)}).ok());
  const auto held = Accept("held");
  Accept("old")->reset();
  EXPECT_TRUE(Goes("old"));
  EXPECT_TRUE(absl::IsAborted(Claim("held").status())) << "somebody has it";
  ASSERT_TRUE((*held != nullptr));
  EXPECT_TRUE(Append(**held, Piece(0, 1)).ok());
  EXPECT_THAT(Claim("old").status().message(), HasSubstr("(--durable-keep)"));
  EXPECT_TRUE(store_->Reserve({"old", "", [] {}}).ok()) << "the id is free again";
}

TEST_F(RequestStoreTest, TheOldestMakeRoom) {
  ASSERT_TRUE(Open({.fingerprint = "fp_1", .space = 10'000}).ok());
  const StreamBatch piece = Piece(0, 200);
  {
    auto first = Accept("first");
    EXPECT_TRUE(Append(**first, piece).ok());
  }
  auto second = Accept("second");
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(Append(**second, piece).ok());
  EXPECT_TRUE(Goes("first"));
  const absl::Status full = Accept("third").status();
  EXPECT_TRUE(absl::IsResourceExhausted(full)) << full;
  EXPECT_THAT(full.message(), HasSubstr("--durable-space"));
  second->reset();
  EXPECT_TRUE(Accept("third").ok());
  EXPECT_TRUE(Goes("second"));
}

// On a file system of its own, which only root can mount.
TEST_F(RequestStoreTest, AFullDiskRefusesNewRequestsAndEndsNoOldOnes) {
  std::filesystem::create_directories(folder_);
  if (mount("tmpfs", folder_.c_str(), "tmpfs", 0, "size=512k") != 0) {
    GTEST_SKIP() << "no tmpfs can be mounted here: " << std::strerror(errno);
  }
  std::vector<std::string> logged;
  ASSERT_TRUE(Open({.fingerprint = "fp_1",
                    .log = [&](const LogEvent& event) { logged.push_back(event.name); }})
                  .ok());
  auto old = Accept("old");
  EXPECT_TRUE(Append(**old, Piece(0, 3)).ok());
  const std::string filler = folder_ + "/filler";
  {
    std::ofstream file(filler);
    while (file << std::string(1024, 'x') << std::flush) {
    }
  }
  // Bytes go into the file's own room first.
  absl::Status refused;
  for (int i = 0; refused.ok() && i < 1000; ++i) {
    auto stream = store_->Reserve({Str("new", i), "", [] {}});
    std::promise<absl::Status> failed;
    StoredRequest request = Request();
    request.body.assign(10'000, 'x');
    (*stream)->Accept(request, [&](const absl::Status& status) { failed.set_value(status); });
    refused = Append(**stream, Piece(0, 1));
    if (refused.ok()) continue;
    EXPECT_EQ(failed.get_future().get(), refused);
  }
  EXPECT_TRUE(absl::IsUnavailable(refused)) << refused;
  EXPECT_THAT(refused.message(), HasSubstr(folder_ + "/requests-00000001.log"));
  EXPECT_THAT(refused.message(), HasSubstr("No space left on device"));
  for (int i = 3; i < 200; ++i) EXPECT_TRUE(Append(**old, Piece(i, 1)).ok()) << "goes on";
  std::filesystem::remove(filler);
  EXPECT_TRUE(Append(**Accept("later"), Piece(0, 1)).ok());
  EXPECT_THAT(logged, testing::Contains("durable_failed"));
  EXPECT_THAT(logged, testing::Contains("durable_resumed"));

  // Stored pieces of the old one have no gap.
  old->reset();
  ASSERT_TRUE(Open().ok());
  ASSERT_OK_AND_ASSIGN(auto resumed, Claim("old"));
  EXPECT_GE(resumed.answer.tokens.size(), 3u);
  EXPECT_LT(resumed.answer.tokens.size(), 200u);
  for (int32_t i = 0; i < std::ssize(resumed.answer.tokens); ++i) {
    EXPECT_EQ(resumed.answer.tokens[i].token, i);
  }
  resumed.stream.reset();  // before the store
  store_.reset();
  umount(folder_.c_str());
}

}  // namespace
}  // namespace treadle
