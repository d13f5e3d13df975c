// Which row of a table an id of Backend::Embed stands for, on the device.
#pragma once

#include <cstdint>

#include "kernels/cuda/runtime/simt.h"

namespace treadle::cuda {

struct EmbedIds {
  const int32_t* ids = nullptr;           // [rows] on the device
  const int32_t* last_samples = nullptr;  // what ids below -1 point into
  int32_t first = 0;                      // the id of the table's first row
  int32_t n = 0;                          // rows of the table
};

// -1: a row of zeros.
TREADLE_DEVICE int32_t TableRow(const EmbedIds& ids, int64_t row) {
  int32_t id = ids.ids[row];
  if (id < -1) id = ids.last_samples[-2 - id];
  id -= ids.first;
  return id >= 0 && id < ids.n ? id : -1;
}

}  // namespace treadle::cuda
