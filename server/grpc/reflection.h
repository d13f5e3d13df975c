// gRPC's server reflection for who may call, read like all other calls: gRPC's own asks for no key
// and parses what it is sent uncounted (wire_format.h says what that costs).
//
// Thread safety: of a grpc::Service.
#pragma once

#include <memory>
#include <string>
#include <vector>

namespace grpc {
class Service;
}  // namespace grpc

namespace treadle {

struct CallEnvironment;

// `services`: full names. `environment` must outlive it.
std::unique_ptr<grpc::Service> MakeReflectionService(const CallEnvironment& environment,
                                                     std::vector<std::string> services);

}  // namespace treadle
