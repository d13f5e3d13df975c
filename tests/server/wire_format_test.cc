#include "server/grpc/wire_format.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "server/grpc/inference.pb.h"

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
