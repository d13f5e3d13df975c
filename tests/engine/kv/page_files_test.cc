// Pages in files: who finds them, what makes room for them, and what is refused.
#include "engine/kv/page_files.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <numeric>

#include "base/status.h"
#include "tests/support/test_folder.h"

namespace treadle {
namespace {

using testing::HasSubstr;
using testing::IsEmpty;

constexpr int64_t kPageSize = 4, kPageBytes = 5000;  // two blocks of a disk, with ids and head
constexpr std::chrono::seconds kPatience{60};

PageFiles::Options OptionsOf(const std::string& folder) {
  return {.folder = folder,
          .max_bytes = 1 << 20,
          .model = "a model",
          .contents = "the contents",
          .page_size = kPageSize,
          .page_bytes = kPageBytes,
          .seconds = [] { return 0.0; }};
}

std::unique_ptr<PageFiles> Open(const PageFiles::Options& options) {
  return PageFiles::Open(options).value();
}

void Await(PageFiles& files) {
  ASSERT_TRUE(files.WaitIdle(std::chrono::steady_clock::now() + kPatience));
}

std::vector<int32_t> Ids(int32_t first, int32_t count) {
  std::vector<int32_t> ids(static_cast<size_t>(count));
  std::iota(ids.begin(), ids.end(), first);
  return ids;
}

PageBytes BytesOf(const PageName& name) {
  return PageBytes(kPageBytes, static_cast<std::byte>(name.ids[0]));
}

void StoreAll(PageFiles& files, const std::vector<PageName>& names) {
  for (const PageName& name : names) files.Store(name, BytesOf(name));
  Await(files);
}

std::vector<PageBytes> ReadAll(PageFiles& files, const std::vector<PageName>& names) {
  const auto fetch = files.Fetch(names, [] {});
  Await(files);
  EXPECT_TRUE(fetch->over());
  return fetch->Take();
}

// By Python's hashlib: a = sha256(sha256("the contents") + "a salt"), in digits, then for each page
// a = sha256(a + its ids, little-endian).
TEST(PageFiles, NamesAreAChainOfSums) {
  const TestFolder folder;
  const auto names = Open(OptionsOf(folder.path()))->NamesOf("a salt", Ids(1, 11));
  ASSERT_EQ(names.size(), 2u);
  EXPECT_EQ(names[0].key, "49c7ffde821536d3fc100c2d747fd63c038fb17579a810d51b236d71af2580c2");
  EXPECT_EQ(names[1].key, "091ad5380e2dd33a0149da91daa5f7485956327aa7fc8d29315863493d85486f");
  EXPECT_EQ(names[1].ids, Ids(5, 4));
}

TEST(PageFiles, ANewProcessReadsWhatWasStored) {
  const TestFolder folder;
  const std::string path = folder / "made/anew";
  std::vector<PageName> names;
  {
    const auto files = Open(OptionsOf(path));
    names = files->NamesOf("", Ids(1, 40));
    for (const PageName& name : names) files->Store(name, BytesOf(name));
  }  // writes what is queued
  for (const auto& entry : std::filesystem::directory_iterator(path)) {
    EXPECT_EQ(entry.status().permissions(), std::filesystem::perms(0600)) << entry.path();
  }
  EXPECT_EQ(std::filesystem::status(path).permissions(), std::filesystem::perms(0700));
  const auto files = Open(OptionsOf(path));
  EXPECT_EQ(files->counters().pages, 10);
  EXPECT_EQ(files->counters().bytes, 10 * 8192);
  EXPECT_EQ(files->Held(names), 10u);
  EXPECT_EQ(files->Held(files->NamesOf("another salt", Ids(1, 40))), 0u);
  const std::vector<PageBytes> read = ReadAll(*files, names);
  ASSERT_EQ(read.size(), 10u);
  for (size_t i = 0; i < read.size(); ++i) EXPECT_EQ(read[i], BytesOf(names[i]));
  EXPECT_THAT(ReadAll(*files, {{names[1].key, Ids(50, 4)}, names[2]}), IsEmpty())
      << "other ids than the file has, and nothing behind a gap";
  EXPECT_EQ(files->counters().misses, 1);
  files->Clear();
  Await(*files);
  EXPECT_EQ(files->counters().pages, 0);
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(path), {}), 2) << "lock, contents";
  EXPECT_THAT(ReadAll(*files, names), IsEmpty());
  EXPECT_EQ(files->counters().misses, 1);
}

// A file counts only under its own name: another salt's page of the same ids is a miss.
TEST(PageFiles, ExchangedFilesAreMisses) {
  const TestFolder folder;
  const auto files = Open(OptionsOf(folder.path()));
  const PageName mine = files->NamesOf("mine", Ids(1, 4))[0];
  const PageName yours = files->NamesOf("yours", Ids(1, 4))[0];
  StoreAll(*files, {mine, yours});
  folder.Write(mine.key, folder.Read(yours.key));
  EXPECT_THAT(ReadAll(*files, {mine}), IsEmpty());
  EXPECT_EQ(ReadAll(*files, {yours}).size(), 1u);
  EXPECT_FALSE(std::filesystem::exists(folder / mine.key));
}

