#include "tests/server/http/tls_client.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/ssl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <vector>

#include "base/status.h"

namespace treadle {

struct TlsClient::State {
  SSL_CTX* context = SSL_CTX_new(TLS_client_method());
  SSL* session = nullptr;
  int fd = -1;
  size_t piece = 0;
};

namespace {

X509* ReadCertificate(const std::string& pem) {
  BIO* bio = BIO_new_mem_buf(pem.data(), static_cast<int>(pem.size()));
  X509* certificate = PEM_read_bio_X509(bio, nullptr, nullptr, nullptr);
  BIO_free(bio);
  TREADLE_CHECK(certificate != nullptr);
  return certificate;
}

void SetOwn(SSL_CTX* context, const PemPair& own) {
  X509* certificate = ReadCertificate(own.certificate);
  BIO* bio = BIO_new_mem_buf(own.key.data(), static_cast<int>(own.key.size()));
  EVP_PKEY* key = PEM_read_bio_PrivateKey(bio, nullptr, nullptr, nullptr);
  BIO_free(bio);
  TREADLE_CHECK(SSL_CTX_use_certificate(context, certificate) == 1);
  TREADLE_CHECK(SSL_CTX_use_PrivateKey(context, key) == 1);
  X509_free(certificate);
  EVP_PKEY_free(key);
}

int Connect(int port) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const timeval patience{.tv_sec = 60, .tv_usec = 0};
  const int at_once = 1;
  setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
  setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &at_once, sizeof at_once);
  if (connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0) return fd;
  close(fd);
  return -1;
}

}  // namespace

TlsClient::TlsClient(int port, const TlsClientOptions& options)
    : state_(std::make_unique<State>()) {
  SSL_CTX* context = state_->context;
  if (options.version != 0) {
    SSL_CTX_set_cipher_list(context,
                            "DEFAULT:@SECLEVEL=0");  // else OpenSSL refuses old ones itself
    SSL_CTX_set_min_proto_version(context, options.version);
    SSL_CTX_set_max_proto_version(context, options.version);
  }
  if (!options.ca.empty()) {
    X509* root = ReadCertificate(options.ca);
    X509_STORE_add_cert(SSL_CTX_get_cert_store(context), root);
    X509_free(root);
  }
  SSL_CTX_set_verify(context, SSL_VERIFY_PEER, nullptr);
  if (!options.own.certificate.empty()) SetOwn(context, options.own);
  state_->piece = options.piece;
  state_->fd = Connect(port);
  state_->session = SSL_new(context);
  SSL_set_bio(state_->session, BIO_new(BIO_s_mem()), BIO_new(BIO_s_mem()));
  SSL_set_connect_state(state_->session);
  TREADLE_CHECK(X509_VERIFY_PARAM_set1_ip_asc(SSL_get0_param(state_->session), "127.0.0.1") == 1);
}

TlsClient::~TlsClient() {
  SSL_free(state_->session);
  SSL_CTX_free(state_->context);
  if (state_->fd >= 0) close(state_->fd);
}

void TlsClient::SendRaw(const std::string& bytes) {
  const size_t piece = state_->piece == 0 ? std::max<size_t>(bytes.size(), 1) : state_->piece;
  for (size_t at = 0; at < bytes.size(); at += piece) {
    const size_t size = std::min(piece, bytes.size() - at);
    send(state_->fd, bytes.data() + at, size, MSG_NOSIGNAL);  // it may be closed by now
  }
}

void TlsClient::Flush() {
  BIO* out = SSL_get_wbio(state_->session);
  std::string bytes(BIO_ctrl_pending(out), '\0');
  if (bytes.empty()) return;
  TREADLE_CHECK(BIO_read(out, bytes.data(), static_cast<int>(bytes.size())) ==
                static_cast<int>(bytes.size()));
  SendRaw(bytes);
}

bool TlsClient::Receive() {
  char buffer[4096];
  const ssize_t count = recv(state_->fd, buffer, sizeof buffer, 0);
  if (count <= 0) return false;
  return BIO_write(SSL_get_rbio(state_->session), buffer, static_cast<int>(count)) == count;
}

template <typename Operation>
bool TlsClient::Do(const Operation& operation) {
  while (true) {
    ERR_clear_error();
    const int done = operation();
    Flush();
    if (done == 1) return true;
    const int error = SSL_get_error(state_->session, done);
    if (error == SSL_ERROR_WANT_READ && Receive()) continue;
    const char* reason = ERR_reason_error_string(ERR_peek_last_error());
    error_ = error == SSL_ERROR_ZERO_RETURN ? "" : reason != nullptr ? reason : "closed";
    return false;
  }
}

void TlsClient::SendPartOfHello(double share) {
  SSL_do_handshake(state_->session);
  BIO* out = SSL_get_wbio(state_->session);
  std::string hello(BIO_ctrl_pending(out), '\0');
  BIO_read(out, hello.data(), static_cast<int>(hello.size()));
  SendRaw(hello.substr(0, static_cast<size_t>(share * static_cast<double>(hello.size()))));
}

bool TlsClient::Handshake() {
  return Do([&] { return SSL_do_handshake(state_->session); });
}

void TlsClient::Send(const std::string& text) {
  size_t count = 0;
  Do([&] { return SSL_write_ex(state_->session, text.data(), text.size(), &count); });
}

void TlsClient::EndSending() {
  SSL_shutdown(state_->session);
  Flush();
  shutdown(state_->fd, SHUT_WR);
}

std::string TlsClient::ReadUntil(const std::string& text) {
  std::string all;
  char buffer[4096];
  size_t count = 0;
  while (Do([&] { return SSL_read_ex(state_->session, buffer, sizeof buffer, &count); })) {
    all.append(buffer, count);
    if (!text.empty() && all.ends_with(text)) return all;
  }
  return error_.empty() ? all : "";
}

std::string TlsClient::ReadRaw() {
  std::string all;
  char buffer[4096];
  ssize_t count = 0;
  while ((count = recv(state_->fd, buffer, sizeof buffer, 0)) > 0) {
    all.append(buffer, static_cast<size_t>(count));
  }
  if (count < 0 && errno == EAGAIN) all += "no end";
  return all;
}

void TlsClient::Reset() {
  const linger none{.l_onoff = 1, .l_linger = 0};
  setsockopt(state_->fd, SOL_SOCKET, SO_LINGER, &none, sizeof none);
  close(state_->fd);
  state_->fd = -1;
}

long TlsClient::serial() const {
  const X509* certificate = SSL_get0_peer_certificate(state_->session);
  return certificate == nullptr ? 0 : ASN1_INTEGER_get(X509_get0_serialNumber(certificate));
}

std::string HttpsGet(int port, const TlsClientOptions& options, const std::string& path,
                     const std::string& headers, std::string* error) {
  TlsClient client(port, options);
  std::string reply;
  if (client.Handshake()) {
    client.Send("GET " + path + " HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n" + headers +
                "\r\n");
    reply = client.ReadAll();
  }
  if (error != nullptr) *error = client.error();
  return reply;
}

}  // namespace treadle
