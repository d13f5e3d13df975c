// vllm.grpc.engine.VllmEngine: what gateways speak to engines, beside Inference on the same port.
#pragma once

#include <memory>

#include "server/grpc/calls.h"
#include "server/observe/health.h"

namespace grpc {
class Service;
}

namespace treadle {

// Both must outlive the service. HealthCheck asks for no key, as other probes; every other call
// needs one where keys are wanted.
std::unique_ptr<grpc::Service> MakeGatewayService(CallEnvironment& environment,
                                                  const HealthBoard& health);

}  // namespace treadle
