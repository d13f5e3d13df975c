// SHA-256, by OpenSSL. Thread safety: confined to one thread.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>

struct evp_md_ctx_st;

namespace treadle {

class Sha256 {
 public:
  Sha256();
  void Add(std::span<const std::byte> bytes);
  // 64 hexadecimal digits. Ends the sum: nothing may be added afterwards.
  std::string Finish();

 private:
  struct Free {
    void operator()(evp_md_ctx_st* context) const;
  };
  std::unique_ptr<evp_md_ctx_st, Free> context_;
};

}  // namespace treadle
