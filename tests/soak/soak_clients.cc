#include "tests/soak/soak_clients.h"

#include <gtest/gtest.h>

#include <random>

#include "base/status.h"
#include "tests/server/http/http_client.h"

namespace treadle {
namespace {

using Code = grpc::StatusCode;

constexpr auto kPatience = std::chrono::minutes(2);  // of a client that is in no hurry

}  // namespace

SoakClients::SoakClients(AttackedServer& server, uint64_t seed)
    : server_(server), seed_(seed), grpc_proxy_(server.port()), http_proxy_(server.http_port()) {
  for (auto& references : references_) references.resize(kRequestKinds);
  // Beside one another, for company changes no answer.
  std::atomic<int> next = 0;
  std::vector<std::thread> askers;
  for (int i = 0; i < 2 * kEach; ++i) {
    askers.emplace_back([&] {
      const auto stub = v1::Inference::NewStub(server.Connect());
      for (int kind = next++; kind < kRequestKinds; kind = next++) {
        Heard over_grpc = AskGrpc(*stub, kind, {});
        // Constraints are an option of the build.
        if (over_grpc.why.find("without XGrammar") != std::string::npos) continue;
        Heard over_http = AskHttp(server.http_port(), kind, {});
        EXPECT_EQ(over_grpc.end, End::kWhole) << kind << ": " << over_grpc.why;
        EXPECT_EQ(over_http.end, End::kWhole) << kind << ": " << over_http.why;
        references_[0][kind] = std::move(over_grpc.said);
        references_[1][kind] = std::move(over_http.said);
      }
    });
  }
  for (std::thread& asker : askers) asker.join();
  for (int kind = 0; kind < kRequestKinds; ++kind) {
    if (!references_[0][kind].empty()) kinds_.push_back(kind);
  }
}

SoakClients::~SoakClients() {
  {
    const MutexLock lock(mutex_);
    over_ = true;
    changed_.NotifyAll();
  }
  for (std::thread& thread : threads_) thread.join();
}

void SoakClients::Begin() {
  for (int i = 0; i < 2 * kEach; ++i) {
    threads_.emplace_back([this, i] { Run(i % 2 == 0, seed_ + static_cast<uint64_t>(i)); });
  }
}

bool SoakClients::Rest() {
  const auto deadline = std::chrono::steady_clock::now() + 2 * kPatience;
  const MutexLock lock(mutex_);
  resting_ = true;
  while (asking_ > 0) {
    if (!changed_.WaitUntil(mutex_, deadline)) return false;
  }
  return true;
}

void SoakClients::GoOn() {
  const MutexLock lock(mutex_);
  resting_ = false;
  changed_.NotifyAll();
}

std::string SoakClients::AskOnce() {
  const auto stub = v1::Inference::NewStub(server_.Connect());
  for (const bool grpc : {true, false}) {
    const int kind = kinds_[static_cast<size_t>(counts_.all()) % kinds_.size()];
    const Heard heard = grpc ? AskGrpc(*stub, kind, {}) : AskHttp(server_.http_port(), kind, {});
    if (heard.end != End::kWhole) return Str("kind ", kind, ": ", heard.why);
    if (heard.said != Reference(grpc, kind)) return Str("kind ", kind, ": another answer");
  }
  return "";
}

SoakClients::Heard SoakClients::AskGrpc(v1::Inference::Stub& stub, int kind,
                                        const Patience& patience) {
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + patience.time);
  context.set_wait_for_ready(true);
  const auto reader = stub.GenerateStream(&context, RequestOfKind(kind));
  Heard heard;
  int messages = 0;
  v1::GenerateResponse message;
  while (messages != patience.messages && reader->Read(&message)) {
    Hear(message, heard.said);
    ++messages;
  }
  if (messages == patience.messages) context.TryCancel();
  const grpc::Status status = reader->Finish();
  heard.why = status.error_message();
  heard.end = status.ok()                                      ? End::kWhole
              : status.error_code() == Code::CANCELLED         ? End::kGivenUp
              : status.error_code() == Code::DEADLINE_EXCEEDED ? End::kTooLate
                                                               : End::kCut;
  if (heard.end == End::kGivenUp && messages != patience.messages) heard.end = End::kCut;
  return heard;
}

