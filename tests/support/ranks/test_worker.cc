// A worker process for tests: test_worker LISTEN [MODEL]. Says where it listens, and ends with its
// parent.

#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <cstdio>

#include "engine/remote/worker/worker.h"
#include "training/remote/training_guest.h"

int main(int argc, char** argv) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  treadle::WorkerOptions options;
  if (argc > 1) options.listen = argv[1];
  if (argc > 2) options.model_path = argv[2];
  options.ranks.threads = 1;
  options.guest = [](treadle::StageLender& lender) {
    return treadle::CreateTrainingGuest(lender, {});
  };
  const auto worker = treadle::Worker::Start(std::move(options));
  if (!worker.ok()) {
    std::printf("%s\n", worker.status().ToString().c_str());
    return 1;
  }
  std::printf("listening on %s\n", (*worker)->address().c_str());
  std::fflush(stdout);
  while (true) pause();
}
