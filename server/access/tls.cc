#include "server/access/tls.h"

#include <fcntl.h>
#include <grpcpp/security/credentials.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/security/tls_certificate_provider.h>
#include <grpcpp/security/tls_credentials_options.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <string>
#include <utility>

#include "base/status.h"

namespace treadle {
namespace {

constexpr int kRefreshSeconds = 1;

// A file without a place on any disk. Whoever opens its path reads one version of it, whole; each
// version has another modification time, in whole seconds, since gRPC takes two reads for a pair if
// the times before and after both are the same.
class MemoryFile {
 public:
  MemoryFile() : fd_(Make()) {}
  ~MemoryFile() { close(fd_); }
  MemoryFile(const MemoryFile&) = delete;
  MemoryFile& operator=(const MemoryFile&) = delete;

  std::string path() const { return Str("/proc/self/fd/", fd_); }
  void Set(const std::string& text) {
    if (text == text_) return;
    text_ = text;
    const int next = Make();
    TREADLE_CHECK(write(next, text.data(), text.size()) == static_cast<ssize_t>(text.size()));
    const timespec time = {.tv_sec = ++version_, .tv_nsec = 0};
    const timespec times[] = {time, time};
    TREADLE_CHECK(futimens(next, times) == 0);
    TREADLE_CHECK(dup3(next, fd_, O_CLOEXEC) == fd_);
    close(next);
  }

 private:
  static int Make() {
    const int fd = memfd_create("treadle-tls", MFD_CLOEXEC);
    TREADLE_CHECK(fd >= 0);
    return fd;
  }

  const int fd_;
  std::string text_;
  time_t version_ = 0;
};

class WatchedTls final : public Tls {
 public:
  explicit WatchedTls(TlsFiles files) : files_(std::move(files)) {}

  absl::Status Start(LogSink log) {
    TREADLE_ASSIGN_OR_RETURN(
        watcher_, TlsWatcher::Open(files_, std::move(log),
                                   [this](const TlsMaterial& material) { Set(material); }));
    using grpc::experimental::FileWatcherCertificateProvider;
    if (files_.key.empty()) {
      provider_ = std::make_shared<FileWatcherCertificateProvider>(ca_.path(), kRefreshSeconds);
    } else if (files_.ca.empty()) {
      provider_ = std::make_shared<FileWatcherCertificateProvider>(
          identity_.path(), identity_.path(), kRefreshSeconds);
    } else {
      provider_ = std::make_shared<FileWatcherCertificateProvider>(
          identity_.path(), identity_.path(), ca_.path(), kRefreshSeconds);
    }
    return absl::OkStatus();
  }

  std::shared_ptr<grpc::ServerCredentials> ForServer() const override {
    TREADLE_CHECK(!files_.key.empty());
    grpc::experimental::TlsServerCredentialsOptions options(provider_);
    options.watch_identity_key_cert_pairs();
    if (files_.ca.empty()) {
      options.set_cert_request_type(GRPC_SSL_DONT_REQUEST_CLIENT_CERTIFICATE);
    } else {
      options.watch_root_certs();
      options.set_cert_request_type(GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
    }
    return grpc::experimental::TlsServerCredentials(options);
  }

  std::shared_ptr<grpc::ChannelCredentials> ForChannel() const override {
    TREADLE_CHECK(!files_.ca.empty());
    grpc::experimental::TlsChannelCredentialsOptions options;
    options.set_certificate_provider(provider_);
    options.watch_root_certs();
    if (!files_.key.empty()) options.watch_identity_key_cert_pairs();
    return grpc::experimental::TlsCredentials(options);
  }

 private:
  void Set(const TlsMaterial& material) {
    // In one file: gRPC reads key and chain one after the other, and must not get one of each. Both
    // readers pass over the other's part.
    identity_.Set(material.key + "\n" + material.certificate);
    ca_.Set(material.ca);
  }

  const TlsFiles files_;
  MemoryFile identity_, ca_;  // written by the watcher alone
  std::shared_ptr<grpc::experimental::FileWatcherCertificateProvider> provider_;
  std::unique_ptr<TlsWatcher> watcher_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Tls>> Tls::Open(const TlsFiles& files, LogSink log) {
  auto tls = std::make_unique<WatchedTls>(files);
  TREADLE_RETURN_IF_ERROR(tls->Start(std::move(log)));
  return tls;
}

}  // namespace treadle
