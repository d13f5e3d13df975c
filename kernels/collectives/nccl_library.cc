// NCCL's functions under their own names, which pass calls on to the library that OpenNccl opened
// (kernels/cuda/runtime/shared_library.h).
#include <nccl.h>

#include "base/status.h"
#include "kernels/collectives/nccl_lane.h"
#include "kernels/cuda/runtime/shared_library.h"

namespace treadle {
namespace {

// The functions that are used, with NCCL's types: X(result, name, parameters, arguments).
#define TREADLE_NCCL_FUNCTIONS(X)                                                                \
  X(ncclResult_t, ncclAllGather,                                                                 \
    (const void* in, void* out, size_t count, ncclDataType_t type, ncclComm_t comm,              \
     cudaStream_t stream),                                                                       \
    (in, out, count, type, comm, stream))                                                        \
  X(ncclResult_t, ncclBroadcast,                                                                 \
    (const void* in, void* out, size_t count, ncclDataType_t type, int root, ncclComm_t comm,    \
     cudaStream_t stream),                                                                       \
    (in, out, count, type, root, comm, stream))                                                  \
  X(ncclResult_t, ncclCommAbort, (ncclComm_t comm), (comm))                                      \
  X(ncclResult_t, ncclCommDestroy, (ncclComm_t comm), (comm))                                    \
  X(ncclResult_t, ncclCommFinalize, (ncclComm_t comm), (comm))                                   \
  X(ncclResult_t, ncclCommGetAsyncError, (ncclComm_t comm, ncclResult_t * error), (comm, error)) \
  X(ncclResult_t, ncclCommInitRankConfig,                                                        \
    (ncclComm_t * comm, int ranks, ncclUniqueId id, int rank, ncclConfig_t* config),             \
    (comm, ranks, id, rank, config))                                                             \
  X(ncclResult_t, ncclCommRevoke, (ncclComm_t comm, int flags), (comm, flags))                   \
  X(const char*, ncclGetErrorString, (ncclResult_t result), (result))                            \
  X(const char*, ncclGetLastError, (ncclComm_t comm), (comm))                                    \
  X(ncclResult_t, ncclGetUniqueId, (ncclUniqueId * id), (id))                                    \
  X(ncclResult_t, ncclGroupEnd, (), ())                                                          \
  X(ncclResult_t, ncclGroupStart, (), ())                                                        \
  X(ncclResult_t, ncclRecv,                                                                      \
    (void* data, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,                   \
     cudaStream_t stream),                                                                       \
    (data, count, type, peer, comm, stream))                                                     \
  X(ncclResult_t, ncclSend,                                                                      \
    (const void* data, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,             \
     cudaStream_t stream),                                                                       \
    (data, count, type, peer, comm, stream))

#define TREADLE_NCCL_MEMBER(result, name, parameters, arguments) TREADLE_LIBRARY_MEMBER(name)
#define TREADLE_NCCL_FIND(result, name, parameters, arguments) TREADLE_LIBRARY_FIND(name)
#define TREADLE_NCCL_CALL(result, name, parameters, arguments) \
  result name parameters { return treadle::Lib().name arguments; }

struct Library {
  TREADLE_NCCL_FUNCTIONS(TREADLE_NCCL_MEMBER)
};

absl::StatusOr<Library> LoadLibrary() {
  Library library;
  TREADLE_ASSIGN_OR_RETURN(void* const opened, cuda::OpenLibrary(Str("libnccl.so.", NCCL_MAJOR)));
  TREADLE_NCCL_FUNCTIONS(TREADLE_NCCL_FIND)
  return library;
}

const absl::StatusOr<Library>& TheLibrary() {
  static const absl::StatusOr<Library> library = LoadLibrary();
  return library;
}
const Library& Lib() { return *TheLibrary(); }

}  // namespace

absl::Status OpenNccl() { return TheLibrary().status(); }

}  // namespace treadle

extern "C" {
TREADLE_NCCL_FUNCTIONS(TREADLE_NCCL_CALL)
}
