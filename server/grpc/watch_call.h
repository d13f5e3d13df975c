// WatchLedger: one object per watching client; it reads the ledger's ring at the client's pace and
// reports what it missed. Thread safety: as generate_call.h.
#pragma once

#include "server/grpc/call_environment.h"

namespace grpc {
template <class W>
class ServerWriteReactor;
}
namespace treadle::v1 {
class LedgerRecord;
}

namespace treadle {

grpc::ServerWriteReactor<v1::LedgerRecord>* StartWatchLedger(
    CallEnvironment& environment, const grpc::CallbackServerContext& context, bool from_start);

}  // namespace treadle
