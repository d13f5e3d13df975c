#include "engine/remote/gloo_pipeline.h"

#include <algorithm>

#include "kernels/collectives/gloo_communicator.h"

namespace treadle {

PipelineFactory GlooPipeline(const std::string& data_interface) {
  return [data_interface](const PipelineRequest& request, Rendezvous& rendezvous) {
    GlooOptions options;
    options.rank = request.rank;
    options.size = request.size;
    options.data_interface = data_interface;
    options.timeout = request.timeout;
    options.connect_timeout = std::min(request.timeout, options.connect_timeout);
    return CreateGlooCommunicator(options, rendezvous);
  };
}

}  // namespace treadle