SoakClients::Heard SoakClients::AskHttp(int port, int kind, const Patience& patience) {
  const OpenAiBody body = OpenAiBodyOfKind(kind);
  HttpClient client(port);
  client.Send(Str("POST ", body.path, " HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n",
                  "Content-Type: application/json\r\nContent-Length: ", body.json.size(),
                  "\r\n\r\n", body.json));
  Heard heard;
  // Events come whole, each behind "data: "; between them are the lengths of HTTP's chunks.
  for (int messages = 0; messages != patience.messages; ++messages) {
    const std::string text = client.ReadUntil("\n\n");
    const size_t begin = text.find("data: ");
    if (begin == std::string::npos || !text.ends_with("\n\n")) {
      heard.why = "the connection ended at: " + text;
      return heard;
    }
    const std::string event = text.substr(begin + 6, text.size() - begin - 8);
    if (event == "[DONE]") {
      heard.end = End::kWhole;
      const std::string rest = client.ReadAll();
      if (rest.find("data: ") != std::string::npos) heard.said["after the end"] = rest;
      return heard;
    }
    if (!Hear(event, heard.said)) {
      heard.why = event;
      return heard;
    }
  }
  heard.end = End::kGivenUp;
  return heard;
}

void SoakClients::Run(bool grpc, uint64_t seed) {
  std::mt19937_64 random(seed);
  const ByteProxy& proxy = grpc ? grpc_proxy_ : http_proxy_;
  const auto stub = v1::Inference::NewStub(server_.Connect(proxy.port()));
  // When the last request began that was answered whole: a connection of gRPC's that ended since is
  // found out by a later one, and not by who does not wait for its answer.
  int faults = proxy.happened();
  while (true) {
    {
      const MutexLock lock(mutex_);
      while (resting_ && !over_) changed_.Wait(mutex_);
      if (over_) return;
      ++asking_;
    }
    const int before = proxy.happened();
    const int kind = kinds_[random() % kinds_.size()];
    Patience patience;
    if (random() % 8 == 0) patience.messages = static_cast<int>(random() % 40);
    if (grpc && random() % 8 == 1) patience.time = std::chrono::milliseconds(1 + random() % 400);
    const Heard heard =
        grpc ? AskGrpc(*stub, kind, patience) : AskHttp(proxy.port(), kind, patience);
    Judge(grpc, kind, heard, patience.time < kPatience, proxy.happened() != faults);
    if (heard.end == End::kWhole) faults = before;
    const MutexLock lock(mutex_);
    --asking_;
    changed_.NotifyAll();
  }
}

void SoakClients::Judge(bool grpc, int kind, const Heard& heard, bool hurried, bool disturbed) {
  const Said& right = Reference(grpc, kind);
  const std::string where = Str(grpc ? "gRPC" : "HTTP", ", kind ", kind, ": ");
  EXPECT_EQ(Beyond(heard.said, right), "") << where << heard.why;
  switch (heard.end) {
    case End::kWhole:
      ++counts_.right;
      EXPECT_TRUE(heard.said == right) << where << "a whole answer that lacks something";
      break;
    case End::kGivenUp:
      ++counts_.given_up;
      break;
    case End::kTooLate:
      ++counts_.too_late;
      EXPECT_TRUE(hurried) << where << "no answer within minutes";
      break;
    case End::kCut:
      ++counts_.cut_off;
      EXPECT_TRUE(disturbed) << where << "nobody touched this connection, and yet: " << heard.why;
      EXPECT_NE(heard.why, "") << where;
      break;
  }
}

}  // namespace treadle
