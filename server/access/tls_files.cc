#include "server/access/tls_files.h"

#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/ssl.h>
#include <openssl/x509.h>

#include <utility>
#include <vector>

#include "base/status.h"

namespace treadle {
namespace {

using Bio = std::unique_ptr<BIO, decltype(&BIO_free)>;
using Certificate = std::unique_ptr<X509, decltype(&X509_free)>;
using PrivateKey = std::unique_ptr<EVP_PKEY, decltype(&EVP_PKEY_free)>;

absl::StatusOr<std::string> TextOf(const FileWatcher::Content& content, const std::string& path) {
  if (content.ok() && (path.empty() || !content->empty())) return *content;
  return InvalidArgument("TLS: cannot read ", path, ": ",
                         content.ok() ? "it is empty" : content.status().message());
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

absl::StatusOr<PrivateKey> ReadKey(const std::string& pem, const std::string& path) {
  // Without this a key with a password would ask for it on the terminal.
  const auto no_password = [](char*, int, int, void*) { return 0; };
  const Bio bio = Open(pem);
  PrivateKey key(PEM_read_bio_PrivateKey(bio.get(), nullptr, no_password, nullptr), EVP_PKEY_free);
  ERR_clear_error();
  if (!key) {
    return InvalidArgument("TLS: ", path, " has no private key, expected PEM without a password");
  }
  return key;
}

absl::Status CheckRoots(const std::vector<Certificate>& roots, const std::string& path) {
  absl::Status status;
  for (const Certificate& root : roots) {
    status = CheckDates(*root, path);
    if (status.ok()) return status;  // one that is valid is enough
  }
  return status;
}

// Without resumption: a session would outlive the rotation of who may come in.
bool ForbidWhatIsOld(SSL_CTX* context) {
  SSL_CTX_set_options(context, SSL_OP_NO_RENEGOTIATION | SSL_OP_NO_TICKET | SSL_OP_NO_COMPRESSION);
  SSL_CTX_set_session_cache_mode(context, SSL_SESS_CACHE_OFF);
  return SSL_CTX_set_min_proto_version(context, TLS1_2_VERSION) == 1 &&
         SSL_CTX_set_num_tickets(context, 0) == 1;
}

bool Identify(SSL_CTX* context, const std::vector<Certificate>& chain, EVP_PKEY* key) {
  if (SSL_CTX_use_certificate(context, chain[0].get()) != 1) return false;
  for (size_t i = 1; i < chain.size(); ++i) {
    if (SSL_CTX_add1_chain_cert(context, chain[i].get()) != 1) return false;
  }
  return SSL_CTX_use_PrivateKey(context, key) == 1;
}

bool AskForCertificateOf(SSL_CTX* context, const std::vector<Certificate>& roots) {
  SSL_CTX_set_verify(context, SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT, nullptr);
  for (const Certificate& root : roots) {
    if (X509_STORE_add_cert(SSL_CTX_get_cert_store(context), root.get()) != 1 ||
        SSL_CTX_add_client_CA(context, root.get()) != 1) {
      return false;
    }
  }
  return true;
}

// One side's context: TLS_server_method() or TLS_client_method(). No `key`: it shows none.
absl::StatusOr<std::shared_ptr<SSL_CTX>> MakeSide(const SSL_METHOD* side,
                                                  const std::vector<Certificate>& chain,
                                                  EVP_PKEY* key,
                                                  const std::vector<Certificate>& roots,
                                                  const TlsFiles& files) {
  const std::shared_ptr<SSL_CTX> context(SSL_CTX_new(side), SSL_CTX_free);
  const bool made = context && ForbidWhatIsOld(context.get()) &&
                    (key == nullptr || Identify(context.get(), chain, key)) &&
                    (roots.empty() || AskForCertificateOf(context.get(), roots));
  const char* reason = made ? nullptr : ERR_reason_error_string(ERR_peek_last_error());
  ERR_clear_error();
  if (made) return context;
  return InvalidArgument("TLS: OpenSSL does not take the certificate in ",
                         key != nullptr ? files.certificate : files.ca, ": ",
                         reason != nullptr ? reason : "it does not say why");
}

std::vector<std::string> PathsOf(const TlsFiles& files) {
  return {files.certificate, files.key, files.ca};
}

// `contents`: of PathsOf(files).
absl::StatusOr<TlsMaterial> Check(const TlsFiles& files,
                                  const std::vector<FileWatcher::Content>& contents) {
  if (files.certificate.empty() != files.key.empty()) {
    return InvalidArgument("TLS: ", files.key.empty() ? "a certificate" : "a key",
                           " is given without its ", files.key.empty() ? "key" : "certificate");
  }
  TlsMaterial material;
  TREADLE_ASSIGN_OR_RETURN(material.certificate, TextOf(contents[0], files.certificate));
  TREADLE_ASSIGN_OR_RETURN(material.key, TextOf(contents[1], files.key));
  TREADLE_ASSIGN_OR_RETURN(material.ca, TextOf(contents[2], files.ca));
  std::vector<Certificate> roots;
  if (!files.ca.empty()) {
    TREADLE_ASSIGN_OR_RETURN(roots, ReadCertificates(material.ca, files.ca));
    TREADLE_RETURN_IF_ERROR(CheckRoots(roots, files.ca));
  }
  const auto make = [&](const SSL_METHOD* side, const std::vector<Certificate>& chain,
                        EVP_PKEY* key) { return MakeSide(side, chain, key, roots, files); };
  if (files.key.empty()) {
    if (!roots.empty()) {
      TREADLE_ASSIGN_OR_RETURN(material.client, make(TLS_client_method(), {}, nullptr));
    }
    return material;
  }
  TREADLE_ASSIGN_OR_RETURN(const std::vector<Certificate> chain,
                           ReadCertificates(material.certificate, files.certificate));
  TREADLE_RETURN_IF_ERROR(CheckDates(*chain[0], files.certificate));
  TREADLE_ASSIGN_OR_RETURN(const PrivateKey key, ReadKey(material.key, files.key));
  const bool match = X509_check_private_key(chain[0].get(), key.get()) == 1;
  ERR_clear_error();
  if (!match) {
    return InvalidArgument("TLS: the key in ", files.key, " does not belong to the certificate in ",
                           files.certificate);
  }
  TREADLE_ASSIGN_OR_RETURN(material.server, make(TLS_server_method(), chain, key.get()));
  if (!roots.empty()) {
    TREADLE_ASSIGN_OR_RETURN(material.client, make(TLS_client_method(), chain, key.get()));
  }
  return material;
}

}  // namespace

absl::StatusOr<TlsMaterial> ReadTlsFiles(const TlsFiles& files) {
  std::vector<FileWatcher::Content> contents;
  for (const std::string& path : PathsOf(files)) contents.push_back(FileWatcher::Read(path));
  return Check(files, contents);
}

absl::StatusOr<std::unique_ptr<FileWatcher>> WatchTlsFiles(
    const TlsFiles& files, LogSink log, std::function<void(const TlsMaterial&)> take) {
  const auto check = [files, take = std::move(take)](
                         const std::vector<FileWatcher::Content>& contents) -> absl::Status {
    TREADLE_ASSIGN_OR_RETURN(const TlsMaterial material, Check(files, contents));
    take(material);
    return absl::OkStatus();
  };
  const std::string& file = files.certificate.empty() ? files.ca : files.certificate;
  const auto told = [file, log = std::move(log)](const absl::Status& status) {
    if (status.ok()) {
      log({.name = "tls_reloaded",
           .message = Str("TLS: read ", file, " anew"),
           .fields = {{"file", file}}});
    } else {
      log({.severity = Severity::kWarning,
           .name = "tls_reload_failed",
           .message = Str(status.message(), "; what was there stays in use"),
           .fields = {{"file", file}}});
    }
  };
  return FileWatcher::Open(PathsOf(files), check, told);
}

absl::StatusOr<std::shared_ptr<const SocketTls>> OpenSocketTls(const TlsFiles& files,
                                                               std::string_view protocol,
                                                               LogSink log) {
  TREADLE_CHECK(!files.key.empty());
  struct Watched {
    explicit Watched(std::string_view protocol) : tls(protocol) {}
    SocketTls tls;
    std::unique_ptr<FileWatcher> watcher;
  };
  const auto watched = std::make_shared<Watched>(protocol);
  TREADLE_ASSIGN_OR_RETURN(
      watched->watcher,
      WatchTlsFiles(files, std::move(log), [&tls = watched->tls](const TlsMaterial& material) {
        tls.Set(material.server);
      }));
  return std::shared_ptr<const SocketTls>(watched, &watched->tls);
}

}  // namespace treadle