TEST(PageFiles, LeastRecentlyUsedOnesMakeRoom) {
  const TestFolder folder;
  PageFiles::Options options = OptionsOf(folder.path());
  options.max_bytes = 3 * 8192 + 100;
  auto files = Open(options);
  const auto names = files->NamesOf("", Ids(1, 20));
  StoreAll(*files, {names.begin(), names.begin() + 3});
  EXPECT_TRUE(files->Use(names[0].key));
  EXPECT_FALSE(files->Use(names[3].key));
  StoreAll(*files, {names[3], names[4]});
  for (const size_t there : {0, 3, 4}) EXPECT_TRUE(files->Use(names[there].key)) << there;
  for (const size_t gone : {1, 2}) EXPECT_FALSE(files->Use(names[gone].key)) << gone;
  files.reset();
  options.max_bytes = 8192;
  EXPECT_EQ(Open(options)->counters().pages, 1) << "there is less room now";
}

TEST(PageFiles, WhatFindsNoRoomInTheQueueIsDropped) {
  const TestFolder folder;
  Mutex mutex;
  CondVar opened;
  bool closed = false;
  PageFiles::Options options = OptionsOf(folder.path());
  options.max_queued = 2 * kPageBytes;
  options.seconds = [&] {  // reading stands still while it is closed
    MutexLock lock(mutex);
    while (closed) opened.Wait(mutex);
    return 0.0;
  };
  const auto files = Open(options);
  const auto names = files->NamesOf("", Ids(1, 20));
  StoreAll(*files, {names[0]});
  {
    MutexLock lock(mutex);
    closed = true;
  }
  const auto fetch = files->Fetch({names[0]}, [] {});
  for (size_t i = 1; i < 5; ++i) files->Store(names[i], BytesOf(names[i]));
  EXPECT_FALSE(files->HasRoom());
  EXPECT_EQ(files->counters().dropped, 2);
  {
    MutexLock lock(mutex);
    closed = false;
  }
  opened.NotifyAll();
  Await(*files);
  EXPECT_EQ(files->counters().stores, 3);
  EXPECT_TRUE(files->HasRoom());
}

TEST(PageFiles, ADiskThatRefusesCostsPagesAndNothingElse) {
  const TestFolder folder;
  std::string warning;
  PageFiles::Options options = OptionsOf(folder / "f");
  options.warn = [&](const std::string& what) { warning += what + "\n"; };
  const auto files = Open(options);
  std::filesystem::remove_all(folder / "f");
  const auto names = files->NamesOf("", Ids(1, 20));
  StoreAll(*files, names);
  EXPECT_EQ(files->counters().dropped, 5);
  EXPECT_THAT(warning, HasSubstr(names[0].key + ": No such file or directory"));
  EXPECT_EQ(std::ranges::count(warning, '\n'), 1) << "it is said once";
}

TEST(PageFiles, OthersFoldersAreRefusedByName) {
  const TestFolder folder;
  const auto refused = [&](const PageFiles::Options& options) {
    const auto files = PageFiles::Open(options);
    EXPECT_FALSE(files.ok());
    return std::string(files.status().message());
  };
  const std::string path = folder / "f";
  PageFiles::Options other = OptionsOf(path);
  other.model = "another model";
  other.contents = "other contents";
  {
    const auto files = Open(OptionsOf(path));
    EXPECT_EQ(refused(OptionsOf(path)),
              path + " is in use by another process, expected a folder for each server");
  }
  EXPECT_EQ(refused(other),
            path +
                " has pages of another model, version or setting (model a model), expected those "
                "of model another model as it is served now: take another folder, or delete "
                "this one");
  folder.Write("f/contents", "");
  EXPECT_THAT(refused(other), HasSubstr("(an unknown one)"));
  std::filesystem::create_directory(folder / "g");
  folder.Write("g/letter.txt", "mine");
  EXPECT_EQ(refused(OptionsOf(folder / "g")),
            folder / "g" +
                " has other files, such as letter.txt, expected a folder for the prefix "
                "cache alone");
  other.max_bytes = 8191;
  EXPECT_EQ(refused(other),
            path + " may have 8191 bytes, expected at least 8192, a page of 4 tokens");
  EXPECT_THAT(refused(OptionsOf(folder.Write("file", ""))), HasSubstr("file: "));
}

// Reading is measured by a clock that each look sets forward by a second: two for a page.
TEST(PageFiles, NothingIsReadWhereComputingIsFaster) {
  const TestFolder folder;
  double seconds = 0;
  PageFiles::Options options = OptionsOf(folder.path());
  options.seconds = [&] { return seconds += 1; };
  auto files = Open(options);
  EXPECT_TRUE(files->PaysToRead()) << "nothing is known yet";
  files->NoteComputing(0.2);
  StoreAll(*files, files->NamesOf("", Ids(1, 4)));
  files.reset();
  files = Open(options);
  EXPECT_EQ(files->costs().read, 1) << "as measured when it is opened";
  EXPECT_EQ(files->costs().compute, 4 * 0.2) << "as known when the page was stored";
  EXPECT_FALSE(files->PaysToRead());
  int refused = 1;
  while (refused < 50 && !files->PaysToRead()) ++refused;
  EXPECT_GT(refused, 5) << "a measure is forgotten slowly";
  EXPECT_LT(refused, 50);
}

}  // namespace
}  // namespace treadle
