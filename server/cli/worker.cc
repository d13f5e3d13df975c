// treadle worker: one stage of a pipeline, until SIGTERM, SIGINT or drain-worker. A
// master that attaches to it says what it runs.
#include "engine/remote/worker/worker.h"

#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/status.h"
#include "engine/remote/control_secret.h"
#include "net/address.h"
#include "server/cli/command.h"
#include "server/cli/daemon.h"
#include "server/cli/rank_devices.h"
#include "server/cli/workers/worker_supervisor.h"
#include "training/remote/training_guest.h"

namespace treadle {
namespace {

// What a worker insists on, as it tells a master; "": whatever the master asks for.
constexpr Choice<std::string_view> kWantedType[] = {
    {"auto", ""}, {"bf16", "bf16"}, {"fp16", "f16"}, {"fp32", "f32"}};
constexpr Choice<std::string_view> kWantedDeterminism[] = {
    {"auto", ""}, {"on", "on"}, {"off", "off"}};

struct WorkerFlags {
  WorkerOptions options;
  DeviceChoice device = DeviceChoice::kAuto;
  ComputeMode compute = ComputeMode::kAuto;  // auto: whatever the master asks for
  std::vector<int> devices;
  std::string control_tls;
  std::string control_secret_file;
  int parent = 0;
};

// This process does not outlive the one that started it.
absl::Status FollowParent(int parent) {
  if (parent == 0) return absl::OkStatus();
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() == parent) return absl::OkStatus();  // it may have gone before the call
  return absl::UnavailableError(Str("process ", parent, " is not the parent any more"));
}

// The masters that may attach to this worker, in words; an error if every host on a network may.
absl::StatusOr<std::string> CheckTrust(const std::string& listen,
                                       const ControlCredentials& credentials) {
  const bool local = StaysOnMachine(listen);
  const bool tls = credentials.server != nullptr && !listen.starts_with("unix:");
  if (!local && !tls && credentials.secret.empty()) {
    return InvalidArgument("--listen is ", listen,
                           ", which other machines reach, and whoever comes first would be this "
                           "worker's master: expected --control-secret-file or --control-tls, or "
                           "a loopback address or unix:path");
  }
  std::string who = local ? "from this machine" : "from other machines";
  if (!credentials.secret.empty()) who += ", with the control secret";
  if (tls) who += ", with a certificate";
  return who;
}

absl::Status Work(WorkerFlags flags, Log& log) {
  TREADLE_RETURN_IF_ERROR(FollowParent(flags.parent));
  Signals signals;
  WorkerOptions& options = flags.options;
  if (!options.listen.starts_with("unix:")) {
    TREADLE_RETURN_IF_ERROR(ParseAddress(options.listen).status());
  }
  if (flags.device != DeviceChoice::kAuto) options.device = WordOf(kDevices, flags.device);
  TREADLE_ASSIGN_OR_RETURN(options.ranks.gpus, FindWorkerGpus(flags.device, flags.devices));
  options.log = [&log](const std::string& line) {
    log.Write({.name = "worker_status", .message = line});
  };
  TREADLE_ASSIGN_OR_RETURN(
      options.credentials,
      OpenControlCredentials(flags.control_tls, flags.control_secret_file, log.sink()));
  TREADLE_ASSIGN_OR_RETURN(const std::string masters,
                           CheckTrust(options.listen, options.credentials));
  if (!StaysOnMachine(options.listen)) options.log("takes masters " + masters);
  options.guest = [say = options.log](StageLender& lender) {
    return CreateTrainingGuest(lender, say);
  };
  options.leave = [&signals] { signals.Interrupt(); };
  TREADLE_ASSIGN_OR_RETURN(std::unique_ptr<Worker> worker, Worker::Start(std::move(options)));
  log.Write({.name = "listening",
             .message = kWorkerListensOn + worker->address(),
             .fields = {{"address", worker->address()}, {"masters", masters}}});
  const int first = signals.Wait();
  log.Write({.name = "ending",
             .message = first == 0 ? "ending" : Str("signal ", first, ": ending"),
             .fields = {{"signal", int64_t{first}}}});
  // All that it holds can be read again: an end that would wait, for a load above all, does not.
  constexpr std::chrono::milliseconds kMaxEnd{200};
  std::promise<void> ended;
  std::thread end([&] {
    worker.reset();
    ended.set_value();
  });
  if (ended.get_future().wait_for(kMaxEnd) != std::future_status::ready) {
    log.Flush(std::chrono::milliseconds(100));
    _exit(0);
  }
  end.join();
  return absl::OkStatus();
}

}  // namespace

int RunWorker(int argc, char** argv) {
  WorkerFlags flags;
  WorkerOptions& options = flags.options;
  CLI::App app(
      "Holds one stage of a model and runs it for `treadle serve --workers`, and, whenever no "
      "request "
      "waits, for `treadle finetune --workers`.");
  app.footer(kExitCodes);
  app.add_option("--listen", options.listen,
                 "control address: host:port (port 0 takes a free one) or unix:path; beyond this "
                 "machine only with --control-secret-file or --control-tls");
  app.add_option("--model,model", options.model_path,
                 "model: a .gguf file or a Hugging Face folder; none: the master sends its layers "
                 "(--weights-from master)");
  app.add_option("--threads", options.ranks.threads,
                 "compute threads of each rank; 0: this process' CPUs, shared out")
      ->check(CLI::Range(0, 4096));
  AddChoice(app, "--pin-threads", options.ranks.pin, kSwitch,
            "bind each compute thread to one CPU: on or off");
  app.add_option("--first-cpu", options.ranks.first_cpu,
                 "CPU of the first thread, counted among this process' CPUs, with --pin-threads on")
      ->check(CLI::Range(0, 4096));
  AddChoice(app, "--compute", flags.compute, kComputeModes,
            "arithmetic that masters must ask for; auto: any");
  AddChoice(app, "--device", flags.device, kDevices,
            "device that masters must ask for (--device of serve): cpu or cuda; auto: any");
  app.add_option("--devices", flags.devices,
                 "numbers of the GPUs of its ranks, in order: 0,1; none: the first ones that "
                 "CUDA_VISIBLE_DEVICES leaves")
      ->delimiter(',')
      ->check(CLI::NonNegativeNumber);
  AddChoice(app, "--dtype", options.dtype, kWantedType,
            "type of a GPU's products that masters must ask for: bf16, fp16 or fp32; auto: any");
  AddChoice(app, "--deterministic", options.deterministic, kWantedDeterminism,
            "determinism on a GPU that masters must ask for: on or off; auto: either");
  AddControlFlags(app, flags.control_tls, flags.control_secret_file);
  app.add_option("--data-interface", options.data_interface,
                 "network interface or address for activations; trusted networks only");
  app.add_option("--memory", options.memory,
                 "number of an open file for the K/V cache of stages on the CPU, whose contents "
                 "outlive this process (memfd_create)")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--parent", flags.parent, "end with this process, which must be the parent")
      ->check(CLI::NonNegativeNumber);
  Log::Options log_options;
  AddLogFlags(app, log_options);
  if (auto code = ParseFlags(app, "worker", argc, argv)) return *code;
  if (flags.compute != ComputeMode::kAuto) options.compute = std::string(Name(flags.compute));
  const auto log = Log::Open(log_options);
  if (!log.ok()) return Fail("worker", log.status());
  const absl::Status status = Work(std::move(flags), **log);
  return status.ok() ? 0 : Fail("worker", status, **log);
}

}  // namespace treadle
