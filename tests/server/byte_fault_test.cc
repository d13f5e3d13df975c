// Bytes between client and server that are lost, late, doubled, cut off or changed on their way: a
// call ends in a clear error or with the right answer, and the next one is answered. Under TLS,
// because a changed byte of plaintext is what the client has sent, for all that a server can know.
#include <gtest/gtest.h>

#include "base/status.h"
#include "server/access/tls_files.h"
#include "tests/server/access/test_certificates.h"
#include "tests/server/cli/streamed_answers.h"
#include "tests/server/test_server.h"
#include "tests/support/assert_ok.h"
#include "tests/support/faults/byte_proxy.h"

namespace treadle {
namespace {

using Kind = ByteFault::Kind;
using Where = ByteFault::Where;

constexpr std::chrono::seconds kPatience{20};

class ByteFaults : public testing::TestWithParam<std::tuple<Kind, Where>> {
 protected:
  void SetUp() override {
    const TlsFiles files{.certificate = TestPath("crt"), .key = TestPath("key"), .ca = {}};
    const PemPair own = ca_.Sign();
    WriteText(files.key, own.key);
    WriteText(files.certificate, own.certificate);
    ASSERT_OK_AND_ASSIGN(auto tls, OpenSocketTls(files, "h2", [](const LogEvent&) {}));
    tls_ = std::move(tls);
    TestServerOptions options;
    options.adjust = [&](ServiceOptions& service) { service.tls = tls_.get(); };
    options.channel_credentials = grpc::SslCredentials({ca_.pem(), "", ""});
    server_ = std::make_unique<TestServer>(options);
    proxy_ = std::make_unique<ByteProxy>(server_->server().address().port);
  }
  grpc::Status Ask(v1::Inference::Stub& stub, Said& said) const {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + kPatience);
    const auto reader = stub.GenerateStream(&context, MakeRequest("a", 1, 300, 60));
    for (v1::GenerateResponse message; reader->Read(&message);) Hear(message, said);
    return reader->Finish();
  }

  const TestCa ca_;
  decltype(OpenSocketTls({}, "", {}))::value_type tls_;
  std::unique_ptr<TestServer> server_;
  std::unique_ptr<ByteProxy> proxy_;
};

TEST_P(ByteFaults, EndACallOrDoNoHarm) {
  const auto [kind, where] = GetParam();
  Said right;
  ASSERT_TRUE(Ask(server_->stub(), right).ok());
  for (const int64_t skip : {0, 700, 2500}) {  // in the handshake, a request, an answer
    SCOPED_TRACE(skip);
    const int before = proxy_->happened();
    proxy_->Inject(
        {.kind = kind, .where = where, .skip = skip, .delay = std::chrono::milliseconds(300)});
    // Each on a connection of its own.
    for (int i = 0; i < 30 && proxy_->happened() == before; ++i) {
      const auto stub = v1::Inference::NewStub(grpc::CreateCustomChannel(
          Str("127.0.0.1:", proxy_->port()), grpc::SslCredentials({ca_.pem(), "", ""}), [] {
            grpc::ChannelArguments arguments;
            arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
            return arguments;
          }()));
      Said said;
      const grpc::Status status = Ask(*stub, said);
      EXPECT_EQ(Beyond(said, right), "");
      if (status.ok()) {
        EXPECT_TRUE(said == right);
      } else {
        EXPECT_NE(status.error_message(), "");
      }
    }
    EXPECT_EQ(proxy_->happened(), before + 1);
    Said next;
    const grpc::Status status = Ask(server_->stub(), next);
    EXPECT_TRUE(status.ok()) << status.error_message();
    EXPECT_TRUE(next == right);
    EXPECT_TRUE(server_->WaitLoad([](const v1::GetLoadResponse& load) {
      return load.running() == 0 && load.kv_pages_free() == load.kv_pages_total();
    }));
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, ByteFaults,
    testing::Combine(testing::Values(Kind::kClose, Kind::kTruncate, Kind::kHalfClose, Kind::kDelay,
                                     Kind::kDrop, Kind::kDuplicate, Kind::kFlip),
                     testing::Values(Where::kToServer, Where::kToClient)));

}  // namespace
}  // namespace treadle
