// treadle drain-worker: asks a worker to leave its stage to another one, while requests run.
#include <CLI/CLI.hpp>
#include <chrono>
#include <string>

#include "base/status.h"
#include "engine/remote/worker/worker.h"
#include "server/cli/command.h"
#include "server/cli/daemon.h"

namespace treadle {
namespace {

constexpr std::chrono::seconds kPatience{10};

struct DrainFlags {
  std::string address;
  std::string control_tls;
  std::string control_secret_file;
};

absl::StatusOr<std::string> Drain(const DrainFlags& flags) {
  TREADLE_ASSIGN_OR_RETURN(
      const ControlCredentials credentials,
      OpenControlCredentials(flags.control_tls, flags.control_secret_file, [](const LogEvent&) {}));
  const absl::Status status = DrainWorker(flags.address, credentials, kPatience);
  if (!status.ok()) {
    return absl::Status(status.code(), Str("worker ", flags.address, ": ", status.message()));
  }
  return Str("worker ", flags.address, " leaves its stage\n");
}

}  // namespace

int RunDrainWorker(int argc, char** argv) {
  DrainFlags flags;
  CLI::App app(
      "Asks a worker to end, as SIGTERM does. One of the server's --spares takes its stage, or the "
      "next worker that listens at its address, and the streams that run go on with the same "
      "tokens (unless the server's --on-worker-loss says otherwise).");
  app.footer(kExitCodes);
  app.add_option("address", flags.address, "address of the worker: host:port or unix:path")
      ->required();
  AddControlFlags(app, flags.control_tls, flags.control_secret_file);
  if (auto code = ParseFlags(app, "drain-worker", argc, argv)) return *code;
  return Finish("drain-worker", Drain(flags));
}

}  // namespace treadle
