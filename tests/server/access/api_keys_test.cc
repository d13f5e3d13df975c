// The keys' file and the limits; time is the test's.
#include "server/access/api_keys.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/status.h"
#include "tests/server/access/test_certificates.h"
#include "tests/support/assert_ok.h"
#include "tests/support/in_time.h"

namespace treadle {
namespace {

using std::chrono::seconds;
using testing::HasSubstr;
using testing::Not;

const char kAlice[] = "alice-0123456789abcdef";
const char kBob[] = "bob-0123456789abcdef00";

absl::StatusOr<std::unique_ptr<ApiKeys>> OpenText(const std::string& name,
                                                  const std::string& text) {
  WriteText(TestPath(name), text);
  return ApiKeys::Open(TestPath(name), [](const LogEvent&) {});
}

std::string Bearer(const std::string& key) { return "Bearer " + key; }

TEST(ApiKeys, FindsWhoIsThere) {
  ASSERT_OK_AND_ASSIGN(const auto keys, OpenText("find", Str("# ours\n\n", kAlice, " alice\n", kBob,
                                                             "  # no name\n")));
  EXPECT_TRUE(keys->Find(Bearer(kAlice)).ok());
  EXPECT_TRUE(keys->Find(Bearer(kBob)).ok());
  const std::string almost = std::string(kAlice) + "0";
  for (const std::string& wrong :
       {std::string(), std::string(kAlice), Bearer(""), Bearer(almost), "Basic " + almost,
        Bearer(std::string(kAlice).substr(1)), Bearer(Str(kAlice, " alice"))}) {
    const absl::Status status = keys->Find(wrong).status();
    EXPECT_TRUE(absl::IsUnauthenticated(status)) << wrong;
    EXPECT_THAT(std::string(status.message()), Not(HasSubstr("0123456789")));
  }
}

// An owner is what does not change when the file does.
TEST(ApiKeys, AnOwnerIsTheNameOrTheKeyAndNotTheLine) {
  const auto owners = [](const std::string& text) {
    const auto keys = OpenText("owners", text);
    EXPECT_TRUE(keys.ok()) << keys.status();
    std::vector<ApiKey::Terms> found;
    for (const char* const key : {kAlice, kBob}) {
      const auto one = (*keys)->Find(Bearer(key));
      found.push_back(one.ok() ? (*one)->terms() : ApiKey::Terms());
      EXPECT_THAT(found.back().owner, Not(HasSubstr("0123456789abcdef")));
      EXPECT_THAT(found.back().name, Not(HasSubstr("line")));
    }
    return found;
  };
  const auto first = owners(Str(kAlice, "\n", kBob, "\n"));
  EXPECT_NE(first[0].owner, first[1].owner);
  EXPECT_NE(first[0].name, first[1].name);
  const auto moved = owners(Str("somebody-else-0123456\n\n", kBob, " - - 5 # now\n", kAlice, "\n"));
  for (const int key : {0, 1}) {
    EXPECT_EQ(moved[key].owner, first[key].owner);
    EXPECT_EQ(moved[key].name, first[key].name);
  }
  // One name is one owner, for keys that are changed in turn; nobody can take a key for a name.
  const auto named = owners(Str(kAlice, " us\n", kBob, " us - - operator\n"));
  EXPECT_EQ(named[0].owner, named[1].owner);
  EXPECT_FALSE(named[0].is_operator);
  EXPECT_TRUE(named[1].is_operator);
  const auto weighted =
      owners(Str(kAlice, " a - - operator weight=2.5\n", kBob, " b - - weight=0.001 operator\n"));
  EXPECT_EQ(first[0].weight, 1);
  EXPECT_EQ(weighted[0].weight, 2.5);
  EXPECT_EQ(weighted[1].weight, 0.001);
  EXPECT_TRUE(weighted[0].is_operator && weighted[1].is_operator);
  EXPECT_NE(owners(Str(kAlice, " ", first[1].name, "\n", kBob, "\n"))[0].owner, first[1].owner);
}

TEST(ApiKeys, WhatIsWrongInTheFileIsNamedWithoutTheKey) {
  struct Case {
    std::string text, message;
  };
  const Case cases[] = {
      {"", "has no key"},
      {"# nothing\n", "has no key"},
      {Str(kAlice, "\nshort\n"), "line 2: a key has 5 characters, expected 16 to 512"},
      {Str(kAlice, " alice many"), "line 1: limit is 'many', expected a whole number per minute"},
      {Str(kAlice, " alice -1"), "line 1: limit is '-1'"},
      {Str(kAlice, " alice 1 2 3"), "line 1: there are 5 words"},
      {Str(kAlice, " alice 1 2 operator 3"), "line 1: there are 6 words"},
      {Str(kAlice, " alice 1 2 weight=0"),
       "line 1: weight is '0', expected a number from 0.001 to"},
      {Str(kAlice, " alice 1 2 weight=nan"), "line 1: weight is 'nan', expected a number from"},
      {Str(kAlice, " alice 1 2 weight="), "line 1: weight is '', expected a number from"},
      {Str(kAlice, "\n", kBob, "\n", kAlice, " again\n"), "line 3: the key is there twice"},
  };
  for (const Case& bad : cases) {
    const absl::Status status = OpenText("bad", bad.text).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status));
    EXPECT_THAT(std::string(status.message()), HasSubstr(bad.message));
    EXPECT_THAT(std::string(status.message()), HasSubstr("--api-keys-file: " + TestPath("bad")));
    EXPECT_THAT(std::string(status.message()), Not(HasSubstr("0123456789")));
  }
  const absl::Status absent = ApiKeys::Open("/no/such/keys", {}).status();
  EXPECT_EQ(absent.message(),
            "--api-keys-file: cannot read /no/such/keys: No such file or directory");
}

