#include "server/access/certificate_feed.h"

#include <fcntl.h>
#include <grpcpp/security/tls_certificate_provider.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/status.h"

namespace treadle {
namespace {

constexpr int kRefreshSeconds = 1;

int MakeFile() {
  const int fd = memfd_create("treadle-tls", MFD_CLOEXEC);
  TREADLE_CHECK(fd >= 0);
  return fd;
}

}  // namespace

CertificateFeed::MemoryFile::MemoryFile() : fd_(MakeFile()) {}
CertificateFeed::MemoryFile::~MemoryFile() { close(fd_); }

std::string CertificateFeed::MemoryFile::path() const { return Str("/proc/self/fd/", fd_); }

void CertificateFeed::MemoryFile::Set(const std::string& text) {
  if (text == text_) return;
  text_ = text;
  const int next = MakeFile();
  TREADLE_CHECK(write(next, text.data(), text.size()) == static_cast<ssize_t>(text.size()));
  const timespec time = {.tv_sec = ++version_, .tv_nsec = 0};
  const timespec times[] = {time, time};
  TREADLE_CHECK(futimens(next, times) == 0);
  TREADLE_CHECK(dup3(next, fd_, O_CLOEXEC) == fd_);
  close(next);
}

void CertificateFeed::Set(const TlsMaterial& material) {
  // Both of gRPC's readers pass over the other's part.
  identity_.Set(material.key + "\n" + material.certificate);
  ca_.Set(material.ca);
  if (provider_) return;
  const std::string identity = material.key.empty() ? "" : identity_.path();
  const std::string ca = material.ca.empty() ? "" : ca_.path();
  provider_ = std::make_shared<grpc::experimental::FileWatcherCertificateProvider>(
      identity, identity, ca, kRefreshSeconds);
}

}  // namespace treadle
