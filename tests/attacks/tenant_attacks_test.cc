// Attempts of one key to take what is another one's, on a server that stores requests.
#include <gtest/gtest.h>
#include <signal.h>

#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "tests/attacks/attacked_server.h"
#include "tests/support/test_folder.h"

namespace treadle {
namespace {

const char kOwn[] = "own-0123456789abcdef", kOther[] = "other-0123456789abcdef";
const char kOperator[] = "operator-0123456789abcdef";
constexpr int kTokens = 12;

class TenantAttacks : public testing::Test {
 protected:
  void Start(const std::vector<std::string>& lines) {
    server_.reset();
    std::string text;
    for (const std::string& line : lines) text += line + "\n";
    server_ = std::make_unique<AttackedServer>(
        std::vector<std::string>{"--api-keys-file", folder_.Write("keys", text), "--durable",
                                 folder_ / "durable"},
        AttackedServer::Limits{});
    stub_ = v1::Inference::NewStub(server_->Connect());
  }
  static void Identify(grpc::ClientContext& context, const std::string& key) {
    context.AddMetadata("authorization", "Bearer " + key);
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::minutes(1));
  }
  static std::pair<grpc::Status, std::string> TextOf(
      grpc::ClientReader<v1::GenerateResponse>& reader) {
    std::string text;
    for (v1::GenerateResponse message; reader.Read(&message);) {
      for (const int32_t id : message.output().token_ids()) text += Str(id, ' ');
    }
    return {reader.Finish(), text};
  }
  std::pair<grpc::Status, std::string> Ask(const std::string& key, const std::string& id) {
    grpc::ClientContext context;
    Identify(context, key);
    v1::GenerateRequest request;
    request.set_request_id(id);
    request.set_text("Once upon a time");
    request.mutable_stopping()->set_max_new_tokens(kTokens);
    request.mutable_stopping()->set_ignore_eos(true);
    return TextOf(*stub_->GenerateStream(&context, request));
  }
  std::pair<grpc::Status, std::string> Resume(const std::string& key, const std::string& id) {
    grpc::ClientContext context;
    Identify(context, key);
    v1::ResumeRequest request;
    request.set_request_id(id);
    return TextOf(*stub_->Resume(&context, request));
  }
  // The id that the ledger shows of the request that Ask has made.
  std::string IdInLedgerOf(const std::string& key) {
    grpc::ClientContext context;
    Identify(context, key);
    v1::WatchLedgerRequest request;
    request.set_from_start(true);
    const auto reader = stub_->WatchLedger(&context, request);
    for (v1::LedgerRecord record; reader->Read(&record);) {
      for (const v1::LedgerEnd& end : record.ends()) {
        if (end.output_tokens() == kTokens) return end.request_id();
      }
    }
    ADD_FAILURE() << "the ledger does not have it";
    return "";
  }

  const TestFolder folder_;
  std::unique_ptr<AttackedServer> server_;
  std::unique_ptr<v1::Inference::Stub> stub_;
};

// Keys without names are told apart by what they are, not by where they stand.
TEST_F(TenantAttacks, ALineThatIsInsertedInheritsNothing) {
  Start({kOwn});
  const auto [asked, text] = Ask(kOwn, "letter");
  ASSERT_TRUE(asked.ok()) << asked.error_message();
  ASSERT_NE(text, "");
  server_->process().Signal(SIGTERM);
  EXPECT_EQ(server_->process().Wait(), 0);
  Start({kOther, kOwn});
  EXPECT_EQ(Resume(kOther, "letter").first.error_code(), grpc::StatusCode::NOT_FOUND);
  const auto [resumed, again] = Resume(kOwn, "letter");
  EXPECT_TRUE(resumed.ok()) << resumed.error_message();
  EXPECT_EQ(again, text);
}

// Nobody learns another one's ids, and the same id is another request's.
TEST_F(TenantAttacks, IdsAreTheirOwnersOwn) {
  Start({Str(kOwn, " own"), Str(kOther, " other"), Str(kOperator, " boss - - operator")});
  const auto [asked, text] = Ask(kOwn, "letter");
  ASSERT_TRUE(asked.ok()) << asked.error_message();
  EXPECT_EQ(Resume(kOther, "letter").first.error_code(), grpc::StatusCode::NOT_FOUND);
  EXPECT_EQ(IdInLedgerOf(kOther), "");
  EXPECT_EQ(IdInLedgerOf(kOwn), "letter");
  EXPECT_EQ(IdInLedgerOf(kOperator), "letter");
  // Taken by one, free for the other.
  EXPECT_TRUE(Ask(kOther, "letter").first.ok());
  EXPECT_EQ(Resume(kOwn, "letter").second, text);
}

}  // namespace
}  // namespace treadle
