#include "server/access/tls.h"

#include <fcntl.h>
#include <grpcpp/security/credentials.h>
#include <grpcpp/security/tls_certificate_provider.h>
#include <grpcpp/security/tls_credentials_options.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <ctime>
#include <string>
#include <utility>

#include "base/status.h"

namespace treadle {
namespace {

constexpr int kRefreshSeconds = 1;

// A file without a place on any disk. Whoever opens its path reads one version of it, whole.
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
  time_t version_ = 0;  // and time of modification: whole seconds are all that gRPC sees
};

}  // namespace

// Certificates for gRPC that change while its channels run.
//
// Only one of gRPC's providers of certificates takes later versions, and it reads files by path
// every second: key and chain one after the other, as a pair if their times of modification were
// the same before and after. The operator's own files will not do: it could take one half of
// a rotation, or what our checks refuse. So it gets files in memory that hold what has passed the
// checks, key and chain in one, each version whole and under a time of its own. Should gRPC take
// certificates from its caller one day, this class is all that changes.
//
// Thread safety: Set from one thread at a time; the rest once the first Set has returned.
class Tls::CertificateFeed {
 public:
  // The files in use from now on; later ones have the same parts as the first.
  void Set(const TlsMaterial& material) {
    // Both of gRPC's readers pass over the other's part.
    identity_.Set(material.key + "\n" + material.certificate);
    ca_.Set(material.ca);
    if (provider_) return;
    const std::string identity = material.key.empty() ? "" : identity_.path();
    const std::string ca = material.ca.empty() ? "" : ca_.path();
    provider_ = std::make_shared<grpc::experimental::FileWatcherCertificateProvider>(
        identity, identity, ca, kRefreshSeconds);
  }

  const std::shared_ptr<grpc::experimental::CertificateProviderInterface>& provider() const {
    return provider_;
  }

 private:
  MemoryFile identity_, ca_;
  std::shared_ptr<grpc::experimental::CertificateProviderInterface> provider_;
};

Tls::Tls(const TlsFiles& files) : files_(files), feed_(std::make_unique<CertificateFeed>()) {}
Tls::~Tls() = default;

absl::StatusOr<std::unique_ptr<Tls>> Tls::Open(const TlsFiles& files, LogSink log) {
  std::unique_ptr<Tls> tls(new Tls(files));
  TREADLE_ASSIGN_OR_RETURN(
      tls->watcher_,
      WatchTlsFiles(files, std::move(log),
                    [&feed = *tls->feed_](const TlsMaterial& material) { feed.Set(material); }));
  return tls;
}

std::shared_ptr<grpc::ChannelCredentials> Tls::ForChannel() const {
  TREADLE_CHECK(!files_.ca.empty());
  grpc::experimental::TlsChannelCredentialsOptions options;
  options.set_certificate_provider(feed_->provider());
  options.watch_root_certs();
  if (!files_.key.empty()) options.watch_identity_key_cert_pairs();
  return grpc::experimental::TlsCredentials(options);
}

}  // namespace treadle
