#include "tests/server/access/test_certificates.h"

#include <gtest/gtest.h>
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/rsa.h>
#include <openssl/x509.h>
#include <openssl/x509v3.h>

#include <algorithm>
#include <cstdio>
#include <fstream>

#include "base/status.h"

namespace treadle {
namespace {

// Keeps OpenSSL's state until the process has ended. gRPC's threads may outlive main, and one that
// ends after OpenSSL's own exit handler leaves its error queue behind, which LeakSanitizer calls a
// leak.
[[maybe_unused]] const int kKept = OPENSSL_init_crypto(OPENSSL_INIT_NO_ATEXIT, nullptr);

std::string Take(BIO* bio) {
  char* data = nullptr;
  const long size = BIO_get_mem_data(bio, &data);
  std::string text(data, static_cast<size_t>(size));
  BIO_free(bio);
  return text;
}

std::string ToPem(X509* certificate) {
  BIO* bio = BIO_new(BIO_s_mem());
  TREADLE_CHECK(PEM_write_bio_X509(bio, certificate) == 1);
  return Take(bio);
}

void AddExtension(X509* certificate, X509* issuer, int id, const char* value) {
  X509V3_CTX context;
  X509V3_set_ctx(&context, issuer, certificate, nullptr, nullptr, 0);
  X509_EXTENSION* extension = X509V3_EXT_conf_nid(nullptr, &context, id, value);
  TREADLE_CHECK(extension != nullptr && X509_add_ext(certificate, extension, -1) == 1);
  X509_EXTENSION_free(extension);
}

X509* Make(EVP_PKEY* key, X509* issuer, EVP_PKEY* issuer_key, long from, long until,
           bool authority) {
  static long serial = 0;
  X509* certificate = X509_new();
  X509_set_version(certificate, 2);
  ASN1_INTEGER_set(X509_get_serialNumber(certificate), ++serial);
  X509_gmtime_adj(X509_getm_notBefore(certificate), from);
  X509_gmtime_adj(X509_getm_notAfter(certificate), until);
  X509_set_pubkey(certificate, key);
  const std::string name = authority ? Str("test CA ", serial) : "test";
  X509_NAME_add_entry_by_txt(X509_get_subject_name(certificate), "CN", MBSTRING_ASC,
                             reinterpret_cast<const unsigned char*>(name.c_str()), -1, -1, 0);
  X509* by = issuer == nullptr ? certificate : issuer;
  X509_set_issuer_name(certificate, X509_get_subject_name(by));
  if (authority) {
    AddExtension(certificate, by, NID_basic_constraints, "critical,CA:TRUE");
  } else {
    AddExtension(certificate, by, NID_subject_alt_name, "IP:127.0.0.1,DNS:localhost");
  }
  TREADLE_CHECK(X509_sign(certificate, issuer_key, EVP_sha256()) > 0);
  return certificate;
}

}  // namespace

struct TestCa::State {
  EVP_PKEY* key = EVP_EC_gen("P-256");
  X509* certificate = Make(key, nullptr, key, -3600, 3600, true);
};

TestCa::TestCa() : state_(std::make_unique<State>()), pem_(ToPem(state_->certificate)) {}

TestCa::~TestCa() {
  X509_free(state_->certificate);
  EVP_PKEY_free(state_->key);
}

PemPair TestCa::Sign(long from, long until) const {
  return SignKey(EVP_EC_gen("P-256"), from, until);
}

PemPair TestCa::SignThroughAnother() const {
  TestCa other;
  X509_free(other.state_->certificate);
  other.state_->certificate =
      Make(other.state_->key, state_->certificate, state_->key, -3600, 3600, true);
  PemPair pair = other.Sign();
  pair.certificate += ToPem(other.state_->certificate);
  return pair;
}

PemPair TestCa::SignWeak() const { return SignKey(EVP_RSA_gen(512), -3600, 3600); }

PemPair TestCa::SignKey(EVP_PKEY* key, long from, long until) const {
  X509* certificate = Make(key, state_->certificate, state_->key, from, until, false);
  PemPair pair;
  pair.certificate = ToPem(certificate);
  BIO* bio = BIO_new(BIO_s_mem());
  TREADLE_CHECK(PEM_write_bio_PrivateKey(bio, key, nullptr, nullptr, 0, nullptr, nullptr) == 1);
  pair.key = Take(bio);
  X509_free(certificate);
  EVP_PKEY_free(key);
  return pair;
}

std::string TestPath(const std::string& name) {
  const testing::TestInfo& test = *testing::UnitTest::GetInstance()->current_test_info();
  std::string own = Str(test.test_suite_name(), "_", test.name(), "_", name);
  std::ranges::replace(own, '/', '_');  // of tests with parameters
  return Str(testing::TempDir(), "/treadle_", own);
}

void WriteText(const std::string& path, const std::string& text) {
  const std::string fresh = path + ".new";
  std::ofstream(fresh) << text;
  TREADLE_CHECK(std::rename(fresh.c_str(), path.c_str()) == 0);
}

}  // namespace treadle
