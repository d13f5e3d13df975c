// Benchmarks that have a file of their own; the others are in bench.cc, with the table.
#pragma once

namespace treadle {

int BenchAccuracy(int argc, char** argv);
int BenchInt8(int argc, char** argv);
int BenchKernels(int argc, char** argv);
int BenchScheduler(int argc, char** argv);
int BenchTrace(int argc, char** argv);

}  // namespace treadle
