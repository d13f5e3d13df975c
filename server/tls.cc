#include "server/tls.h"

#include <fcntl.h>
#include <grpcpp/security/credentials.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/security/tls_certificate_provider.h>
#include <grpcpp/security/tls_credentials_options.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/x509.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <iterator>
#include <utility>
#include <vector>

#include "kernels/status.h"
#include "server/file_watcher.h"

namespace treadle {
namespace {

using Bio = std::unique_ptr<BIO, decltype(&BIO_free)>;
using Certificate = std::unique_ptr<X509, decltype(&X509_free)>;
using PrivateKey = std::unique_ptr<EVP_PKEY, decltype(&EVP_PKEY_free)>;

constexpr int kRefreshSeconds = 1;

struct Material {
  std::string certificate, key, ca;
};

absl::StatusOr<std::string> ReadFile(const std::string& path) {
  if (path.empty()) return std::string();
  std::ifstream file(path, std::ios::binary);
  std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  if (!file || text.empty()) {
    return InvalidArgument("TLS: cannot read ", path, ": ",
                           file.is_open() ? "it is empty" : std::strerror(errno));
  }
  return text;
}

Bio Open(const std::string& pem) {
  return Bio(BIO_new_mem_buf(pem.data(), static_cast<int>(pem.size())), BIO_free);
}

std::string TimeOf(const ASN1_TIME* time) {
  const Bio bio(BIO_new(BIO_s_mem()), BIO_free);
  ASN1_TIME_print(bio.get(), time);
  char text[64];
  const int length = BIO_read(bio.get(), text, sizeof text);
  return std::string(text, length > 0 ? static_cast<size_t>(length) : 0);
}

absl::Status CheckDates(const X509& certificate, const std::string& path) {
  if (X509_cmp_current_time(X509_get0_notBefore(&certificate)) > 0) {
    return InvalidArgument("TLS: the certificate in ", path, " is not valid before ",
                           TimeOf(X509_get0_notBefore(&certificate)));
  }
  if (X509_cmp_current_time(X509_get0_notAfter(&certificate)) < 0) {
    return InvalidArgument("TLS: the certificate in ", path, " has expired on ",
                           TimeOf(X509_get0_notAfter(&certificate)));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<Certificate>> ReadCertificates(const std::string& pem,
                                                          const std::string& path) {
  const Bio bio = Open(pem);
  std::vector<Certificate> chain;
  while (true) {
    Certificate next(PEM_read_bio_X509(bio.get(), nullptr, nullptr, nullptr), X509_free);
    if (!next) break;
    chain.push_back(std::move(next));
  }
  const bool at_end = ERR_GET_REASON(ERR_peek_last_error()) == PEM_R_NO_START_LINE;
  ERR_clear_error();
  if (chain.empty() || !at_end) {
    return InvalidArgument("TLS: ", path, " has ", chain.empty() ? "no" : "a damaged",
                           " certificate, expected PEM");
  }
  return chain;
}

absl::Status CheckIdentity(const Material& material, const TlsFiles& files) {
  TREADLE_ASSIGN_OR_RETURN(const std::vector<Certificate> chain,
                           ReadCertificates(material.certificate, files.certificate));
  TREADLE_RETURN_IF_ERROR(CheckDates(*chain[0], files.certificate));
  // Without this a key with a password would ask for it on the terminal.
  const auto no_password = [](char*, int, int, void*) { return 0; };
  const Bio bio = Open(material.key);
  const PrivateKey key(PEM_read_bio_PrivateKey(bio.get(), nullptr, no_password, nullptr),
                       EVP_PKEY_free);
  ERR_clear_error();
  if (!key) {
    return InvalidArgument("TLS: ", files.key,
                           " has no private key, expected PEM without a password");
  }
  const bool match = X509_check_private_key(chain[0].get(), key.get()) == 1;
  ERR_clear_error();
  if (!match) {
    return InvalidArgument("TLS: the key in ", files.key, " does not belong to the certificate in ",
                           files.certificate);
  }
  return absl::OkStatus();
}

absl::Status CheckCa(const Material& material, const TlsFiles& files) {
  TREADLE_ASSIGN_OR_RETURN(const std::vector<Certificate> roots,
                           ReadCertificates(material.ca, files.ca));
  absl::Status status;
  for (const Certificate& root : roots) {
    status = CheckDates(*root, files.ca);
    if (status.ok()) return status;  // one that is valid is enough
  }
  return status;
}

absl::StatusOr<Material> Read(const TlsFiles& files) {
  if (files.certificate.empty() != files.key.empty()) {
    return InvalidArgument("TLS: ", files.key.empty() ? "a certificate" : "a key",
                           " is given without its ", files.key.empty() ? "key" : "certificate");
  }
  Material material;
  TREADLE_ASSIGN_OR_RETURN(material.certificate, ReadFile(files.certificate));
  TREADLE_ASSIGN_OR_RETURN(material.key, ReadFile(files.key));
  TREADLE_ASSIGN_OR_RETURN(material.ca, ReadFile(files.ca));
  if (!files.key.empty()) TREADLE_RETURN_IF_ERROR(CheckIdentity(material, files));
  if (!files.ca.empty()) TREADLE_RETURN_IF_ERROR(CheckCa(material, files));
  return material;
}

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
  WatchedTls(TlsFiles files, const Material& material, Log log)
      : files_(std::move(files)), log_(std::move(log)) {
    Set(material);
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
    std::vector<std::string> watched;
    for (const std::string* path : {&files_.certificate, &files_.key, &files_.ca}) {
      if (!path->empty()) watched.push_back(*path);
    }
    watcher_ = std::make_unique<FileWatcher>(std::move(watched), [this] { Reload(); });
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
  void Set(const Material& material) {
    // In one file: gRPC reads key and chain one after the other, and must not get one of each. Both
    // readers pass over the other's part.
    identity_.Set(material.key + "\n" + material.certificate);
    ca_.Set(material.ca);
  }
  void Reload() {
    const auto material = Read(files_);
    if (!material.ok()) {
      log_(Str(std::string(material.status().message()), "; what was there stays in use"));
      return;
    }
    Set(*material);
    log_(Str("TLS: read ", files_.key.empty() ? files_.ca : files_.certificate, " anew"));
  }

  const TlsFiles files_;
  const Log log_;
  MemoryFile identity_, ca_;  // the watcher's, once it runs
  std::shared_ptr<grpc::experimental::FileWatcherCertificateProvider> provider_;
  std::unique_ptr<FileWatcher> watcher_;
};

}  // namespace

absl::Status CheckTlsFiles(const TlsFiles& files) { return Read(files).status(); }

absl::StatusOr<std::unique_ptr<Tls>> Tls::Open(const TlsFiles& files, Log log) {
  TREADLE_ASSIGN_OR_RETURN(const Material material, Read(files));
  return std::make_unique<WatchedTls>(files, material, std::move(log));
}

}  // namespace treadle
