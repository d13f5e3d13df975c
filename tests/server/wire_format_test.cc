#include "server/grpc/wire_format.h"

#include <gmock/gmock.h>
#include <grpcpp/support/status.h>
#include <gtest/gtest.h>

#include <map>

#include "base/retry_after.h"
#include "server/grpc/inference.pb.h"
#include "server/grpc/rpc_details.pb.h"

namespace treadle {
namespace {

using testing::HasSubstr;

// Serializing would refuse a string that is not UTF-8, so valid bytes are spoiled afterwards.
std::string Spoiled(const v1::GenerateRequest& request) {
  std::string bytes = request.SerializeAsString();
  const size_t at = bytes.find("@@");
  EXPECT_NE(at, std::string::npos);
  bytes[at + 1] = '\xFF';
  return bytes;
}

std::string ErrorOf(const std::string& bytes) {
  v1::GenerateRequest parsed;
  const absl::Status status = ParseMessage(bytes, parsed);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  return std::string(status.message());
}

TEST(WireFormat, NamesTheFieldThatIsNotUtf8) {
  v1::GenerateRequest text;
  text.set_text("ab@@");
  EXPECT_EQ(ErrorOf(Spoiled(text)), "text is not valid UTF-8 at byte 3, expected UTF-8 text");

  v1::GenerateRequest chat;
  chat.mutable_chat()->add_messages()->set_content("fine");
  chat.mutable_chat()->add_messages()->set_content("@@");
  EXPECT_THAT(ErrorOf(Spoiled(chat)), HasSubstr("chat.messages[1].content is not valid UTF-8"));

  v1::GenerateRequest stops;
  stops.mutable_stopping()->add_stop_strings("x");
  stops.mutable_stopping()->add_stop_strings("@@");
  EXPECT_THAT(ErrorOf(Spoiled(stops)), HasSubstr("stopping.stop_strings[1] is not valid UTF-8"));
}

TEST(WireFormat, SaysWhatIsNoMessage) {
  EXPECT_THAT(ErrorOf("\xFF\xFF\xFF"), HasSubstr("treadle.v1.GenerateRequest"));
  EXPECT_THAT(ErrorOf(std::string("\x12\x7F", 2)), HasSubstr("treadle.v1.GenerateRequest"));
}

// Entries are counted over all parts of a message that the parser would merge, packed or not.
TEST(WireFormat, CountsEntriesBeforeItParses) {
  v1::GenerateRequest request;
  for (int i = 0; i < 3; ++i) request.mutable_chat()->add_messages()->set_role("user");
  for (const int id : {1, 300, 70000}) request.mutable_stopping()->add_stop_token_ids(id);
  request.mutable_stopping()->add_stop_strings("x");
  std::map<std::string, int64_t> counts;
  const CheckEntries count = [&](std::string_view field, int64_t entries) {
    counts[std::string(field)] = entries;
    return absl::OkStatus();
  };
  v1::GenerateRequest parsed;
  const std::string bytes = request.SerializeAsString();
  const std::string unpacked("\x32\x02\x20\x05", 4);  // stop_token_ids: 5
  ASSERT_TRUE(ParseMessage(bytes + bytes + unpacked, parsed, count).ok());
  EXPECT_THAT(counts, testing::UnorderedElementsAre(testing::Pair("chat.messages", 6),
                                                    testing::Pair("stopping.stop_token_ids", 7),
                                                    testing::Pair("stopping.stop_strings", 2)));
  parsed.Clear();
  const absl::Status refused =
      ParseMessage(bytes, parsed, [](std::string_view field, int64_t entries) {
        return absl::InvalidArgumentError(std::string(field) + std::to_string(entries));
      });
  EXPECT_EQ(refused.message(), "chat.messages3");
  EXPECT_EQ(parsed.ByteSizeLong(), 0u);
}

TEST(WireFormat, RefusesManyUnknownFields) {
  std::string fields;
  for (int i = 0; i < 1024; ++i) fields += "\x7a\x01x";
  v1::GenerateRequest parsed;
  EXPECT_TRUE(ParseMessage(fields, parsed).ok());
  // The right number of the field, but a number where a text belongs: the parser keeps it, too.
  EXPECT_THAT(ErrorOf(fields + "\x10\x01"), HasSubstr("1025 fields that are not known"));
  EXPECT_THAT(ErrorOf("\x7b\x7c"), HasSubstr("is not a message"));  // a group
}

// google.rpc.RetryInfo, field 1: a Duration with 7 in its field 1 (seconds).
TEST(WireFormat, ARefusalSaysWhenToTryAgain) {
  rpc::Status details;
  const auto status = WithRetryAfter(absl::ResourceExhaustedError("late"), 6.2);
  ASSERT_TRUE(details.ParseFromString(ToGrpcStatus(status).error_details()));
  ASSERT_EQ(details.details_size(), 1);
  EXPECT_EQ(details.details(0).value(), std::string("\x0a\x02\x08\x07"));
}

TEST(WireFormat, AValidMessageParses) {
  v1::GenerateRequest request;
  request.set_text("\xE2\x82\xAC");
  request.mutable_sampling()->set_temperature(0.5f);
  v1::GenerateRequest parsed;
  ASSERT_TRUE(ParseMessage(request.SerializeAsString(), parsed).ok());
  EXPECT_EQ(parsed.SerializeAsString(), request.SerializeAsString());
}

}  // namespace
}  // namespace treadle
