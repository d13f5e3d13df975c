// The benchmarks of treadle-bench, rows of main.cc's table (server/cli/command.h).
#pragma once

namespace treadle {

int BenchAccuracy(int argc, char** argv);
int BenchInt8(int argc, char** argv);
int BenchKernels(int argc, char** argv);
int BenchLoad(int argc, char** argv);
int BenchScheduler(int argc, char** argv);

}  // namespace treadle
