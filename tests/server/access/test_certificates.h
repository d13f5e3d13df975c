// Certificates for tests, made on the spot: a CA, and what it signs. Not thread-safe.
#pragma once

#include <memory>
#include <string>

struct evp_pkey_st;  // OpenSSL's EVP_PKEY

namespace treadle {

struct PemPair {
  std::string certificate, key;
};

class TestCa {
 public:
  TestCa();
  ~TestCa();
  const std::string& pem() const { return pem_; }
  // For 127.0.0.1 and localhost; valid from `from` to `until`, in seconds from now.
  PemPair Sign(long from = -3600, long until = 3600) const;
  // By another authority, which this one has signed; `certificate` is the chain of both.
  PemPair SignThroughAnother() const;
  // With a key of RSA that is too short for anybody.
  PemPair SignWeak() const;

 private:
  PemPair SignKey(evp_pkey_st* key, long from, long until) const;

  struct State;
  std::unique_ptr<State> state_;
  std::string pem_;
};

// A path of the running test's own, in gtest's temporary folder.
std::string TestPath(const std::string& name);

// Replaces the file as a whole, as whoever rotates such files does.
void WriteText(const std::string& path, const std::string& text);

}  // namespace treadle
