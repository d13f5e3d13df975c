// A benchmark that has a file of its own; the others are in bench.cc, with the table.
#pragma once

namespace treadle {

int BenchServe(int argc, char** argv);

}  // namespace treadle
