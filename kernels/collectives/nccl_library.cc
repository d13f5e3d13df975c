#include "kernels/collectives/nccl_library.h"

#include <nccl.h>

#include "base/status.h"
#include "kernels/cuda/runtime/shared_library.h"

namespace treadle {
namespace {

// The functions that are used. They keep NCCL's names and types.
#define TREADLE_NCCL_FUNCTIONS(X) \
  X(ncclAllGather)                \
  X(ncclBroadcast)                \
  X(ncclCommAbort)                \
  X(ncclCommDestroy)              \
  X(ncclCommFinalize)             \
  X(ncclCommGetAsyncError)        \
  X(ncclCommInitRankConfig)       \
  X(ncclCommRevoke)               \
  X(ncclGetErrorString)           \
  X(ncclGetLastError)             \
  X(ncclGetUniqueId)              \
  X(ncclGroupEnd)                 \
  X(ncclGroupStart)               \
  X(ncclRecv)                     \
  X(ncclSend)

struct Library {
  TREADLE_NCCL_FUNCTIONS(TREADLE_LIBRARY_MEMBER)
};

absl::StatusOr<Library> LoadLibrary() {
  Library library;
  TREADLE_ASSIGN_OR_RETURN(void* const opened, cuda::OpenLibrary(Str("libnccl.so.", NCCL_MAJOR)));
  TREADLE_NCCL_FUNCTIONS(TREADLE_LIBRARY_FIND)
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

using treadle::Lib;

ncclResult_t ncclAllGather(const void* in, void* out, size_t count, ncclDataType_t type,
                           ncclComm_t comm, cudaStream_t stream) {
  return Lib().ncclAllGather(in, out, count, type, comm, stream);
}
ncclResult_t ncclBroadcast(const void* in, void* out, size_t count, ncclDataType_t type, int root,
                           ncclComm_t comm, cudaStream_t stream) {
  return Lib().ncclBroadcast(in, out, count, type, root, comm, stream);
}
ncclResult_t ncclCommAbort(ncclComm_t comm) { return Lib().ncclCommAbort(comm); }
ncclResult_t ncclCommDestroy(ncclComm_t comm) { return Lib().ncclCommDestroy(comm); }
ncclResult_t ncclCommFinalize(ncclComm_t comm) { return Lib().ncclCommFinalize(comm); }
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error) {
  return Lib().ncclCommGetAsyncError(comm, error);
}
ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank,
                                    ncclConfig_t* config) {
  return Lib().ncclCommInitRankConfig(comm, ranks, id, rank, config);
}
ncclResult_t ncclCommRevoke(ncclComm_t comm, int flags) {
  return Lib().ncclCommRevoke(comm, flags);
}
const char* ncclGetErrorString(ncclResult_t result) { return Lib().ncclGetErrorString(result); }
const char* ncclGetLastError(ncclComm_t comm) { return Lib().ncclGetLastError(comm); }
ncclResult_t ncclGetUniqueId(ncclUniqueId* id) { return Lib().ncclGetUniqueId(id); }
ncclResult_t ncclGroupEnd() { return Lib().ncclGroupEnd(); }
ncclResult_t ncclGroupStart() { return Lib().ncclGroupStart(); }
ncclResult_t ncclRecv(void* data, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  return Lib().ncclRecv(data, count, type, peer, comm, stream);
}
ncclResult_t ncclSend(const void* data, size_t count, ncclDataType_t type, int peer,
                      ncclComm_t comm, cudaStream_t stream) {
  return Lib().ncclSend(data, count, type, peer, comm, stream);
}

}  // extern "C"
