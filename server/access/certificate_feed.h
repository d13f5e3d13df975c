// Certificates for gRPC that change while its servers and channels run.
//
// Of gRPC's providers of certificates only one takes later versions, and that one reads files by
// path every second: key and chain one after the other, as a pair if their times of modification
// were the same before and after. The operator's own files will not do: it could take one half of
// a rotation, or what our checks refuse. So it gets files in memory that hold what has passed the
// checks, key and chain in one, each version whole and under a time of its own. Should gRPC take
// certificates from its caller one day, this file is all that changes.
//
// Thread safety: Set from one thread at a time; the rest once the first Set has returned.
#pragma once

#include <ctime>
#include <memory>
#include <string>

#include "server/access/tls_files.h"

namespace grpc {
namespace experimental {
class CertificateProviderInterface;
}
}  // namespace grpc

namespace treadle {

class CertificateFeed {
 public:
  // What is used from now on; later ones have the same parts as the first.
  void Set(const TlsMaterial& material);

  std::shared_ptr<grpc::experimental::CertificateProviderInterface> provider() const {
    return provider_;
  }

 private:
  // A file without a place on any disk. Whoever opens its path reads one version of it, whole.
  class MemoryFile {
   public:
    MemoryFile();
    ~MemoryFile();
    MemoryFile(const MemoryFile&) = delete;
    MemoryFile& operator=(const MemoryFile&) = delete;

    std::string path() const;
    void Set(const std::string& text);

   private:
    const int fd_;
    std::string text_;
    time_t version_ = 0;  // and time of modification: whole seconds are all that gRPC sees
  };

  MemoryFile identity_, ca_;
  std::shared_ptr<grpc::experimental::CertificateProviderInterface> provider_;
};

}  // namespace treadle
