// A port of 127.0.0.1 that passes what it gets on to another one, and back, but for the faults that
// a test injects. It knows bytes alone: messages of the control plane are FaultProxy's, activations
// are FaultyCommunicator's.
//
// Thread safety: all methods from any thread; destruction ends every connection.
#pragma once

#include <chrono>
#include <list>
#include <memory>
#include <thread>
#include <vector>

#include "base/sync.h"

namespace treadle {

struct ByteFault {
  enum class Kind {
    kClose,      // both ends see the end
    kTruncate,   // of what has come, half goes on, and then both ends see the end
    kHalfClose,  // who would get the bytes sees the end; the other direction goes on
    kDelay,      // for so long nothing is read in this direction
    kDrop,       // what has come is lost
    kDuplicate,  // what has come is passed on twice
    kFlip,       // one bit of what has come is another
  };
  enum class Where { kToServer, kToClient };
  Kind kind = Kind::kClose;
  Where where = Where::kToServer;
  int64_t skip = 0;  // so many bytes pass first, of all connections together
  std::chrono::milliseconds delay{0};
};

class ByteProxy {
 public:
  explicit ByteProxy(int server_port);
  ~ByteProxy();

  int port() const { return port_; }
  // Happens once, to the connection that has the next bytes.
  void Inject(const ByteFault& fault) ABSL_LOCKS_EXCLUDED(mutex_);
  // Ends all connections that are there.
  void CutAll() ABSL_LOCKS_EXCLUDED(mutex_);
  // Faults that were injected and have happened, and calls of CutAll.
  int happened() const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Connection;

  void Accept();
  void Pump(Connection& connection, ByteFault::Where where);
  // False if the connection ends here.
  bool Pass(Connection& connection, ByteFault::Where where, std::vector<char>& bytes, int to);
  bool TakeFault(ByteFault::Where where, size_t bytes, ByteFault& fault)
      ABSL_LOCKS_EXCLUDED(mutex_);

  const int server_port_;
  const int listening_;
  int port_ = 0;

  mutable Mutex mutex_;
  std::list<ByteFault> faults_ ABSL_GUARDED_BY(mutex_);
  std::list<std::unique_ptr<Connection>> connections_ ABSL_GUARDED_BY(mutex_);
  int happened_ ABSL_GUARDED_BY(mutex_) = 0;
  bool over_ ABSL_GUARDED_BY(mutex_) = false;

  std::thread accepting_;  // last
};

}  // namespace treadle
