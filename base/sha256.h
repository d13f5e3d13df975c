// SHA-256, by OpenSSL. Thread safety: confined to one thread.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "absl/status/statusor.h"
#include "base/mapped_file.h"

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

// The sum of a whole file. `state`: if not null, gets that of the file that was read. `cancelled`:
// asked often; may be empty. Errors: MappedFile's; Cancelled.
absl::StatusOr<std::string> FileSha256(const std::string& path, FileState* state = nullptr,
                                       const std::function<bool()>& cancelled = {});

}  // namespace treadle