TEST(ApiKeys, ASuspendedKeyIsDenied) {
  ASSERT_OK_AND_ASSIGN(const auto keys,
                       OpenText("suspended", Str(kAlice, " alice 0\n", kBob, " bob - 0\n")));
  for (const char* key : {kAlice, kBob}) {
    EXPECT_TRUE(absl::IsPermissionDenied(keys->Find(Bearer(key)).status()));
  }
}

TEST(ApiKeys, RequestsPerMinuteAreABucket) {
  const ApiKey::TimePoint start{};
  ApiKey key({.name = "alice", .requests = 3.0, .tokens = {}}, start);
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(key.Admit(start).ok());
  const absl::Status refused = key.Admit(start);
  EXPECT_TRUE(absl::IsResourceExhausted(refused));
  EXPECT_EQ(refused.message(), "the API key 'alice' has used up its 3 requests per minute");
  EXPECT_FALSE(key.Admit(start + seconds(19)).ok());
  EXPECT_TRUE(key.Admit(start + seconds(21)).ok());
  EXPECT_FALSE(key.Admit(start + seconds(21)).ok());
  // An hour later there is one minute's worth, not sixty.
  int admitted = 0;
  while (key.Admit(start + seconds(3600)).ok()) ++admitted;
  EXPECT_EQ(admitted, 3);
}

TEST(ApiKeys, TokensPerMinuteMayLeaveADebt) {
  const ApiKey::TimePoint start{};
  ApiKey key({.name = "alice", .requests = {}, .tokens = 60.0}, start);
  EXPECT_TRUE(key.Admit(start).ok());
  key.Charge(50);
  key.Charge(40);  // 30 too many
  const absl::Status refused = key.Admit(start + seconds(29));
  EXPECT_TRUE(absl::IsResourceExhausted(refused));
  EXPECT_THAT(std::string(refused.message()), HasSubstr("60 tokens per minute"));
  EXPECT_TRUE(key.Admit(start + seconds(32)).ok());
}

TEST(ApiKeys, AChangedFileIsTakenOverAndABrokenOneIsNot) {
  Mutex mutex;
  std::vector<std::string> log;
  const std::string path = TestPath("reload");
  WriteText(path, Str(kAlice, " alice 1\n"));
  ASSERT_OK_AND_ASSIGN(const auto opened, ApiKeys::Open(path, [&](const LogEvent& event) {
                         MutexLock lock(mutex);
                         log.push_back(event.message);
                       }));
  const ApiKeys& keys = *opened;
  ASSERT_TRUE((*keys.Find(Bearer(kAlice)))->Admit(ApiKey::TimePoint::clock::now()).ok());

  WriteText(path, Str(kAlice, " alice 1\n", kBob, " bob\n"));
  EXPECT_TRUE(ComesTrue([&] { return keys.Find(Bearer(kBob)).ok(); }));
  // Used tokens stay used.
  EXPECT_FALSE((*keys.Find(Bearer(kAlice)))->Admit(ApiKey::TimePoint::clock::now()).ok());

  WriteText(path, "bad\n");
  EXPECT_TRUE(ComesTrue([&] {
    MutexLock lock(mutex);
    return !log.empty() && log.back().find("the keys stay as they were") != std::string::npos;
  }));
  EXPECT_TRUE(keys.Find(Bearer(kBob)).ok());

  WriteText(path, Str(kAlice, "\n"));
  EXPECT_TRUE(ComesTrue([&] { return absl::IsUnauthenticated(keys.Find(Bearer(kBob)).status()); }));
  EXPECT_TRUE(keys.Find(Bearer(kAlice)).ok());
  MutexLock lock(mutex);
  for (const std::string& line : log) EXPECT_THAT(line, Not(HasSubstr("0123456789")));
}

}  // namespace
}  // namespace treadle
